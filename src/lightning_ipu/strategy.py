"""The strategy: runs a LightningModule's steps by executors, one for each stage of the Trainer.

Lightning calls the input of one executor call a batch. `prepare.py` makes the strategy's options,
`loaders.py` its loaders of combined batches, and `recording.py` the `StepModule` that executors compile.
After each call `_replay` repeats the step's actions on the host, such as logging, with the call's values.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import popdist
import poptorch
from popdist import collectives
from popengine.torch_private import tree_map_only
from poptorch.checks import checked
from poptorch.data.loader import LoadedBatch, loaded_batches, record_loaded
from poptorch.data.rows import row_count_of
from poptorch.logs import logger
from poptorch.nested_values import tensors_of, with_tensors

from .loaders import convert_loader, micro_batch_count, resize_batch
from .prepare import (
    Lightning,
    check_before_setup,
    check_optimizers,
    make_options,
    reading_accumulation,
    with_report,
)
from .recording import StepModule, set_until_closed


class StrategyPart:
    """Lightning's strategy for ipus.

    >>> Trainer(accelerator="ipu", devices=4, strategy=IPUStrategy(device_iterations=8))

    Args:
        device_iterations: number of weight updates (in inference: micro-batches of each replica) per call
        autoreport: whether to write a profile and its page; True if `autoreport_dir` (its folder) is given
        training_opts, inference_opts: poptorch.Options, used unchanged: `device_iterations` and the Trainer's
            `devices` and `accumulate_grad_batches` then have no effect
    """

    lightning: Lightning
    strategy_name = "ipu_strategy"
    # If true, Lightning puts its own sampler into loaders; poptorch.DataLoader partitions rows itself.
    is_distributed = False
    global_rank = local_rank = node_rank = 0
    world_size = 1  # number of processes
    handles_gradient_accumulation = True

    # Attributes of Lightning's base class.
    _lightning_module: Any
    accelerator: Any
    model: Any
    optimizers: list[Any]
    parallel_devices: Any
    precision_plugin: Any

    def __init__(
        self,
        accelerator: Any = None,
        device_iterations: int = 1,
        autoreport: bool = False,
        autoreport_dir: str | None = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        training_opts: poptorch.Options | None = None,
        inference_opts: poptorch.Options | None = None,
    ) -> None:
        of_lightning = (accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        super().__init__(*of_lightning)  # type: ignore[call-arg]
        self.device_iterations = device_iterations
        self.autoreport, self.autoreport_dir = autoreport or autoreport_dir is not None, autoreport_dir
        self._given_opts = {"training_opts": training_opts, "inference_opts": inference_opts}
        given = {name: opts for name, opts in self._given_opts.items() if opts is not None}
        vars(self).update({x: checked(f"IPUStrategy: {x}", y, poptorch.Options) for x, y in given.items()})
        self.poptorch_models: dict[Any, poptorch.PoplarExecutor] = {}
        self._undo = ExitStack()
        self.updates = 0  # training steps of a batch, less the optimizer's steps
        self._first_batch_rows: dict[tuple[int, ...], int] = {}  # for prediction, by (loader's index,)
        self._random_state: dict[str, list[int]] = {}
        self._loaded_random_state: dict[str, list[int]] = {}

    # ---- the life of a run -------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        self._release_executors()
        is_fit = trainer.state.fn == "fit"
        check_before_setup(self, trainer, is_fit)
        self.world_size = self.training_opts.Distributed.numProcesses
        if self.world_size > 1:
            popdist.init()
            self.global_rank, self.local_rank = popdist.getInstanceIndex(), popdist.getLocalInstanceIndex()
        if is_fit:
            reading_accumulation(self._undo, trainer, self.lightning.name)
        set_until_closed(
            self._undo, vars(trainer._data_connector), "_prepare_dataloader", self._prepare_dataloader
        )
        super().setup(trainer)  # type: ignore[misc]
        if is_fit:
            check_optimizers(self, trainer)
            members = vars(self._lightning_module)
            set_until_closed(self._undo, members, "optimizer_zero_grad", None)
            step = self._check_steps(self._lightning_module.optimizer_step)
            set_until_closed(self._undo, members, "optimizer_step", step)
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            set_until_closed(self._undo, vars(loop), "_on_before_zero_grad", lambda optimizer: None)
            if trainer.gradient_clip_val:
                name = "max_grad_value" if trainer.gradient_clip_algorithm == "value" else "max_grad_norm"
                set_until_closed(self._undo, vars(self.optimizers[0]), name, float(trainer.gradient_clip_val))
        self.model = StepModule(self._lightning_module)
        self._make_executors(trainer, is_fit)

    def _make_executors(self, trainer: Any, is_fit: bool) -> None:
        stages = self.lightning.import_object("trainer.states.RunningStage")
        if not is_fit:
            self.poptorch_models = {trainer.state.stage: self._make_inference_executor()}
        else:
            optimizer = self.optimizers[0] if self.optimizers else None
            training = poptorch.trainingModel(self.model, with_report(self, self.training_opts), optimizer)
            self.poptorch_models = {stages.TRAINING: training}
            if trainer.enable_validation:
                self.poptorch_models[stages.VALIDATING] = validation = self._make_inference_executor()
                if trainer.num_sanity_val_steps > 0:
                    self.poptorch_models[stages.SANITY_CHECKING] = validation
        for stage in self.poptorch_models:
            options = self.options_for(stage)
            is_given = any(options is given for given in self._given_opts.values())
            if is_given and stage != stages.SANITY_CHECKING:
                logger.info(
                    "%s runs with the options given: device iterations %d, gradient accumulation %d, replicas %d",
                    stage.value,
                    options.device_iterations,
                    options.Training.gradient_accumulation,
                    options.replication_factor,
                )

    def _make_inference_executor(self) -> poptorch.PoplarExecutor:
        options = with_report(self, self.inference_opts).clone().allowNewShapes()
        return poptorch.inferenceModel(self.model, options)

    def _release_executors(self) -> None:
        self._save_random_state()
        for executor in self.poptorch_models.values():
            executor.destroy()
        self._first_batch_rows = {}
        self._undo.close()
        if isinstance(self.model, StepModule):
            self.model = self._lightning_module

    def teardown(self) -> None:
        self._release_executors()
        super().teardown()  # type: ignore[misc]

    def model_to_device(self) -> None:
        """Do nothing: executors train the weights where they are."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    # ---- steps -------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        executor = self.poptorch_models[self._current_stage]
        if self.optimizers:
            executor.setOptimizer(self.optimizers[0])

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizers:
            self._call_before_zero_grad(self.optimizers[0])
        self.updates += 1
        return self._step(self._current_stage, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(self._current_stage, *args, **kwargs)

    test_step = validation_step

    def _call_before_zero_grad(self, optimizer: Any) -> None:
        """Call the hooks `on_before_zero_grad` before the call, because Lightning would call them after its update.
        Raise a MisconfigurationException if they write weights: on a CPU, the gradients are those of the old ones."""
        parameters = [*self._lightning_module.parameters()]
        before = [parameter._version for parameter in parameters]
        loop = self._lightning_module.trainer.fit_loop.epoch_loop.automatic_optimization
        type(loop)._on_before_zero_grad(loop, optimizer)
        if before != [parameter._version for parameter in parameters]:
            raise self.lightning.Misconfiguration(
                "`on_before_zero_grad` writes into parameters, between the forward and the backward of a batch, which"
                " are one call with IPUs. Write into them in `on_train_batch_start` or `on_train_batch_end`."
            )

    def _check_steps(self, optimizer_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a module's `optimizer_step`, which raises a MisconfigurationException if it runs the closure without a
        step of the optimizer: the closure has updated the weights."""

        def step(*args: Any, **kwargs: Any) -> Any:
            self.updates = 0
            result = optimizer_step(*args, **kwargs)
            if self.updates > 0:
                code = inspect.unwrap(optimizer_step).__code__
                raise self.lightning.Misconfiguration(
                    f"{code.co_filename}:{code.co_firstlineno}: `optimizer_step` calls the closure and skips"
                    " `optimizer.step`, but with IPUs the closure has updated the weights: a call is forward, backward"
                    " and update. Call `optimizer.step(closure=optimizer_closure)` for each batch, leave out batches"
                    " in the loader, or set the learning rate of a batch to 0."
                )
            return result

        return step

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions for a batch. A short last batch is padded, and the predictions are cut."""
        rows = row_count_of(batch)
        if rows is None:
            return self._step(self._current_stage, batch, *args, **kwargs)
        n = micro_batch_count(self.inference_opts, training=False)
        whole = -(-max(rows, self._first_batch_rows.setdefault(args[1:], rows)) // n) * n
        padded = resize_batch(batch, rows, whole)
        return resize_batch(self._step(self._current_stage, padded, *args, **kwargs), whole, rows)

    def _step(self, stage: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the executor of a stage, repeat the step's actions on the host, and return the call's output."""
        prepared = self._prepare_input(args)
        executor = self.poptorch_models[stage]
        random_state = self._loaded_random_state.pop(stage.value, None)
        if random_state is not None and not executor.isCompiled():
            executor.compile(*prepared, **kwargs)
            executor.rng_state = random_state
        output = executor(*prepared, **kwargs)
        _replay(self._lightning_module, executor.notes, self.reduce)
        return output

    def _prepare_input(self, args: Any) -> Any:
        """Return a step's arguments, with a tensor of one element per micro-batch in place of each number."""
        options, is_training = self.options_for(self._current_stage), self._current_stage == "train"
        n = micro_batch_count(options, is_training)
        if not is_training and not any(tensor in loaded_batches for tensor in tensors_of(args)):
            # Loaders that are not poptorch's yield whole calls.
            record_loaded(args, LoadedBatch(options._counts(), n))
        return tree_map_only((int, float), lambda number: torch.tensor(number).repeat(n), args)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]
        return self.precision_plugin.cast(batch)

    def _prepare_dataloader(self, dataloader: Any, shuffle: bool = False, mode: Any = None) -> Any:
        """Return a loader of combined batches, in place of Lightning's method, which rebuilds the loader."""
        stage = self._current_stage if mode is None else mode
        return convert_loader(dataloader, stage, self.options_for(stage), self.lightning)

    # ---- options -----------------------------------------------------------------------------------------

    @property
    def _current_stage(self) -> Any:
        return self._lightning_module.trainer.state.stage

    @cached_property
    def training_opts(self) -> poptorch.Options:
        """Return the options of training; those given, or made from the Trainer."""
        return make_options(self, training=True)

    @cached_property
    def inference_opts(self) -> poptorch.Options:
        """Return the options of validation, tests and predictions; those given, or made from the Trainer."""
        return make_options(self, training=False)

    def options_for(self, stage: Any) -> poptorch.Options:
        return self.training_opts if stage == "train" else self.inference_opts

    @property
    def replication_factor(self) -> int:
        """Return the number of replicas of the current stage; before `setup` of the options or devices."""
        if not self.poptorch_models:
            options = vars(self).get("training_opts") or vars(self).get("inference_opts")
            return options.replication_factor if options is not None else len(self.parallel_devices or [0])
        return self.options_for(self._current_stage).replication_factor

    # ---- weights and checkpoints -------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self._save_random_state()
        if self._random_state:
            checkpoint = {**checkpoint, "ipu_random_numbers": self._random_state}
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def _save_random_state(self) -> None:
        """Store the random states of compiled executors, for checkpoints after they are destroyed."""
        compiled = {s.value: e.rng_state for s, e in self.poptorch_models.items() if e.isCompiled()}
        self._random_state = {**self._random_state, **compiled}

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        checkpoint = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self._loaded_random_state = dict(checkpoint.get("ipu_random_numbers", {}))
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizers' states. A poptorch optimizer can also load the state of torch's optimizer."""
        poptorchs = {"ipu_state": None, "ipu_param": None}
        states = [
            {**(poptorchs if isinstance(optimizer, poptorch.optim.Optimizer) else {}), **state}
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})  # type: ignore[misc]

    # ---- other processes ---------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, sum, min or max over processes of a tensor or number."""
        if self.world_size == 1:
            return tensor
        word = str(reduce_op or "mean").rpartition(".")[2].lower()  # also for torch's ReduceOp.SUM
        return collectives.all_reduce(tensor, "mean" if word == "avg" else word)

    def barrier(self, name: str | None = None) -> None:
        if self.world_size > 1:
            collectives.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        values = [obj]
        if self.world_size > 1:
            torch.distributed.broadcast_object_list(values, src)
        return values[0]

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all processes, as [processes, *shape]; with one process the tensor itself."""
        return collectives.all_gather(tensor.unsqueeze(0)) if self.world_size > 1 else tensor


# ---- after a call ----------------------------------------------------------------------------------------


def _replay(
    module: Any, notes: Sequence[tuple[Any, Any]], reduce_over_instances: Callable[..., Tensor]
) -> None:
    """Repeat the actions of a recorded step, with their values, [micro-batches, ...]; extend lists last."""
    appended: dict[str, list[Any]] = {}
    metric_values: dict[int, Any] = {}  # results of calls of metrics, by the number of the call

    def metric_or_value(metric: str | int) -> Any:
        return metric_values[metric] if isinstance(metric, int) else module.get_submodule(metric)

    for action, value in notes:
        match action:
            case "log", name, options:
                reduced = _reduce_value(value, options, reduce_over_instances)
                module.log(name, reduced, **{**options, "sync_dist": False})
            case "log_metric", name, metric, options:
                module.log(name, metric_or_value(metric), **options)
            case "log_metrics", metric, args, kwargs:
                module.log_dict(metric_or_value(metric), *args, **kwargs)
            case "metric", path, method, call:
                rows = (t.flatten(0, 1) if t.dim() > 1 else t for t in tensors_of(value))
                args, kwargs = with_tensors(value, rows)
                metric_values[call] = getattr(module.get_submodule(path), method)(*args, **kwargs)
            case "append", name:
                appended.setdefault(name, []).append(value)
            case "key", name, key:
                getattr(module, name)[key] = _select_row(value, -1)
            case "set", name:
                setattr(module, name, _select_row(value, -1))
    for name, values in appended.items():  # in the order of micro-batches
        n = len(tensors_of(values[0])[0])
        getattr(module, name).extend(_select_row(v, i) for i in range(n) for v in values)


def _reduce_value(value: Any, options: dict[str, Any], reduce_over_instances: Callable[..., Tensor]) -> Any:
    """Return the value to log: a tensor is reduced over micro-batches and, with `sync_dist`, instances."""
    if not isinstance(value, Tensor):
        return value
    reduce: Any = options.get("reduce_fx", "mean")
    if isinstance(reduce, str):
        reduce = getattr(torch, "mean" if reduce == "avg" else reduce)
    value = reduce(value.float())
    return reduce_over_instances(value, reduce_op=reduce.__name__) if options.get("sync_dist") else value


def _select_row(value: Any, index: int) -> Any:
    return with_tensors(value, iter([tensor[index].clone() for tensor in tensors_of(value)]))
