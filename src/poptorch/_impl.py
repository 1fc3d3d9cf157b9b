"""Two private functions of PopTorch that integrations use: unwrap a wrapped model, and wrap it again."""

import weakref
from typing import Any

from .executor import marked_model

_owners: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # executors of unwrapped models


def unwrapModelIfNecessary(model: Any) -> None:
    """Copy the newest weights to a model that is wrapped for training, and unwrap it; ignore other models."""
    owner = marked_model.owner_of(model)
    if owner is not None:
        owner.copyWeightsToHostIfNeeded()
        _owners[model] = weakref.ref(owner)
        marked_model.unmark(model)


def rewrapModelIfNecessary(model: Any) -> None:
    """Wrap again a model that `unwrapModelIfNecessary` unwrapped, if its executor is alive."""
    link = _owners.pop(model, None)
    owner = link() if link is not None else None
    if owner is not None:
        marked_model.mark(model, owner)
