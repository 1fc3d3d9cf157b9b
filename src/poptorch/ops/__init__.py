"""Operations for a model's forward: marks for the compiler, control flow, host code and a few algorithms.

Outside a compiled model an operation computes its result at once, and a mark returns its input.
"""

from .control import cond, for_loop
from .ctc import ctc_beam_search_decoder
from .grouped_norm import GroupedBatchNorm2d
from .host import CPU, custom_op, registerCustomOp
from .marks import (
    Attribute,
    MultiConv,
    NameScope,
    identity_loss,
    isRunningOnIpu,
    nop,
    recomputationCheckpoint,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from .printing import ipu_print_tensor
from .tensor_ops import dynamic_slice, dynamic_update, fps, nearest, serializedMatMul

__all__ = [name for name, value in vars().items() if callable(value) and name[0] != "_"]  # pyright: ignore
