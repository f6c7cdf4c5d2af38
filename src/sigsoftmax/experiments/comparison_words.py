"""The table of a comparison and the sentences that follow from it; nothing here is known beforehand.

Shapes: L positions of the test text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sigsoftmax.experiments.display import duration_text
from sigsoftmax.heads import Head
from sigsoftmax.records.model_spectra import ModelSpectrum
from sigsoftmax.records.training import ComparisonRecord
from sigsoftmax.report.statistics import Sample, student_quantile
from sigsoftmax.synthetic import batch_means

__all__ = ["Difference", "Measured", "findings", "table"]

BASELINE = "softmax"
NORMAL = 1.96
"""of a 95 % interval: batch means are many"""
NEAR_FULL = 0.9
"""of the most that a rank can be"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What came of one run."""

    record: ComparisonRecord
    spectrum: ModelSpectrum
    values_L: NDArray[np.float64]
    """at each test position the KL to the truth, or the loss where the truth is not known; in nats"""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """By how many nats a head is above another on the same text, seeds and updates, on average."""

    mean: float
    standard_error: float
    """over test positions for one seed, over seeds for several"""
    seeds: int

    @classmethod
    def of(cls, head: Sequence[Measured], other: Sequence[Measured]) -> Difference:
        """Run by run, each with the other's run of the same seed."""
        others = {measured.record.run.seed: measured.values_L for measured in other}
        pairs = [(measured.values_L, others[measured.record.run.seed]) for measured in head]
        if len(pairs) == 1:
            estimate = batch_means(torch.from_numpy(pairs[0][0] - pairs[0][1]))
            return cls(mean=estimate.mean, standard_error=estimate.standard_error, seeds=1)
        sample = Sample.of([float((ours - theirs).mean()) for ours, theirs in pairs])
        assert sample.standard_error is not None
        return cls(mean=sample.mean, standard_error=sample.standard_error, seeds=len(pairs))

    @property
    def is_resolved(self) -> bool:
        """Whether the 95 % interval leaves out zero."""
        factor = student_quantile(0.975, self.seeds - 1) if self.seeds > 1 else NORMAL
        return abs(self.mean) > factor * self.standard_error

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.standard_error:.4f}"


def by_head(results: Sequence[Measured]) -> dict[str, list[Measured]]:
    heads: dict[str, list[Measured]] = {}
    for measured in results:
        heads.setdefault(measured.record.run.head, []).append(measured)
    return heads


# --- the table --------------------------------------------------------------------------------------------------------


def table(results: Sequence[Measured]) -> str:
    """The heads, worst first, in plain text."""
    heads = by_head(results)
    has_truth = results[0].record.kl is not None
    seeds = len(next(iter(heads.values())))
    columns: list[tuple[str, str, Callable[[list[Measured]], str]]] = [
        ("head", "", lambda runs: _name(runs[0].record.run.head)),
        ("parameters", "", lambda runs: f"{runs[0].record.run.parameters:,}"),
        ("test", "perplexity", lambda runs: _mean(runs, lambda r: r.test_perplexity, 2)),
    ]
    if has_truth:
        columns.append(("KL to the", "truth (nats)", _kl))
    if BASELINE in heads and len(heads) > 1:
        baseline, quantity = heads[BASELINE], "KL" if has_truth else "loss"
        columns.append(
            (
                f"{quantity} minus",
                "softmax's",
                lambda runs: "" if runs is baseline else str(Difference.of(runs, baseline)),
            )
        )
    columns += [
        ("rank", "", _ranks),
        ("rank", "bound", lambda runs: str(runs[0].record.rank_bound)),
        ("time", "a run", lambda runs: duration_text(Sample.of([m.record.seconds for m in runs]).mean)),
    ]
    ordered = sorted(heads.values(), key=lambda runs: -_level(runs))
    rows = [[column[0] for column in columns], [column[1] for column in columns]]
    rows += [[column[2](runs) for column in columns] for runs in ordered]
    sizes = [max(len(row[place]) for row in rows) for place in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(size) if place else cell.ljust(size) for place, (cell, size) in enumerate(cells)).rstrip()
        for cells in (list(zip(row, sizes, strict=True)) for row in rows)
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join([rule, *lines[:2], rule, *lines[2:], rule, _legend(results, seeds, has_truth=has_truth)])


def _legend(results: Sequence[Measured], seeds: int, *, has_truth: bool) -> str:
    record = results[0].record
    lines = []
    if record.entropy_rate is not None:
        lines.append(f"A model that knew the truth would have perplexity {math.exp(record.entropy_rate):.2f}.")
    what = "KL" if has_truth else "loss"
    if seeds > 1:
        lines.append(
            f"± of perplexity{' and KL' if has_truth else ''}: standard deviation over {seeds} seeds; of a difference: "
            "standard error over seeds, pairs of the same seed."
        )
    else:
        lines.append(f"±: standard error over test positions, by batch means; of a difference of {what}, of pairs.")
    lines.append(
        f"Rank: singular values of log P at {record.contexts:,} test positions above 0.5 sqrt(M + T + 1) sigma_max "
        "eps32."
    )
    return "\n".join(lines)


def _name(head: str) -> str:
    return head.replace("=0.0)", "=0)")


def _level(runs: Sequence[Measured]) -> float:
    return Sample.of([float(measured.values_L.mean()) for measured in runs]).mean


def _mean(runs: Sequence[Measured], value: Callable[[ComparisonRecord], float], digits: int) -> str:
    sample = Sample.of([value(measured.record) for measured in runs])
    spread = "" if sample.deviation is None else f" ± {sample.deviation:.{digits}f}"
    return f"{sample.mean:.{digits}f}{spread}"


def _kl(runs: list[Measured]) -> str:
    if len(runs) == 1:
        return f"{runs[0].record.kl:.4f} ± {runs[0].record.kl_standard_error:.4f}"
    return _mean(runs, lambda record: record.kl if record.kl is not None else math.nan, 4)


def _ranks(runs: Sequence[Measured]) -> str:
    ranks = [measured.record.rank for measured in runs]
    known = [rank for rank in ranks if rank is not None]
    if len(known) < len(ranks):
        return "not counted"
    return str(known[0]) if len(set(known)) == 1 else f"{min(known)} to {max(known)}"


# --- the words --------------------------------------------------------------------------------------------------------


def findings(results: Sequence[Measured]) -> list[str]:
    heads = by_head(results)
    seeds = len(next(iter(heads.values())))
    quantity = "KL" if results[0].record.kl is not None else "loss"
    lines = []
    if BASELINE in heads and len(heads) > 1:
        lines.append(_against(BASELINE, heads, quantity, seeds))
    control = next((head for head in heads if head != BASELINE and Head.parse(head).is_softmax), None)
    if control is not None and "sigsoftmax" in heads:
        lines.append(_control(heads, control, quantity, seeds))
    lines += _ranks_and_nats(heads, quantity)
    if seeds == 1:
        lines.append(
            "- One seed: nothing here tells how far another seed would move a head. --seeds 1,2,3 does, and is needed "
            "before a small gap means anything."
        )
    elif len(heads) > 2:
        lines.append("- Each interval stands for itself: among many heads one in twenty is resolved by chance.")
    return lines


def _against(baseline: str, heads: dict[str, list[Measured]], quantity: str, seeds: int) -> str:
    base = _level(heads[baseline])
    parts = []
    for head, runs in sorted(heads.items(), key=lambda item: -_level(item[1])):
        if head == baseline:
            continue
        difference = Difference.of(runs, heads[baseline])
        share = f" ({abs(difference.mean) / base:.1%} of it)" if quantity == "KL" else ""
        direction = "below" if difference.mean < 0 else "above"
        parts.append(
            f"\n    {_name(head)}: {abs(difference.mean):.4f} nats {direction}{share}, {_verdict(difference, seeds)}"
        )
    return f"- {quantity} against {baseline}'s {base:.4f}:" + "".join(parts)


def _verdict(difference: Difference, seeds: int) -> str:
    if seeds == 1:
        return "more than the test text leaves open" if difference.is_resolved else "not resolved by the test text"
    return f"resolved by {seeds} seeds" if difference.is_resolved else f"not resolved by {seeds} seeds"


def _control(heads: dict[str, list[Measured]], control: str, quantity: str, seeds: int) -> str:
    of_head = Difference.of(heads["sigsoftmax"], heads[control])
    verdict = _verdict(of_head, seeds)
    direction = "below" if of_head.mean < 0 else "above"
    return (
        f"- Against the control for scale, {_name(control)}, sigsoftmax has {abs(of_head.mean):.4f} nats of {quantity} "
        f"{direction}, {verdict}."
    )


def _ranks_and_nats(heads: dict[str, list[Measured]], quantity: str) -> list[str]:
    full = [
        _level(runs)
        for runs in heads.values()
        if all(
            m.record.rank is not None and m.record.rank >= NEAR_FULL * min(m.record.words, m.record.contexts or 0)
            for m in runs
        )
    ]
    lines = []
    if BASELINE in heads and "sigsoftmax" in heads:
        lines.append(
            f"- Rank: sigsoftmax {_ranks(heads['sigsoftmax'])}, softmax {_ranks(heads[BASELINE])}; {quantity} "
            f"{_level(heads['sigsoftmax']):.4f} and {_level(heads[BASELINE]):.4f}."
        )
    if len(full) > 1:
        lines.append(
            f"- The {len(full)} heads of full or almost full rank have {quantity} from {min(full):.4f} to "
            f"{max(full):.4f}: their rank does not tell which is which."
        )
    return lines
