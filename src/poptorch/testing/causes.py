"""The likely cause of wrong gradients or weights, in words of the field.

A cause is a prediction of the gradients from plain PyTorch's: times a factor, as a part of a sum or mean over ranks, or
from rows with other weights. `_HYPOTHESES` has the predictions in the order in which they are tested.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor, nn

from .loop import PARTS, Difference, RankReport, half_of
from .meeting import ranks_text
from .plain import NEAR, SLACK, PlainUpdates, Recipe, fit, sample
from .verdicts import (
    ZEROS,
    describe_difference,
    factor_between,
    format_factor,
    is_rounding,
    rounding_of,
)

_MOST_PARTS = 64  # of a batch, whose gradients are computed


@dataclass(frozen=True)
class Case:
    """What a conclusion is derived from.

    Args:
        micro_batches: of an update, on each replica of an executor
        replicas:      of an executor
        differences:   of each rank, how "gradient" and "weight" of its parameters differ from plain PyTorch's
        reports:       of each rank
        differing:     which arguments have other values on a rank than on rank 0, as text; or ""
    """

    micro_batches: int
    replicas: int
    differences: Sequence[dict[str, dict[str, Difference]]]
    reports: Sequence[RankReport]
    differing: str
    plain: PlainUpdates
    model: nn.Module

    @functools.cached_property
    def verdicts(self) -> dict[str, dict[str, dict[int, str]]]:
        """Return the verdicts by part, name and rank. A rank with most of another's parameters should have all of them;
        the gradients of a rank without an optimizer's step don't count, if its weights are right."""
        names = [set(report.sent) for report in self.reports]
        due = [
            had.union(*(peer for peer in names if had < peer and 2 * len(had) > len(peer))) for had in names
        ]
        verdicts = {part: {name: dict[int, str]() for name in self.plain.parameters} for part in PARTS}
        for rank, of_rank in enumerate(self.differences):
            is_idle = not self.reports[rank].steps and any(report.steps for report in self.reports)
            for name, parameter in self.plain.parameters.items():
                of_name = of_rank.get(name, {})
                is_unused = is_idle and "weight" in of_name and is_rounding(of_name["weight"].verdict)
                for part in PARTS:
                    if part in of_name and not (part == "gradient" and is_unused):
                        verdicts[part][name][rank] = of_name[part].verdict
                    elif part not in of_name and name in due[rank] and parameter.grad is not None:
                        verdicts[part][name][rank] = "missing"
        return verdicts

    def is_trained(self, name: str) -> bool:
        """Return whether plain PyTorch computes a gradient of the parameter, or changes it."""
        now = self.plain.parameters[name]
        return now.grad is not None or not torch.equal(now, self.model.get_parameter(name))

    @functools.cached_property
    def trained(self) -> list[str]:
        """Return the parameters of which a rank has a gradient."""
        return [name for name in self.plain.parameters if self.holders([name])]

    def wrong(self, part: str) -> list[str]:
        """Return the parameters of which a gradient, or a new weight, differs by more than rounding."""
        return [name for name in self.plain.parameters if self.wrong_ranks(part, name)]

    def wrong_ranks(self, part: str, name: str) -> list[int]:
        """Return the ranks whose tensor differs by more than rounding."""
        verdicts = self.verdicts[part][name].items()
        return [rank for rank, verdict in verdicts if not is_rounding(verdict) and verdict != "missing"]

    def samples(self, part: str, name: str) -> dict[int, Tensor]:
        """Return the samples of each rank that has a tensor of the right shape."""
        ranks = {rank: self.differences[rank].get(name, {}).get(part) for rank in self.verdicts[part][name]}
        return {rank: of.sample for rank, of in ranks.items() if of and of.sample is not None}

    def holders(self, names: Iterable[str]) -> list[int]:
        """Return the ranks that have a gradient of one of these parameters."""
        return sorted({rank for name in names for rank in self.samples("gradient", name)})

    def gradients(self, names: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Return samples of gradients [ranks that have one, elements], NaN where a rank has none; those of plain
        PyTorch, and bounds of rounding errors [elements]."""
        plain, half = [self.plain.sample(name) for name in names], half_of(self.reports)
        bounds = [torch.full_like(p, self.plain.bound(n, half)) for n, p in zip(names, plain, strict=True)]
        samples = [
            [self.samples("gradient", n).get(rank, p * math.nan) for n, p in zip(names, plain, strict=True)]
            for rank in self.holders(names)
        ]
        return torch.stack([torch.cat(of_rank) for of_rank in samples]), torch.cat(plain), torch.cat(bounds)

    def is_finite(self, names: Sequence[str]) -> bool:
        """Return whether all ranks that have gradients of these parameters have finite ones, of the right shapes."""
        samples = [[*self.samples("gradient", name).values()] for name in names]
        return all(of_name and all(value.isfinite().all() for value in of_name) for of_name in samples)

    def factor(self, names: Sequence[str]) -> float:
        """Return the factor between all ranks' gradients and plain PyTorch's; 0.0 if there is none."""
        actual, plain, bounds = self.gradients(names)
        every = plain.expand_as(actual)[~actual.isnan()]
        factor = factor_between([(actual[~actual.isnan()], every)])
        return factor if _is_near(actual, factor * plain, bounds * abs(factor)) else 0.0

    def text(self, part: str, name: str) -> str:
        """Return the verdicts on the ranks that have the parameter: one text, if they are equal."""
        verdicts = self.verdicts[part][name]
        if not verdicts:
            return (
                "missing on all ranks" if self.is_trained(name) else "none" if part == "gradient" else "equal"
            )
        if all(map(is_rounding, verdicts.values())):
            return max(verdicts.values(), key=lambda verdict: float(verdict.partition(", ")[2] or 0))
        ranks = {verdict: [r for r, v in verdicts.items() if v == verdict] for verdict in verdicts.values()}
        texts = [f"{ranks_text(of_verdict)}: {verdict}" for verdict, of_verdict in ranks.items()]
        return "; ".join(texts) if len(ranks) > 1 else next(iter(ranks))

    def subject(self, names: Sequence[str]) -> str:
        """Return "gradients are", or "gradients of a, b and 3 others are"."""
        return "gradients are" if len(names) == len(self.trained) else f"gradients of {_list_text(names)} are"

    def where(self, ranks: Iterable[int]) -> str:
        """Return " on rank 1"; "" if there is one rank."""
        return f" on {ranks_text(ranks)}" if len(self.reports) > 1 else ""


def _list_text(names: Sequence[str]) -> str:
    """Return "a, b and c", or "a, b, c and 5 others"."""
    *first, last = names if len(names) < 5 else [*names[:3], f"{len(names) - 3} others"]
    return f"{', '.join(first)} and {last}" if first else last


def _is_near(values: Tensor, expected: Tensor, bound: Tensor) -> bool:
    """Return whether values are equal up to rounding, where a rank has values: NaN elsewhere."""
    return bool((((values - expected).abs() <= SLACK * bound) | values.isnan()).all())


def other_recipe(case: Case) -> Recipe | None:
    """Return another recipe by which plain PyTorch may compute what the loop does, which is then right: zeros as
    gradients of unused parameters, clipping, or other micro-batches, if a loss couples rows (batch norm)."""
    recipe, plain, wrong = case.plain.recipe, case.plain, case.wrong("gradient")
    unused = {name for name in wrong if set(case.verdicts["gradient"][name].values()) == {ZEROS}}
    if unused:
        return replace(recipe, unused=frozenset(unused))
    if not wrong or recipe.note or not case.is_finite(wrong):
        return None
    factor = case.factor(case.trained)
    limit = _round_norm(factor * plain.norm) if 0 < factor < 1 else 0.0
    if limit and not _cause_of_factor(case, case.trained, factor):
        return replace(
            recipe, max_norm=limit, note=f"gradients clipped to {limit:g}, which hides a constant factor"
        )
    ranks = len(case.holders(wrong))
    numbers = (case.micro_batches * ranks, ranks) if ranks > 1 and not factor else ()
    for number in (number for number in numbers if number <= plain.rows):
        parts, (actual, expected, bounds) = plain.parts(number), case.gradients(wrong)
        columns = plain.columns(parts, wrong)
        if columns is None or not _is_near(actual, columns.mean(1), bounds):
            continue
        if fit(columns, expected[:, None], bounds) is None:
            note = f"{number} micro-batches, since the loss couples the rows of a micro-batch"
            return replace(recipe, layout=[parts], note=note)
    return None


def conclude(case: Case, loss: str) -> str:
    """Return in one sentence whether the loop is right, or what differs and the likely cause.

    Args: loss: how the loss differs
    """
    gradients, weights = (case.verdicts[part] for part in PARTS)
    expected = [name for name in case.plain.parameters if case.is_trained(name)]
    nowhere = [name for name in expected if not gradients[name] and not weights[name]]
    if nowhere == expected:
        hint = "if its modules are copies, return a poptorch.testing.Updated"
        return f"the loop has changed no parameter of the model that it was given, on any rank: {hint}"
    cause, wrong, wrong_weights = _explain(case), case.wrong("gradient"), case.wrong("weight")
    if wrong:
        text = f"{len(wrong)} of {sum(map(bool, gradients.values()))} gradients differ, first {wrong[0]}"
        return cause or f"{text}: {case.text('gradient', wrong[0])}"
    how = rounding_of(verdict for of_name in gradients.values() for verdict in of_name.values())
    texts = [f"all gradients are {how}" if case.trained else "no gradients are left"]
    missing = {name: [r for r, v in of.items() if v == "missing"] for name, of in gradients.items()}
    missing = {name: ranks for name, ranks in missing.items() if ranks}
    if missing:
        where = case.where(next(iter(missing.values())))
        texts.append(f"{len(missing)} gradients are missing{where}: {_list_text([*missing])}")
    if nowhere:
        idle = [rank for rank, report in enumerate(case.reports) if not (report.sent or report.steps)]
        skipped = f"; {ranks_text(idle)} skipped the step" if idle else ""
        texts.append(f"{len(nowhere)} parameters are missing on all ranks: {_list_text(nowhere)}{skipped}")
    if wrong_weights:
        text = f"{len(wrong_weights)} new weights differ, first {wrong_weights[0]}"
        texts.append(cause or f"{text}: {case.text('weight', wrong_weights[0])}")
    texts += [] if is_rounding(loss) or loss == "not returned" else [f"the loss is {loss}"]
    if len(texts) > 1:
        return "; ".join(texts)
    every = {
        verdict for of in (gradients, weights) for of_name in of.values() for verdict in of_name.values()
    }
    return f"all {rounding_of(every | ({loss} - {'not returned'}))}"


def _explain(case: Case) -> str | None:
    """Return the likely cause of the differences; None if there are none, or no hypothesis fits."""
    wrong, wrong_weights = case.wrong("gradient"), case.wrong("weight")
    if case.differing and (wrong or wrong_weights):
        return f"ranks with different seeds or data: {case.differing}"
    if not wrong:
        return _of_weights(case, wrong_weights) if wrong_weights else None
    if not case.is_finite(wrong):
        return None
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


# ---- hypotheses: names of wrong gradients -> sentence, if the prediction is right ----------------------------


def _by_factor(case: Case, names: Sequence[str]) -> str | None:
    """Plain PyTorch's times a factor, on all ranks that have them."""
    if not (factor := case.factor(names)):
        return None
    cause = _cause_of_factor(case, names, factor)
    text = f"{case.subject(names)} {format_factor(factor)}{case.where(case.holders(names))}"
    return f"{text}: {cause}" if cause else text


def _cause_of_factor(case: Case, names: Sequence[str], factor: float) -> str:
    """Return the cause of a factor that is a number of micro-batches, replicas or ranks; "" if it is none."""
    size, steps = 1 / factor if 0 < factor < 1 else factor, case.micro_batches
    is_alone, is_twice = len(case.reports) == 1, factor < 1
    unit = "replicas" if is_alone else "ranks"
    most = case.replicas if is_alone else max(len(case.holders([name])) for name in names)
    degrees = [1, *(degree for degree in range(2, most + 1) if most % degree == 0)]  # of data parallelism
    texts, error = list[str](), NEAR if half_of(case.reports) else 1e-4
    for degree in degrees:
        for number in sorted({1, steps, *(steps // d for d in degrees if steps % d == 0)}):
            if degree * number > 1 and abs(size / (degree * number) - 1) < error:
                scaled = f"accumulation is {'scaled twice' if is_twice else 'not scaled'}, over {number} micro-batches"
                averaged = f"{'averaged twice' if is_twice else 'not averaged'} over {degree} {unit}"
                texts.append(" and ".join([scaled] * (number > 1) + [averaged] * (degree > 1)))
    return ", or ".join(reversed(texts))  # of ranks first


def _over_ranks(case: Case, names: Sequence[str]) -> str | None:
    """Different on the ranks, with plain PyTorch's as their mean or sum."""
    actual, plain, bounds = case.gradients(names)
    distinct = [v for i, v in enumerate(actual) if not any(_is_same(v, w, bounds) for w in actual[:i])]
    if len(distinct) < 2:
        return None
    ranks = ranks_text(case.holders(names))
    if _is_near(actual.nanmean(0), plain, bounds):
        return f"{case.subject(names)} of only the own rank's rows: not averaged over {ranks}"
    if not _is_near(torch.stack(distinct).nansum(0), plain, bounds):
        return None
    if len(names) == len(case.trained):
        return f"gradients are of only the own rank's rows: not summed over {ranks}"
    every = [id(parameter) for _, parameter in case.model.named_parameters(remove_duplicate=False)]
    if all(every.count(id(case.model.get_parameter(name))) > 1 for name in names):
        return f"a tied weight's gradient is not summed over {ranks}: {_list_text(names)}"
    return f"{case.subject(names)} partial sums on {ranks}: a replicated (or tied) weight without all-reduce"


def _is_same(one: Tensor, other: Tensor, bounds: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and _is_near(one, other, bounds)


def _by_rows(case: Case, names: Sequence[str]) -> str | None:
    """Sums over the rows with other weights than plain PyTorch's."""
    ranks, rows, steps = case.holders(names), case.plain.rows, case.micro_batches
    actual, plain, bounds = case.gradients(names)
    for number in dict.fromkeys((rows, steps * len(ranks), steps, len(ranks))):
        parts = case.plain.parts(number)
        columns = case.plain.columns(parts, names) if 1 < number <= min(rows, _MOST_PARTS) else None
        if columns is None:
            continue
        solved = []
        for of_rank in actual:
            held = ~of_rank.isnan()
            values = torch.stack([plain, of_rank], dim=1)[held]
            solved.append(fit(columns[held], values, bounds[held]))
        if all(weights is not None for weights in solved):
            return _of_rows(case, names, [part.tolist() for part in parts], solved)
    return None


def _of_rows(case: Case, names: Sequence[str], parts: list[list[int]], weights: list[Any]) -> str | None:
    """Return how the weights of rows [parts, plain PyTorch's and own] of each rank differ from plain PyTorch's."""
    ranks, every, subject = case.holders(names), [row for part in parts for row in part], case.subject(names)
    ratios = [of_rank[:, 1] / of_rank[:, 0] for of_rank in weights]  # NaN for rows without a gradient
    kept = [list(chain(*compress(parts, (~(ratio.abs() < NEAR)).tolist()))) for ratio in ratios]
    if any(of_rank != kept[0] for of_rank in kept):
        return f"{subject} of only the own rank's rows: not averaged over {ranks_text(ranks)}"
    if kept[0] != every:
        rows, size = kept[0], len(kept[0]) // len(ranks)
        blocks = [part.tolist() for part in case.plain.parts(len(ranks))]
        cause = "rows are left out"
        if len(ranks) > 1 and rows in blocks:
            cause = f"only rank {ranks[blocks.index(rows)]}'s rows, ranks take the same rows or throw the others away"
        elif 2 * len(rows) <= len(every) and rows in (
            every[-len(rows) :],
            [row for block in blocks for row in block[len(block) - size :]],
        ):
            cause = "the last micro-batch, those of earlier micro-batches are thrown away"
        return f"{subject} of rows {_row_text(rows)} of {len(every)} only: {cause}"
    if all(float((ratio - ratio.nanmean()).abs().nan_to_num().max()) < NEAR for ratio in ratios):
        return None  # a factor on each rank
    if all(abs(float(w[:, 1].sum() / w[:, 0].sum()) - 1) < NEAR / 10 for w in weights):
        return "loss averaged per micro-batch in place of per token: rows have other weights than in the mean over all"
    if all((ratio.nan_to_num() < 1 + NEAR).all() for ratio in ratios):
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
    norms = [report.norm for report in case.reports]
    limit, is_sharded = max(norms), any(report.is_sharded for report in case.reports)
    clipped = [rank for rank, norm in enumerate(norms) if abs(norm / limit - 1) < 1e-4]
    wrong = {rank for name in names for rank in case.wrong_ranks("gradient", name)}
    if len(norms) == 1 or not _round_norm(limit) or not (is_sharded or wrong <= set(clipped)):
        return None
    return f"{case.subject(names)} clipped by the norm of one rank, not of all: to {limit:.3g} on {ranks_text(clipped)}"


_HYPOTHESES = (_by_factor, _over_ranks, _by_rows, _by_norm_of_a_rank)


# ---- new weights ---------------------------------------------------------------------------------------------


def _of_weights(case: Case, names: Sequence[str]) -> str | None:
    """Return why new weights differ where gradients are equal."""
    ranks = sorted({rank for name in names for rank in case.wrong_ranks("weight", name)})
    # [a rank's, plain PyTorch's and the initial weights, elements] of parameters and ranks.
    every = list[Tensor]()
    for name in names:
        values, now = case.samples("weight", name), case.plain.parameters[name]
        given = [sample(tensor, now.grad) for tensor in (now, case.model.get_parameter(name))]
        every += [torch.stack([values[r], *given]) for r in case.wrong_ranks("weight", name) if r in values]
    if not every:
        return None
    actual, plain, initial = torch.cat(every, dim=1)
    step, plain_step, noise = actual - initial, plain - initial, 5e-7 * initial.abs().max()
    if not step.any():
        held = {name for name in case.trained if set(case.holders([name])) & set(ranks)}
        what = "" if held <= set(names) else f" of {_list_text(names)}"
        who = ranks_text(ranks) if len(case.reports) > 1 else "the loop"
        return f"{who} skipped the step{what}: weights are unchanged"
    factor, decay = factor_between([(step, plain_step)]), factor_between([(step - plain_step, initial)])
    if ((step - factor * plain_step).abs() <= noise * max(1.0, abs(factor))).all():
        return f"steps are {format_factor(factor)}'s{case.where(ranks)}: another learning rate"
    if decay and ((step - plain_step - decay * initial).abs() <= noise).all():
        return f"another weight decay{case.where(ranks)}: for {_list_text(names)}"
    return _of_steps(case)


def _of_steps(case: Case) -> str | None:
    steps = {rank: report.steps for rank, report in enumerate(case.reports) if report.steps > 1}
    return (
        f"an optimizer stepped {max(steps.values())} times in an update{case.where(steps)}" if steps else None
    )


def describe_loss(reports: Sequence[RankReport], plain: PlainUpdates) -> str:
    """Return how the losses differ: their mean over the ranks that returned one."""
    losses = [report.losses for report in reports if report.losses]
    if not losses:
        return "not returned"
    actual, expected = torch.tensor(losses, dtype=torch.float64).mean(0), plain.losses.flatten(1)
    if actual.numel() != expected.numel():  # those of updates, or of the rows of an instance
        actual, expected = actual.reshape(len(expected), -1).mean(1), expected.mean(1)
    return describe_difference(actual.to(expected.dtype), expected.flatten(), half=half_of(reports))
