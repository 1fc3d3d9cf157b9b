"""`Options.Precision` and `Options.Jit`: number formats, and a deprecated switch of tracing."""

from __future__ import annotations

from typing import Self

import torch

from poptorch.enums import HalfFloatCastingBehavior
from poptorch.logs import logger
from poptorch.options.base import OptionsDict
from poptorch.options.popart import Popart

_AUTOCAST = "autocast options left PopTorch in 3.1; use torch.autocast, or model.half() for all of a model"
_PARTIALS = {torch.float: "float", torch.half: "half"}


class Precision(OptionsDict):
    _popart: Popart
    _renamed = {"runningVarianceAlwaysFloat": "runningStatisticsAlwaysFloat"}
    _gone = {"autocastEnabled": _AUTOCAST, "autocastPolicy": _AUTOCAST}

    def __init__(self, popart: Popart) -> None:
        super().__init__()
        self._declare(_popart=popart)

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
