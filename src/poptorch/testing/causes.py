"""The likely cause of wrong gradients or weights, in words of the field: hypotheses, each tested against samples.

A hypothesis predicts the gradients of the ranks from plain PyTorch's: by a factor, a norm to which they are clipped, a
sum or mean over ranks, weights of the rows, or one use of a tied weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .meeting import ranks_text
from .plain import NEAR, SLACK, Layout, PlainUpdates, Probe, Rows, blocks_of_rows, fit
from .reports import Evidence, RankReport
from .verdicts import factor_between, format_factor, is_rounding

_MOST_PARTS = 64  # of a batch, whose gradients are computed


@dataclass(frozen=True)
class OtherPlain:
    """Settings with which plain PyTorch computes what the loop does, which is then right."""

    note: str
    max_norm: float = math.inf
    layout: Layout | None = None


@dataclass(frozen=True)
class Case:
    """What a conclusion is derived from.

    Args:
        micro_batches: of an update, on each replica of an executor
        replicas:      of an executor
        seen:          of each parameter, what rank 0 has received
        reports:       of each rank
        differing:     which arguments have other values on a rank than on rank 0, as text; or ""
        plain:         plain PyTorch's updates
    """

    micro_batches: int
    replicas: int
    seen: dict[str, Evidence]
    reports: Sequence[RankReport]
    differing: str
    plain: PlainUpdates

    @functools.cached_property
    def probe(self) -> Probe:
        """Return the gradients of rows."""
        return self.plain.probe()

    @functools.cached_property
    def trained(self) -> list[str]:
        """Return the parameters of which a rank has sent a gradient."""
        return [name for name, seen in self.seen.items() if seen.found["gradient"]]

    def wrong(self, part: str) -> list[str]:
        """Return the parameters of which a gradient, or a new weight, differs by more than rounding."""
        return [name for name, seen in self.seen.items() if seen.wrong(part)]

    def holders(self, names: Iterable[str]) -> list[int]:
        """Return the ranks that have sent a gradient of one of these parameters."""
        return sorted({rank for name in names for rank in self.seen[name].found["gradient"]})

    def gradients(self, names: Iterable[str], rank: int) -> tuple[list[str], Tensor, Tensor, Tensor]:
        """Return the names that a rank has; samples of its gradients, and of plain PyTorch's; bounds of rounding."""
        held = [name for name in names if rank in self.seen[name].found["gradient"]]
        seen = [self.seen[name] for name in held]
        found, plain = ([s.found["gradient"][rank] for s in seen], [s.plain for s in seen])
        bounds = [torch.full_like(s.plain, s.bound) for s in seen]
        return held, torch.cat(found), torch.cat(plain), torch.cat(bounds)

    def subject(self, names: Sequence[str]) -> str:
        """Return "gradients are", or "gradients of a, b and 3 others are"."""
        if len(names) == len(self.trained):
            return "gradients are"
        return f"gradients of {_list_text(names)} are" if len(names) > 1 else f"the gradient of {names[0]} is"

    def where(self, ranks: Iterable[int]) -> str:
        """Return " on rank 1"; "" if there is one rank."""
        return f" on {ranks_text(ranks)}" if len(self.reports) > 1 else ""


def _list_text(names: Sequence[str]) -> str:
    """Return "a, b and c", or "a, b, c and 5 others"."""
    *first, last = names if len(names) < 5 else [*names[:3], f"{len(names) - 3} others"]
    return f"{', '.join(first)} and {last}" if first else last


def conclude(case: Case, loss: str) -> str | OtherPlain:
    """Return in one sentence whether the loop is right, or what differs and the likely cause.

    Args: loss: how the loss differs
    """
    cause, seen, is_alone = _explain(case), case.seen, len(case.reports) == 1
    if isinstance(cause, OtherPlain):
        return cause
    expected = [name for name, of_name in seen.items() if of_name.is_trained]
    nowhere = [name for name in expected if not any(seen[name].verdicts.values())]
    wrong, wrong_weights = case.wrong("gradient"), case.wrong("weight")
    if len(nowhere) == len(expected):
        hint = "if its modules are copies, return a poptorch.testing.Updated"
        return f"the loop has changed no parameter of the model that it was given, on any rank: {hint}"
    if wrong:
        verdicts = {name: seen[name].text("gradient") for name in case.trained}
        if cause and (not is_alone or len(set(verdicts.values())) == 1):
            return cause
        text = f"{len(wrong)} of {len(verdicts)} gradients differ, first {wrong[0]}: {verdicts[wrong[0]]}"
        return f"{text}: {cause}" if cause else text
    of_gradients = {verdict for s in seen.values() for verdict in s.verdicts["gradient"].values()}
    verdicts = of_gradients.union(*(s.verdicts["weight"].values() for s in seen.values()), {loss})
    how = "equal" if of_gradients <= {"equal", "none", "missing"} else "equal up to rounding"
    if verdicts <= {"equal", "none", "not returned"} and not nowhere:
        return "all equal"
    if (
        all(map(is_rounding, verdicts - {"not returned"}))
        and not nowhere
        and not (is_alone and how == "equal")
    ):
        return "all equal up to rounding"
    texts = [f"all gradients are {how}" if case.trained else "no gradients are left"]
    missing = [name for name in case.trained if "missing" in seen[name].verdicts["gradient"].values()]
    if missing:
        ranks = [
            rank for rank, verdict in seen[missing[0]].verdicts["gradient"].items() if verdict == "missing"
        ]
        texts.append(f"{len(missing)} gradients are missing{case.where(ranks)}: {_list_text(missing)}")
    if nowhere:
        idle = [rank for rank, report in enumerate(case.reports) if not (report.sent or report.steps)]
        skipped = f"; {ranks_text(idle)} skipped the step" if idle and len(idle) < len(case.reports) else ""
        texts.append(f"{len(nowhere)} parameters are missing on all ranks: {_list_text(nowhere)}{skipped}")
    if cause:
        texts.append(cause)
    elif wrong_weights and not is_alone:
        verdict = seen[wrong_weights[0]].text("weight")
        texts.append(f"{len(wrong_weights)} new weights differ, first {wrong_weights[0]}: {verdict}")
    elif not wrong_weights and not case.trained:
        texts.append("all new weights are equal up to rounding")
    texts += [] if is_rounding(loss) or loss == "not returned" or is_alone else [f"the loss is {loss}"]
    return "; ".join(texts)


def _explain(case: Case) -> str | OtherPlain | None:
    """Return the likely cause of the differences; None if there are none, or no hypothesis fits."""
    wrong = case.wrong("gradient")
    if case.differing and (wrong or case.wrong("weight")):
        return f"ranks with different seeds or data: {case.differing}"
    if not wrong:
        return _explain_weights(case)
    by_holders: dict[tuple[int, ...], list[str]] = {}
    for name in wrong:
        by_holders.setdefault(tuple(case.holders([name])), []).append(name)
    hypotheses = (_by_factor, _over_ranks, _by_rows, _by_uses, _by_norm_of_a_rank, _by_half_precision)
    for groups in ([wrong], list(by_holders.values()), [[name] for name in wrong]):
        causes = [next(filter(None, (h(case, names) for h in hypotheses)), None) for names in groups]
        if len(causes) == 1 and isinstance(causes[0], OtherPlain):
            return causes[0]
        if all(isinstance(cause, str) for cause in causes):
            return "; ".join(dict.fromkeys(map(str, causes)))
    early = {rank: report.early[0] for rank, report in enumerate(case.reports) if report.early}
    if early:
        text = f"{ranks_text(early)} had other weights before the step than the model, first {min(early.values())}"
        return f"{text}: ranks with different seeds, or a missing broadcast"
    return _explain_steps(case)


# ---- factors and norms ---------------------------------------------------------------------------------------


def _by_factor(case: Case, names: Sequence[str]) -> str | OtherPlain | None:
    """Gradients that are plain PyTorch's times a factor, on all ranks that have them."""
    factor = _factor(case, names)
    if not factor:
        return None
    cause = _cause_of_factor(case, max(len(case.holders([name])) for name in names), factor)
    if not cause and 0 < factor < 1 and math.isinf(case.plain.max_norm) and _factor(case, case.trained):
        limit = _round_norm(math.hypot(*(max(case.seen[name].norms.values()) for name in case.trained)))
        if limit:
            return OtherPlain(f"gradients clipped to a norm of {limit:g}", limit)
    text = f"{case.subject(names)} {format_factor(factor)}{case.where(case.holders(names))}"
    return f"{text}: {cause}" if cause else text


def _factor(case: Case, names: Sequence[str]) -> float:
    """Return the factor between all ranks' gradients and plain PyTorch's; 0.0 if there is none."""
    values = [case.gradients(names, rank)[1:] for rank in case.holders(names)]
    found, plain, bounds = (torch.cat(of_ranks) for of_ranks in zip(*values, strict=True))
    factor = factor_between([(found, plain)])
    return factor if ((found - factor * plain).abs() <= SLACK * bounds * abs(factor)).all() else 0.0


def _cause_of_factor(case: Case, ranks: int, factor: float) -> str:
    """Return the cause of a factor that is a number of micro-batches, replicas or ranks; "" if it is none.

    Args: ranks: the number of ranks that have the gradients
    """
    steps, replicas, inverse = case.micro_batches, case.replicas, factor < 1
    number = round(1 / factor if inverse else factor)
    if number < 2 or abs((1 / factor if inverse else factor) / number - 1) > 1e-4:
        return ""
    if len(case.reports) == 1:
        values = {
            steps * replicas: "micro-batches and replicas",
            replicas: "replicas",
            steps: "micro-batches",
        }
        what = values.get(number, "")
        if number == steps and inverse:
            return "accumulation is scaled twice"
        how = f"the mean over {what} is taken twice" if inverse else f"{what} are summed, not averaged"
        return how if what else ""
    degrees = [degree for degree in range(2, ranks + 1) if ranks % degree == 0]  # of data parallelism
    how = "averaged twice over" if inverse else "not averaged over"
    texts = [f"{how} {number} ranks"] if number in degrees else []
    if steps > 1 and number != steps:
        texts += [f"{how} {steps} micro-batches and {d} ranks" for d in degrees if number == steps * d]
    if not texts or number in [steps, *(steps // degree for degree in degrees)]:
        summed = f"accumulation is not scaled: {number} micro-batches are summed, not averaged"
        texts.append(f"accumulation is scaled twice by {number} micro-batches" if inverse else summed)
    return ", or ".join(texts)


def _round_norm(norm: float) -> float:
    """Return the limit to which a norm was clipped, a number of at most three digits; 0.0 if it is not near one."""
    limit = float(f"{norm:.3g}")
    return limit if norm and abs(norm / limit - 1) < 2e-5 + 1e-6 / limit else 0.0


def _by_norm_of_a_rank(case: Case, names: Sequence[str]) -> str | None:
    """Gradients whose norm on each rank (of its shards) is the same round number, or smaller where they are right."""
    norms = {}
    for rank, report in enumerate(case.reports):
        norms[rank] = math.hypot(
            *(sent["gradient"].norm for sent in report.sent.values() if "gradient" in sent)
        )
    limit = max(norms.values())
    clipped = [rank for rank, norm in norms.items() if abs(norm / limit - 1) < 1e-4]
    wrong = {rank for name in names for rank in case.seen[name].wrong("gradient")}
    is_sharded = any(
        sent.mesh for report in case.reports for parts in report.sent.values() for sent in parts.values()
    )
    if len(norms) == 1 or not _round_norm(limit) or not (is_sharded or wrong <= set(clipped)):
        return None
    return f"{case.subject(names)} clipped by the norm of one rank, not of all: to {limit:.3g} on {ranks_text(clipped)}"


# ---- sums and means over ranks, and uses ---------------------------------------------------------------------


def _over_ranks(case: Case, names: Sequence[str]) -> str | None:
    """Gradients that differ between ranks, and whose mean or sum over ranks is plain PyTorch's."""
    are_sums = are_means = True
    for seen in (case.seen[name] for name in names):
        values, distinct = list(seen.found["gradient"].values()), list[Tensor]()
        for value in values:
            if not any(_agree(value, one, seen.bound) for one in distinct):
                distinct.append(value)
        if len(distinct) == 1:
            return None
        are_sums &= _agree(torch.stack(distinct).sum(0), seen.plain, seen.bound)
        are_means &= _agree(torch.stack(values).mean(0), seen.plain, seen.bound)
    ranks = ranks_text(case.holders(names))
    if are_means:
        return f"{case.subject(names)} of only the own rank's rows: not averaged over {ranks}"
    if not are_sums:
        return None
    if len(names) <= 3 and (text := _by_uses(case, names)):
        return text
    if len(names) == len(case.trained):
        return f"gradients are of only the own rank's rows: not summed over {ranks}"
    return f"{case.subject(names)} partial sums on {ranks}: a replicated weight without all-reduce"


def _agree(one: Tensor, other: Tensor, bound: float) -> bool:
    return bool(((one - other).abs() <= SLACK * bound).all())


def _by_uses(case: Case, names: Sequence[str]) -> str | None:
    """The gradient of one use of a weight that forward uses several times."""
    for name in names:
        seen, uses = case.seen[name], case.probe.gradients_of_uses(name, case.plain.layout)
        parts = [*uses, *(sum(uses) - use for use in uses)] if len(uses) > 1 else []
        if not all(
            any(_agree(value, p, seen.bound) for p in parts) for value in seen.found["gradient"].values()
        ):
            return None
    ranks = case.holders(names)
    over = f" over {ranks_text(ranks)}" if len(ranks) > 1 else ""
    return (
        f"a tied weight's gradient is not summed{over}: {_list_text(names)} has the gradient of one use only"
    )


# ---- weights of rows -----------------------------------------------------------------------------------------


def _by_rows(case: Case, names: Sequence[str]) -> str | OtherPlain | None:
    """Gradients that are sums over the rows with other weights than plain PyTorch's."""
    ranks = case.holders(names)
    for parts in _partitions(case, len(ranks)):
        try:
            fits = [_fit_rows(case, names, rank, parts) for rank in ranks]
        except (RuntimeError, ValueError):  # such as batch norm over one row
            continue
        solved = [(weights, are_sums) for weights, are_sums in fits if len(weights)]
        if len(solved) < len(ranks):
            continue
        if all(are_sums[0] and are_sums[1] for _, are_sums in solved):
            ratios = {rank: w[:, 1] / w[:, 0] for rank, (w, _) in zip(ranks, solved, strict=True)}
            if all((ratio - ratio.nanmean()).abs().nan_to_num().max() < NEAR for ratio in ratios.values()):
                return None  # a factor on each rank
            return _describe_rows(
                case, case.subject(names), parts, ratios, [w[:, :2].sum(0) for w, _ in solved]
            )
        are_means = all(s[2] and (w[:, 2] * len(parts) - 1).abs().max() < NEAR for w, s in solved)
        if are_means and not solved[0][1][0] and len(case.reports) > 1 and not case.plain.note:
            note = f"{len(parts)} micro-batches, since the loss couples the rows of a micro-batch"
            return OtherPlain(note, layout=[parts])
    return None


def _partitions(case: Case, ranks: int) -> Iterator[list[Rows]]:
    """Yield divisions of the rows into parts: single rows; blocks for ranks and micro-batches; every n-th row."""
    rows, steps = case.probe.rows, case.micro_batches
    for number in dict.fromkeys([rows, steps * ranks, steps, ranks]):
        yield from [blocks_of_rows(rows, number)] if 1 < number <= min(rows, _MOST_PARTS) else []
    yield from [[torch.arange(rank, rows, ranks) for rank in range(ranks)]] if 1 < ranks < rows else []


def _fit_rows(
    case: Case, names: Sequence[str], rank: int, parts: Sequence[Rows]
) -> tuple[Tensor, list[bool]]:
    """Return the weights of parts [parts, 3] in plain PyTorch's gradients, in a rank's and in the mean over ranks, and
    whether each is a sum over the parts; no weights, if they are ambiguous."""
    held, found, plain, bounds = case.gradients(names, rank)
    mean = torch.cat([torch.stack([*case.seen[name].found["gradient"].values()]).mean(0) for name in held])
    solved = fit(case.probe.columns(parts, held), torch.stack([plain, found, mean], dim=1), bounds)
    return solved or (torch.empty(0), [])


def _describe_rows(
    case: Case, subject: str, parts: Sequence[Rows], ratios: dict[int, Tensor], sums: Sequence[Tensor]
) -> str | None:
    """Return how the weights of rows differ from plain PyTorch's.

    Args:
        ratios: of each rank, between its weights and plain PyTorch's; NaN for rows without a gradient
        sums:   of each rank, of plain PyTorch's weights and of its own
    """
    total, ranks = case.probe.rows, list(ratios)
    kept = [
        {
            row
            for part, ratio in zip(parts, of_rank, strict=True)
            if not ratio.abs() < NEAR
            for row in part.tolist()
        }
        for of_rank in ratios.values()
    ]
    if any(of_rank != kept[0] for of_rank in kept):
        return f"{subject} of only the own rank's rows: not averaged over {ranks_text(ranks)}"
    if len(kept[0]) < total:
        text = f"{subject} of rows {_row_text(kept[0])} of {total} only"
        for rank, block in zip(ranks, torch.arange(total).tensor_split(len(ranks)), strict=True):
            if len(ranks) > 1 and kept[0] == set(block.tolist()):
                return f"{text}: only rank {rank}'s rows, ranks take the same rows or throw the others away"
        for number in (len(ranks), 1):
            blocks = [block.tolist() for block in torch.arange(total).tensor_split(number)]
            size = len(kept[0]) // number
            if kept[0] == {row for block in blocks for row in block[len(block) - size :]}:
                return f"{text}: the last micro-batch, those of earlier micro-batches are thrown away"
        return (
            f"{text}: ranks take the same rows, as with different seeds, or leave rows out"
            if len(ranks) > 1
            else text
        )
    if all(abs(found / plain - 1) < NEAR / 10 for plain, found in sums):
        return "loss averaged per micro-batch in place of per token: rows have other weights than in the mean over all"
    if all((ratio[~ratio.isnan()] < 1 + NEAR).all() for ratio in ratios.values()):
        return f"{subject} clipped or scaled on each rank before they are averaged"
    return None


def _row_text(rows: Iterable[int]) -> str:
    """Return "0 to 3, 6" for rows 0, 1, 2, 3 and 6."""
    runs: list[list[int]] = []
    for row in sorted(rows):
        if runs and runs[-1][-1] == row - 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


# ---- rounding and steps --------------------------------------------------------------------------------------


def _by_half_precision(case: Case, names: Sequence[str]) -> str | None:
    """Gradients that were computed or reduced in bfloat16 or float16."""
    values = [case.gradients(names, rank)[1:3] for rank in case.holders(names)]
    error = max(float((found - plain).norm() / plain.norm()) for found, plain in values)
    kinds = [kind for kind in (torch.float16, torch.bfloat16) if error < 2 * torch.finfo(kind).eps]
    return f"gradients are equal up to rounding of {str(kinds[0]).removeprefix('torch.')}" if kinds else None


def _explain_weights(case: Case) -> str | None:
    """Return why new weights differ where gradients are equal."""
    wrong = [(name, rank) for name in case.wrong("weight") for rank in case.seen[name].wrong("weight")]
    if not wrong:
        return None
    moves = {}  # steps, plain PyTorch's steps, and initial values
    for name, rank in wrong:
        seen = case.seen[name]
        moves[name, rank] = (
            seen.found["weight"][rank] - seen.initial,
            seen.weight - seen.initial,
            seen.initial,
        )
    names, ranks = list(dict.fromkeys(name for name, _ in wrong)), sorted({rank for _, rank in wrong})
    where = case.where(ranks)
    if not any(step.any() for step, *_ in moves.values()):
        every = [name for name in case.trained if set(case.holders([name])) & set(ranks)]
        what = "" if len(names) == len(every) else f" of {_list_text(names)}"
        who = ranks_text(ranks) if len(case.reports) > 1 else "the loop"
        return f"{who} skipped the step{what}: weights are unchanged"
    step, plain, initial = (torch.cat(values) for values in zip(*moves.values(), strict=True))
    noise, factor = 4 * torch.finfo(torch.float32).eps * initial.abs().max(), factor_between([(step, plain)])
    if ((step - factor * plain).abs() <= noise * max(1.0, abs(factor))).all():
        return f"steps are {format_factor(factor)}'s{where}: another learning rate"
    decay = factor_between([(step - plain, initial)])
    if decay and ((step - plain - decay * initial).abs() <= noise).all():
        return f"another weight decay{where}: for {_list_text(names)}"
    return _explain_steps(case)


def _explain_steps(case: Case) -> str | None:
    steps = {rank: report.steps for rank, report in enumerate(case.reports) if report.steps > 1}
    return (
        f"an optimizer stepped {max(steps.values())} times in an update{case.where(steps)}" if steps else None
    )
