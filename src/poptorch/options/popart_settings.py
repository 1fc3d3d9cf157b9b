"""`Options._Popart`: settings of PopTorch's compiler, by their names."""

import enum
from typing import Any, Self

from popengine.errors import Error, did_you_mean
from popengine.torch_private import tree_leaves
from poptorch.checks import checked
from poptorch.logs import log_no_effect, logger
from poptorch.options.option_base import OptionsDict, merge_disjoint, plain_copy

# Settings without effect; with a dot at the end: the prefix of names.
_NO_EFFECT = """
    accumulateOuterFragmentSettings. automaticLossScalingSettings. batchSerializationSettings.
    replicatedCollectivesSettings.
    cachePath convolutionOptions decomposeGradSum defaultBufferingDepth defaultPrefetchBufferingDepth
    disableGradAccumulationTensorStreams disableOptimizerStateTensorStreams enableEngineCaching enableExplicitIR
    enableGradientAccumulation enableOutlining enableStableNorm explicitRecomputation
    groupNormStridedChannelGrouping outlineThreshold partialsTypeMatMuls rearrangeAnchorsOnHost
    saveInitializersToFile scheduleNonWeightUpdateGradientConsumersEarly subgraphCopyingStrategy
    timeLimitScheduler virtualGraphMode
"""
# Settings with an effect, and their defaults.
_DEFAULTS: dict[str, Any] = {
    "autoRecomputation": 0,
    "automaticLossScalingSettings.enabled": False,
    "enableFloatingPointChecks": False,
    "enableStochasticRounding": False,
    "engineOptions": {},
    "instrumentWithHardwareCycleCounter": False,
    "syntheticDataMode": 0,
    "updatableNamedBuffers": [],
}


class Popart(OptionsDict):
    """`options._Popart`: settings of PopTorch's compiler, stored by name in `options`. At compilation a name that looks
    mistyped raises Error, and an unknown name logs a warning."""

    _path = "options._Popart"
    options: dict[str, Any] = {}
    patterns: dict[str, bool] = {}
    patterns_level: int = 2

    def __call__(self, name: str) -> Any:
        return self.options.get(name, _DEFAULTS[name])

    def set(self, name: str, value: Any) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Store a setting by name. A name may have dots: "automaticLossScalingSettings.enabled"."""
        if checked("_Popart.set", name, str) not in _DEFAULTS and _has_no_effect(name):
            log_no_effect(f"options._Popart.set({name!r}, ...)", "Pando has no such setting")
        return self._store(name, int(value) if isinstance(value, enum.IntEnum) else value)

    def _store(self, name: str, value: Any) -> Self:
        self.checkIsFrozen()
        self.options[name] = value
        return self

    def _merge(self, name: str, values: dict[str, Any]) -> Self:
        """Add entries to a setting that is a dictionary; create it if it does not exist."""
        return self._store(name, {**self.options.get(name, {}), **values})

    def setEngineOptions(self, engine_options: dict[str, str]) -> Self:
        """Set all engine options. Only `autoReport.all` and `autoReport.directory` (profiles) are used."""
        return self.set("engineOptions", dict(checked("setEngineOptions", engine_options, dict)))

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> Self:
        """Has no effect; kept for compatibility: there are no graph patterns."""
        for name, is_on in checked("setPatterns", patterns, dict).items():
            checked("setPatterns: the name of a pattern", name, str)
            checked(f"setPatterns: the value of {name!r}", is_on, int)
        self.patterns, self.patterns_level = dict(patterns), int(checked("setPatterns", level, int))
        return self

    def check_names(self) -> None:
        """*Pando*: raise Error for names that look mistyped, and for values that are not bools, numbers,
        strings or containers of these. Log a warning for each unknown name."""
        for name, value in self.options.items():
            if not all(isinstance(leaf, int | float | str) for leaf in tree_leaves(value)):
                raise Error(
                    f"Unknown value type {type(value).__name__} for option {name}: _Popart options are "
                    f"bools, numbers, strings, and lists or dictionaries of them"
                )
            if name in _DEFAULTS or _has_no_effect(name):
                continue
            if meant := did_you_mean(name, [*_DEFAULTS, *_NO_EFFECT.split()], least=0.85):
                raise Error(f"Unknown {type(value).__name__} option {name}{meant}")
            logger.warning("_Popart option %s is not known here: it has no effect", name)

    def toDict(self) -> dict[str, Any]:
        """Return the settings by name, and the patterns with their level."""
        patterns = {"patterns": dict(self.patterns), "patterns_level": self.patterns_level}
        return merge_disjoint(plain_copy(self.options), patterns)


def _has_no_effect(name: str) -> bool:
    known = _NO_EFFECT.split()
    return name in known or name.startswith(tuple(prefix for prefix in known if prefix.endswith(".")))
