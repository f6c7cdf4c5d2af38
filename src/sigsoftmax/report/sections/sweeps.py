"""Sweeps: means over seeds of every point, and differences of recipes from their baseline over the same seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sigsoftmax.records.grouping import grouped
from sigsoftmax.records.schemas.sweeps import PairedDifferenceRecord, TrialRecord
from sigsoftmax.records.statistics import LEAST_SEEDS, Sample
from sigsoftmax.report.material import Material, changes, corpus_label
from sigsoftmax.report.number_text import DASH, sample_text, seconds_text, sentence, signed_text, yes_or_no
from sigsoftmax.report.sections.section import Absent, Block, Section
from sigsoftmax.report.tables import Cell, Column, Fields, Table
from sigsoftmax.report.theme import Looks, swatch

__all__ = ["Trials", "mean_fields", "section"]

QUANTITIES = {"kl": "KL to the truth", "test_loss": "test loss"}


def section(material: Material, looks: Looks) -> Section | Absent:
    if not material.trials:
        return Absent("Sweeps", "sigsoftmax sweep --heads softmax,mos --seeds 1,2,3")
    trials = [entry.payload for entry in material.trials]
    differences = [entry.payload for entry in material.paired_differences]
    corpora = grouped(trials, lambda trial: (trial.run.corpus, trial.run.corpus_checksum))
    blocks: list[Block] = [_trials(found, looks) for found in corpora.values()]
    return Section(
        id="sweeps",
        title="Sweeps",
        short="Sweeps",
        lead="Recipes trained with several seeds, and at several values of their fields where an alternative is named. "
        "Differences are taken seed by seed, so that what the seed decides is in neither.",
        findings=_findings(differences),
        blocks=[*blocks, *([_differences(differences)] if differences else [])],
    )


Trials = list[TrialRecord]
"""Trials that differ in their seed alone."""


def mean_fields(*, has_truth: bool) -> Fields[Trials]:
    """Means of trials that differ in their seed alone, as the terminal shows them too."""
    kl: Fields[Trials] = {"KL to the truth (nats)": lambda trials: _mean([t.kl for t in trials], 4)}
    return {
        "Validation perplexity": lambda trials: _mean([t.valid_perplexity for t in trials]),
        "Test perplexity": lambda trials: _mean([t.test_perplexity for t in trials]),
        **(kl if has_truth else {}),
    }


def _mean(values: Iterable[float | None], decimals: int = 2) -> str:
    known = [value for value in values if value is not None]
    return sample_text(Sample.of(known) if known else None, decimals)


def _trials(trials: Trials, looks: Looks) -> Table:
    def changed(trial: TrialRecord) -> set[str]:
        # Trials of two sweeps may differ in what was changed for all trials of one, which is no alternative within it.
        return {*changes(trial.run), *trial.point}

    groups = grouped(trials, lambda t: (t.run.recipe, t.run.head, tuple(sorted(changed(t)))))
    # What all have in common is said once.
    common = set.intersection(*map(changed, trials))
    fields: Fields[Trials] = {
        Column("Recipe", "label"): lambda same: Cell(same[0].run.recipe, before=swatch(looks[same[0].run.head])),
        Column("Alternative", "words"): lambda same: ", ".join(sorted(changed(same[0]) - common)) or DASH,
        "Seeds": lambda same: f"{len(same)}",
        **mean_fields(has_truth=any(trial.kl is not None for trial in trials)),
        "Time of a trial": lambda same: seconds_text(sum(trial.seconds for trial in same) / len(same)),
    }
    title = sentence(", ".join((corpus_label(trials[0].run.corpus), *sorted(common))))
    notes = ["± is the standard deviation over seeds."]
    return Table.of(groups.values(), fields, caption=f"{title}: means over seeds", notes=notes)


def _differences(differences: Sequence[PairedDifferenceRecord]) -> Table:
    common = set.intersection(*(set(d.changes) for d in differences))

    def named(d: PairedDifferenceRecord, recipe: str, point: Sequence[str]) -> str:
        return ", ".join((recipe, *point, *(change for change in d.changes if change not in common)))

    fields: Fields[PairedDifferenceRecord] = {
        Column("Recipe", "label"): lambda d: named(d, d.recipe, d.point),
        Column("Less", "words"): lambda d: named(d, d.baseline_recipe, d.baseline_point),
        Column("Of", "words"): lambda d: QUANTITIES[d.quantity],
        "Pairs": lambda d: f"{len(d.seeds)}",
        "Mean difference (nats)": lambda d: signed_text(d.mean, ".4f"),
        Column(f"{differences[0].confidence:.0%} interval", "label"): lambda d: (
            " to ".join(signed_text(end, ".4f") for end in _interval(d)) or DASH
        ),
        Column("Leaves out zero", "label"): lambda d: yes_or_no(_is_resolved(d)),
    }
    return Table.of(
        differences,
        fields,
        caption="Differences, seed by seed",
        notes=["Each interval stands for itself: of twenty differences that are none, one leaves out zero on average."],
    )


def _interval(d: PairedDifferenceRecord) -> tuple[float, ...]:
    """Both ends, or none: earlier versions recorded intervals of two seeds, which are none to judge by."""
    return () if d.low is None or d.high is None or len(d.seeds) < LEAST_SEEDS else (d.low, d.high)


def _is_resolved(difference: PairedDifferenceRecord) -> bool | None:
    interval = _interval(difference)
    return interval[0] > 0.0 or interval[1] < 0.0 if interval else None


def _findings(differences: Sequence[PairedDifferenceRecord]) -> list[str]:
    judged = [d for d in differences if _interval(d)]
    if not judged:
        fewer = f"With fewer than {LEAST_SEEDS} seeds of each nothing can be resolved."
        return [fewer] if differences else []
    resolved = [d for d in judged if _is_resolved(d)]
    if not resolved:
        return [f"None of {len(judged)} differences from the baseline is resolved by these seeds."]
    parts = [
        f"{', '.join((d.recipe, *d.point))} {signed_text(d.mean, '.3f')} nats of {QUANTITIES[d.quantity]} against "
        f"{', '.join((d.baseline_recipe, *d.baseline_point))}"
        for d in resolved
    ]
    return [f"{len(resolved)} of {len(judged)} differences are resolved: {'; '.join(parts)}."]
