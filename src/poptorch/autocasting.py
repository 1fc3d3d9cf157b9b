"""Automatic casts as in PopTorch 3.0 and before: `autocast`, with an effect in compiled models only.

The default policy is torch.autocast's. A user's policy is a function mode, which runs before torch.autocast.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from popengine.torch_private import tree_leaves, tree_map

__all__ = ["Policy", "autocast", "default"]


class Policy(TorchFunctionMode):
    """The dtypes to which `autocast` casts the floating point operands of each torch function.

    Args: lists of names of torch functions, such as "matmul". If several lists have a name, the last applies;
        for a function in no list torch.autocast's rules for float16 apply.
        fp16, fp32:      functions whose operands are cast to float16, to float32
        promote, demote: functions whose operands are cast to the widest, to the narrowest of their dtypes
    """

    def __init__(
        self,
        fp16: Sequence[str] | None = None,
        fp32: Sequence[str] | None = None,
        promote: Sequence[str] | None = None,
        demote: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        rules = {"fp16": fp16, "fp32": fp32, "promote": promote, "demote": demote}
        self._rule_of = {name: rule for rule, names in rules.items() for name in names or ()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._rule_of or ''})"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, rule = kwargs or {}, self._rule_of.get(getattr(func, "__name__", ""), "")
        operands = list(filter(_is_float_tensor, tree_leaves((args, kwargs)))) if rule else []
        if not operands or not torch.is_autocast_enabled("cpu"):  # by autocast(False) inside
            return func(*args, **kwargs)
        by_size = sorted({operand.dtype for operand in operands}, key=lambda dtype: dtype.itemsize)
        dtypes = {"fp16": torch.float16, "fp32": torch.float32, "promote": by_size[-1], "demote": by_size[0]}
        dtype = dtypes[rule]
        args, kwargs = tree_map(
            lambda leaf: leaf.to(dtype) if _is_float_tensor(leaf) else leaf, (args, kwargs)
        )
        with torch.autocast("cpu", enabled=False):  # torch.autocast must not cast the operands again
            return func(*args, **kwargs)


def _is_float_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


default = Policy()
_policy: ContextVar[Policy | None] = ContextVar("policy", default=default)  # None: autocast has no effect


@contextlib.contextmanager
def using_policy(policy: Policy | None) -> Iterator[None]:
    """Set the policy of each `autocast` that is entered inside the `with`; None: `autocast` has no effect."""
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


class autocast(contextlib.ContextDecorator):  # noqa: N801 the public name
    """Context manager and decorator that casts operands in a compiled model, by default those of products and
    convolutions to float16; `options.Precision.autocastPolicy` sets other rules.

    In plain PyTorch it has no effect. With `enabled=False` nothing is cast inside, as in torch.autocast.

    with poptorch.autocast():
        x = self.layer(x)
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._stacks: list[contextlib.ExitStack] = []  # of the entered contexts: an instance can be nested

    def __enter__(self) -> None:
        # Imported late: options import this module in processes that only load data, without the compiler.
        from popengine.compile.recording.current_capture import current

        stack, policy = contextlib.ExitStack(), _policy.get()
        if current() is not None and policy is not None:
            # A capture's tensors are on the CPU, whatever the device of the model.
            stack.enter_context(torch.autocast("cpu", torch.float16, self._enabled))
            if self._enabled:
                stack.enter_context(policy)
        self._stacks.append(stack)

    def __exit__(self, *details: Any) -> None:
        self._stacks.pop().__exit__(*details)
