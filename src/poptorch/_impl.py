"""Two private functions of PopTorch that integrations use: unwrap a wrapped model, and wrap it again."""

import weakref
from typing import Any

from .executor import marked_model

_owners: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # executors of unwrapped models


def unwrapModelIfNecessary(model: Any) -> None:
    """If a model is wrapped for training, copy the newest weights to the host and unmark the model."""
    owner = marked_model.executor_of(model)
    if owner is not None:
        owner.copyWeightsToHostIfNeeded()
        _owners[model] = weakref.ref(owner)
        marked_model.unmark_model(model)


def rewrapModelIfNecessary(model: Any) -> None:
    """Mark a model again that `unwrapModelIfNecessary` unmarked, if the executor still exists."""
    link = _owners.pop(model, None)
    owner = link() if link is not None else None
    if owner is not None:
        marked_model.mark_model(model, owner)
