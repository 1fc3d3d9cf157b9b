"""Changes of the program that would make it faster: each is run in virtual time, on both machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from popengine.profile import Profile

from . import memory
from .gains import Change, Machine, promised
from .memory_changes import keep_activations, keep_state
from .trace import block_shares
from .virtual import Step


def changes(profile: Profile, step: Step, spread: float) -> list[Change]:
    """What would give more than the measured spread, the best first; of each kind the best one."""
    if not sum(step.costs):
        return []
    machine = Machine(profile, step)
    found: list[Change] = []
    for kind in (_more_rows, _pipeline, _cuts, _replicas, _threads, _fused, keep_activations, keep_state):
        best = max(kind(machine), key=lambda change: change.best, default=None)
        if best is not None and promised(best.best, spread) is not None:
            found.append(best)
    return sorted(found, key=lambda change: -change.best)


def _more_rows(machine: Machine) -> Iterator[Change]:
    """More micro-batches a step: of those that nearly give the most the smallest."""
    step = machine.step
    option = "options.Training.gradientAccumulation" if step.backward else "options.deviceIterations"
    found = []
    for factor in (2, 4, 8, 16):
        count = factor * step.micro_batches
        also = (
            f"the effective batch becomes {factor} times as large, so the learning rate may have to change"
            if step.backward
            else f"a call takes {factor} times the rows"
        )
        more = replace(step, micro_batches=count)
        setting = {"accumulation" if step.backward else "iterations": count}
        found.append(machine.change("micro-batches", more, f"{option}({count})", also, **setting))
    most = max(change.best for change in found)
    yield next(change for change in found if change.best - 1 >= 0.7 * (most - 1))


def _pipeline(machine: Machine) -> Iterator[Change]:
    """Stages in turns, where they could work at the same time."""
    step, stages = machine.step, len(machine.step.ipus)
    enough = 2 * stages - 1 if step.backward else stages
    in_order = list(step.ipus) == sorted(step.ipus)
    if machine.profile.facts.get("mode") == "sharded" and in_order and step.micro_batches >= enough > 1:
        also = "up to as many micro-batches as there are stages are held at the same time"
        pipelined = replace(step, in_turns=False)
        yield machine.change("pipeline", pipelined, "poptorch.PipelinedExecution", also, pipelined=True)


def _replicas(machine: Machine) -> Iterator[Change]:
    """Cores that one replica leaves idle."""
    step = machine.step
    count = machine.cores // step.replicas * step.replicas
    if count > step.replicas and machine.profile.counts.get("instances", 1) == 1:
        factor = count // step.replicas
        limit, _, is_shared = memory.capacity(machine.profile)
        if limit and is_shared and factor * memory.wanted(machine.profile, machine.needs) > limit:
            return
        also = f"a call takes {factor} times the rows" + (
            ", and the effective batch becomes as many times as large" if step.backward else ""
        )
        more = replace(step, replicas=count)
        change = machine.change("replicas", more, f"options.replicationFactor({count})", also, replicas=count)
        yield replace(change, apart=1.0)  # on separate devices it takes so many more of them


def _threads(machine: Machine) -> Iterator[Change]:
    """Fewer threads, where they mostly wait for Python's lock, or more."""
    for count in {1, *machine.step.sharing} - {machine.cores}:
        if machine.cores and machine.step.rows >= count:  # else they would share operations
            what, also = f"torch.set_num_threads({count})", ""
            change = machine.change("threads", machine.step, what, also, cores=count, threads=count)
            yield replace(change, apart=1.0)


def _fused(machine: Machine) -> Iterator[Change]:
    """torch's one kernel for an update, as fast as it was measured here."""
    step, factor = machine.step, machine.profile.facts.get("fused")
    if factor and any(step.updates.values()):
        faster = replace(step, updates={ipu: cost / factor for ipu, cost in step.updates.items()})
        what = "fused=True in the optimizer"
        yield machine.change("fused", faster, what, "the last bits of the weights differ", fused=True)


# ---- cuts ------------------------------------------------------------------------------------------------


def _cuts(machine: Machine) -> Iterator[Change]:
    """A block moved over a border, or all borders moved."""
    profile, step = machine.profile, machine.step
    blocks = [[block.name for block in profile.blocks if block.stage == s] for s in range(len(step.ipus))]
    names = [name for own in blocks for name in own]
    if len(step.ipus) < 2 or not all(blocks) or len(set(names)) < len(names):
        return
    pieces = _Pieces(profile, step, blocks)
    for stage, own in enumerate(blocks):
        for block, target in ((own[0], stage - 1), (own[-1], stage + 1)):
            if len(own) > 1 and 0 <= target < len(blocks) and step.ipus[target] != step.ipus[stage]:
                cut = [list(names) for names in blocks]
                cut[stage].remove(block)
                cut[target].insert(0 if target > stage else len(cut[target]), block)
                what = f"moving block {block} from stage {stage} to stage {target}"
                yield machine.change("cut", pieces.cut(cut), what, cut=cut)
    if len(set(step.ipus)) == len(step.ipus):
        cut = pieces.evenest()
        if cut != blocks:
            what = "cutting the stages as " + " | ".join(", ".join(names) for names in cut)
            yield machine.change("cut", pieces.cut(cut), what, cut=cut)


class _Pieces:
    """What each block costs, and a step whose blocks are cut in another way."""

    def __init__(self, profile: Profile, step: Step, blocks: Sequence[Sequence[str]]) -> None:
        self._step, self._blocks = step, blocks
        shares = block_shares(profile)
        size = {(block.stage, block.name): block.parameters for block in profile.blocks}
        of_ipu: dict[int, int] = {}
        for (stage, _), count in size.items():
            of_ipu[step.ipus[stage]] = of_ipu.get(step.ipus[stage], 0) + count
        self._costs: dict[str, tuple[float, float, float]] = {}  # forward, backward, update
        for stage, names in enumerate(blocks):
            ipu = step.ipus[stage]
            for name in names:
                backward = step.backward[stage] if step.backward else 0.0
                self._costs[name] = (
                    step.forward[stage] * shares.get(("F", stage, name), 0.0),
                    backward * shares.get(("B", stage, name), 0.0),
                    step.updates.get(ipu, 0.0) * size[stage, name] / (of_ipu[ipu] or 1),
                )

    def _sum(self, names: Sequence[str], kind: int) -> float:
        return sum(self._costs[name][kind] for name in names)

    def cut(self, cut: Sequence[Sequence[str]]) -> Step:
        updates = dict.fromkeys(self._step.ipus, 0.0)
        for ipu, names in zip(self._step.ipus, cut, strict=True):
            updates[ipu] += self._sum(names, 2)
        return replace(
            self._step,
            forward=tuple(self._sum(names, 0) for names in cut),
            backward=tuple(self._sum(names, 1) for names in cut) if self._step.backward else (),
            updates=updates,
        )

    def evenest(self) -> list[list[str]]:
        """The same stages with consecutive blocks, such that the slowest stage is as fast as it can be."""
        names = [name for stage in self._blocks for name in stage]
        total = [0.0, *accumulate(sum(self._costs[name][:2]) for name in names)]
        size, count = len(names), len(self._blocks)
        best: list[tuple[float, tuple[int, ...]]] = [(total[end], (end,)) for end in range(size + 1)]
        for stages in range(2, count + 1):
            best = [
                min(
                    (max(best[start][0], total[end] - total[start]), (*best[start][1], end))
                    for start in range(stages - 1, end)
                )
                if end >= stages
                else (total[-1] + 1, ())
                for end in range(size + 1)
            ]
        return [names[start:end] for start, end in pairwise((0, *best[-1][1]))]
