"""`serializedMatMul`: a matrix product in pieces, which needs less memory at a time."""

import torch
from torch import Tensor

from popengine.compile.recording.current_capture import current
from popengine.errors import Error

from ..enums import MatMulSerializationMode


def serializedMatMul(
    lhs: Tensor,
    rhs: Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> Tensor:
    """Return `torch.matmul(lhs, rhs)`, computed in `factor` pieces.

    Args:
        lhs, rhs: [..., rows, inner] and [..., inner, columns]
        mode:     cut along the rows of lhs (InputChannels), along inner (ReducingDim), along the columns of
            rhs (OutputChannels), or not at all (Disabled)
        factor:   how many pieces; it must divide that dimension (0: not cut)
        keep_precision: sum the products of ReducingDim in float32, where the operands are narrower
    """
    assert isinstance(lhs, Tensor), f"serializedMatMul: lhs must be a tensor; found {type(lhs).__name__}"
    assert isinstance(rhs, Tensor), f"serializedMatMul: rhs must be a tensor; found {type(rhs).__name__}"
    assert isinstance(mode, MatMulSerializationMode), (
        f"serializedMatMul: mode must be one of poptorch.MatMulSerializationMode's; found {mode!r}"
    )
    assert isinstance(factor, int), f"serializedMatMul: factor must be an integer; found {factor!r}"
    if mode is MatMulSerializationMode.Disabled or factor == 0:
        return torch.matmul(lhs, rhs)
    cut = rhs if mode is MatMulSerializationMode.OutputChannels else lhs
    dim = -2 if mode is MatMulSerializationMode.InputChannels else -1
    length = cut.shape[dim] if cut.dim() >= 2 else None
    if length is None or factor < 1 or length % factor:
        raise Error(
            f"serializedMatMul: factor {factor} can't cut {mode.name} of {tuple(lhs.shape)} @ {tuple(rhs.shape)}\n"
            f"  why: the dimension {'is missing' if length is None else f'has {length} elements'}, and all pieces"
            " must be equal\n  fix: a factor that divides it, or MatMulSerializationMode.Disabled"
        )
    if current() is None or factor == 1:
        return torch.matmul(lhs, rhs)
    if mode is MatMulSerializationMode.InputChannels:
        return torch.cat([torch.matmul(piece, rhs) for piece in lhs.chunk(factor, -2)], -2)
    if mode is MatMulSerializationMode.OutputChannels:
        return torch.cat([torch.matmul(lhs, piece) for piece in rhs.chunk(factor, -1)], -1)
    return _reduced(lhs, rhs, factor, keep_precision)


def _reduced(lhs: Tensor, rhs: Tensor, factor: int, keep_precision: bool) -> Tensor:
    wide = torch.promote_types(lhs.dtype, torch.float32) if keep_precision else lhs.dtype
    pairs = zip(lhs.to(wide).chunk(factor, -1), rhs.to(wide).chunk(factor, max(-2, -rhs.dim())), strict=True)
    first, *others = (torch.matmul(left, right) for left, right in pairs)
    return sum(others, first).to(lhs.dtype)
