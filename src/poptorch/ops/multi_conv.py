"""MultiConv: convolutions that an IPU may run as one parallel group. Validated and recorded; results are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from popengine.compile.recording.current_capture import Group, current
from popengine.errors import Error

from ..enums import MultiConvPlanType


class MultiConv:
    """Record the convolutions inside as one group.

        with poptorch.MultiConv().planType(poptorch.MultiConvPlanType.Parallel):
            a, b = self.left(x), self.right(y)

    Each property is one value for all, a list with one for each convolution, or None to leave it open.
    """

    def __init__(self) -> None:
        self._properties: dict[str, Any] = {}

    def availableMemoryProportions(self, value: float | list[float] | None) -> MultiConv:
        """Set the proportion of tile memory that each convolution may use."""
        valid = _all(value, lambda item: isinstance(item, int | float) and not isinstance(item, bool))
        assert valid, f"Invalid available memory proportion! A number or a list of them; found {value!r}"
        return self._with("available_memory_proportions", value)

    def partialsTypes(self, value: torch.dtype | list[torch.dtype] | None) -> MultiConv:
        """Set the type of partial sums: torch.float or torch.half."""
        if not _all(value, lambda dtype: dtype in (torch.float32, torch.float16)):
            raise ValueError(
                f"Invalid partials types: torch.float, torch.half or a list of them; found {value!r}"
            )
        return self._with("partials_types", value)

    def enableConvDithering(self, value: bool | list[bool] | None) -> MultiConv:
        """Set whether the start tile of a convolution is spread."""
        if not _all(value, lambda flag: isinstance(flag, bool)):
            raise ValueError(f"Invalid convolution dithering: a bool or a list of them; found {value!r}")
        return self._with("conv_dithering", value)

    def planType(self, value: MultiConvPlanType | None) -> MultiConv:
        """Set whether the convolutions run in parallel or one after another."""
        valid = isinstance(value, MultiConvPlanType | None)
        assert valid, f"Invalid plan type! One of poptorch.MultiConvPlanType's; found {value!r}"
        return self._with("plan_type", value)

    def perConvReservedTiles(self, value: int | None) -> MultiConv:
        """Set the number of tiles that are reserved for each convolution."""
        valid = isinstance(value, int | None) and not isinstance(value, bool)
        assert valid, f"Invalid reserved tiles! An integer; found {value!r}"
        return self._with("per_conv_reserved_tiles", value)

    def cycleBackOff(self, value: float | None) -> MultiConv:
        """Set the share of cycles by which a plan may be slower than the best."""
        assert isinstance(value, float | None), f"Invalid cycle back-off! A float; found {value!r}"
        return self._with("cycle_back_off", value)

    def _with(self, name: str, value: Any) -> MultiConv:
        self._properties[name] = tuple(value) if isinstance(value, list) else value
        return self

    def __enter__(self) -> None:
        capture = current()
        if capture is None:
            return
        if capture.group is not None:
            raise Error(
                "Nested poptorch.MultiConv is not supported: a convolution is in one group\n"
                "  fix: end the outer `with` before the inner begins"
            )
        capture.group = Group({name: value for name, value in self._properties.items() if value is not None})

    def __exit__(self, kind: Any, *_: object) -> None:
        capture = current()
        if capture is None or capture.group is None:
            return
        group, capture.group = capture.group, None
        if kind is not None:
            return
        if group.convolutions == 0:
            raise Error(
                "Unexpected end_multi_conv: there is no convolution in this poptorch.MultiConv\n"
                "  fix: call the convolutions inside the `with`"
            )
        wrong = {
            name: len(value)
            for name, value in group.properties.items()
            if isinstance(value, tuple) and len(value) != group.convolutions
        }
        if wrong:
            raise Error(
                f"this poptorch.MultiConv has {group.convolutions} convolutions, but "
                + ", ".join(f"{name} has {length} values" for name, length in wrong.items())
                + "\n  fix: one value for each convolution, or a single value for all"
            )


def _all(value: Any, valid: Callable[[Any], bool]) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(valid(item) for item in value)
    return value is None or valid(value)
