"""Loops of the field, right and with one fault each, that `compare` checks on two or four ranks. A loop is right if
`FAULTS` has no words of its conclusion."""

import contextlib
import copy
import functools
import io
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from poptorch.testing import Updated, compare

# Right up to rounding of that type.
IN_BFLOAT16 = ("bfloat16 sums", "FSDP2 reduced in bfloat16", "autocast", "accelerate in bfloat16")
CPU, MICRO_BATCHES = torch.device("cpu"), 4
FAULTS = {  # words of the conclusion, by loop
    "pipeline scaled twice": "1/4 of plain on ranks 0 and 1: accumulation is scaled twice",
    "pipeline not scaled": "4 times plain on ranks 0 and 1: accumulation is not scaled",
    "pipeline clipped by one rank's norm": "clipped by the norm of one rank, not of all: to 0.1 on ranks 0 and 1",
    "pipeline stepped on one stage": "rank 1 skipped the step: weights are unchanged",
    "pipeline stepped on one stage, then zero_grad": "last.weight and last.bias; rank 1 skipped the step",
    "pipeline tied, not summed": "a tied weight's gradient is not summed over ranks 0 and 1: embed.weight",
    "DDP summed": "2 times plain on ranks 0 and 1: not averaged over 2 ranks",
    "DDP averaged twice": "1/2 of plain on ranks 0 and 1: averaged twice over 2 ranks",
    "DDP no_sync on the last micro-batch": "only the own rank's rows: not averaged over ranks 0 and 1",
    "DDP forward of the inner module": "only the own rank's rows: not averaged over ranks 0 and 1",
    "thrown away": "rows 4 to 7, 12 to 15 of 16 only: the last micro-batch, those of earlier",
    "mean per micro-batch": "loss averaged per micro-batch in place of per token",
    "norm without all-reduce": "gradients of norm.weight and norm.bias are partial sums on ranks 0 and 1",
    "other rows": "different seeds or data: rank 1 passed other values of the batch than rank 0",
    "other weights": "ranks with different seeds",
    "the same rows": "rows 0 to 7 of 16 only: only rank 0's rows",
    "FSDP2 clipped by one rank's norm": "clipped by the norm of one rank",
    "another rate": "steps are 2 times plain's on ranks 0 and 1: another learning rate",
    "step in each micro-batch": "an optimizer stepped 2 times in an update on ranks 0 and 1",
    "a gradient is missing": "2 gradients are missing on rank 1: last.weight and last.bias",
    "copies": "the loop has changed no parameter of the model that it was given",
    "dropout": "plain PyTorch differs from itself: drop (Dropout) draws random numbers; fix: p = 0",
    "a bucket is left out": "gradients of blocks.2.1.bias are of only the own rank's rows",
    "another decay": "another weight decay on ranks 0 and 1",
    "a sampler of rank 1": "gradients are of rows 1, 3, 5, 7, 9, 11, 13, 15 of 16 only",
    "ranks with more rows": "rows have other weights than in the mean over all",
    "norm reduced twice": "gradients of norm.weight and norm.bias are 2 times plain",
    "not a number": "1 of 6 gradients differ, first last.bias: rank 0: rounding",
    "optimizer made before the shards": "ranks 0, 1, 2 and 3 skipped the step",
    "DDP x pipeline, not averaged": "only the own rank's rows: not averaged over ranks 0, 1, 2 and 3",
    "DDP x pipeline, clipped by one stage's norm": "clipped by the norm of one rank",
}


class MLP(nn.Module):
    """Layers that stages can share, and a dropout that is off."""

    def __init__(self, depth=2, p=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth))
        self.last, self.drop = nn.Linear(8, 4), nn.Dropout(p)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return functional.mse_loss(self.drop(self.last(x)), y)


class Block(nn.Module):
    """A normalized block, for tensor parallel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 16)
        self.down, self.last = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x, y):
        return functional.mse_loss(self.last(x + self.down(functional.gelu(self.up(self.norm(x))))), y)


class Language(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def first(self, tokens):
        x = self.embed(tokens)
        return x + self.attention(x, x, x, need_weights=False)[0]

    def forward(self, tokens, y):
        return token_loss(self.head(self.norm(self.first(tokens))), y)


class BatchNormed(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x, y):
        return functional.mse_loss(super().forward(x), y)


class Deep(nn.Module):
    """Checkpointed blocks, an output layer that is the embedding, and a layer without a use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.unused = nn.Embedding(20, 16), nn.Linear(4, 4)
        blocks = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, y):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return token_loss(self.head(x), y)


class Stage(nn.Module):
    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.modules_of_stage = function, nn.ModuleList(modules)

    def forward(self, x):
        return self.function(x)


def token_loss(logits, y, reduction="mean"):
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction=reduction)


def rows(number=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(number, 8, generator=generator), torch.randn(number, 4, generator=generator)


def tokens(ignored=0):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(20, (8, 6), generator=generator) for _ in range(2))
    for row in range(8):
        y[row, : row * ignored // 8] = -100
    return x, y


def own(batch):
    return [value.chunk(dist.get_world_size())[dist.get_rank()] for value in batch]


def average(model, divisor=None):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= divisor or dist.get_world_size()


def clip(model, norm, group=None):
    """Clip to the norm over the ranks of a group, each of which has other parameters."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    dist.all_reduce(squares, group=group)
    for gradient in gradients:
        gradient *= min(1.0, norm / (float(squares.sqrt()) + 1e-6))


# ---- pipelines -----------------------------------------------------------------------------------------------


def run_stages(schedule, batch, first, last):
    losses = []
    keywords = {"target": batch[1], "losses": losses} if last else {}
    schedule.step(*([batch[0]] if first else []), **keywords)
    return torch.stack(losses).mean() if losses else None


def part_of(model, rank):
    """Return the layers of one of two stages."""
    return nn.Sequential(model.layers[rank], *([model.last] * rank))


def run_stage(module, rank, batch, kind=Schedule1F1B, loss=functional.mse_loss, group=None, **more):
    """Run one of two stages on the micro-batches of this rank, and return the loss in the last stage."""
    more.setdefault("n_microbatches", MICRO_BATCHES)
    schedule = kind(PipelineStage(module, rank, 2, CPU, group=group), loss_fn=loss, **more)
    return run_stages(schedule, batch, rank == 0, rank == 1)


def pipeline(model, optimizer, batch, scale=1.0, clipping=None, stepping=(0, 1), keeps=True, **more):
    rank = dist.get_rank()
    loss = run_stage(
        part_of(model, rank), rank, batch, loss=lambda *given: functional.mse_loss(*given) * scale, **more
    )
    if clipping:
        clipping(model)
    if rank in stepping:
        optimizer.step()
    if not keeps:
        optimizer.zero_grad()
    return loss / scale if rank else None


def clip_by_own_norm(model, norm=0.1):
    nn.utils.clip_grad_norm_(model.parameters(), norm)


def interleaved(model, optimizer, batch, kind=ScheduleInterleaved1F1B, places=lambda rank: (rank, rank + 2)):
    indices = places(dist.get_rank())
    modules = [nn.Sequential(model.layers[i], *([model.last] * (i == 3))) for i in indices]
    stages = [PipelineStage(module, i, 4, CPU) for module, i in zip(modules, indices, strict=True)]
    loss = run_stages(
        kind(stages, MICRO_BATCHES, loss_fn=functional.mse_loss), batch, 0 in indices, 3 in indices
    )
    optimizer.step()
    return loss


def tied_pipeline(model, optimizer, batch, is_summed=True):
    rank = dist.get_rank()
    parts = (
        (model.first, model.embed, model.attention),
        (lambda x: model.head(model.norm(x)), model.head, model.norm),
    )
    loss = run_stage(Stage(*parts[rank]), rank, batch, loss=token_loss)
    if is_summed:
        dist.all_reduce(model.embed.weight.grad)
    optimizer.step()
    return loss


def copied_stages(model, optimizer, batch):
    rank = dist.get_rank()
    given = part_of(model, rank)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    names, module = [names[id(parameter)] for parameter in given.parameters()], copy.deepcopy(given)
    loss = run_stage(module, rank, batch, ScheduleGPipe)
    torch.optim.AdamW(module.parameters(), lr=0.01).step()
    weights = dict(zip(names, module.parameters(), strict=True))
    return Updated(loss, {f"module.{name}": weight.grad for name, weight in weights.items()}, weights)


# ---- data parallel -------------------------------------------------------------------------------------------


def data_parallel(model, optimizer, batch, unsynchronized=range(1), inner=False, divisor=1):
    wrapped, losses = DistributedDataParallel(model), []
    for turn, (x, y) in enumerate(zip(*(value.chunk(2) for value in own(batch)), strict=True)):
        with wrapped.no_sync() if turn in unsynchronized else contextlib.nullcontext():
            losses.append((model if inner else wrapped)(x, y) / 2)
            losses[-1].backward()
    for parameter in model.parameters():
        parameter.grad /= divisor
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses).detach()


def by_hand(model, optimizer, batch, reduce=average, part=own, keeps=True, clipping=None, steps=1):
    for x, y in zip(*(value.chunk(2) for value in part(batch)), strict=True):
        if not keeps:
            optimizer.zero_grad()
        (model(x, y) / 2).backward()
        if steps > 1:
            optimizer.step()
    reduce(model)
    if clipping:
        clipping(model)
    if steps == 1:
        optimizer.step()


def reduce_in_bfloat16(model):
    for parameter in model.parameters():
        rounded = parameter.grad.bfloat16()
        dist.all_reduce(rounded)
        parameter.grad = rounded.float() / dist.get_world_size()


def drop_last(model):
    average(model)
    if dist.get_rank() == 1:
        for parameter in model.last.parameters():
            parameter.grad = None


def at_other_rate(model, optimizer, batch):
    optimizer.param_groups[0]["lr"] *= dist.get_world_size()
    by_hand(model, optimizer, batch)


def with_other_weights(model, optimizer, batch):
    torch.manual_seed(dist.get_rank())
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    by_hand(model, optimizer, batch)


def to_one_rank(model, optimizer, batch):
    model(*own(batch)).backward()
    for parameter in model.parameters():
        dist.reduce(parameter.grad, 0)
        parameter.grad /= dist.get_world_size()
    if dist.get_rank() == 0:
        optimizer.step()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)


def of_copies(model, optimizer, batch):
    MLP().requires_grad_()(*own(batch)).backward()


def mean_over_tokens(model, optimizer, batch, is_right=True):
    x, y = own(batch)
    count = (y != -100).sum()
    dist.all_reduce(count)
    logits = model.head(model.norm(model.first(x)))
    loss = token_loss(logits, y, "sum") * dist.get_world_size() / count if is_right else token_loss(logits, y)
    loss.backward()
    average(model)
    optimizer.step()
    return loss


def accelerated(model, optimizer, batch, precision="no", norm=None):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for x, y in zip(*(value.chunk(2) for value in own(batch)), strict=True):
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(x, y))
            if norm and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()


# ---- shards --------------------------------------------------------------------------------------------------


def sharded(model, optimizer, batch, policy=None, clipping=None, shape=None):
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape or (1, dist.get_world_size()), mesh_dim_names=names)
    mesh, policy = mesh if shape else mesh["shard"], policy or MixedPrecisionPolicy()
    for layer in getattr(model, "layers", []):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = model(*own(batch))
    loss.backward()
    if clipping:
        clipping(model)
    optimizer.step()
    return loss


def clip_shards(model):
    shards = [parameter.grad.to_local() for parameter in model.parameters()]
    norm = torch.stack([shard.square().sum() for shard in shards]).sum().sqrt()
    for shard in shards:
        shard *= min(1.0, 0.1 / (float(norm) + 1e-6))


def flat_shards(model, optimizer, batch, norm=None):
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    loss = wrapped(*own(batch))
    loss.backward()
    if norm:
        wrapped.clip_grad_norm_(norm)
    optimizer.step()
    if norm:
        optimizer.zero_grad(set_to_none=False)
    return loss


def tensor_parallel(model, optimizer, batch, reduces_norm=False):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    loss = model(*batch)
    loss.backward()
    if reduces_norm:
        average(model.norm, divisor=1)
    torch.optim.AdamW(model.parameters(), lr=0.01).step()
    return loss


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        return own([gradient])[0]


def sequence_parallel(model, optimizer, batch, is_summed=True):
    x, y = batch
    hidden = Gather.apply(model.norm(own([x])[0]))
    loss = functional.mse_loss(model.last(x + model.down(functional.gelu(model.up(hidden)))), y)
    loss.backward()
    if is_summed:
        average(model.norm, divisor=1)
    optimizer.step()
    return loss


# ---- four ranks ----------------------------------------------------------------------------------------------


def data_and_pipeline(model, optimizer, batch, is_averaged=True, is_wrapped=False, clipping=None):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    place, rank = mesh.get_local_rank("data"), mesh.get_local_rank("stage")
    module = part_of(model, rank)
    wrapped = DistributedDataParallel(module, process_group=mesh.get_group("data")) if is_wrapped else module
    part = [value.chunk(2)[place] for value in batch]
    kind = ScheduleGPipe if is_wrapped else Schedule1F1B
    loss = run_stage(wrapped, rank, part, kind, group=mesh.get_group("stage"), n_microbatches=2)
    for parameter in module.parameters() if is_averaged and not is_wrapped else ():
        dist.all_reduce(parameter.grad, group=mesh.get_group("data"))
        parameter.grad /= 2
    if clipping:
        clipping(module, 0.1, mesh.get_group("stage"))
    optimizer.step()
    return loss


def shards_and_tensor_parallel(model, optimizer, batch, turns=1, is_early=False):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    if not is_early:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parts = (value.chunk(2)[mesh.get_local_rank("data")].chunk(turns) for value in batch)
    losses = []
    for turn, (x, y) in enumerate(zip(*parts, strict=True)):
        model.set_requires_gradient_sync(turn == turns - 1)
        losses.append(model(x, y) / turns)
        losses[-1].backward()
    optimizer.step()
    return losses[0] if turns == 1 else None


# ---- idioms of other programs --------------------------------------------------------------------------------


def everything(model, optimizer, batch):
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)
    averaged, loss = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), None
    for turn, (x, y) in enumerate(zip(*(value.chunk(2) for value in own(batch)), strict=True)):
        with wrapped.no_sync() if turn == 0 else contextlib.nullcontext():
            loss = wrapped(x, y)
            (loss / 2).backward()
    nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
    optimizer.step()
    averaged.update_parameters(model)
    optimizer.zero_grad(set_to_none=False)
    return loss  # of the last micro-batch


def in_autocast(model, optimizer, batch):
    wrapped = DistributedDataParallel(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = wrapped(*own(batch))
    loss.backward()
    optimizer.step()


def sharded_optimizer(model, optimizer, batch):
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.01)
    wrapped(*own(batch)).backward()
    optimizer.step()


def in_buckets(model, optimizer, batch, left_out=0, decay=0.01):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=decay)
    model(*own(batch)).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    buckets = [gradients[first : first + 3] for first in range(0, len(gradients), 3)]
    for bucket in buckets[: len(buckets) - left_out]:
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat, async_op=True).wait()
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient) / dist.get_world_size())
    optimizer.step()
    model.zero_grad(set_to_none=False)


def optimizer_in_backward(model, optimizer, batch):
    def step(parameter, optimizer):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()

    for parameter in model.parameters():
        own_optimizer = torch.optim.AdamW([parameter], lr=0.01)
        parameter.register_post_accumulate_grad_hook(functools.partial(step, optimizer=own_optimizer))
    model(*own(batch)).backward()


def spoil_bias(model):
    average(model)
    if dist.get_rank() == 1:
        model.last.bias.grad[0] = float("nan")


# ---- all loops -----------------------------------------------------------------------------------------------

first_rows = functools.partial(lambda batch: [value.chunk(2)[0] for value in batch])
uneven_rows = functools.partial(lambda batch: [v[:10] if dist.get_rank() == 0 else v[10:] for v in batch])
v_places = functools.partial(lambda rank: (rank, 3 - rank))
ON_TWO: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[], nn.Module], Any]] = {
    "1F1B": (pipeline, {"keeps": False}, MLP, rows),
    "GPipe": (pipeline, {"kind": ScheduleGPipe}, MLP, rows),
    "interleaved": (interleaved, {}, functools.partial(MLP, 4), rows),
    "zero bubble": (interleaved, {"kind": ScheduleInterleavedZeroBubble}, functools.partial(MLP, 4), rows),
    "ZBV": (
        interleaved,
        {"kind": ScheduleZBVZeroBubble, "places": v_places},
        functools.partial(MLP, 4),
        rows,
    ),
    "pipeline scaled twice": (pipeline, {"scale": 1 / MICRO_BATCHES}, MLP, rows),
    "pipeline not scaled": (pipeline, {"scale_grads": False}, MLP, rows),
    "pipeline clipped": (pipeline, {"clipping": functools.partial(clip, norm=0.1)}, MLP, rows),
    "pipeline clipped by one rank's norm": (pipeline, {"clipping": clip_by_own_norm}, MLP, rows),
    "pipeline stepped on one stage": (pipeline, {"stepping": (0,)}, MLP, rows),
    "pipeline stepped on one stage, then zero_grad": (
        pipeline,
        {"stepping": (0,), "keeps": False},
        MLP,
        rows,
    ),
    "pipeline tied": (tied_pipeline, {}, Language, tokens),
    "pipeline tied, not summed": (tied_pipeline, {"is_summed": False}, Language, tokens),
    "pipeline of copies": (copied_stages, {}, MLP, rows),
    "DDP": (data_parallel, {}, MLP, rows),
    "DDP, batch norm": (data_parallel, {}, BatchNormed, rows),
    "DDP summed": (by_hand, {"reduce": functools.partial(average, divisor=1)}, MLP, rows),
    "DDP averaged twice": (data_parallel, {"divisor": 2}, MLP, rows),
    "DDP no_sync on the last micro-batch": (data_parallel, {"unsynchronized": (1,)}, MLP, rows),
    "DDP forward of the inner module": (data_parallel, {"inner": True}, MLP, rows),
    "by hand": (by_hand, {}, MLP, rows),
    "by hand, clipped": (by_hand, {"clipping": clip_by_own_norm}, MLP, rows),
    "thrown away": (by_hand, {"keeps": False}, MLP, rows),
    "mean per token": (mean_over_tokens, {}, Language, functools.partial(tokens, 5)),
    "mean per micro-batch": (mean_over_tokens, {"is_right": False}, Language, functools.partial(tokens, 5)),
    "other rows": (by_hand, {}, MLP, lambda: [value + dist.get_rank() for value in rows()]),
    "other weights": (with_other_weights, {}, MLP, rows),
    "the same rows": (by_hand, {"part": first_rows}, MLP, rows),
    "bfloat16 sums": (by_hand, {"reduce": reduce_in_bfloat16}, MLP, rows),
    "another rate": (at_other_rate, {}, MLP, rows),
    "step in each micro-batch": (by_hand, {"keeps": False, "steps": 2}, MLP, rows),
    "a gradient is missing": (by_hand, {"reduce": drop_last}, MLP, rows),
    "reduced to one rank": (to_one_rank, {}, MLP, rows),
    "copies": (of_copies, {}, MLP, rows),
    "dropout": (by_hand, {}, functools.partial(MLP, p=0.5), rows),
    "accelerate": (accelerated, {}, MLP, rows),
    "FSDP2": (sharded, {}, Language, tokens),
    "FSDP2 clipped": (sharded, {"clipping": clip_by_own_norm}, MLP, rows),
    "FSDP2 clipped by one rank's norm": (sharded, {"clipping": clip_shards}, MLP, rows),
    "FSDP2 reduced in bfloat16": (
        sharded,
        {"policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        MLP,
        rows,
    ),
    "FSDP1": (flat_shards, {}, MLP, rows),
    "tensor parallel": (tensor_parallel, {}, Block, rows),
    "everything at once": (everything, {}, Deep, tokens),
    "autocast": (in_autocast, {}, Language, tokens),
    "sharded optimizer": (sharded_optimizer, {}, MLP, rows),
    "buckets": (in_buckets, {}, Deep, tokens),
    "optimizer in backward": (optimizer_in_backward, {}, MLP, rows),
    "accelerate in bfloat16": (accelerated, {"precision": "bf16", "norm": 0.3}, MLP, rows),
    "FSDP1 clipped": (flat_shards, {"norm": 0.2}, Deep, tokens),
    "a bucket is left out": (in_buckets, {"left_out": 1}, Deep, tokens),
    "another decay": (in_buckets, {"decay": 0.3}, MLP, rows),
    "a sampler of rank 1": (by_hand, {"part": lambda batch: [value[1::2] for value in batch]}, MLP, rows),
    "ranks with more rows": (by_hand, {"part": uneven_rows}, MLP, rows),
    "norm reduced twice": (tensor_parallel, {"reduces_norm": True}, Block, rows),
    "not a number": (by_hand, {"reduce": spoil_bias}, MLP, rows),
    "norm with all-reduce": (sequence_parallel, {}, Block, rows),
    "norm without all-reduce": (sequence_parallel, {"is_summed": False}, Block, rows),
}
ON_FOUR = {
    "DDP x pipeline": (data_and_pipeline, {}, MLP, rows),
    "DDP x pipeline, clipped": (data_and_pipeline, {"clipping": clip}, MLP, rows),
    "DDP x pipeline, not averaged": (data_and_pipeline, {"is_averaged": False}, MLP, rows),
    "DDP x pipeline, clipped by one stage's norm": (
        data_and_pipeline,
        {"clipping": lambda module, norm, _: clip_by_own_norm(module, norm)},
        MLP,
        rows,
    ),
    "FSDP x tensor parallel": (shards_and_tensor_parallel, {}, Block, rows),
    "pipeline of DDP": (data_and_pipeline, {"is_wrapped": True}, MLP, rows),
    "FSDP x tensor parallel, accumulated": (shards_and_tensor_parallel, {"turns": 2}, Block, rows),
    "optimizer made before the shards": (
        shards_and_tensor_parallel,
        {"turns": 2, "is_early": True},
        Block,
        rows,
    ),
    "HSDP": (sharded, {"shape": (2, 2)}, MLP, rows),
}
if torch.__version__.startswith(
    "2.10."
):  # there these schedules of torch fail on gloo, also without `compare`
    for name in ("interleaved", "zero bubble", "ZBV"):
        del ON_TWO[name]
LOOPS = {2: ON_TWO, 4: ON_FOUR}


def compare_all():
    """Return, for each loop of this number of ranks: the comparison, as text, conclusion, rows and whether all is
    equal, and what this rank printed."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=240))
    results = {}
    for name, (update, arguments, make_model, make_batch) in LOOPS[dist.get_world_size()].items():
        model, printed = make_model(), io.StringIO()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        function = functools.partial(update, **arguments)
        with contextlib.redirect_stdout(printed):
            found = compare(
                model, None, make_batch(), optimizer, update=function, micro_batches=MICRO_BATCHES
            )
        results[name] = str(found), found.conclusion, found.rows, found.equal, printed.getvalue()
    dist.destroy_process_group()
    return results
