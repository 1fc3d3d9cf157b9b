"""Each operation of torch that writes into an operand gives the bits of plain PyTorch, whatever memory it writes into.

The operations are those of torch's own list of schemas; arguments are made from the types and names in a schema.
"""

import copy
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from parity_runs import assert_trains_as_plain_pytorch, options
from torch import Tensor, nn
from torch.utils._pytree import tree_any

import poptorch
from small_models import module

SIZE = (
    8  # rows shorter than two vector registers, of matrices longer than two: kernels treat them differently
)
# Tensors of other layouts, other memory or other sizes, state of torch itself; what torch can't make functional, or
# draws without saying so.
LEFT_OUT = re.compile(
    "resize|set_|sparse|coalesced|mkldnn|swap|requires_grad|rename|as_strided_|view|transpose_|"
    "t_[.]default|squeeze_|detach_|philox|sobol|_amp_|_fused_|dropout_mask|fbgemm|mps|cuda|cudnn|xpu|"
    "quantize|_cummax_helper|_cummin_helper|miopen|_pin|_index_put_impl|_validate|embedding_renorm|"
    "fill_diagonal_|_like[.]|empty|_no_grad_|polygamma_"
)


def written_operations() -> list[Any]:
    """All overloads of aten that declare a write into their first argument, or into their only `out`."""
    found = []
    for name in dict.fromkeys(s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")):
        packet: Any = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        for operation in [] if packet is None else [getattr(packet, each) for each in packet.overloads()]:
            written = [a for a in operation._schema.arguments if a.is_write]
            if len(written) != 1 or str(written[0].type) not in ("Tensor", "List[Tensor]"):
                continue
            is_in_place = written == operation._schema.arguments[:1]
            is_out = written[0].name == "out" and hasattr(torch, name[6:]) and name[6] != "_"
            if (is_in_place or is_out) and not LEFT_OUT.search(str(operation)):
                found.append(operation)
    return found


def tensor(kind: str, seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "float":
        return torch.rand(shape, generator=generator) * 0.8 + 0.1
    numbers = torch.randint(1, 5, shape, generator=generator)
    return numbers > 2 if kind == "bool" else numbers


def argument_values(argument: Any, kind: str) -> list[Any]:
    """Values to try for an argument of an operation, which may all be wrong; none for an unknown type."""
    name, type_name = argument.name, str(argument.type)
    of_type = {
        "Tensor": [tensor(kind, 1, SIZE, SIZE), tensor(kind, 1, SIZE), tensor(kind, 1)],
        "List[Tensor]": [[tensor(kind, 1, SIZE, SIZE)] * 2],
        "List[Optional[Tensor]]": [[tensor("int", 1, SIZE)]],
        "number": [0.5, 2] if kind == "float" else [2],
        "float": [0.5],
        "int": [0, 2],
        "bool": [False],
        "str": ["add", "sum", "floor", "mean"],
        "Optional[str]": ["floor"],
        "List[int]": [[1], [SIZE, SIZE], [2, 2]],
        "List[number]": [[0.5, 2.0]],
    }
    if name in ("index", "indices") and type_name == "Tensor":
        return [tensor("int", 1, SIZE, SIZE), tensor("int", 1, SIZE)]
    if name in ("mask", "condition"):
        return [tensor("bool", 1, SIZE, SIZE)]
    if name in ("min", "max") and type_name.startswith("Optional"):
        return [0.3, tensor(kind, 1, SIZE, SIZE)] if "number" in type_name else [tensor(kind, 1, SIZE, SIZE)]
    if name == "reduce" and type_name == "str":
        return ["multiply", "mean", "amax", "sum"]
    return of_type.get(type_name, [])


def choices(operation: Any, kind: str) -> list[dict[str, Any]]:
    """Arguments by name, without the written one, to try in turn."""
    given = {}
    for argument in operation._schema.arguments:
        if argument.is_write:
            continue
        is_bound = argument.name in ("min", "max") and "Optional" in str(argument.type)
        if argument.has_default_value() and not is_bound:
            continue
        given[argument.name] = argument_values(argument, kind)
        if not given[argument.name]:
            return []
    combinations = itertools.product(*given.values())
    return [dict(zip(given, values, strict=True)) for values in itertools.islice(combinations, 200)]


class Writes(nn.Module):
    """Writes into a value of forward, or into a buffer, by an operation; reads what was written and its memory."""

    memory: Tensor

    def __init__(self, operation: Any, arguments: dict[str, Any], layout: str, kind: str) -> None:
        super().__init__()
        self.operation, self.layout = operation, layout
        (self.written,) = (a for a in operation._schema.arguments if a.is_write)
        self.fixed = {
            name: v for name, v in arguments.items() if not tree_any(lambda part: isinstance(part, Tensor), v)
        }
        self.names = [name for name in arguments if name not in self.fixed]
        self.register_buffer("memory", tensor(kind, 0, SIZE, 3 * SIZE))

    def forward(self, *given):
        base = self.memory if self.layout == "buffer" else self.memory.clone()
        part = base[:, SIZE : 2 * SIZE]
        if self.layout == "whole":
            base = part = part.contiguous()
        elif self.layout == "transposed":
            part = part.t()
        is_list = str(self.written.type) == "List[Tensor]"
        into = [part, base.clone()[:, :SIZE]] if is_list else part
        arguments = {**self.fixed, **dict(zip(self.names, given, strict=True)), self.written.name: into}
        self.operation(**arguments)
        if part.shape != (SIZE, SIZE):
            raise RuntimeError("the operation has resized its output")
        read = part.exp() if part.is_floating_point() else part * 2
        return base.clone(), read, part.t().contiguous()


class Trial(NamedTuple):
    """Two equal models, and the tensors that their forward takes."""

    model: Writes
    plain: Writes
    given: list[Any]


def trials(operation: Any, layout: str, kinds: Sequence[str] = ("float", "int", "bool")) -> Iterator[Trial]:
    """A trial for each kind of numbers for which arguments are found that plain PyTorch takes."""
    for kind in kinds:
        for arguments in choices(operation, kind):
            model = Writes(operation, arguments, layout, kind)
            given = [arguments[name] for name in model.names]
            try:
                model(*given)
            except (RuntimeError, TypeError, IndexError, ValueError):
                continue
            model, plain = (Writes(operation, arguments, layout, kind) for _ in range(2))
            yield Trial(model, plain, given)
            break


OPERATIONS = written_operations()


@functools.cache
def is_reached(operation: Any) -> bool:
    return any(True for _ in trials(operation, "columns"))


def test_arguments_are_found_for_nearly_all_operations_in_place_and_for_most_others():
    of_kind = {"in place": [o for o in OPERATIONS if o._schema.arguments[0].is_write]}
    of_kind["out"] = [o for o in OPERATIONS if o not in of_kind["in place"]]
    for kind, most in (("in place", 0.07), ("out", 0.45)):
        missing = [str(operation) for operation in of_kind[kind] if not is_reached(operation)]
        assert len(missing) < most * len(of_kind[kind]), missing


def cases() -> list[Any]:
    """Return all operations. The ids begin with what capture distinguishes, so that each kind is selected first."""
    found = []
    for operation in filter(is_reached, OPERATIONS):
        schema, tags = operation._schema, (torch.Tag.pointwise, torch.Tag.nondeterministic_seeded)
        written = schema.arguments[0].is_write, str(schema.arguments[0].type), len(schema.returns)
        kind = *written, *(tag in operation.tags for tag in tags)
        found.append(pytest.param(operation, id=f"{kind}-{operation}"))
    return found


@pytest.mark.parametrize("operation", cases())
def test_a_write_gives_the_bits_of_plain_pytorch(operation):
    is_in_place = operation._schema.arguments[0].is_write
    found = [*trials(operation, "columns")] if is_in_place else [next(trials(operation, "columns"))]
    layouts = ("whole", "transposed", "buffer") if is_in_place else ("transposed",)
    found += [next(trials(operation, layout)) for layout in layouts]
    for model, plain, given in found:
        executor = poptorch.inferenceModel(model, options(accumulation=1))
        for _ in range(2):  # the second call reads the buffer that the first has written
            for ours, theirs in zip(executor(*given), plain(*given), strict=True):
                if torch.Tag.nondeterministic_seeded in operation.tags:
                    assert ours.shape == theirs.shape
                else:
                    assert torch.equal(ours.to(theirs.dtype).nan_to_num(), theirs.nan_to_num()), model.layout


LOSSES = {
    **{name: {} for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")},
    **{name: {} for name in ("poisson_nll_loss", "hinge_embedding_loss", "multilabel_soft_margin_loss")},
    "binary_cross_entropy_with_logits": {},
    "binary_cross_entropy_with_logits, weights": {"weight": torch.rand(7), "pos_weight": torch.rand(7)},
    "cross_entropy": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_beside_a_write_has_the_bits_of_plain_pytorch(name, reduction):
    """A graph with a write is replayed, and torch.func has formulas of its own for some operations."""

    def forward(self, x, target):
        self.calls += 1
        function = getattr(nn.functional, name.partition(",")[0])
        loss = function(self.layer(x), target, reduction=reduction, **LOSSES[name])
        return poptorch.identity_loss(loss, "mean")

    def make():
        return module(forward, layer=nn.Linear(3, 7), calls=torch.zeros(()))

    torch.manual_seed(1)
    rows = torch.randn(8 * 5, 3), torch.rand(8 * 5, 7)
    sgd = functools.partial(torch.optim.SGD, lr=0.01)
    assert_trains_as_plain_pytorch(make, sgd, *rows, accumulation=1, updates=8)


def test_in_inference_a_forward_may_write_into_a_parameter():
    """As `nn.Embedding(max_norm=)` does. In training the value belongs to the optimizer."""
    torch.manual_seed(0)
    model = nn.Embedding(5, 3, max_norm=0.5)
    twin, rows = copy.deepcopy(model), torch.tensor([1, 4, 1])
    assert torch.equal(poptorch.inferenceModel(model)(rows), twin(rows).detach())
    assert torch.equal(model.weight, twin.weight)


def test_a_trained_embedding_with_max_norm_is_an_error_with_a_fix():
    model = module(
        lambda self, rows: poptorch.identity_loss(self.embedding(rows), "sum"),
        embedding=nn.Embedding(5, 3, max_norm=0.5),
    )
    with pytest.raises(poptorch.Error, match=r"Embedding\(max_norm=\)"):
        poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))(
            torch.tensor([1])
        )


# A value that autograd saved may be changed in place: gradients are those of the value that was saved.


class Changes(nn.Module):
    """Saved values are changed as a whole, in a slice, through a view, and in a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (poptorch.BeginBlock(nn.Linear(4, 4), name) for name in "ab")
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        y = self.a(x).relu()
        z = torch.sigmoid(y * y)
        y.mul_(2)
        y[0] += 1
        w = z * self.scale
        self.scale.mul_(0.5)
        z.view(-1)[:3].exp_()
        return poptorch.identity_loss(self.b(y + w + z).square(), "mean")


class Drops(Changes):
    """As networks for speech are written: an activation, and a dropout that overwrites it."""

    def __init__(self):
        super().__init__()
        self.c = nn.Sequential(
            nn.ReLU(), nn.Dropout(0.0, inplace=True), nn.SiLU(), nn.Dropout(0.0, inplace=True)
        )

    def forward(self, x):
        return poptorch.identity_loss(self.b(self.c(self.a(x))).square(), "mean")


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


SGD = partial(torch.optim.SGD, lr=0.5)


@pytest.mark.parametrize("make", [Changes, Drops])
@pytest.mark.parametrize("stages", [("a", "b"), None], ids=["two stages", "one stage"])
def test_a_saved_value_that_is_changed_in_place_has_the_gradient_of_what_was_saved(make, stages):
    strategy = stages and poptorch.ShardedExecution(*stages)
    assert_trains_as_plain_pytorch(make, SGD, X, strategy=strategy, accumulation=1)
