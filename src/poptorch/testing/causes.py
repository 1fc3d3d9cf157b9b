"""The likely cause of wrong gradients or weights, in words of the field.

A cause is a prediction of the gradients from plain PyTorch's: times a factor, as a part of a sum or mean over ranks, or
from rows with other weights. `_HYPOTHESES` has the predictions in the order in which they are tested.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .loop import PARTS, Difference, RankReport
from .meeting import ranks_text
from .plain import NEAR, SLACK, PlainUpdates, Recipe, fit, sample
from .verdicts import HALF, describe_difference, factor_between, format_factor, is_rounding, rounding_bound

_MOST_PARTS = 64  # of a batch, whose gradients are computed


class Parameter:
    """What the ranks have of one parameter.

    Args:
        plain: plain PyTorch's updates
        found: by rank, how "gradient" and "weight" differ
        half:  the coarser dtype that the loop computed in
    """

    def __init__(
        self,
        name: str,
        plain: PlainUpdates,
        initial: Tensor,
        found: dict[int, dict[str, Difference]],
        half: torch.dtype | None,
    ) -> None:
        now = plain.parameters[name]
        largest = max(plain.largest / 4, 0.0 if now.grad is None else float(now.grad.abs().max()))
        self.bound = rounding_bound(largest, half or now.dtype)
        self.gradient, self.weight, self.initial = (sample(t, now.grad) for t in (now.grad, now, initial))
        self.is_trained = now.grad is not None or not torch.equal(now, initial)
        self.has_gradient = now.grad is not None
        self.found = {part: {rank: of[part] for rank, of in found.items() if part in of} for part in PARTS}
        self.missing = dict[str, list[int]]()

    def samples(self, part: str) -> dict[int, Tensor]:
        """Return the samples of each rank that has a tensor of the right shape."""
        return {rank: of.sample for rank, of in self.found[part].items() if of.sample is not None}

    def wrong(self, part: str) -> list[int]:
        """Return the ranks whose tensor differs by more than rounding."""
        return [rank for rank, of in self.found[part].items() if not is_rounding(of.verdict)]

    def verdicts(self, part: str) -> dict[int, str]:
        """Return the verdict of each rank that has the parameter."""
        missing = dict.fromkeys(self.missing.get(part, []), "missing")
        return {rank: of.verdict for rank, of in self.found[part].items()} | missing

    def text(self, part: str) -> str:
        """Return the verdicts on the ranks that have the parameter: one text, if they are equal."""
        verdicts = self.verdicts(part)
        if not verdicts:
            return (
                "missing on all ranks" if self.is_trained else {"gradient": "none", "weight": "equal"}[part]
            )
        if all(map(is_rounding, verdicts.values())):
            return max(verdicts.values(), key=lambda verdict: float(verdict.partition(", ")[2] or 0))
        ranks: dict[str, list[int]] = {}
        for rank, verdict in sorted(verdicts.items()):
            ranks.setdefault(verdict, []).append(rank)
        if len(ranks) == 1:
            return next(iter(ranks))
        return "; ".join(f"{ranks_text(of_verdict)}: {verdict}" for verdict, of_verdict in ranks.items())


@dataclass(frozen=True)
class Case:
    """What a conclusion is derived from.

    Args:
        micro_batches: of an update, on each replica of an executor
        replicas:      of an executor
        found:         on each rank, how the tensors of each parameter differ
        reports:       of each rank
        differing:     which arguments have other values on a rank than on rank 0, as text; or ""
    """

    micro_batches: int
    replicas: int
    found: Sequence[dict[str, dict[str, Difference]]]
    reports: Sequence[RankReport]
    differing: str
    plain: PlainUpdates
    model: nn.Module

    @functools.cached_property
    def half(self) -> torch.dtype | None:
        """Return the coarser dtype that a rank computed in."""
        return next((report.half for report in self.reports if report.half), None)

    @functools.cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Return what the ranks have of each parameter. A rank that has most of another's should have all of them; the
        gradients of a rank without an optimizer's step don't count, if its weights are right."""
        every, names = {}, [set(report.sent) for report in self.reports]
        due = [
            own.union(*(peer for peer in names if own < peer and 2 * len(own) > len(peer))) for own in names
        ]
        for name, initial in self.model.named_parameters():
            found = {rank: dict(of[name]) for rank, of in enumerate(self.found) if name in of}
            for rank, of in found.items():
                idle = not self.reports[rank].steps and any(report.steps for report in self.reports)
                if idle and len(found) > 1 and is_rounding(of["weight"].verdict):
                    of.pop("gradient", None)
            every[name] = one = Parameter(name, self.plain, initial.detach(), found, self.half)
            ranks = [rank for rank, of_rank in enumerate(due) if name in of_rank]
            for part in PARTS if one.has_gradient else ():
                one.missing[part] = [rank for rank in ranks if part not in self.found[rank].get(name, {})]
        return every

    @functools.cached_property
    def trained(self) -> list[str]:
        """Return the parameters of which a rank has a gradient."""
        return [name for name, one in self.parameters.items() if one.samples("gradient")]

    def wrong(self, part: str) -> list[str]:
        """Return the parameters of which a gradient, or a new weight, differs by more than rounding."""
        return [name for name, one in self.parameters.items() if one.wrong(part)]

    def holders(self, names: Iterable[str]) -> list[int]:
        """Return the ranks that have a gradient of one of these parameters."""
        return sorted({rank for name in names for rank in self.parameters[name].samples("gradient")})

    def gradients(self, names: Iterable[str], rank: int) -> tuple[list[str], Tensor, Tensor, Tensor]:
        """Return the names that a rank has; samples of its gradients, and of plain PyTorch's; bounds of rounding."""
        held = [name for name in names if rank in self.parameters[name].samples("gradient")]
        every = [self.parameters[name] for name in held]
        found = [one.samples("gradient")[rank] for one in every]
        bounds = [torch.full_like(one.gradient, one.bound) for one in every]
        return held, torch.cat(found), torch.cat([one.gradient for one in every]), torch.cat(bounds)

    def factor(self, names: Sequence[str]) -> float:
        """Return the factor between all ranks' gradients and plain PyTorch's; 0.0 if there is none."""
        values = [self.gradients(names, rank)[1:] for rank in self.holders(names)]
        found, plain, bounds = (torch.cat(of_ranks) for of_ranks in zip(*values, strict=True))
        factor = factor_between([(found, plain)])
        return factor if ((found - factor * plain).abs() <= SLACK * bounds * abs(factor)).all() else 0.0

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


def other_recipe(case: Case) -> Recipe | None:
    """Return another recipe by which plain PyTorch may compute what the loop does, which is then right: zeros as
    gradients of unused parameters, clipping, or other micro-batches, if a loss couples rows (batch norm)."""
    recipe, wrong = case.plain.recipe, case.wrong("gradient")
    zeros = {
        name for name in wrong if all(not s.any() for s in case.parameters[name].samples("gradient").values())
    }
    unused = frozenset(name for name in zeros if not case.parameters[name].has_gradient)
    if unused - recipe.unused:
        return replace(recipe, unused=unused)
    if not wrong or recipe.note or (len(case.reports) == 1 and case.replicas > 1):
        return None
    factor = case.factor(case.trained)
    if 0 < factor < 1 and not _cause_of_factor(case, case.trained, factor):
        norms = (max(of.norm for of in case.parameters[n].found["gradient"].values()) for n in case.trained)
        if limit := _round_norm(math.hypot(*norms)):
            return replace(recipe, max_norm=limit, note=f"gradients clipped to a norm of {limit:g}")
    ranks = case.holders(wrong)
    for number in (case.micro_batches * len(ranks), len(ranks)) if len(ranks) > 1 else ():
        if number > case.plain.rows or any(len(case.holders([name])) < len(ranks) for name in wrong):
            continue
        parts = list(torch.arange(case.plain.rows).tensor_split(number))
        try:
            expected = case.plain.columns(parts, wrong).mean(1)
        except (RuntimeError, ValueError):  # such as batch norm over one row
            continue
        values = [case.gradients(wrong, rank) for rank in ranks]
        if all(_near(found, expected, bounds) for _, found, _, bounds in values):
            note = f"{number} micro-batches, since the loss couples the rows of a micro-batch"
            is_coupled = fit(case.plain.columns(parts, wrong), values[0][2][:, None], values[0][3]) is None
            return replace(recipe, layout=[parts], note=note) if is_coupled else None
    return None


def conclude(case: Case, loss: str) -> str:
    """Return in one sentence whether the loop is right, or what differs and the likely cause.

    Args: loss: how the loss differs
    """
    parameters, is_alone = case.parameters, len(case.reports) == 1
    nowhere = [n for n, one in parameters.items() if one.is_trained and not any(map(one.verdicts, PARTS))]
    if len(nowhere) == sum(one.is_trained for one in parameters.values()):
        hint = "if its modules are copies, return a poptorch.testing.Updated"
        return f"the loop has changed no parameter of the model that it was given, on any rank: {hint}"
    cause, wrong = _explain(case), case.wrong("gradient")
    if wrong:
        texts = {name: parameters[name].text("gradient") for name in case.trained}
        if cause and (not is_alone or len(set(texts.values())) == 1):
            return cause
        text = f"{len(wrong)} of {len(texts)} gradients differ, first {wrong[0]}: {texts[wrong[0]]}"
        return f"{text}: {cause}" if cause else text
    verdicts = {
        part: {v for one in parameters.values() for v in one.verdicts(part).values()} for part in PARTS
    }
    every = set[str]().union(*verdicts.values(), {loss} - {"not returned"})
    rounding = next(
        (
            f" of {str(dtype).removeprefix('torch.')}"
            for dtype in HALF
            for verdict in every
            if str(dtype)[6:] in verdict
        ),
        "",
    )
    exact = {"equal", "none"}
    if every <= exact and not nowhere:
        return "all equal"
    is_exact = verdicts["gradient"] <= exact | {"missing"}
    if all(map(is_rounding, every)) and not nowhere and not (is_alone and is_exact):
        return f"all equal up to rounding{rounding}"
    how = "equal" if is_exact else f"equal up to rounding{rounding}"
    texts = [f"all gradients are {how}" if case.trained else "no gradients are left"]
    missing = [name for name, one in parameters.items() if one.missing.get("gradient")]
    if missing:
        ranks = parameters[missing[0]].missing["gradient"]
        texts.append(f"{len(missing)} gradients are missing{case.where(ranks)}: {_list_text(missing)}")
    if nowhere:
        idle = [rank for rank, report in enumerate(case.reports) if not (report.sent or report.steps)]
        skipped = f"; {ranks_text(idle)} skipped the step" if idle and len(idle) < len(case.reports) else ""
        texts.append(f"{len(nowhere)} parameters are missing on all ranks: {_list_text(nowhere)}{skipped}")
    if cause:
        texts.append(cause)
    elif (wrong_weights := case.wrong("weight")) and not is_alone:
        verdict = parameters[wrong_weights[0]].text("weight")
        texts.append(f"{len(wrong_weights)} new weights differ, first {wrong_weights[0]}: {verdict}")
    texts += [] if is_rounding(loss) or loss == "not returned" or is_alone else [f"the loss is {loss}"]
    return "; ".join(texts)


def _explain(case: Case) -> str | None:
    """Return the likely cause of the differences; None if there are none, or no hypothesis fits."""
    wrong, wrong_weights = case.wrong("gradient"), case.wrong("weight")
    if case.differing and (wrong or wrong_weights):
        return f"ranks with different seeds or data: {case.differing}"
    if not wrong:
        return _of_weights(case, wrong_weights) if wrong_weights else None
    by_holders: dict[tuple[int, ...], list[str]] = {}
    for name in wrong:
        by_holders.setdefault(tuple(case.holders([name])), []).append(name)
    for groups in ([wrong], list(by_holders.values()), [[name] for name in wrong]):
        causes = [next(filter(None, (h(case, names) for h in _HYPOTHESES)), None) for names in groups]
        if all(causes):
            return "; ".join(dict.fromkeys(map(str, causes)))
    early = {rank: report.early[0] for rank, report in enumerate(case.reports) if report.early}
    if early:
        text = f"{ranks_text(early)} had other weights before the step than the model, first {min(early.values())}"
        return f"{text}: ranks with different seeds, or a missing broadcast"
    return _of_steps(case)


def _near(one: Tensor, other: Tensor, bound: Tensor | float) -> bool:
    return bool(((one - other).abs() <= SLACK * bound).all())


# ---- hypotheses: names of wrong gradients -> sentence, if the prediction is right ----------------------------


def _by_factor(case: Case, names: Sequence[str]) -> str | None:
    """Plain PyTorch's times a factor, on all ranks that have them."""
    factor = case.factor(names)
    if not factor:
        return None
    cause = _cause_of_factor(case, names, factor)
    text = f"{case.subject(names)} {format_factor(factor)}{case.where(case.holders(names))}"
    return f"{text}: {cause}" if cause else text


def _cause_of_factor(case: Case, names: Sequence[str], factor: float) -> str:
    """Return the cause of a factor that is a number of micro-batches, replicas or ranks; "" if it is none."""
    size = 1 / factor if 0 < factor < 1 else factor
    number, steps = round(size), case.micro_batches
    if number < 2 or abs(size / number - 1) > (NEAR if case.half else 1e-4):
        return ""
    unit, most = (
        ("ranks", max(len(case.holders([name])) for name in names))
        if len(case.reports) > 1
        else ("replicas", case.replicas)
    )
    degrees = [1, *(degree for degree in range(2, most + 1) if most % degree == 0)]  # of data parallelism
    texts = []
    for degree in degrees:
        for micro in {1, steps, *(steps // d for d in degrees if steps % d == 0)}:
            if micro * degree == number and (micro > 1 or degree > 1):
                scaled = f"accumulation is {'scaled twice' if factor < 1 else 'not scaled'}, over {micro} micro-batches"
                averaged = f"{'averaged twice' if factor < 1 else 'not averaged'} over {degree} {unit}"
                texts.append(" and ".join([scaled] * (micro > 1) + [averaged] * (degree > 1)))
    return ", or ".join(sorted(dict.fromkeys(texts), key=len))


def _over_ranks(case: Case, names: Sequence[str]) -> str | None:
    """Different on the ranks, with plain PyTorch's as their mean or sum."""
    are_sums = are_means = True
    for one in (case.parameters[name] for name in names):
        values, distinct = list(one.samples("gradient").values()), list[Tensor]()
        distinct = [
            v for i, v in enumerate(values) if not any(_near(v, other, one.bound) for other in values[:i])
        ]
        if len(distinct) < 2:
            return None
        are_sums &= _near(torch.stack(distinct).sum(0), one.gradient, one.bound)
        are_means &= _near(torch.stack(values).mean(0), one.gradient, one.bound)
    ranks = ranks_text(case.holders(names))
    if are_means:
        return f"{case.subject(names)} of only the own rank's rows: not averaged over {ranks}"
    if not are_sums:
        return None
    if len(names) == len(case.trained):
        return f"gradients are of only the own rank's rows: not summed over {ranks}"
    if all(case.plain.uses(name) > 1 for name in names):
        return f"a tied weight's gradient is not summed over {ranks}: {_list_text(names)}"
    return f"{case.subject(names)} partial sums on {ranks}: a replicated weight without all-reduce"


def _by_rows(case: Case, names: Sequence[str]) -> str | None:
    """Sums over the rows with other weights than plain PyTorch's."""
    ranks, rows, steps = case.holders(names), case.plain.rows, case.micro_batches
    numbers = (rows, steps * len(ranks), steps, len(ranks)) if case.plain.number == 1 else ()
    for number in dict.fromkeys(n for n in numbers if 1 < n <= min(rows, _MOST_PARTS)):
        parts, ratios, sums = (
            list(torch.arange(rows).tensor_split(number)),
            dict[int, Tensor](),
            list[float](),
        )
        for rank in ranks:
            held, found, plain, bounds = case.gradients(names, rank)
            try:
                weights = fit(case.plain.columns(parts, held), torch.stack([plain, found], dim=1), bounds)
            except (RuntimeError, ValueError):  # such as batch norm over one row
                weights = None
            if weights is not None:
                ratios[rank] = weights[:, 1] / weights[:, 0]
                sums.append(float(weights[:, 1].sum() / weights[:, 0].sum()))
        if len(ratios) == len(ranks):
            return _describe_rows(case, case.subject(names), [part.tolist() for part in parts], ratios, sums)
    return None


def _describe_rows(
    case: Case, subject: str, parts: Sequence[list[int]], ratios: dict[int, Tensor], sums: Sequence[float]
) -> str | None:
    """Return how the weights of rows differ from plain PyTorch's.

    Args:
        ratios: of each rank, between its weights and plain PyTorch's; NaN for rows without a gradient
        sums:   of each rank, between the sums of its weights and of plain PyTorch's
    """
    every, ranks = [row for part in parts for row in part], list(ratios)
    kept = [
        [
            row
            for part, of_part in zip(parts, ratio.tolist(), strict=True)
            if not abs(of_part) < NEAR
            for row in part
        ]
        for ratio in ratios.values()
    ]
    if any(of_rank != kept[0] for of_rank in kept):
        return f"{subject} of only the own rank's rows: not averaged over {ranks_text(ranks)}"
    if kept[0] != every:
        text = f"{subject} of rows {_row_text(kept[0])} of {len(every)} only"
        blocks = [block.tolist() for block in torch.tensor(every).tensor_split(len(ranks))]
        if len(ranks) > 1 and kept[0] in blocks:
            rank = ranks[blocks.index(kept[0])]
            return f"{text}: only rank {rank}'s rows, ranks take the same rows or throw the others away"
        size = len(kept[0]) // len(ranks)
        if kept[0] in (
            every[-len(kept[0]) :],
            [row for block in blocks for row in block[len(block) - size :]],
        ):
            return f"{text}: the last micro-batch, those of earlier micro-batches are thrown away"
        return f"{text}: ranks take the same rows, or leave rows out" if len(ranks) > 1 else text
    spread = max(float((ratio - ratio.nanmean()).abs().nan_to_num().max()) for ratio in ratios.values())
    if spread > NEAR and all(abs(total - 1) < NEAR / 10 for total in sums):
        return "loss averaged per micro-batch in place of per token: rows have other weights than in the mean over all"
    if spread > NEAR and all((ratio.nan_to_num() < 1 + NEAR).all() for ratio in ratios.values()):
        return f"{subject} clipped or scaled on each rank before they are averaged"
    return None


def _row_text(rows: Sequence[int]) -> str:
    """Return "0 to 3, 6" for rows 0, 1, 2, 3 and 6."""
    firsts = [row for row in rows if row - 1 not in rows]
    lasts = [row for row in rows if row + 1 not in rows]
    return ", ".join(f"{a} to {b}" if a < b else f"{a}" for a, b in zip(firsts, lasts, strict=True))


def _round_norm(norm: float) -> float:
    """Return the limit to which a norm was clipped, a number of at most three digits; 0.0 if it is not near one."""
    limit = float(f"{norm:.3g}")
    return limit if norm and abs(norm / limit - 1) < 2e-5 + 1e-6 / limit else 0.0


def _by_norm_of_a_rank(case: Case, names: Sequence[str]) -> str | None:
    """Gradients (or shards) whose norm on each rank is the same round number, or smaller where they are right."""
    norms = [
        math.hypot(*(of["gradient"].shard_norm for of in found.values() if "gradient" in of))
        for found in case.found
    ]
    limit = max(norms)
    clipped = [rank for rank, norm in enumerate(norms) if abs(norm / limit - 1) < 1e-4]
    wrong = {rank for name in names for rank in case.parameters[name].wrong("gradient")}
    is_sharded = any(parts.get("gradient") for report in case.reports for parts in report.sent.values())
    if len(norms) == 1 or not _round_norm(limit) or not (is_sharded or wrong <= set(clipped)):
        return None
    return f"{case.subject(names)} clipped by the norm of one rank, not of all: to {limit:.3g} on {ranks_text(clipped)}"


def _by_half_precision(case: Case, names: Sequence[str]) -> str | None:
    """Plain PyTorch's with errors as large as those of bfloat16 or float16."""
    values = [case.gradients(names, rank)[1:3] for rank in case.holders(names)]
    error = max(float((found - plain).norm() / plain.norm()) for found, plain in values)
    dtype = next((dtype for dtype in reversed(HALF) if error < 2 * torch.finfo(dtype).eps), None)
    return (
        f"errors of gradients are as large as rounding of {str(dtype).removeprefix('torch.')}"
        if dtype
        else None
    )


_HYPOTHESES = (_by_factor, _over_ranks, _by_rows, _by_norm_of_a_rank, _by_half_precision)


# ---- new weights ---------------------------------------------------------------------------------------------


def _of_weights(case: Case, names: Sequence[str]) -> str | None:
    """Return why new weights differ where gradients are equal."""
    ranks = sorted({rank for name in names for rank in case.parameters[name].wrong("weight")})
    every = [
        (case.parameters[name], rank) for name in names for rank in case.parameters[name].wrong("weight")
    ]
    every = [(one, rank) for one, rank in every if rank in one.samples("weight")]
    if not every:
        return None
    step = torch.cat([one.samples("weight")[rank] - one.initial for one, rank in every])
    plain = torch.cat([one.weight - one.initial for one, _ in every])
    initial = torch.cat([one.initial for one, _ in every])
    if not step.any():
        held = [name for name in case.trained if set(case.holders([name])) & set(ranks)]
        what = "" if set(held) <= set(names) else f" of {_list_text(names)}"
        who = ranks_text(ranks) if len(case.reports) > 1 else "the loop"
        return f"{who} skipped the step{what}: weights are unchanged"
    noise, factor = 4 * torch.finfo(torch.float32).eps * initial.abs().max(), factor_between([(step, plain)])
    if ((step - factor * plain).abs() <= noise * max(1.0, abs(factor))).all():
        return f"steps are {format_factor(factor)}'s{case.where(ranks)}: another learning rate"
    decay = factor_between([(step - plain, initial)])
    if decay and ((step - plain - decay * initial).abs() <= noise).all():
        return f"another weight decay{case.where(ranks)}: for {_list_text(names)}"
    return _of_steps(case)


def _of_steps(case: Case) -> str | None:
    steps = {rank: report.steps for rank, report in enumerate(case.reports) if report.steps > 1}
    return (
        f"an optimizer stepped {max(steps.values())} times in an update{case.where(steps)}" if steps else None
    )


def describe_loss(reports: Sequence[RankReport], plain: PlainUpdates, half: torch.dtype | None) -> str:
    """Return how the losses differ: their mean over the ranks that returned one."""
    losses = [report.losses for report in reports if report.losses]
    if not losses:
        return "not returned"
    found, expected = torch.tensor(losses, dtype=torch.float64).mean(0), plain.losses.flatten(1)
    if found.numel() != expected.numel():  # those of updates, or of the rows of an instance
        found, expected = found.reshape(len(expected), -1).mean(1), expected.mean(1)
    return describe_difference(found.to(expected.dtype), expected.flatten(), half=half)
