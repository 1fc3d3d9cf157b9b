"""`Options.Precision` and `Options.Jit`: number formats, and a deprecated switch of tracing."""

from __future__ import annotations

from typing import Self

import torch

from poptorch import autocasting
from poptorch.enums import HalfFloatCastingBehavior
from poptorch.logs import logger
from poptorch.options.base import OptionsDict
from poptorch.options.popart import Popart

_PARTIALS = {torch.float: "float", torch.half: "half"}


class Precision(OptionsDict):
    _popart: Popart
    _renamed = {"runningVarianceAlwaysFloat": "runningStatisticsAlwaysFloat"}

    def __init__(self, popart: Popart) -> None:
        super().__init__(autocast_enabled=True, autocast_policy=autocasting.default)
        self._declare(_popart=popart)

    def autocastEnabled(self, autocast_enabled: bool) -> Self:
        """False: `poptorch.autocast` casts nothing in this model. Raises: ValueError, if not a bool."""
        if not isinstance(autocast_enabled, bool):
            raise ValueError(f"autocastEnabled takes a bool; found {autocast_enabled!r}")
        return self.set(autocast_enabled=autocast_enabled)

    def autocastPolicy(self, autocast_policy: autocasting.Policy) -> Self:
        """What `poptorch.autocast` casts. Raises: ValueError, if not a `poptorch.autocasting.Policy`."""
        if not isinstance(autocast_policy, autocasting.Policy):
            raise ValueError(f"autocastPolicy takes a poptorch.autocasting.Policy; found {autocast_policy!r}")
        return self.set(autocast_policy=autocast_policy)

    def enableStochasticRounding(self, enabled: bool) -> Self:
        """Recorded: round half-precision results at random, without bias."""
        assert isinstance(enabled, int), f"enableStochasticRounding takes a bool; found {enabled!r}"
        self._popart.set("enableStochasticRounding", bool(enabled))
        return self

    def enableFloatingPointExceptions(self, enabled: bool) -> Self:
        """Raise an error at run time where a computation overflows or yields no number."""
        assert isinstance(enabled, bool), f"enableFloatingPointExceptions takes a bool; found {enabled!r}"
        self._popart.set("enableFloatingPointChecks", enabled)
        return self

    def setPartialsType(self, dtype: torch.dtype) -> Self:
        """The format in which products are summed. Raises: ValueError, if not torch.float or torch.half."""
        if dtype not in _PARTIALS:
            raise ValueError(f"setPartialsType takes torch.float or torch.half; found {dtype!r}")
        self._popart.set("partialsTypeMatMuls", _PARTIALS[dtype])
        self._popart.merge("convolutionOptions", {"partialsType": _PARTIALS[dtype]})
        return self

    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> Self:
        """Deprecated, without effect: mixed operands follow PyTorch's own promotion."""
        assert isinstance(half_float_casting, HalfFloatCastingBehavior), (
            f"halfFloatCasting takes a poptorch.HalfFloatCastingBehavior; found {half_float_casting!r}"
        )
        logger.warning("Precision.halfFloatCasting is deprecated and has no effect: leave it out")
        return self.createOrSet(half_float_casting=half_float_casting.value)

    def runningStatisticsAlwaysFloat(self, value: bool) -> Self:
        """Deprecated, without effect: running statistics have the type the model gives them."""
        if not isinstance(value, bool):
            raise ValueError(f"runningStatisticsAlwaysFloat takes a bool; found {value!r}")
        logger.warning("Precision.runningStatisticsAlwaysFloat is deprecated and has no effect: leave it out")
        return self.createOrSet(running_statistics_always_float=value)


class Jit(OptionsDict):
    def __init__(self) -> None:
        super().__init__(trace_model=False)

    def traceModel(self, trace_model: bool) -> Self:
        """Deprecated. Raises: ValueError for True, since tracing with TorchScript is gone."""
        logger.warning("Jit.traceModel is deprecated: leave it out")
        if trace_model:
            raise ValueError(
                "Jit.traceModel(True) asks for tracing with TorchScript, which is gone: models are captured "
                "by dispatching. Leave the option out"
            )
        return self.set(trace_model=False)
