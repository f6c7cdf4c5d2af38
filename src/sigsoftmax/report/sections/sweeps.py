"""Sweeps: means over seeds of every point, and how far recipes lie from their baseline over the same seeds."""

from __future__ import annotations

from collections.abc import Sequence

from sigsoftmax.records.schemas.sweeps import PairedDifferenceRecord, TrialRecord
from sigsoftmax.records.statistics import LEAST_SEEDS, Sample
from sigsoftmax.report.material import Material, changes, corpus_label
from sigsoftmax.report.section import Absent, Block, Section
from sigsoftmax.report.tables import DASH, Cell, Column, Row, Table, sample_text, seconds_text, sentence, signed_text
from sigsoftmax.report.theme import Looks, swatch

__all__ = ["section"]

QUANTITIES = {"kl": "KL to the truth", "test_loss": "test loss"}
SPLITS = ("valid", "test")


def section(material: Material, looks: Looks) -> Section | Absent:
    if not material.trials:
        return Absent("Sweeps", "sigsoftmax sweep --heads softmax,mos --seeds 1,2,3")
    corpora: dict[tuple[str, str], list[TrialRecord]] = {}
    for entry in material.trials:
        run = entry.payload.run
        corpora.setdefault((run.corpus, run.corpus_checksum), []).append(entry.payload)
    differences = [entry.payload for entry in material.paired_differences]
    blocks: list[Block] = [_trials(trials, looks) for trials in corpora.values()]
    if differences:
        blocks.append(_differences(differences))
    return Section(
        id="sweeps",
        title="Sweeps",
        short="Sweeps",
        lead="Recipes trained with several seeds, and at several values of their fields where an alternative is named. "
        "Differences are taken seed by seed, so that what the seed decides is in neither.",
        findings=_findings(differences),
        blocks=blocks,
    )


def _trials(trials: Sequence[TrialRecord], looks: Looks) -> Table:
    # Trials of two sweeps may differ in what was changed for all trials of one, which is no alternative within it.
    groups: dict[tuple[str, str, tuple[str, ...]], list[TrialRecord]] = {}
    for trial in trials:
        changed = tuple(sorted({*changes(trial.run), *trial.point}))
        groups.setdefault((trial.run.recipe, trial.run.head, changed), []).append(trial)
    # What all have in common is said once.
    common = set.intersection(*(set(changed) for _, _, changed in groups))
    has_truth = any(trial.kl is not None for trial in trials)
    rows = []
    for (recipe, head, changed), found in groups.items():
        point = [change for change in changed if change not in common]
        look = looks[head]
        known = [trial.kl for trial in found if trial.kl is not None]
        cells: list[Cell | str] = [Cell(recipe, before=swatch(look)), ", ".join(point) or DASH, f"{len(found)}"]
        cells += [
            sample_text(Sample.of([getattr(trial, f"{split}_perplexity") for trial in found])) for split in SPLITS
        ]
        if has_truth:
            cells.append(sample_text(Sample.of(known), decimals=4) if known else DASH)
        cells.append(seconds_text(sum(trial.seconds for trial in found) / len(found)))
        rows.append(Row(cells))
    columns = [Column("Recipe", "label"), Column("Alternative", "words"), Column("Seeds")]
    columns += [Column(f"{sentence(split)} perplexity") for split in ("validation", "test")]
    if has_truth:
        columns.append(Column("KL to the truth (nats)"))
    columns.append(Column("Time of a trial"))
    return Table(
        caption=f"{sentence(', '.join((corpus_label(trials[0].run.corpus), *sorted(common))))}: means over seeds",
        columns=columns,
        rows=rows,
        notes=["± is the standard deviation over seeds."],
    )


def _differences(differences: Sequence[PairedDifferenceRecord]) -> Table:
    rows = []
    common = set.intersection(*(set(d.changes) for d in differences))
    for d in differences:
        changed = [change for change in d.changes if change not in common]
        found = _interval(d)
        interval = DASH if found is None else " to ".join(signed_text(end, ".4f") for end in found)
        rows.append(
            Row(
                (
                    _named(d.recipe, [*d.point, *changed]),
                    _named(d.baseline_recipe, [*d.baseline_point, *changed]),
                    QUANTITIES[d.quantity],
                    f"{len(d.seeds)}",
                    signed_text(d.mean, ".4f"),
                    interval,
                    {True: "yes", False: "no", None: DASH}[_is_resolved(d)],
                )
            )
        )
    columns = [Column("Recipe", "label"), Column("Less", "words"), Column("Of", "words"), Column("Pairs")]
    columns += [Column("Mean difference (nats)"), Column(f"{differences[0].confidence:.0%} interval", "label")]
    columns.append(Column("Leaves out zero", "label"))
    return Table(
        caption="Differences, seed by seed",
        columns=columns,
        rows=rows,
        notes=["Each interval stands for itself: of twenty differences that are none, one leaves out zero on average."],
    )


def _named(recipe: str, point: Sequence[str]) -> str:
    return ", ".join((recipe, *point))


def _interval(difference: PairedDifferenceRecord) -> tuple[float, float] | None:
    """Earlier versions recorded intervals of two seeds, which are none to judge by."""
    if difference.low is None or difference.high is None or len(difference.seeds) < LEAST_SEEDS:
        return None
    return difference.low, difference.high


def _is_resolved(difference: PairedDifferenceRecord) -> bool | None:
    interval = _interval(difference)
    return None if interval is None else interval[0] > 0.0 or interval[1] < 0.0


def _findings(differences: Sequence[PairedDifferenceRecord]) -> list[str]:
    judged = [d for d in differences if _is_resolved(d) is not None]
    if not judged:
        fewer = f"With fewer than {LEAST_SEEDS} seeds of each nothing can be resolved."
        return [fewer] if differences else []
    resolved = [d for d in judged if _is_resolved(d)]
    if not resolved:
        return [f"None of {len(judged)} differences from the baseline is resolved by these seeds."]
    parts = [
        f"{_named(d.recipe, d.point)} {signed_text(d.mean, '.3f')} nats of {QUANTITIES[d.quantity]} against "
        f"{_named(d.baseline_recipe, d.baseline_point)}"
        for d in resolved
    ]
    return [f"{len(resolved)} of {len(judged)} differences are resolved: {'; '.join(parts)}."]
