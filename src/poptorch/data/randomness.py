"""The global generators of torch, numpy and Python, as a value of plain types."""

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

RandomState = dict[str, Any]


def random_state() -> RandomState:
    """The states of all three, which `torch.load(weights_only=True)` reads back."""
    numpys: Any = numpy.random.get_state(legacy=False)
    key = torch.from_numpy(numpys["state"]["key"].astype("int64"))
    return {
        "torch": torch.get_rng_state(),
        "numpy": {**numpys, "state": {**numpys["state"], "key": key}},
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    numpys = state["numpy"]
    numpy.random.set_state(
        {**numpys, "state": {**numpys["state"], "key": numpys["state"]["key"].numpy().astype("uint32")}}
    )
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
