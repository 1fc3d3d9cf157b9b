"""`Options.memoryFormat`: in which memory layout the convolutions of a captured model run."""

from collections.abc import Sequence

from torch import Tensor, nn

from popengine.compile.partition import partition
from popengine.compile.rewriting.channels_last import has_convolutions, in_channels_last
from popengine.ir import Graph
from popengine.run.measure.piece_costs import measure
from popengine.settings import DeviceKind, Strategy

from ..reporting.logs import logger

_WORTH = 0.95  # of the time: for less nobody should lose the bits of plain PyTorch
_EACH_ALONE = Strategy("sharded", "auto_increment")


def laid_out(
    graph: Graph, wanted: str, model: nn.Module, samples: Sequence[Tensor], device: DeviceKind
) -> tuple[Graph, str]:
    """The graph in the layout that was asked for, and which that is.

    Args:
        wanted:  "preserve", "channels_last", or "auto": the one that is faster on the sample micro-batch, which only a
            CPU is asked
        samples: one micro-batch
    """
    if wanted == "preserve" or not has_convolutions(graph) or (wanted == "auto" and device != "cpu"):
        return graph, "preserve"
    other = in_channels_last(graph)
    if wanted == "channels_last":
        return other, wanted
    before, after = (
        sum(measure(partition(found, _EACH_ALONE), weights_of(model), samples)) for found in (graph, other)
    )
    chosen = "channels_last" if after < _WORTH * before else "preserve"
    logger.info(
        "memoryFormat auto: a micro-batch takes %.3f ms as the model has it and %.3f ms in channels_last: %s is used",
        before * 1e3,
        after * 1e3,
        chosen,
    )
    return (other if chosen == "channels_last" else graph), chosen


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by canonical name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
