"""Two private functions of PopTorch that integrations use: unwrap a wrapped model, and wrap it again."""

import weakref
from typing import Any

from .executor import wrapped_model

_owners: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # executors of unwrapped models


def unwrapModelIfNecessary(model: Any) -> None:
    """If a model is wrapped for training, unmark the model."""
    owner = wrapped_model.executor_of(model)
    if owner is not None:
        _owners[model] = weakref.ref(owner)
        wrapped_model.unmark_model(model)


def rewrapModelIfNecessary(model: Any) -> None:
    """Mark a model again that `unwrapModelIfNecessary` unmarked, if the executor still exists."""
    link = _owners.pop(model, None)
    owner = link() if link is not None else None
    if owner is not None:
        wrapped_model.mark_model(model, owner)
