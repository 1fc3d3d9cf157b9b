"""Ways to write and to read a weight, a buffer, an optimizer's state or a flag between training calls.

A way is a function of a `Loop`: it steps, writes and reads, and returns what it has read. It knows nothing of how
the loop trains. `test_one_state.py` runs each way in plain PyTorch and through an executor.
"""

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters
from torch.optim import swa_utils


class Small(nn.Module):
    """Two linear layers with BatchNorm between them, a buffer that is read, and one that counts micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        self.seen += 1
        output = self.second(torch.relu(self.norm(self.first(x)))) * self.scale
        return output if target is None else (output, nn.functional.mse_loss(output, target))


class Loop(Protocol):
    """A training that goes on by `step`. Its model and optimizer are the user's own."""

    model: Any
    optimizer: Any

    def step(self) -> None:
        """Train on the next batch: one update."""

    def evaluate(self, part: nn.Module | None = None, x: Tensor | None = None) -> Tensor:
        """Return the output of the model, or of a part of it, in eval mode."""

    def set_optimizer(self, optimizer: Any) -> None:
        """Train with another optimizer, or with changed rates, from now on."""

    def load(self, weights: dict[str, Tensor], inference: bool = False) -> None:
        """Load a state_dict; through the executor for training or for inference, if there is one."""

    def detach(self) -> None:
        """Release the devices, if there are any."""

    def again(self) -> None:
        """Let the next step compile the model as it is, if anything is compiled."""


@dataclass(frozen=True)
class Way:
    run: Callable[[Loop], Any]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], Any]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


WAYS: dict[str, Way] = {}


def way(
    run: Callable[[Loop], Any] | None = None,
    *,
    model: Callable[[], nn.Module] = Small,
    optimizer: Callable[[Any], Any] = adamw,
) -> Any:
    """Add a way to the table."""

    def add(run: Callable[[Loop], Any]) -> Callable[[Loop], Any]:
        WAYS[run.__name__] = Way(run, model, optimizer)
        return run

    return add if run is None else add(run)


def read(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model, as copies."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def some(shape: Any, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def halves(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value / 2 if value.is_floating_point() else value.clone() for name, value in weights.items()
    }


def through_bytes(value: Any, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def changed(change: Callable[[Loop], Any], steps: int = 1) -> Callable[[Loop], Any]:
    """A way that changes something after one step, trains on, and evaluates."""

    def run(loop: Loop) -> Any:
        loop.step()
        found = change(loop)
        for _ in range(steps):
            loop.step()
        return found, loop.evaluate()

    run.__name__ = change.__name__
    return run


# ---- weights, in place -------------------------------------------------------------------------------------


def written(write: Callable[[Tensor], Any]) -> Callable[[Loop], Any]:
    """A way that writes the first layer's weight after one step, evaluates, and trains on."""

    def run(loop: Loop) -> Any:
        loop.step()
        write(loop.model.first.weight)
        found = loop.evaluate()
        loop.step()
        return found, loop.evaluate()

    return run


def without_gradient(write: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
    def run(weight: Tensor) -> None:
        with torch.no_grad():
            write(weight)

    return run


def by_address(weight: Tensor) -> None:
    floats = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    for index in range(0, weight.numel(), 3):
        floats[index] = 0.25


def by_storage(weight: Tensor) -> None:
    weight.detach().untyped_storage().copy_(some(weight.shape).untyped_storage())


def by_numpy_dlpack(weight: Tensor) -> None:
    numpy.from_dlpack(weight.detach()).ravel()
    torch.from_dlpack(weight.detach()).mul_(0.5)


def by_set(weight: Tensor) -> None:
    weight.data.set_(some(weight.shape))


for name, write in {
    "add_": without_gradient(lambda w: w.add_(0.1)),
    "copy_": without_gradient(lambda w: w.copy_(some(w.shape))),
    "fill_": without_gradient(lambda w: w.fill_(0.2)),
    "mul_": without_gradient(lambda w: w.mul_(0.5)),
    "a row": without_gradient(lambda w: w.__setitem__(0, 0.5)),
    "foreach": without_gradient(lambda w: torch._foreach_mul_([w], 0.5)),
    "out=": without_gradient(lambda w: torch.mul(w, 0.5, out=w)),
    "an initializer": lambda w: nn.init.constant_(w, 0.1),
    "data.clamp_": lambda w: w.data.clamp_(-0.2, 0.2),
    "data = a tensor": lambda w: setattr(w, "data", some(w.shape)),
    "data = a view": lambda w: setattr(w, "data", some((7, *w.shape[1:]))[1:]),
    "data = a copy": lambda w: setattr(w, "data", w.data.clone()),
    "data.set_": by_set,
    "detach().add_": lambda w: w.detach().add_(0.1),
    "a numpy view": lambda w: w.detach().numpy().__setitem__((0, slice(None)), 0.5),
    "dlpack": by_numpy_dlpack,
    "data_ptr": by_address,
    "the storage": by_storage,
    "share_memory_": lambda w: w.data.share_memory_().mul_(0.5),
}.items():
    WAYS[f"a weight by {name}"] = Way(written(write), Small, adamw)


@way
def a_view_made_before_the_first_step(loop: Loop) -> Any:
    view = loop.model.first.weight.detach()
    array = loop.model.second.bias.detach().numpy()
    loop.step()
    found = view.clone(), torch.from_numpy(array).clone()
    view.mul_(0.5)
    array[:] = 0.25
    loop.step()
    return found, view.clone(), torch.from_numpy(array).clone()


@way
@changed
def perturbed_and_restored(loop: Loop) -> Any:
    kept = [parameter.data.clone() for parameter in loop.model.parameters()]
    for parameter in loop.model.parameters():
        parameter.data.add_(0.1)
    found = loop.evaluate()
    for parameter, value in zip(loop.model.parameters(), kept, strict=True):
        parameter.data = value
    return found


# ---- state_dict, files and copies --------------------------------------------------------------------------


@way
@changed
def load_state_dict_of_the_model(loop: Loop) -> Any:
    loop.model.load_state_dict(halves(read(loop.model)))
    return loop.evaluate()


@way
def the_best_weights_loaded_through_the_inference_executor(loop: Loop) -> Any:
    loop.step()
    best = copy.deepcopy(loop.model.state_dict())
    loop.step()
    found = loop.evaluate()
    loop.load(best, inference=True)
    restored = loop.evaluate()
    loop.step()
    return found, restored, loop.evaluate()


@way
@changed
def load_state_dict_by_assignment_and_a_new_optimizer(loop: Loop) -> Any:
    loop.model.load_state_dict(halves(read(loop.model)), assign=True)
    take_a_new_optimizer(loop)


def take_a_new_optimizer(loop: Loop) -> Any:
    """Train with a new optimizer of the model's parameters, which has the state of the old one."""
    new = adamw(loop.model.parameters())
    new.load_state_dict(loop.optimizer.state_dict())
    loop.set_optimizer(new)
    return new.state_dict()["state"]


@way
def a_state_dict_from_before_a_step(loop: Loop) -> Any:
    early = loop.model.state_dict()
    loop.step()
    middle = {name: value.clone() for name, value in early.items()}
    loop.step()
    return middle, early, through_bytes(early)


@way
def a_state_dict_from_before_a_step_loaded_after_it(loop: Loop) -> Any:
    early, copied = loop.model.state_dict(), copy.deepcopy(loop.model.state_dict())
    loop.step()
    loop.model.load_state_dict(early)
    loop.step()
    found = loop.evaluate()
    loop.model.load_state_dict(copied)
    loop.step()
    return found, loop.evaluate()


@way
@changed
def a_model_saved_by_pickle(loop: Loop) -> Any:
    loaded = pickle.loads(pickle.dumps(loop.model))
    return read(loaded), [type(value) is nn.Parameter for value in loaded.parameters()]


@way
def safetensors_written_and_read(loop: Loop) -> Any:
    loop.step()
    saved = safetensors.torch.save(loop.model.state_dict())
    loop.step()
    found = read(loop.model)
    loop.model.load_state_dict(safetensors.torch.load(saved))
    loop.step()
    return found


@way
def a_deep_copy(loop: Loop) -> Any:
    before = copy.deepcopy(loop.model)
    loop.step()
    after = copy.deepcopy(loop.model)
    with torch.no_grad():
        after.first.weight.zero_()
    loop.step()
    return read(before), read(after), loop.evaluate(after.eval())


@way
def classes_of_the_model_and_its_tensors(loop: Loop) -> Any:
    objects = [id(value) for value in (*loop.model.parameters(), *loop.model.buffers())]
    loop.step()
    values = *loop.model.parameters(), *loop.model.buffers()
    same = [id(value) == before for value, before in zip(values, objects, strict=True)]
    return same, type(loop.model).__name__, [type(value).__name__ for value in values]


# ---- torch.nn.utils, averages ------------------------------------------------------------------------------


@way
def vectors_of_parameters(loop: Loop) -> Any:
    loop.step()
    vector = parameters_to_vector(loop.model.parameters()).detach().clone()
    vector_to_parameters(vector * 0.5, loop.model.parameters())
    loop.step()
    return vector, parameters_to_vector(loop.model.parameters()).detach()


@way
def an_exponential_average(loop: Loop) -> Any:
    average = swa_utils.AveragedModel(loop.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    found = []
    for _ in range(3):
        loop.step()
        average.update_parameters(loop.model)
        found.append(loop.evaluate(average.module))
    loop.model.load_state_dict(average.module.state_dict())
    loop.step()
    return found, read(average)


def pruned_half(loop: Loop) -> None:
    prune.l1_unstructured(loop.model.first, "weight", 0.5)


@way
def pruned_before_the_first_step(loop: Loop) -> Any:
    pruned_half(loop)
    loop.step()
    loop.step()
    return loop.evaluate()


@way
def a_mask_of_pruning_changed(loop: Loop) -> Any:
    pruned_half(loop)
    return changed(lambda loop: loop.model.first.weight_mask.zero_())(loop)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def parametrized(loop: Loop) -> None:
    parametrize.register_parametrization(loop.model.first, "weight", Doubled())


@way
def parametrized_before_the_first_step(loop: Loop) -> Any:
    parametrized(loop)
    loop.step()
    with torch.no_grad():
        loop.model.first.parametrizations.weight.original.mul_(0.5)
    loop.step()
    return loop.evaluate(), loop.model.first.weight.detach().clone()


def normed() -> nn.Module:
    model = Small()
    parametrizations.weight_norm(model.first)
    return model


@way(model=normed)
def a_weight_norm_assigned_to(loop: Loop) -> Any:
    loop.step()
    found = loop.model.first.weight.detach().clone()
    loop.model.first.weight = found * 0.5
    loop.step()
    return found, loop.model.first.weight.detach().clone()


@way
@changed
def functional_call(loop: Loop) -> Any:
    other = {name: value * 0.5 for name, value in loop.model.first.named_parameters()}
    return torch.func.functional_call(loop.model.first, other, some((2, 4))).detach()


# ---- other executors ---------------------------------------------------------------------------------------


@way
def two_inference_executors(loop: Loop) -> Any:
    found = []
    outer = nn.Sequential(loop.model)
    for _ in range(2):
        loop.step()
        found += [loop.evaluate(), loop.evaluate(outer)]
    with torch.no_grad():
        loop.model.second.bias.zero_()
    return found, loop.evaluate(outer), loop.evaluate()


@way
def an_executor_of_a_submodule(loop: Loop) -> Any:
    found, x = [], some((2, 4))
    for _ in range(2):
        loop.step()
        found.append(loop.evaluate(loop.model.first, x))
        with torch.no_grad():
            loop.model.first.bias.add_(1)
        found.append(loop.evaluate(loop.model.first, x))
    return found


@way
@changed
def detached_written_and_attached(loop: Loop) -> Any:
    loop.detach()
    found = read(loop.model)
    with torch.no_grad():
        loop.model.first.weight.mul_(0.5)
        loop.model.norm.running_mean.add_(1)
    return found


@way
@changed
def destroyed_written_and_compiled_again(loop: Loop) -> Any:
    loop.again()
    loop.model.load_state_dict(halves(read(loop.model)))


# ---- requires_grad -----------------------------------------------------------------------------------------


@way
def a_layer_frozen_and_freed(loop: Loop) -> Any:
    for number in range(6):
        loop.model.first.requires_grad_(number % 3 != 1)
        loop.step()
    return loop.evaluate()


def with_a_frozen_layer() -> nn.Module:
    model = Small()
    model.first.requires_grad_(False)
    return model


@way(optimizer=momentum)
def frozen_with_momentum(loop: Loop) -> Any:
    loop.step()
    loop.model.second.requires_grad_(False)
    loop.step()
    loop.model.second.requires_grad_(True)
    loop.step()


# ---- parameters, layers and buffers replaced ---------------------------------------------------------------


@way
@changed
def a_parameter_replaced_with_its_optimizer(loop: Loop) -> Any:
    loop.model.first.weight = nn.Parameter(some((6, 4)))
    take_a_new_optimizer(loop)


@way
@changed
def a_layer_replaced_with_its_optimizer(loop: Loop) -> Any:
    torch.manual_seed(9)
    loop.model.second = nn.Linear(6, 3)
    take_a_new_optimizer(loop)


@way
@changed
def a_layer_of_another_shape(loop: Loop) -> Any:
    torch.manual_seed(1)
    loop.model.first = nn.Linear(4, 6, bias=False)


@way
@changed
def a_buffer_replaced(loop: Loop) -> Any:
    loop.model.scale = torch.tensor(0.5)
    return loop.evaluate()


@way
@changed
def a_buffer_registered_anew(loop: Loop) -> Any:
    loop.model.register_buffer("seen", torch.tensor(10.0))
    loop.model.register_buffer("unused", torch.tensor(1.0))


@way
def a_buffer_that_forward_writes(loop: Loop) -> Any:
    view = loop.model.seen
    loop.step()
    found = view.clone()
    loop.model.seen.fill_(7)
    loop.step()
    return found, loop.model.seen.clone()


@way
@changed
def running_statistics_written(loop: Loop) -> Any:
    loop.model.norm.running_var.data.fill_(2)
    found = loop.evaluate()
    loop.model.norm.reset_running_stats()
    return found


# ---- the optimizer -----------------------------------------------------------------------------------------


@way
def optimizer_state_held_over_a_step(loop: Loop) -> Any:
    loop.step()
    held = loop.optimizer.state[loop.model.first.weight]
    average, whole = held["exp_avg"], loop.optimizer.state_dict()
    loop.step()
    return held, average, whole["state"]


@way
@changed
def optimizer_state_written(loop: Loop) -> Any:
    loop.optimizer.state[loop.model.first.weight]["exp_avg"].zero_()
    loop.optimizer.state[loop.model.second.weight]["exp_avg_sq"] *= 0.5


@way
@changed
def optimizer_state_assigned(loop: Loop) -> Any:
    loop.optimizer.state[loop.model.first.weight]["exp_avg"] = some((6, 4))
    loop.optimizer.state[loop.model.first.bias] = {
        "step": torch.tensor(3.0), "exp_avg": torch.zeros(6), "exp_avg_sq": torch.ones(6)
    }  # fmt: skip


@way(optimizer=momentum)
@changed
def momentum_written(loop: Loop) -> Any:
    for state in loop.optimizer.state.values():
        state["momentum_buffer"].zero_()


@way
def optimizer_rolled_back(loop: Loop) -> Any:
    loop.step()
    weights = copy.deepcopy(loop.model.state_dict())
    state = copy.deepcopy(loop.optimizer.state_dict())
    loop.step()
    loop.model.load_state_dict(weights)
    loop.optimizer.load_state_dict(state)
    loop.step()


@way
def optimizer_state_from_before_the_first_step(loop: Loop) -> Any:
    early = loop.optimizer.state_dict()
    for _ in range(2):
        loop.step()
    loop.optimizer.load_state_dict(early)
    loop.step()
    return early


@way
@changed
def state_of_a_plain_training_loaded(loop: Loop) -> Any:
    torch.manual_seed(0)
    model = Small()
    other = adamw(model.parameters())
    for seed in range(3):
        other.zero_grad()
        model(some((2, 4), seed), some((2, 3), seed))[1].backward()
        other.step()
    loop.optimizer.load_state_dict(other.state_dict())
    loop.model.load_state_dict(model.state_dict())


@way
def state_that_a_plain_training_goes_on_with(loop: Loop) -> Any:
    loop.step()
    loop.step()
    model = copy.deepcopy(loop.model)
    other = adamw(model.parameters())
    other.load_state_dict(loop.optimizer.state_dict())
    model(some((2, 4)), some((2, 3)))[1].backward()
    other.step()
    return read(model), other.state_dict()["state"]


@way
@changed
def optimizer_copied_and_pickled(loop: Loop) -> Any:
    both = copy.deepcopy(loop.optimizer), pickle.loads(pickle.dumps(loop.optimizer))
    return [other.state_dict()["state"] for other in both]


@way
@changed
def another_rate(loop: Loop) -> Any:
    loop.optimizer.param_groups[0]["lr"] = 0.01
    loop.set_optimizer(loop.optimizer)


@way
def one_cycle_of_rates_and_betas(loop: Loop) -> Any:
    schedule = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, max_lr=0.2, total_steps=5)
    for _ in range(4):
        loop.set_optimizer(loop.optimizer)
        loop.step()
        schedule.step()


WAYS["one_cycle_of_rates_and_momentum"] = Way(one_cycle_of_rates_and_betas, Small, momentum)


@way
@changed
def a_group_added(loop: Loop) -> Any:
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    loop.set_optimizer(loop.optimizer)


# ---- modes -------------------------------------------------------------------------------------------------


@way
def the_mode_of_the_model(loop: Loop) -> Any:
    loop.step()
    loop.model.eval()
    loop.step()
    loop.model.train()
    loop.step()


@way
def a_mode_set_before_the_first_step(loop: Loop) -> Any:
    loop.model.norm.eval()
    loop.step()
    loop.step()
    return loop.evaluate()


# ---- one change after a step ---------------------------------------------------------------------------------

for name, change in {
    "swapped_tensors": lambda loop: torch.utils.swap_tensors(
        loop.model.first.weight, nn.Parameter(some((6, 4)))
    ),
    "load_state_dict_of_the_executor": lambda loop: loop.load(halves(read(loop.model))),
    "load_state_dict_by_assignment": lambda loop: (
        loop.model.load_state_dict(halves(read(loop.model)), assign=True) and None
    ),
    "pruned_after_a_step": pruned_half,
    "parametrized_after_a_step": parametrized,
    # In train(): running statistics and the counter change.
    "the_model_called_by_the_program": lambda loop: loop.model(some((2, 4))).detach(),
    "one_parameter_frozen": lambda loop: loop.model.first.weight.requires_grad_(False).detach().clone(),
    "a_parameter_replaced": lambda loop: setattr(loop.model.first, "weight", nn.Parameter(some((6, 4)))),
    "a_weight_of_another_shape": lambda loop: setattr(loop.model.second.bias, "data", torch.zeros(1)),
    "a_weight_of_another_dtype": lambda loop: loop.model.double() and None,
    "another_dtype_and_back": lambda loop: loop.model.double().float() and None,
    "a_weight_removed": lambda loop: setattr(loop.model.second, "bias", None),
    "a_weight_tied": lambda loop: setattr(loop.model.norm, "bias", loop.model.norm.weight),
    "optimizer_state_cleared": lambda loop: loop.optimizer.state.clear(),
    "optimizer_state_of_one_parameter_removed": lambda loop: (
        loop.optimizer.state.pop(loop.model.first.weight) and None
    ),
    "another_optimizer_with_its_state": take_a_new_optimizer,
    "the_mode_of_a_submodule": lambda loop: loop.model.norm.eval() and None,
}.items():
    WAYS[name] = Way(changed(change, steps=2), Small, adamw)
for name, change in {
    "a_frozen_layer_freed": lambda loop: loop.model.first.requires_grad_(True) and None,
    "a_frozen_layer_written": lambda loop: loop.model.first.weight.mul_(0.5).clone(),
}.items():
    WAYS[name] = Way(changed(change, steps=2), with_a_frozen_layer, adamw)
