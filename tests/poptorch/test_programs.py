"""What public programs do beside the ordinary, each corner in a few lines."""

import ctypes
import warnings

import pytest
import torch
from executor_models import Trained, batch, options, trainer
from torch import nn

import popart
import poptorch
from poptorch import _impl, optim
from poptorch._poplar_executor import PoplarExecutor
from small_models import module


def inference(forward, *inputs, opts=None):
    return poptorch.inferenceModel(forward, opts)(*inputs)


def test_enums_of_popart_are_passed_as_integers():
    opts = poptorch.Options()
    schedule = int(popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized)
    opts._Popart.set("accumulateOuterFragmentSettings.schedule", schedule)
    opts._Popart.set("accumulateOuterFragmentSettings.excludedVirtualGraphs", ["0"])
    opts._Popart.set("subgraphCopyingStrategy", int(popart.SubgraphCopyingStrategy.JustInTime))
    opts._Popart.set("virtualGraphMode", int(popart.VirtualGraphMode.Manual))
    opts._Popart.set("outlineThreshold", 10.0)
    opts._Popart.setPatterns({"TiedGather": True, "UpdateInplacePrioritiesForIpu": True})
    opts.enableSyntheticData(int(popart.SyntheticDataMode.RandomNormal))
    assert inference(lambda x: x * 2, torch.zeros(2), opts=opts).shape == (2,)


def test_a_compiled_library_of_custom_operations_may_be_loaded():
    ctypes.CDLL(None)  # whatever a program loads, its operators are looked up by name
    opts = poptorch.Options()
    with pytest.raises(poptorch.Error, match=r"poptorch.registerCustomOp\('Cube'"):
        inference(lambda x: poptorch.custom_op([x], "Cube", "com.acme", 1, [x])[0], torch.ones(2), opts=opts)


def test_operations_are_called_as_torch_ops():
    def forward(x):
        torch.ops.poptorch.push_name_scope("scope")
        x = torch.ops.poptorch.internal_cast(x + 1, "FLOAT16")
        torch.ops.poptorch.pop_name_scope()
        return x

    assert inference(forward, torch.ones(2)).dtype == torch.float16


def test_insides_that_programs_touch():
    executor, model = trainer()
    assert not executor._executable and isinstance(executor, PoplarExecutor)
    executor(*batch())
    assert executor._executable and executor._user_model is model
    assert executor._options.output_mode == executor.options.output_mode == poptorch.OutputMode.Final
    assert poptorch.DataLoader(options(iterations=2), [1, 2, 3, 4])._combined_batch_size == 2
    _impl.unwrapModelIfNecessary(model)
    assert type(model) is Trained and not hasattr(model, "destroy")
    _impl.rewrapModelIfNecessary(model)
    assert type(model) is Trained and model.destroy
    with pytest.raises(poptorch.Error, match="no PopART graph"):
        executor._debugGetPopartIR()


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.LAMB])
def test_rates_may_be_none(kind):
    model = Trained()
    optimizer = kind(model.parameters(), lr=None, betas=None, eps=None)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    poptorch.trainingModel(model, options(), optimizer)(*batch())


def test_lamb_takes_its_largest_norm_by_keyword_as_none_and_in_a_group():
    model = Trained()
    groups = [
        {"params": [p], "max_weight_norm": n} for p, n in zip(model.parameters(), (None, 2.0), strict=True)
    ]
    optimizer = optim.LAMB(groups, lr=0.1, max_weight_norm=None)
    optimizer._step_count = 1
    before = model.layer.weight.detach().clone()
    poptorch.trainingModel(model, options(), optimizer)(*batch())
    assert not torch.equal(model.layer.weight, before)


def test_inputs_may_be_none_nested_images_and_integers():
    def forward(x, nothing, pair, image, count, *, mask=None):
        assert nothing is None and mask is None
        return x * count + pair[0][1] + image.float() / 255

    x = torch.ones(2)
    image = torch.full((2,), 255, dtype=torch.uint8)
    executor = poptorch.inferenceModel(forward)
    assert executor(x, None, ((x, x), x), image, 3, mask=None).tolist() == [5, 5]


def test_a_model_may_have_no_inputs():
    model = module(
        lambda self: poptorch.identity_loss(self.weight**2, "sum"), weight=nn.Parameter(torch.ones(3))
    )
    executor = poptorch.trainingModel(model, options(iterations=2), optim.SGD(model.parameters(), lr=0.25))
    assert executor().item() == pytest.approx(3 * 0.25)
    assert model.weight.tolist() == [0.25] * 3


def test_many_workers_are_too_many_for_a_small_machine(caplog, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert poptorch.DataLoader(options(), [1, 2], num_workers=64).num_workers == 2
    assert "num_workers=64 is more than this machine's cores: using 2" in caplog.text


def test_programs_find_the_hardware_that_they_ask_for():
    assert poptorch.ipuHardwareIsAvailable() and poptorch.ipuHardwareIsAvailable(16)
    assert poptorch.ipuHardwareVersion() == 2


def test_a_profile_is_asked_for_by_engine_options(tmp_path, monkeypatch):
    settings = f'{{"autoReport.all": "true", "autoReport.directory": "{tmp_path}"}}'
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", settings)
    executor, _ = trainer()
    executor(*batch())
    executor.destroy()
    assert (tmp_path / "training" / "profile.pop").exists()


def test_a_scheduler_may_step_after_a_call_without_a_warning():
    # Every program with a scheduler warned: the executor's steps are not the optimizer's own.
    model = Trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    executor = poptorch.trainingModel(model, options(), optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            executor(*batch())
            scheduler.step()
            executor.setOptimizer(optimizer)
