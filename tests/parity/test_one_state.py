"""The weights in the model and the state in the optimizer are those that train, however they are written and read."""

import itertools
import logging
import re
from typing import Any

import parity_runs
import pytest
import torch
from torch import Tensor, nn
from ways_to_write_and_read import WAYS, Way, read, some

import poptorch

ACCUMULATION, ROWS = 2, 4

# Ways that executors refuse, and what the error says.
REFUSED = {
    "a_weight_of_another_shape": r"second\.bias has the shape \[1\] now, and .* \[3\]",
    "a_weight_of_another_dtype": r"has the type torch\.float64 now, and .* torch\.float32",
    "a_weight_removed": r"the model has lost second\.bias",
    "a_group_added": r"the optimizer holds tensors that aren't parameters of the model",
}
# Ways to change a mode. Compilation fixes modes: a plain loop does the same if it keeps those of its first step.
TOLD = {
    "the_mode_of_the_model": r"the model .* eval\(\)",
    "the_mode_of_a_submodule": r"norm .* eval\(\)",
}
EQUAL = [name for name in WAYS if name not in REFUSED and name not in TOLD]


class PlainLoop:
    """Training in plain PyTorch. With `keeps_modes` each step uses the modes of the first one."""

    def __init__(self, way: Way, keeps_modes: bool = False) -> None:
        torch.manual_seed(0)
        self.model: Any = way.model()
        self.optimizer: Any = way.optimizer(self.model.parameters())
        self.losses: list[Tensor] = []
        self._seeds = itertools.count(100, 2)
        self._modes: dict[str, bool] | None = {} if keeps_modes else None

    def batch(self) -> list[Tensor]:
        seed = next(self._seeds)
        return [some((ACCUMULATION * ROWS, 4), seed), some((ACCUMULATION * ROWS, 3), seed + 1)]

    def step(self) -> None:
        now = modes(self.model)
        if self._modes is not None:
            self._modes = self._modes or now
            set_modes(self.model, self._modes)
        self.losses += parity_runs.plain_update(
            self.model, self.optimizer, parity_runs.cut(ROWS, *self.batch())
        )
        set_modes(self.model, now)

    def evaluate(self, part: nn.Module | None = None, x: Tensor | None = None) -> Tensor:
        part = self.model if part is None else part
        before = modes(part)
        with torch.no_grad():
            found = part.eval()(some((ROWS, 4), 3) if x is None else x)
        set_modes(part, before)
        return found

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def load(self, weights: dict[str, Tensor], inference: bool = False) -> None:
        self.model.load_state_dict(weights)

    def detach(self) -> None:
        pass

    def again(self) -> None:
        pass

    def result(self) -> dict[str, Any]:
        """What a training leaves."""
        return {
            "losses": torch.stack(self.losses),
            "weights": read(self.model),
            "optimizer": self.optimizer.state_dict()["state"],
        }


class ExecutorLoop(PlainLoop):
    """Training through an executor; each module that is evaluated has an executor of its own."""

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.executor = poptorch.trainingModel(
            self.model, parity_runs.options(accumulation=ACCUMULATION), self.optimizer
        )
        self._inference: dict[nn.Module, Any] = {}
        self.before = read(self.model)  # the latest step

    def step(self) -> None:
        self.before = read(self.model)
        self.losses.extend(self.executor(*self.batch())[1])

    def evaluate(self, part: nn.Module | None = None, x: Tensor | None = None) -> Tensor:
        part = self.model if part is None else part
        x = some((ROWS, 4), 3) if x is None else x
        if part in self._inference:
            return self._inference[part](x)
        before = modes(part)
        executor = poptorch.inferenceModel(part.eval(), parity_runs.options(accumulation=1))
        self._inference[part], found = executor, executor(x)
        set_modes(part, before)
        return found

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer, self.before = optimizer, read(self.model)
        self.executor.setOptimizer(optimizer)

    def load(self, weights: dict[str, Tensor], inference: bool = False) -> None:
        (self._inference[self.model] if inference else self.executor).load_state_dict(weights)

    def detach(self) -> None:
        self.executor.detachFromDevice()

    def again(self) -> None:
        self.executor.destroy()


def modes(module: nn.Module) -> dict[str, bool]:
    return {name: layer.training for name, layer in module.named_modules()}


def set_modes(module: nn.Module, found: dict[str, bool]) -> None:
    for name, layer in module.named_modules():
        layer.training = found.get(name, layer.training)


def differences(ours: Any, plain: Any, place: str = "") -> list[str]:
    """The places at which two nested values differ, to the last bit."""
    if isinstance(plain, dict):
        if ours.keys() != plain.keys():
            return [f"{place}: keys {list(ours)}, plain {list(plain)}"]
        return [found for key in plain for found in differences(ours[key], plain[key], f"{place}[{key!r}]")]
    if isinstance(plain, list | tuple):
        if len(ours) != len(plain):
            return [f"{place}: {len(ours)} values, plain {len(plain)}"]
        pairs = zip(ours, plain, strict=True)
        return [
            found for index, pair in enumerate(pairs) for found in differences(*pair, f"{place}[{index}]")
        ]
    if isinstance(plain, Tensor):
        same = isinstance(ours, Tensor) and ours.dtype == plain.dtype and torch.equal(ours, plain)
        return [] if same else [f"{place}: {str(ours)[:80]}, plain {str(plain)[:80]}"]
    return [] if ours == plain else [f"{place}: {ours!r}, plain {plain!r}"]


@pytest.mark.parametrize("name", EQUAL)
def test_a_write_counts_and_a_read_is_new_as_in_plain_pytorch(name):
    way = WAYS[name]
    ours, plain = ExecutorLoop(way), PlainLoop(way)
    assert differences(way.run(ours), way.run(plain), "read") == []
    assert differences(ours.result(), plain.result(), "left") == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_compiled_program_cannot_follow_is_refused_with_the_fix(name):
    loop = ExecutorLoop(WAYS[name])
    with pytest.raises(poptorch.Error, match=rf"(?s){REFUSED[name]}.*fix:"):
        WAYS[name].run(loop)
    assert differences(read(loop.model), loop.before) == []


@pytest.mark.parametrize("name", TOLD)
def test_a_mode_that_changes_after_compilation_is_told_once_and_has_no_effect(name, caplog):
    way = WAYS[name]
    ours, plain = ExecutorLoop(way), PlainLoop(way, keeps_modes=True)
    with caplog.at_level(logging.WARNING):
        assert differences(way.run(ours), way.run(plain), "read") == []
    (message,) = caplog.messages
    assert re.search(rf"{TOLD[name]}.*\n  fix:", message)
    assert differences(ours.result(), plain.result(), "left") == []
