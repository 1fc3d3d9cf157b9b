"""The rules of overlapped input and output: where `set_overlap_for_input` and `set_overlap_for_output` may stand."""

from typing import Any

from torch import fx

from popengine.errors import Error
from popengine.ir import Graph

from ..annotating.strategies import PipelinedExecution, ShardedExecution
from ..enums import OutputMode, OverlapMode
from ..options import Options

_INPUT, _OUTPUT = "set_overlap_for_input", "set_overlap_for_output"


def check_overlap(graph: Graph, options: Options) -> None:
    """Raises Error, where a mark is misplaced, or the options don't fit to one."""
    code: Any = graph.code
    marks = [(node, name) for node in code.nodes if (name := _mark_of(node)) is not None]
    if not marks:
        return
    _check_options(options, any(name == _OUTPUT for _, name in marks))
    output = next(node for node in code.nodes if node.op == "output")
    for node, name in marks:
        if name == _INPUT:
            given, place = node.args[0], "the first operation on an input of the model, and its only use"
            fits = given.op == "placeholder" and given.meta["role"] == "input" and len(given.users) == 1
        else:
            place = "on an output of the model that is returned once"
            results = zip(output.args[0], graph.results, strict=True)
            fits = [value for value, result in results if result.kind == "output"].count(node) == 1
        if not fits:
            raise Error(
                f"poptorch.{name} is misplaced, at {node.meta.get('where', '?')}\n"
                f"  why: it must be {place}: only then can the transfer overlap with computation\n"
                "  fix: move it there"
            )


def _mark_of(node: fx.Node) -> str | None:
    """The name of a mark that asks for overlap."""
    if node.op != "call_function" or node.args[1:2] == (OverlapMode.NoOverlap.value,):
        return None
    name = str(node.target).removeprefix("poptorch.").removesuffix(".default")
    return name if name in (_INPUT, _OUTPUT) else None


def _check_options(options: Options, has_output: bool) -> None:
    strategy = options._execution_strategy
    if isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution):
        raise Error(
            "Overlapped IO is not supported with poptorch.PipelinedExecution\n"
            "  fix: options.setExecutionStrategy(poptorch.ShardedExecution(...))"
        )
    if not options.TensorLocations.exists("num_io_tiles"):
        raise Error(
            "overlapped IO needs at least 32 tiles for it, and numIOTiles is not set\n"
            "  fix: options.TensorLocations.numIOTiles(32)"
        )
    if has_output and options.output_mode not in (OutputMode.All, OutputMode.Sum):
        raise Error(
            f"{_OUTPUT} needs OutputMode.All or OutputMode.Sum; it is OutputMode.{OutputMode(options.output_mode).name}"
            "\n  fix: options.outputMode(poptorch.OutputMode.All)"
        )
