"""`Options.Precision` and `Options.Jit`: number formats, and a deprecated switch of tracing."""

from typing import Literal, Self

import torch

from poptorch import autocasting
from poptorch.enums import HalfFloatCastingBehavior
from poptorch.logs import logger
from poptorch.options.option_base import OptionsDict, Setting, expect, recorded, refused

HALF_KERNELS = ("auto", "native", "float32")
_PARTIALS = {torch.float: "float", torch.half: "half"}


class Precision(OptionsDict):
    """Number formats."""

    _renamed = {"runningVarianceAlwaysFloat": "runningStatisticsAlwaysFloat"}

    autocast_enabled = Setting(True)
    autocast_policy = Setting(autocasting.default)
    half_kernels = Setting("auto")
    half_float_casting: Setting[int] = Setting()
    running_statistics_always_float: Setting[bool] = Setting()

    def autocastEnabled(self, autocast_enabled: bool) -> Self:
        """False: `poptorch.autocast` casts nothing in this model.

        Raises: ValueError, if not a bool.
        """
        return self.set(autocast_enabled=expect("autocastEnabled", autocast_enabled, bool, ValueError))

    def autocastPolicy(self, autocast_policy: autocasting.Policy) -> Self:
        """What `poptorch.autocast` casts.

        Raises: ValueError, if not a `poptorch.autocasting.Policy`.
        """
        expect("autocastPolicy", autocast_policy, autocasting.Policy, ValueError)
        return self.set(autocast_policy=autocast_policy)

    def enableStochasticRounding(self, enabled: bool) -> Self:
        """Round weight updates in half precision at random, without bias."""
        expect("enableStochasticRounding", enabled, int)
        return self._set_popart("enableStochasticRounding", bool(enabled))

    def enableFloatingPointExceptions(self, enabled: bool) -> Self:
        """Raise an Error at run time where a computation overflows or yields no number."""
        expect("enableFloatingPointExceptions", enabled, bool)
        return self._set_popart("enableFloatingPointChecks", enabled)

    @recorded("products are summed as PyTorch sums them")
    def setPartialsType(self, dtype: torch.dtype) -> Self:
        """Raises: ValueError, if not torch.float or torch.half."""
        if dtype not in _PARTIALS:
            raise ValueError(f"setPartialsType takes torch.float or torch.half; found {dtype!r}")
        self._popart.set("partialsTypeMatMuls", _PARTIALS[dtype])
        self._popart.merge("convolutionOptions", {"partialsType": _PARTIALS[dtype]})
        return self

    def halfKernels(self, kernels: Literal["auto", "native", "float32"]) -> Self:
        """Compute a CPU's products of half precision by "native" kernels, in "float32", or by processor ("auto").

        Products are those of matrices, convolutions and attention, of float16 and bfloat16. "float32": from float32
        copies of their operands, with one rounding at the end; copies of weights are made once a step. "auto" (default)
        is "native" for the types that the processor has units for (avx512_fp16, avx512_bf16), and "float32" for others
        and for attention. Instances on different processors have to name one of the other two.

        Raises: ValueError, if none of these.
        """
        if kernels not in HALF_KERNELS:
            raise ValueError(
                f"halfKernels takes one of {', '.join(map(repr, HALF_KERNELS))}; found {kernels!r}"
            )
        return self.set(half_kernels=kernels)

    @recorded("deprecated: mixed operands follow PyTorch's own promotion")
    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> Self:
        expect("halfFloatCasting", half_float_casting, HalfFloatCastingBehavior)
        logger.warning("Precision.halfFloatCasting is deprecated and has no effect: leave it out")
        return self.createOrSet(half_float_casting=half_float_casting.value)

    @recorded("deprecated: running statistics have the type that the model gives them")
    def runningStatisticsAlwaysFloat(self, value: bool) -> Self:
        expect("runningStatisticsAlwaysFloat", value, bool, ValueError)
        logger.warning("Precision.runningStatisticsAlwaysFloat is deprecated and has no effect: leave it out")
        return self.createOrSet(running_statistics_always_float=value)


class Jit(OptionsDict):
    """Deprecated options of tracing."""

    trace_model = Setting(False)

    @refused("True asks for tracing with TorchScript, which is gone")
    def traceModel(self, trace_model: bool) -> Self:
        """Raises: ValueError for True; False is deprecated."""
        logger.warning("Jit.traceModel is deprecated: leave it out")
        if trace_model:
            raise ValueError(
                "Jit.traceModel(True) asks for tracing with TorchScript, which is gone: models are captured "
                "by dispatching. Leave the option out"
            )
        return self.set(trace_model=False)
