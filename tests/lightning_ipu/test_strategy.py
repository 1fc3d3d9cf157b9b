"""The strategy between Lightning and executors: what users of IPUs could rely on."""

import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.plugins import IPUPrecision
from lightning.pytorch.strategies import IPUStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning_models import Classifier, assert_fits_as_on_the_cpu, dataset, loader, made, trainer, weights
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import poptorch


def on(strategy, **more):
    return trainer("auto", strategy=strategy, **more)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("fit_first", [True, False])
def test_all_functions_of_the_trainer_run_in_turn(devices, fit_first):
    run, module = trainer(devices=devices), made()
    if fit_first:
        run.fit(module, loader(), loader())
    run.validate(module, loader(), verbose=False)
    run.test(module, loader(), verbose=False)
    assert torch.cat(run.predict(module, loader())).shape == (64, 3)


def test_training_learns_and_a_saved_model_gives_the_same_accuracy(tmp_path):
    class Learning(Classifier):
        def test_step(self, batch, batch_idx):
            self.log("accuracy", super().validation_step(batch, batch_idx))

    module = made(Learning, lambda p: torch.optim.Adam(p, lr=0.05))
    run = trainer(max_epochs=40)
    run.fit(module, loader())
    before = run.test(module, loader(), verbose=False)
    run.save_checkpoint(tmp_path / "model.ckpt")
    again = made(Learning)
    again.load_state_dict(torch.load(tmp_path / "model.ckpt", weights_only=False)["state_dict"])
    assert trainer().test(again, loader(), verbose=False) == before
    assert before[0]["accuracy"] > 0.7


def test_a_strategy_alone_makes_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        on(IPUStrategy(), devices=2)


def test_options_have_the_trainers_numbers():
    run = on(IPUStrategy(device_iterations=3), devices=2, accumulate_grad_batches=2)
    run.fit(made(), loader(), loader())
    training, inference = run.strategy.training_opts, run.strategy.inference_opts
    assert (training.device_iterations, training.replication_factor) == (3, 2)
    assert training.Training.gradient_accumulation == 2
    assert (inference.device_iterations, inference.Training.gradient_accumulation) == (3, 1)
    executor = run.strategy.poptorch_models[RunningStage.TRAINING]
    assert executor._options.toDict()["device_iterations"] == 3
    assert executor._options.Training.toDict()["gradient_accumulation"] == 2
    assert run.accumulate_grad_batches == 2  # as it was


def test_a_subclass_may_prepare_inputs_and_run_steps_itself():
    class Own(IPUStrategy):
        def _prepare_input(self, args):
            (x, y), *rest = super()._prepare_input(args)
            return (x * 2, y), *rest

        def _step(self, stage, *args, **kwargs):
            calls.append(stage)
            return super()._step(stage, *args, **kwargs)

    calls = []
    (doubled,) = on(Own()).predict(made(), loader(4))
    batch = dataset().tensors[0][:4] * 2
    assert calls == [RunningStage.PREDICTING]
    torch.testing.assert_close(doubled, made()(batch).detach())


def test_options_are_all_one_by_default():
    run = trainer()
    for options in (run.strategy.training_opts, run.strategy.inference_opts):
        assert (options.device_iterations, options.replication_factor) == (1, 1)
        assert options.Training.gradient_accumulation == 1


def test_the_seed_of_lightning_is_that_of_the_options(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    assert trainer().strategy.training_opts.random_seed == 11


class Options(Callback):
    def on_fit_end(self, trainer, module):
        assert (
            trainer.strategy.training_opts is self.training
            and trainer.strategy.inference_opts is self.inference
        )
        assert trainer.train_dataloader.options is self.training
        assert trainer.val_dataloaders.options is self.inference
        self.seen = True


def test_a_users_options_are_taken_whole(caplog):
    check = Options()
    check.training = poptorch.Options().deviceIterations(2).replicationFactor(2)
    check.training.Training.gradientAccumulation(2)
    check.inference = poptorch.Options().deviceIterations(4)
    strategy = IPUStrategy(device_iterations=9, training_opts=check.training, inference_opts=check.inference)
    with caplog.at_level("INFO", logger="poptorch::python"):
        run = on(strategy, devices=1, accumulate_grad_batches=7, callbacks=[check])
        run.fit(made(), loader(), loader())
    assert check.seen and run.global_step == 16 // 8
    assert (
        "train runs with the options given: device iterations 2, gradient accumulation 2, replicas 2"
        in caplog.text
    )


def by_hand(strategy, **more):
    run, module = on(strategy, **more), made()
    run._data_connector.attach_data(module, loader(), loader(), loader(), loader())
    strategy._lightning_module = module
    return run


def test_the_replication_factor_is_that_of_the_stage():
    assert trainer(devices=2).strategy.replication_factor == 2
    training, inference = poptorch.Options().replicationFactor(8), poptorch.Options().replicationFactor(7)
    strategy = IPUStrategy(training_opts=training, inference_opts=inference)
    assert strategy.replication_factor == 8
    run = by_hand(strategy)
    run.state.fn, run.state.stage = TrainerFn.FITTING, RunningStage.TRAINING
    run.strategy.setup(run)
    assert strategy.replication_factor == 8
    run.state.stage = RunningStage.VALIDATING
    assert strategy.replication_factor == 7
    for fn, stage in (("VALIDATING",) * 2, ("TESTING",) * 2, ("PREDICTING",) * 2):
        run.state.fn, run.state.stage = TrainerFn[fn], RunningStage[stage]
        run.strategy.setup(run)
        assert strategy.replication_factor == 7


def test_each_function_has_the_executors_it_needs():
    strategy = IPUStrategy()
    run = by_hand(strategy)
    run.state.fn, run.state.stage = TrainerFn.FITTING, RunningStage.TRAINING
    run.strategy.setup(run)
    stages = [RunningStage.TRAINING, RunningStage.VALIDATING, RunningStage.SANITY_CHECKING]
    assert list(strategy.poptorch_models) == stages
    assert strategy.poptorch_models[stages[1]] is strategy.poptorch_models[stages[2]]
    for name in ("VALIDATING", "TESTING", "PREDICTING"):
        run.state.fn, run.state.stage = TrainerFn[name], RunningStage[name]
        run.strategy.setup(run)
        assert list(strategy.poptorch_models) == [RunningStage[name]]
    strategy.teardown()
    strategy.teardown()


class Constants(Classifier):
    """Each step gives a constant of its own."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return (loss - loss) + 1

    def validation_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return (loss - loss) + 2

    def test_step(self, batch, batch_idx):
        return self.validation_step(batch, batch_idx) + 1

    def predict_step(self, batch, batch_idx):
        return self.validation_step(batch, batch_idx) + 2

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.add(("train", outputs["loss"].item()))

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.seen.add(("validate", outputs.item()))

    def on_test_batch_end(self, outputs, batch, batch_idx):
        self.seen.add(("test", outputs.item()))


def test_each_stage_runs_its_own_step():
    module, run = made(Constants), trainer()
    module.seen = set()
    run.fit(module, loader(), loader())
    run.test(module, loader(), verbose=False)
    assert module.seen == {("train", 1.0), ("validate", 2.0), ("test", 3.0)}
    assert torch.stack(run.predict(module, loader())).unique().tolist() == [4.0]


@pytest.mark.parametrize("flag", ["training", "validating", "sanity_checking", "testing", "predicting"])
def test_the_wrapper_runs_the_step_of_the_trainers_flag(flag):
    from unittest.mock import MagicMock

    from lightning_ipu.recording import StepModule

    flags = dict.fromkeys(["training", "validating", "sanity_checking", "testing", "predicting"], False)
    module = MagicMock(_trainer=MagicMock(**{**flags, flag: True}))
    wrapper = StepModule(module)
    assert wrapper.eval() is wrapper
    module.train.assert_called_once_with(False)
    wrapper("batch", 0)
    steps = {"training": "training_step", "testing": "test_step", "predicting": "predict_step"}
    called = [
        name
        for name in ("training_step", "validation_step", "test_step", "predict_step")
        if getattr(module, name).called
    ]
    assert called == [steps.get(flag, "validation_step")]
    StepModule(MagicMock(_trainer=None))("batch").assert_not_called()


# ---- precision -------------------------------------------------------------------------------------------


class Types(Callback):
    def on_train_start(self, trainer, module):
        self.weights = {p.dtype for p in trainer.strategy.model.parameters()}
        batch = trainer.strategy.batch_to_device(
            [torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.ones(2).long()]
        )
        self.batch = [tensor.dtype for tensor in batch]


@pytest.mark.parametrize(
    ("precision", "half_module", "kept"),
    [
        ("16-mixed", False, torch.float32),
        ("16-mixed", True, torch.float16),
        ("16-true", False, torch.float16),
    ],
)
def test_half_precision_casts_batches_but_no_integers(precision, half_module, kept):
    types, module = Types(), made()
    module = module.half() if half_module else module
    run = trainer(precision=precision, callbacks=[types])
    run.fit(module, loader())
    assert run.precision == precision
    assert types.weights == {kept}
    assert types.batch == [torch.float16, torch.float16, torch.int64]
    assert torch.isfinite(module.first.weight).all()


def test_a_precision_of_lightnings_own_is_refused():
    from lightning.pytorch.plugins import MixedPrecision

    with pytest.raises(Exception, match="can't be the precision of an IPUStrategy"):
        on(IPUStrategy(), plugins=MixedPrecision("bf16-mixed", "cpu")).fit(made(), loader())
    assert on(IPUStrategy(), plugins=IPUPrecision("16-mixed")).precision == "16-mixed"


# ---- reports ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"autoreport": True}, {}])
def test_a_directory_or_autoreport_leaves_a_profile(tmp_path, more):
    run = on(IPUStrategy(autoreport_dir=str(tmp_path / "report"), **more))
    run.fit(made(), loader())
    assert Path(tmp_path, "report/training/profile.pop").exists()
    import os

    assert "POPLAR_ENGINE_OPTIONS" not in os.environ


# ---- what is refused -------------------------------------------------------------------------------------


class ReturnsNone(Classifier):
    def training_step(self, batch, batch_idx):
        return None


class OwnClipping(Classifier):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        pass


class ReadsLoader(Classifier):
    def training_step(self, dataloader_iter):
        return next(dataloader_iter)


class ReadsValue(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if batch_idx % 2 else batch[0].sum()


class ManyLosses(Classifier):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")


class Manual(Classifier):
    count = 1

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        raise AssertionError("compiled")

    def configure_optimizers(self):
        return [self.optimizer(self.parameters()) for _ in range(self.count)]


class TwoOptimizers(Manual):
    count = 2


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        (
            Manual,
            {},
            r"Return the loss from `training_step`, and leave out `self\.automatic_optimization = False`",
        ),
        (TwoOptimizers, {}, r"IPUs currently only support one optimizer\."),
        (ReturnsNone, {}, "Skipping backward by returning `None`"),
        (OwnClipping, {}, "`configure_gradient_clipping` can't be overridden"),
        (ReadsLoader, {}, "the step would read data while it is"),
        (ReadsValue, {}, "reads a value out of a tensor"),
        (ManyLosses, {}, "training needs a scalar"),
        (
            Classifier,
            {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 4})]},
            "does not support `accumulate_grad_batches` changing",
        ),
        (Classifier, {"accumulate_grad_batches": {0: 2, 1: 4}}, "`accumulate_grad_batches`"),
        (Classifier, {"strategy": "ddp"}, r"found strategy='ddp'\n  fix: leave it out;"),
    ],
)
def test_what_cannot_be_done_is_an_error_before_anything_trains(kind, more, words):
    module = made(kind)
    with pytest.raises(Exception, match=words):
        trainer(**more).fit(module, loader())
    trainer().fit(made(), loader())  # nothing is left of it


def test_an_optimizer_that_looks_several_times_is_refused():
    with pytest.raises(Exception, match="not compatible"):
        trainer().fit(made(optimizer=lambda p: torch.optim.LBFGS(p)), loader())
    with pytest.raises(AssertionError, match="Unsupported optimizer type"):
        trainer().fit(made(optimizer=lambda p: torch.optim.SparseAdam(list(p))), loader())


class Overriding(Classifier):
    def optimizer_zero_grad(self, *args):
        raise AssertionError("ignored")

    def backward(self, *args):
        raise AssertionError("ignored")


def test_hooks_that_have_no_use_are_ignored_with_a_warning():
    with (
        pytest.warns(UserWarning, match="zero_grad.* will be ignored"),
        pytest.warns(UserWarning, match="backward"),
    ):
        trainer().fit(made(Overriding), loader())


def test_the_search_for_anomalies_trains():
    run = trainer(detect_anomaly=True)
    run.fit(made(), loader())
    assert run.global_step == 16


# ---- the snippets of Lightning's page on IPUs ------------------------------------------------------------


class Blocks(Classifier):
    """Four blocks on four ipus."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for ipu, layer in enumerate(self.layers):
            poptorch.BeginBlock(layer, ipu_id=ipu)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return super().forward(x)


def test_a_pipeline_without_accumulation_runs_one_stage_after_another(caplog):
    with caplog.at_level("INFO", logger="poptorch::python"):
        run = on(IPUStrategy(device_iterations=2), devices=2)
        module = made(Blocks)
        run.fit(module, loader())
    assert "gradientAccumulation is 1, and from 7 they are a pipeline" in caplog.text
    twin = made(Blocks)
    trainer("cpu", accumulate_grad_batches=2).fit(twin, loader())
    assert torch.equal(module.last.weight, twin.last.weight)


def test_a_users_options_of_a_pipeline_keep_its_minimum():
    with pytest.raises(poptorch.Error, match="number of pipeline stages"):
        on(IPUStrategy(training_opts=poptorch.Options())).fit(made(Blocks), loader())


def test_options_with_all_losses_give_one_for_each_iteration():
    inference = poptorch.Options().deviceIterations(32)
    training = poptorch.Options().deviceIterations(32)
    training.anchorMode(poptorch.OutputMode.All)
    shapes = []
    module = made()
    module.on_train_batch_end = lambda outputs, batch, batch_idx: shapes.append(tuple(outputs["loss"].shape))
    run = on(IPUStrategy(inference_opts=inference, training_opts=training), devices=8)
    run.fit(module, DataLoader(dataset(), batch_size=2))
    assert shapes == [(32,)]


def test_blocks_may_be_begun_before_the_fit():
    class Begun(Classifier):
        def __init__(self):
            super().__init__()
            poptorch.BeginBlock(self.last, ipu_id=1)

    assert_fits_as_on_the_cpu(Begun, accumulate_grad_batches=4)


class InBlocks(Classifier):
    """A step that says itself where its parts run."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        with poptorch.Block(ipu_id=0):
            x = torch.tanh(self.first(x))
        with poptorch.Block(ipu_id=1):
            return functional.cross_entropy(self.last(x), y)


def test_blocks_may_be_in_the_step():
    assert_fits_as_on_the_cpu(InBlocks, accumulate_grad_batches=4)


def test_a_loader_with_the_options_of_the_blog_makes_9600_micro_batches_a_call():
    options = poptorch.Options().deviceIterations(300).replicationFactor(8)
    options.Training.gradientAccumulation(4)
    data = poptorch.DataLoader(options, dataset(9600), batch_size=1)
    module, twin = made(), made()
    run = on(IPUStrategy(training_opts=options), devices=8)
    run.fit(module, data)
    assert run.global_step == 1
    trainer("cpu").fit(
        twin, DataLoader(dataset(9600), batch_size=32)
    )  # the same 300 updates, in large batches
    torch.testing.assert_close(weights(module), weights(twin), rtol=1e-3, atol=1e-5)
