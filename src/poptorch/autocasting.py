"""Automatic casts as in PopTorch 3.0 and before: `autocast`, which is torch.autocast in compiled models only."""

import contextlib
from typing import Any

import torch

from popengine.errors import Error

__all__ = ["Policy", "autocast", "default"]


class Policy:
    """The rules of `autocast`: those of torch.autocast. Raises Error for rules of your own (fp16=[...], ...)."""

    def __init__(self, *rules: Any, **named_rules: Any) -> None:
        if any((*rules, *named_rules.values())):
            raise Error(
                "poptorch.autocasting.Policy: rules of your own are not supported\n"
                "  why: poptorch.autocast casts as torch.autocast does\n"
                "  fix: poptorch.autocasting.Policy(), and casts of tensors in forward: x.half(), x.float()"
            )

    def __repr__(self) -> str:
        return "Policy()"


default = Policy()


class autocast(contextlib.ContextDecorator):  # noqa: N801 the public name
    """Context manager and decorator that casts operands in a compiled model, such as those of products and
    convolutions to float16.

    In plain PyTorch it has no effect. With `enabled=False` nothing is cast inside, as in torch.autocast.

    >>> with poptorch.autocast():
    ...     x = self.layer(x)
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._entered: list[Any] = []  # an instance can be nested

    def __enter__(self) -> None:
        # Imported late: options import this module in processes that only load data, without the compiler.
        from popengine.compile.recording.current_capture import current

        capture = current()
        is_effective = capture is not None and capture.allows_autocast
        # A capture's tensors are on the CPU, whatever the device of the model.
        context = (
            torch.autocast("cpu", torch.float16, self._enabled) if is_effective else contextlib.nullcontext()
        )
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *details: Any) -> None:
        self._entered.pop().__exit__(*details)
