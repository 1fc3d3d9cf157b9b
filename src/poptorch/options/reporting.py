"""The options of what is kept beside the results: executables, logs, profiles, places in the source."""

import json
import os
from pathlib import Path
from typing import Any, Self

from poptorch.logs import logger
from poptorch.options.option_base import OptionsDict, Setting, expect, recorded

_NO_LIMIT = 2**64 - 1


class ReportingOptions(OptionsDict):
    _source_location_excludes: list[str]

    log_dir = Setting(".")
    max_repeat_logs = Setting(4)
    model_name: Setting[str] = Setting()

    def enableExecutableCaching(self, path: str | os.PathLike[str] | None) -> Self:
        """Leave each compiled model in this folder as a file, which `loadExecutable` takes. None: do not.

        A compilation reads none of them.
        """
        self._popart.set("enableEngineCaching", path is not None)
        return self._set_popart("cachePath", "" if path is None else os.fspath(path))

    @recorded("there are no log files but POPTORCH_LOG_DEST")
    def logDir(self, log_dir: str | os.PathLike[str]) -> Self:
        return self.set(log_dir=os.fspath(log_dir))

    def modelName(self, name: str) -> Self:
        """The name of the model in profiles, and of its folder there."""
        return self.createOrSet(model_name=expect("modelName", name, str))

    def maxRepeatLogs(self, max_lines: int | None = None) -> Self:
        """How often in a row the same line is written at most. None: as often as it comes."""
        return self.set(max_repeat_logs=_NO_LIMIT if max_lines is None else max_lines)

    @recorded("only an IPU counts cycles; `getPerfCounters` has seconds")
    def logCycleCount(self, log_cycle_count: bool) -> Self:
        expect("logCycleCount", log_cycle_count, bool)
        return self._set_popart("instrumentWithHardwareCycleCounter", log_cycle_count)

    def enableProfiling(self, profile_dir: str | os.PathLike[str] | None = None) -> Self:
        """Write a profile and a page, in formats of ours.

        Into `<profile_dir>/<model name, or "training" or "inference">/`.
        """
        directory = os.fspath("." if profile_dir is None else profile_dir)
        wanted = {"autoReport.all": "true", "autoReport.directory": directory}
        clash = sorted(wanted.keys() & _engine_options_of_environment().keys())
        if clash:
            logger.warning("POPLAR_ENGINE_OPTIONS sets %s too: enableProfiling goes first", ", ".join(clash))
        self._popart.merge("engineOptions", wanted)
        return self

    def _profile_directory(self, training: bool) -> Path | None:
        """Where the executor writes its profile, or None if nobody asked for one."""
        engine = {**_engine_options_of_environment(), **self._popart.options.get("engineOptions", {})}
        if str(engine.get("autoReport.all", "")).lower() != "true":
            return None
        kind = "training" if training else "inference"
        name = self.model_name if self.exists("model_name") else kind
        return Path(engine.get("autoReport.directory", ".")) / name

    @recorded("operations have the names of `NameScope` only")
    def disableModuleNamescope(self) -> Self:
        self._module_namescope_enabled = False
        return self

    @recorded("the lines shown are the innermost ones outside of torch and this package")
    def sourceLocationExcludes(self, excludes: list[str]) -> Self:
        """Args: excludes: fragments of paths that are not to be shown"""
        assert isinstance(excludes, list) and all(isinstance(fragment, str) for fragment in excludes), (
            f"sourceLocationExcludes takes a list of strings; found {excludes!r}"
        )
        self._source_location_excludes = list(excludes)
        return self

    @recorded("see `sourceLocationExcludes`, to whose fragments it adds")
    def appendToLocationExcludes(self, *excludes: str) -> Self:
        return self.sourceLocationExcludes([*self._source_location_excludes, *excludes])

    def showCompilationProgressBar(self, show: bool = True) -> Self:
        """Draw a bar while a model is compiled; without it `compilationTime()` is an error."""
        self._show_progress_bar = expect("showCompilationProgressBar", show, bool)
        return self


def _engine_options_of_environment() -> dict[str, Any]:
    text = os.environ.get("POPLAR_ENGINE_OPTIONS", "")
    if not text:
        return {}
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        logger.warning("POPLAR_ENGINE_OPTIONS is ignored, since it is no JSON (%s): %s", error, text)
        return {}
    return found if isinstance(found, dict) else {}
