"""PopTorch's programming model on ordinary machines: the public names, nothing else."""

from popengine.errors import Error, RecoverableError, UnrecoverableError

from . import autocasting, optim, profiling, testing
from .autocasting import autocast
from .blocks import BeginBlock, Block, BlockFunction, LegacyBeginBlockFn, module_repr, print, removeBlocks
from .data import AsynchronousDataAccessor, DataLoader
from .enums import *  # noqa: F403
from .environment import log_recorded
from .hooks import registerPostCompileHook, registerPreCompileHook
from .logs import logger, setLogLevel
from .model import PoplarExecutor, inferenceModel, load, trainingModel
from .ops import (
    CPU,
    Attribute,
    MultiConv,
    NameScope,
    cond,
    ctc_beam_search_decoder,
    custom_op,
    dynamic_slice,
    dynamic_update,
    for_loop,
    fps,
    identity_loss,
    ipu_print_tensor,
    isRunningOnIpu,
    nearest,
    nop,
    recomputationCheckpoint,
    registerCustomOp,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from .options import ConfigFileError, Options, TensorLocationSettings
from .plumbing import (
    accessAttributes,
    attributes_lists,
    getIpuTensorId,
    importPoptorchMetadataFromFile,
    poptorchAtExit,
)
from .poptorch_core import createPoptorchError
from .strategies import (
    AutoBalance,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from .structure import ICustomArgParser, registerCustomArgParser
from .system import ipuHardwareIsAvailable, ipuHardwareVersion
from .version import __version__

log_recorded()
del log_recorded
