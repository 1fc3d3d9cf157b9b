"""Compare outputs, and compare a weight update with plain PyTorch's: functions for tests of models and of loops."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from popengine.errors import Error, without_internal_frames
from popengine.settings import Counts
from popengine.texts import table_text

from ..nested_values import spec_of, tensors_of, with_tensors
from .causes import Case, conclude, describe_loss, other_recipe
from .equal_arguments import Fingerprint, check_arguments, differing_values, fingerprint
from .loop import Loop, Updated
from .meeting import Ranks
from .plain import PlainUpdates, Recipe, layout_of, random_module, rows_in, take
from .verdicts import is_rounding

if TYPE_CHECKING:
    from ..options import Options

__all__ = ["Comparison", "Updated", "allclose", "compare"]


def allclose(ref_outputs: Any, test_outputs: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Return whether outputs have equal containers, constants, shapes, and close values. NaN equals NaN."""
    if spec_of(ref_outputs) != spec_of(test_outputs):
        return False
    for ref, test in zip(tensors_of(ref_outputs), tensors_of(test_outputs), strict=True):
        dtype = torch.promote_types(ref.dtype, test.dtype)
        if ref.shape != test.shape or not torch.allclose(ref.to(dtype), test.to(dtype), rtol, atol, True):
            return False
    return True


@dataclass(frozen=True)
class Comparison:
    """Weight updates compared with plain PyTorch's; prints as a table.

    Args:
        title:      the plan, or the function `update`, that was compared with plain PyTorch
        conclusion: "all equal", "all equal up to rounding", or how gradients differ, and a likely cause
        loss:       "equal", or a description of the difference; of all updates
        rows:       (name, gradient, new value) of each parameter, of the last update: "equal", "none" (in both) or a
            difference; those of each rank, if they differ between ranks
        ranks:      number of ranks that made the update together
    """

    title: str
    conclusion: str
    loss: str
    rows: tuple[tuple[str, str, str], ...]
    ranks: int = 1

    @property
    def equal(self) -> bool:
        """Return whether the loss, gradients and new weights are bitwise equal, or missing in both. If several ranks
        made the update: whether gradients and new weights are equal up to rounding, since ranks add in another order.
        """
        verdicts = {verdict for _, *row in self.rows for verdict in row}
        if self.ranks > 1:
            return bool(self.rows) and all(map(is_rounding, verdicts))
        return bool(self.rows) and verdicts | {self.loss} <= {"equal", "none", "not returned"}

    def __str__(self) -> str:
        lines = dict.fromkeys([self.title, self.conclusion])  # the same line for both, if the model is random
        table = [("", "gradient", "new weight"), *self.rows]
        return "\n".join([*lines, *([f"loss: {self.loss}", table_text(table)] if self.rows else [])])

    __repr__ = __str__


@without_internal_frames
def compare(
    model: nn.Module,
    options: "Options | None",
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    update: Callable[[nn.Module, torch.optim.Optimizer, Any], Any] | None = None,
    updates: int = 1,
    micro_batches: int | None = None,
) -> Comparison:
    """*Pando*: Return a comparison of weight updates by a loop, or by an executor, and by plain PyTorch.

    Each updates a copy of the model. Plain PyTorch runs the micro-batches one after another, adds their
    gradients and divides the sums by micro-batches × replicas. Random numbers differ: set dropout to 0.

    If torch.distributed is initialized with several ranks, all ranks must call this with equal arguments, and `update`
    runs this rank's part of the loop. All ranks return the same comparison, and rank 0 prints it.

    >>> print(poptorch.testing.compare(model, options, (images, labels), torch.optim.AdamW(model.parameters())))
    >>> poptorch.testing.compare(model, None, (images, labels), update=loop, micro_batches=8)

    Args:
        options:   those of the executor; with `update` they only say how many micro-batches there are, or are None
        batch:     a combined batch: a tensor, a tuple or list of arguments, or a dictionary of them
        optimizer: with the parameters of `model`; by default SGD with lr 0.01
        update:    makes the update instead of an executor: called with a copy of the model, a copy of the
            optimizer, and the rows of one update, returns the loss, None or an `Updated`, and leaves gradients in
            `.grad`, which it finds None
        updates:   number of updates one after another, each with the rows of the next device iteration, or again of
            the first one. Two or more also compare the optimizer's state, by its effect
        micro_batches: instead of options: the number of micro-batches of an update
    Raises: Error, if the model can't be compiled, or returns no loss. With several ranks: on all of them, if one raises
        or leaves, or arguments have other types or differ between ranks
    """
    ranks = Ranks()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as an ipu computes: more threads add in another order
    try:
        comparison = _Check(ranks, model, options, batch, optimizer, update, updates, micro_batches).run()
    finally:
        torch.set_num_threads(threads)
    if ranks.size > 1 and ranks.rank == 0:
        print(comparison)
    return comparison


@dataclass
class _Check:
    """One call of `compare` on this rank. Arguments: see there."""

    ranks: Ranks
    model: Any
    options: Any
    batch: Any
    optimizer: Any
    update: Any
    updates: int
    micro_batches: int | None
    plain: PlainUpdates | None = None  # on rank 0

    def run(self) -> Comparison:
        """Make the updates, and return the comparison."""
        ranks = self.ranks
        differing = differing_values(ranks.run("call compare", self._begin))
        module, loss_index = ranks.run("run plain PyTorch", self._run_plain)[0]
        if module:
            text = f"plain PyTorch differs from itself: {module} draws random numbers; fix: p = 0, or model.eval()"
            return Comparison(text, text, "random", (), ranks.size)
        if self.update is None:
            from .executor_loop import ExecutorUpdate

            self.update = ExecutorUpdate(self.options, loss_index, self.updates)
        loop = Loop(self.model, self.optimizer, self.update, is_alone=ranks.size == 1)
        reports = ranks.run("make the update", functools.partial(loop.run, self.batches))
        outcome, group = ranks.run("run plain PyTorch", self._facts)[0], ranks.connect()
        while not isinstance(outcome, Comparison):  # rank 0 may try other recipes of plain PyTorch
            differences = functools.partial(loop.differences, reports, group, outcome, self.plain)
            of_ranks = ranks.run("compare", differences)
            judge = functools.partial(self._judge, loop.title, of_ranks, reports, differing)
            outcome = ranks.run("name the cause", judge)[0]
        return outcome

    def _begin(self) -> Fingerprint:
        """Check the arguments, and set those that were left out."""
        arguments = self.options, self.optimizer, self.update, self.updates, self.micro_batches
        check_arguments(self.model, *arguments)
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        if self.options is None and self.update is None:
            from ..options import Options

            self.options = Options()
            self.options.Training.gradientAccumulation(self.micro_batches or 1)
        counts = self.options._counts() if self.options else Counts(accumulation=self.micro_batches or 1)
        rows = rows_in(self.batch) // counts.iterations
        parts = zip(*(t.chunk(counts.iterations) for t in tensors_of(self.batch)), strict=True)
        batches = [with_tensors(self.batch, iter(part)) for part in parts]
        self.batches, self.layout = list(islice(cycle(batches), self.updates)), layout_of(rows, counts)
        return fingerprint(self.model, counts, self.batch, self.optimizer, self.update, self.updates)

    def _run_plain(self) -> tuple[str | None, int]:
        """Make an update on rank 0. Return the module that makes plain PyTorch differ from itself; the loss's index."""
        if self.ranks.rank != 0:
            return None, 0
        module = random_module(self.model, take(self.batches[0], self.layout[0][0]))
        if module:
            return module, 0
        before = [parameter.grad for parameter in self.model.parameters()]
        self.plain = PlainUpdates(self.model, self.optimizer, self.batches, Recipe(self.layout))
        _check_copied(self.model, before)
        if self.update is not None:
            self.plain.weigh_tokens()
        return None, self.plain.loss_index

    def _facts(self, recipe: Recipe | None = None) -> Any:
        """Run plain PyTorch on rank 0, if another recipe or number of updates is needed, and return `Loop`'s facts."""
        if (plain := self.plain) is None:
            return None
        if recipe or plain.number != self.updates:
            plain.run(recipe or plain.recipe, self.updates)
        return {name for name, p in plain.parameters.items() if p.grad is not None}, plain.largest

    def _judge(self, title: str, differences: Any, reports: Any, differing: str) -> Any:
        """Return, on rank 0, the comparison, or facts of another recipe of plain PyTorch with which to compare."""
        if (plain := self.plain) is None:
            return None
        case = Case(len(self.layout[0]), len(self.layout), differences, reports, differing, plain, self.model)
        if recipe := other_recipe(case):
            return self._facts(recipe)
        size, loss = self.ranks.size, describe_loss(reports, plain)
        title += f"; {plain.number} updates" * (plain.number > 1) + f" on {size} ranks" * (size > 1)
        title += f"; against plain PyTorch{f': {plain.recipe.note}' * bool(plain.recipe.note)}"
        rows = [(n, case.text("gradient", n), case.text("weight", n)) for n in plain.parameters]
        return Comparison(title, conclude(case, loss), loss, tuple(rows), size)


def _check_copied(model: nn.Module, before: Sequence[Tensor | None]) -> None:
    """Raise Error if a copy of the model has written gradients of the model itself; restore these."""
    changed = []
    for (name, parameter), gradient in zip(model.named_parameters(), before, strict=True):
        if parameter.grad is not gradient:
            changed.append(name)
            parameter.grad = gradient
    if changed:
        raise Error(
            f"compare: a copy of the model computes with parameters of the model itself: {', '.join(changed)}\n"
            "  why: a lambda or another function keeps these layers, and copy.deepcopy copies no functions\n"
            "  fix: assign the layers to attributes of the module, and read them in forward by `self`"
        )
