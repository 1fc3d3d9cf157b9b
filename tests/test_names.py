"""The names that programs import, pinned: one that goes away breaks them. And one class name, one class."""

import ast
import inspect
import operator
import pkgutil
import re
from collections import Counter
from pathlib import Path

import pytest

import poptorch

NAMES = """
    AsynchronousDataAccessor Attribute AutoStage BeginBlock Block BlockFunction CPU CommGroupType
    ConfigFileError ConnectionType DataLoader DataLoaderMode Error HalfFloatCastingBehavior
    ICustomArgParser LegacyBeginBlockFn Liveness MatMulSerializationMode MeanReductionStrategy
    MultiConv MultiConvPlanType NameScope Options OutputMode OverlapMode ParallelPhasedExecution
    Phase PipelinedExecution PoplarExecutor RecoverableError ReductionType SerialPhasedExecution
    ShardedExecution SharingStrategy Stage SyncPattern TensorLocationSettings UnrecoverableError
    VariableRetrievalMode cond ctc_beam_search_decoder custom_op dynamic_slice dynamic_update
    for_loop fps identity_loss inferenceModel ipu_print_tensor isRunningOnIpu logger module_repr
    nearest nop recomputationCheckpoint registerCustomArgParser registerPostCompileHook
    registerPreCompileHook removeBlocks serializedMatMul setLogLevel set_available_memory
    set_overlap_for_input set_overlap_for_output trainingModel optim.Adam optim.AdamW optim.LAMB
    optim.Optimizer optim.RMSprop optim.SGD profiling.Channel testing.allclose __version__
"""

EXECUTOR = """
    attachToDevice compilationTime compile copyNamedBuffersToDevice copyWeightsToDevice copyWeightsToHost
    copyWeightsToHostIfNeeded cycleCount destroy detachFromDevice isAttachedToDevice isCompiled load_state_dict
    model options rng_state setOptimizer state_dict
"""

# Names of two classes, without leading underscores: the users' words for what they choose. This list may only shrink.
TWICE = "Optimizer Options"

ROOT = Path(__file__).parents[1]
DOTTED = re.compile(
    r"\b(?:poptorch|popdist|popvision|popengine|ipujob|lightning_ipu)(?:\.(?!md\b)[A-Za-z_]\w*)+"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_poptorch_has(name):
    assert operator.attrgetter(name)(poptorch) is not None


@pytest.mark.parametrize("name", EXECUTOR.split())
def test_an_executor_has(name):
    assert inspect.getattr_static(poptorch.PoplarExecutor, name) is not None


def test_a_star_import_of_enums_brings_no_modules():
    assert not [name for name in ("IntEnum", "enum", "annotations") if hasattr(poptorch, name)]


def test_one_class_name_is_one_class():
    classes = [
        node.name.lstrip("_")
        for path in (Path(__file__).parents[1] / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name, count in Counter(classes).items() if count > 1} == set(TWICE.split())


def test_each_dotted_name_in_documents_and_docstrings_exists():
    """`poptorch.notes.note` had moved, and pages still named it."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]  # the changelog also names what is gone
    texts = {path: path.read_text() for path in pages if path.name != "CHANGELOG.md"}
    for path in ROOT.glob("src/**/*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        kinds = ast.FunctionDef | ast.ClassDef | ast.Module
        texts[path] = "\n".join(ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))
    missing = []
    for path, text in texts.items():
        for name in sorted(set(DOTTED.findall(text))):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing
