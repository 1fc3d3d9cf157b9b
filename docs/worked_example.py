"""One model through all passes: three stages, five micro-batches. `python docs/worked_example.py`

architecture.md reads this output pass by pass; a test holds what stands there against what is printed here.
"""

from textwrap import indent

import torch
from torch import nn

import poptorch
from popengine.schedules import drawn_schedule


class Net(nn.Module):
    """Three blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, label):
        with poptorch.Block("A", ipu_id=0):
            x = self.a(x).relu()
        with poptorch.Block("B", ipu_id=1):
            x = self.b(x).relu()
        with poptorch.Block("C", ipu_id=2):
            return nn.functional.cross_entropy(self.c(x), label)


def compiled() -> poptorch.PoplarExecutor:
    torch.manual_seed(0)
    options = poptorch.Options()
    options.Training.gradientAccumulation(5)
    options.showCompilationProgressBar(False)
    model = Net()
    executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    executor.compile(*batch())
    return executor


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Five micro-batches of two rows."""
    return torch.randn(10, 8), torch.arange(10) % 4


def show(title: str, text: str) -> None:
    print(f"--- {title}\n{indent(text.rstrip(), '  ')}\n")


def main() -> None:
    executor = compiled()
    executable = executor._executable
    assert executable is not None
    graph, plan = executable.graph, executable.plan

    lines = []
    for node in graph.code.nodes:
        if node.op == "call_function":
            block = node.meta["block"]
            name = graph.visits[block].name if block is not None and block >= 0 else "-"
            operands = ", ".join(operand.name for operand in node.all_input_nodes)
            lines.append(f"{node.meta['phase']} {name}  {node.name} = {node.target}({operands})")
    results = [f"result: {result.kind} {result.key} = {result.name}" for result in graph.results]
    show("capture: one graph of one micro-batch, forward and backward", "\n".join([*lines, *results]))

    partition = plan.partition
    homes = "\n".join(f"{name} lives in stage {stage}" for name, stage in partition.home.items())
    pieces = "\n".join(
        f"{piece} on ipu {partition.ipus[piece.stage]}:"
        f" reads {', '.join(piece.reads)}; writes {', '.join(piece.writes)}"
        for piece in partition.pieces
    )
    show("partition: a piece for each phase of each stage", f"{homes}\n{pieces}")
    show("a piece is the Python that runs it", partition.pieces[1].source)

    for cores, title in ((0, "each ipu is a device of its own"), (2, "two cores share all ipus")):
        name, grid = drawn_schedule(plan, cores)
        show(f"schedule, if {title}: {name}", grid)

    def after(row: int) -> str:
        found = []
        for edge in plan.tasks[row].after:
            name = str(plan.tasks[edge.row])
            found.append(
                f"{name} of all" if edge.behind is None else f"{name} -{edge.behind}" if edge.behind else name
            )
        return ", ".join(dict.fromkeys(found)) or "nothing"

    rows = [
        f"{task!s:<22} {task.index.replace('_', '-'):<12} after {after(row)}"
        for row, task in enumerate(plan.tasks)
    ]
    show("tasks: the table of a step", "\n".join(rows))

    show("a call: all of it, five micro-batches and the update", f"loss {executor(*batch()).item():.4f}")


if __name__ == "__main__":
    main()
