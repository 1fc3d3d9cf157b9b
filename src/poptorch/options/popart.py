"""`Options._Popart`: settings of PopTorch's compiler, stored by name.

Programs set them for speed or memory on an IPU; setters of `Options` write here, too. Names and types of values are
checked at compilation only (`check_names`), so that building options never fails.
"""

import difflib
import enum
from typing import Any, Self

from torch.utils._pytree import tree_leaves

from popengine.errors import Error
from poptorch.logs import logger
from poptorch.options.option_base import Freezable, expect, merged, plain, printed

_NAMES = """
    autoRecomputation cachePath convolutionOptions decomposeGradSum defaultBufferingDepth
    defaultPrefetchBufferingDepth disableGradAccumulationTensorStreams disableOptimizerStateTensorStreams
    enableEngineCaching enableExplicitIR enableFloatingPointChecks enableGradientAccumulation enableOutlining
    enableStableNorm enableStochasticRounding engineOptions explicitRecomputation
    groupNormStridedChannelGrouping instrumentWithHardwareCycleCounter outlineThreshold partialsTypeMatMuls
    rearrangeAnchorsOnHost saveInitializersToFile scheduleNonWeightUpdateGradientConsumersEarly
    subgraphCopyingStrategy syntheticDataMode timeLimitScheduler updatableNamedBuffers virtualGraphMode
"""
_PREFIXES = (
    "accumulateOuterFragmentSettings.",
    "automaticLossScalingSettings.",
    "batchSerializationSettings.",
    "replicatedCollectivesSettings.",
)


class Popart(Freezable):
    """`options._Popart`: settings of PopTorch's compiler, stored by name in `options`.
    Only `autoRecomputation`, `autoReport.*` and settings that the setters above write have an effect; all
    others are only stored. At compilation a name that looks mistyped raises Error, and an unknown name logs a
    warning."""

    options: dict[str, Any]
    patterns: dict[str, bool]
    patterns_level: int

    def __init__(self) -> None:
        super().__init__()
        self._declare(options={}, patterns={}, patterns_level=2)

    def set(self, name: str, value: Any) -> Self:
        """Store a setting by name. Dots address a nested setting: "automaticLossScalingSettings.enabled"."""
        self.checkIsFrozen()
        name = expect("_Popart.set", name, str)
        self.options[name] = int(value) if isinstance(value, enum.IntEnum) else value
        return self

    def merge(self, name: str, values: dict[str, Any]) -> Self:
        """*Pando*: add entries to a setting that is a dictionary; create it if it does not exist."""
        return self.set(name, {**self.options.get(name, {}), **values})

    def setEngineOptions(self, engine_options: dict[str, str]) -> Self:
        """Set all engine options. Only `autoReport.all` and `autoReport.directory` (profiles) are used."""
        return self.set("engineOptions", dict(expect("setEngineOptions", engine_options, dict)))

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> Self:
        """Recorded: there are no graph patterns that could be switched on or off."""
        assert isinstance(patterns, dict) and all(
            isinstance(name, str) and isinstance(on, int) for name, on in patterns.items()
        ), f"setPatterns takes a dictionary of bools by their names; found {patterns!r}"
        self.patterns, self.patterns_level = dict(patterns), int(expect("setPatterns", level, int))
        return self

    def check_names(self) -> None:
        """*Pando*: check names and values, at compilation. Log a warning for each unknown name.

        Raises: Error for a name that looks mistyped, or a value that is no bool, number, string or container.
        """
        known = _NAMES.split()
        for name, value in self.options.items():
            if not all(isinstance(leaf, int | float | str) for leaf in tree_leaves(value)):
                raise Error(
                    f"Unknown value type {type(value).__name__} for option {name}: _Popart options are "
                    f"bools, numbers, strings, and lists or dictionaries of them"
                )
            if name in known or name.startswith(_PREFIXES):
                continue
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if close:
                raise Error(f"Unknown {type(value).__name__} option {name}\n  fix: did you mean {close[0]}?")
            logger.warning("_Popart option %s is not known here: it is recorded, without effect", name)

    def toDict(self) -> dict[str, Any]:
        """Return the settings by name, and the patterns with their level."""
        patterns = {"patterns": dict(self.patterns), "patterns_level": self.patterns_level}
        return merged(plain(self.options), patterns)

    def __repr__(self) -> str:
        patterns = f"patterns={printed(self.patterns)}, patterns_level={self.patterns_level}"
        return f"{type(self).__name__}(options={printed(self.options)}, {patterns})"
