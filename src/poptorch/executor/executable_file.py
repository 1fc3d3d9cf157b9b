"""An executor's files: `save` and `compileAndExport` write them, `loadExecutable` and `load` read them."""

from __future__ import annotations

from typing import Any

from popengine.errors import Error

from ..enums import ConnectionType
from . import marked_model, saved_file
from .device_lease import DeviceOwner


class FileOwner(DeviceOwner):
    """The part of an executor that saves and restores it."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def compileAndExport(self, filename: str, *args: Any, export_model: bool = True, **kwargs: Any) -> None:
        """`compile` for these arguments, then `save`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model=export_model)

    def save(self, filename: str, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the compiled model, its options, its state and (export_model) the model with its optimizer.

        Raises:
            AssertionError: the file's folder is a file
        """
        executable = self._need_executable()
        self.copyWeightsToHostIfNeeded()
        states, factor = self._kept_state, self._kept_factor
        if self._engine is not None:
            states, factor = self._engine.read_optimizer(), self._engine.loss_factor
        saved = saved_file.Saved(
            executable.without_graph(),
            self._options,
            self._training,
            self._user_model if export_model else None,
            self._optimizer if export_model else None,
            states,
            factor,
            (self.rng_state[0], self.rng_state[1]) if save_rng_state else None,
            self.per_replica_params,
        )
        saved_file.write(filename, saved)

    def loadExecutable(self, filename: str) -> None:
        """Take over what was compiled for the same model and options, and its optimizer and random state.

        Raises:
            Error: no such file, one of another version, or one of another model
        """
        try:
            saved = saved_file.read(filename)
        except AssertionError as error:
            raise Error(str(error)) from error
        saved_file.check_fits(filename, saved, self._model, self._training)
        if self._executable is not None:
            self.destroy()
        self._restore(saved)

    def _restore(self, saved: saved_file.Saved) -> None:
        if self._training and marked_model.owner_of(self._user_model) is not self:
            marked_model.mark(self._user_model, self)
        self._executable = saved.executable
        self.per_replica_params = saved.per_replica_params
        self._kept_state, self._kept_factor = saved.optimizer_state, saved.loss_factor
        self._kept_rng = saved.rng_state
        if self._options.connection_type == ConnectionType.Always:
            self.attachToDevice()
