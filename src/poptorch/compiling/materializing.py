"""Models that are made on the device "meta": their weights get memory and values when they are first needed; in each
process those of its ipus only."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from popengine.errors import Error
from popengine.run.elsewhere import Mark, is_elsewhere, set_mark, swap_memory
from popengine.run.instances.consistency import hash_of_sample
from popengine.torch_private import reset_parameters

from .arguments import weights_of

Model = TypeVar("Model", bound=nn.Module)
_PENDING = "_pando_init"  # the attribute of a model for which `materialize` was called


def materialize(model: Model, init: Callable[[nn.Module], Any] | None = None) -> Model:
    """*Pando*: let the first call give memory and first values to the weights of a model that was made without them.

    >>> torch.manual_seed(0)
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(4, 2)
    >>> trainer = poptorch.trainingModel(poptorch.materialize(model), options)

    If a replica spans several processes, each of them keeps the weights of its own ipus only. The first values are
    those of a model that is made in the ordinary way with torch's present random state, if the layers draw in their
    `reset_parameters()`, in the order of `model.modules()`.

    Args: init: as for `model.apply`: sets the own parameters and buffers of a layer, and is called for each layer that
        has some, children first; by default it calls `reset_parameters()`
    Returns: the model. Call this before the model is wrapped. An error of the first call names weights without values
    """
    setattr(model, _PENDING, (init or reset_parameters, torch.get_rng_state()))
    return model


def fill_weights(model: nn.Module, holders: Mapping[str, int], process: int) -> None:
    """Fill the weights on "meta" of a model for which `materialize` was called, layer by layer; those that another
    process than `process` holds (of `holders`, by canonical name) lose their memory again. The random state has to be
    equal in all processes. Raises Error for weights that `init` does not set."""
    if not hasattr(model, _PENDING):
        return
    init, random_state = getattr(model, _PENDING)
    weights = weights_of(model).items()
    missing = {id(value): key for key, value in weights if value.is_meta and not is_elsewhere(value)}
    filled: dict[str, Tensor] = {}  # by canonical name; of another process's weights, on "meta"

    def fill(layer: nn.Module) -> None:
        values = chain(layer._parameters.values(), layer._buffers.values())
        to_fill = {missing[id(x)]: x for x in values if x is not None and id(x) in missing}
        try:
            for key, value in to_fill.items():
                memory = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                memory.view(-1).view(torch.uint8).fill_(255)  # NaN, -1
                swap_memory(key, value, memory)
            if to_fill:
                init(layer)
            if empty := [key for key, value in to_fill.items() if _is_unset(value)]:
                raise Error(
                    f"{', '.join(empty)} of the model, which is made on the meta device, have no values\n"
                    f"  why: {getattr(init, '__name__', init)} does not set them in {type(layer).__name__}\n"
                    "  fix: set them in the layer's reset_parameters(), or by poptorch.materialize(model, init)"
                )
        except BaseException:
            for key, value in to_fill.items():
                swap_memory(key, value, value.detach().to("meta"))
            raise
        for key, value in to_fill.items():  # a tied weight keeps the values of its first layer
            memory = value.detach()
            is_elsewhere = holders.get(key, process) != process
            memory = filled.setdefault(key, memory.to("meta") if is_elsewhere else memory)
            swap_memory(key, value, memory, elsewhere=is_elsewhere)
            set_mark(value, mark := Mark(holders.get(key), value))
            mark.loaded, mark.is_compared = f"drawn from {hash_of_sample(random_state)}", True

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.set_rng_state(random_state)
        model.apply(fill)


def _is_unset(value: Tensor) -> bool:
    return value.numel() > 0 and bool((value.detach().reshape(-1).view(torch.uint8) == 255).all())
