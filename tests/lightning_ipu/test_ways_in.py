"""How programs ask for ipus: every spelling, in both Lightning packages, without an import of ours."""

import importlib
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def run(code, **environment):
    """A fresh process: Lightning is not imported yet."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(params=PACKAGES)
def pl(request):
    return importlib.import_module(request.param)


def parts(trainer):
    return tuple(
        type(part).__name__ for part in (trainer.accelerator, trainer.strategy, trainer.precision_plugin)
    )


OURS = ("IPUAccelerator", "IPUStrategy", "IPUPrecision")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_program_needs_no_import_of_ours(package):
    run(f"""
        import sys
        import {package} as pl
        assert "poptorch" not in sys.modules, "loaded before anybody asked for ipus"
        for _ in range(2):
            trainer = pl.Trainer(accelerator="ipu", devices=8, logger=False)
            assert type(trainer.strategy).__name__ == "IPUStrategy", trainer.strategy
            assert trainer.num_devices == trainer.strategy.replication_factor == 8
        import {package}.strategies.ipu, {package}.accelerators.ipu, {package}.plugins.precision.ipu
        from {package}.strategies import IPUStrategy
        assert {package}.strategies.ipu.IPUStrategy is IPUStrategy is type(trainer.strategy)
        assert IPUStrategy.__module__ == "lightning_graphcore"
    """)


def test_with_the_autoload_switched_off_importing_poptorch_is_enough():
    run(
        """
        import lightning.pytorch as pl
        try:
            pl.Trainer(accelerator="ipu", logger=False)
        except ValueError:
            pass
        else:
            raise AssertionError("the autoload was on")
        import poptorch
        assert type(pl.Trainer(accelerator="ipu", logger=False).strategy).__name__ == "IPUStrategy"
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_lightning_graphcore_gives_the_classes_of_the_package_in_use():
    run("""
        import pytorch_lightning
        from lightning_graphcore import IPUStrategy
        from pytorch_lightning.strategies import IPUStrategy as theirs
        assert IPUStrategy is theirs
    """)


def test_torch_is_imported_where_there_is_no_lightning():
    run("""
        import sys
        sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
        import torch, poptorch
        import lightning_graphcore
    """)


def test_importing_torch_adds_a_hook_and_imports_nothing_of_lightning(tmp_path):
    """The metadata of this checkout come first on the path, since an installation may be older."""
    metadata = tmp_path / "pando_torch-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: pando-torch\nVersion: 0\n")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    entries = "".join(f"{n} = {v}\n" for n, v in project["entry-points"]["torch.backends"].items())
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{entries}")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    code = """
        import sys
        import torch
        assert not [name for name in sys.modules if name.startswith(("lightning", "pytorch_lightning"))]
        assert {name for name in sys.modules if name.startswith("pop")} == {"popengine", "popengine.import_hook"}
        from popengine.import_hook import install
        install()
        assert [type(finder).__name__ for finder in sys.meta_path].count("_Finder") == 1
        import lightning.pytorch as pl
        assert "poptorch" not in sys.modules
        assert type(pl.Trainer(accelerator="ipu", logger=False).strategy).__name__ == "IPUStrategy"
    """
    run(code, PYTHONPATH=path)


def test_what_fails_inside_is_a_warning(monkeypatch):
    import lightning.pytorch  # noqa: F401  `add_ipus` acts on modules that are there already

    from lightning_ipu import autoload

    monkeypatch.setattr(autoload, "_patch_package", lambda package, module: 1 / 0)
    with pytest.warns(UserWarning, match="Pando can't add ipus to Lightning"):
        autoload.add_ipus()


def test_devices_are_counted(pl):
    for given, count in ((8, 8), (2, 2), ("auto", 4), ("2", 2), ([0, 1], 2)):
        assert pl.Trainer(accelerator="ipu", devices=given, logger=False).num_devices == count
    assert pl.Trainer(accelerator="ipu", logger=False).num_devices == 4
    with pytest.raises(Exception, match="not a valid input"):
        pl.Trainer(accelerator="ipu", devices=0, logger=False)
    with pytest.raises(ValueError, match="takes a number of devices"):
        pl.Trainer(accelerator="ipu", devices="two", logger=False)


def test_the_strategy_alone_brings_accelerator_and_precision(pl):
    strategies = importlib.import_module(f"{pl.__name__}.strategies")
    assert parts(pl.Trainer(strategy="ipu_strategy", devices=2, logger=False)) == OURS
    assert parts(pl.Trainer(strategy=strategies.IPUStrategy(), devices=2, logger=False)) == OURS


def test_the_accelerator_may_be_an_object(pl):
    accelerators = importlib.import_module(f"{pl.__name__}.accelerators")
    strategies = importlib.import_module(f"{pl.__name__}.strategies")
    accelerator = accelerators.IPUAccelerator
    assert parts(pl.Trainer(accelerator=accelerator(), logger=False)) == OURS
    assert pl.Trainer(accelerator=accelerator(), devices=8, logger=False).num_devices == 8
    trainer = pl.Trainer(
        accelerator=accelerator(), strategy=strategies.IPUStrategy(), devices=8, logger=False
    )
    assert parts(trainer) == OURS
    with pytest.raises(Exception, match="accelerator set through both"):
        pl.Trainer(
            strategy=strategies.IPUStrategy(accelerator=accelerator()), accelerator="ipu", logger=False
        )


@pytest.mark.parametrize(
    ("given", "meant"),
    [(None, "32-true"), (32, "32-true"), (16, "16-mixed"), ("16-mixed", "16-mixed"), ("16-true", "16-true")],
)
def test_precisions(pl, given, meant):
    assert pl.Trainer(accelerator="ipu", precision=given, logger=False).precision == meant


@pytest.mark.parametrize("given", ["bf16-mixed", "64-true", "bf16", 64])
def test_other_precisions_are_refused(pl, given):
    with pytest.raises(
        ValueError, match=r"accelerator='ipu', precision='(bf16-mixed|64-true)'\)` is not supported"
    ):
        pl.Trainer(accelerator="ipu", precision=given, logger=False)


def test_auto_is_never_ipu(pl):
    for given in ({}, {"accelerator": "auto"}):
        assert type(pl.Trainer(logger=False, **given).accelerator).__name__ != "IPUAccelerator"


def test_an_accelerator_that_says_it_is_unavailable_is_refused(pl, monkeypatch):
    kind = importlib.import_module(f"{pl.__name__}.accelerators").IPUAccelerator
    monkeypatch.setattr(kind, "is_available", staticmethod(lambda: False))
    with pytest.raises(Exception, match="can not run on your system"):
        pl.Trainer(accelerator="ipu", logger=False)


def test_a_strategy_of_the_other_package_is_refused_and_the_own_class_named(pl):
    other = next(name for name in PACKAGES if name != pl.__name__)
    strategy = importlib.import_module(f"{other}.strategies").IPUStrategy()
    with pytest.raises(Exception, match=rf"instance of `{pl.__name__}\.strategies\.Strategy`"):
        pl.Trainer(strategy=strategy, logger=False)


def test_a_lightning_that_chooses_in_another_way_is_told_of():
    import types

    from lightning_ipu import autoload

    module = types.ModuleType("lightning.pytorch.trainer.connectors.accelerator_connector")
    with pytest.warns(UserWarning, match="plugins=IPUPrecision"):
        autoload._wrap_connector("lightning.pytorch", module)
