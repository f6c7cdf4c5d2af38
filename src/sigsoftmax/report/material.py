"""All that a page is made of, typed; of what was measured again, the last measurement that is no less than others."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sigsoftmax.records.kinds import Measured
from sigsoftmax.records.published.paper import CORPORA, HEADS
from sigsoftmax.records.schemas.audits import Audit
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.spectra import RankBounds, Spectrum
from sigsoftmax.records.schemas.speed import Measurement
from sigsoftmax.records.schemas.sweeps import PairedDifferenceRecord, TrialRecord
from sigsoftmax.records.schemas.training import (
    ComparisonRecord,
    DynamicEvaluationRecord,
    EpochRecord,
    EvaluationRecord,
    RunIdentity,
)
from sigsoftmax.records.storing import not_covered_later
from sigsoftmax.report.loading import Entry, Loaded
from sigsoftmax.report.theme import same_head

__all__ = [
    "Material",
    "changes",
    "corpus_label",
    "differing",
    "run_label",
    "setting_label",
    "setting_labels",
    "setting_parts",
]

M = TypeVar("M", bound=Measured)


@dataclass(frozen=True, kw_only=True)
class Material:
    epochs: list[Entry[EpochRecord]]
    evaluations: list[Entry[EvaluationRecord]]
    dynamic_evaluations: list[Entry[DynamicEvaluationRecord]]
    comparisons: list[Entry[ComparisonRecord]]
    model_spectra: list[Entry[ModelSpectrum]]
    spectra: list[Entry[Spectrum]]
    rank_bounds: list[Entry[RankBounds]]
    audits: list[Entry[Audit]]
    capacities: list[Entry[CapacityResult]]
    measurements: list[Entry[Measurement]]
    trials: list[Entry[TrialRecord]]
    paired_differences: list[Entry[PairedDifferenceRecord]]
    replaced: int
    """records that a later one of the same thing replaces, as epochs that a resumed run repeated"""

    @classmethod
    def of(cls, loaded: Loaded) -> Material:
        replaced = 0

        def counting(entries: list[Entry[M]]) -> list[Entry[M]]:
            """Those that no later measurement of the same thing covers."""
            nonlocal replaced
            places = not_covered_later([(entry.payload, entry.environment) for entry in entries])
            replaced += len(entries) - len(places)
            return [entries[place] for place in places]

        def best(entries: list[Entry[CapacityResult]]) -> list[Entry[CapacityResult]]:
            """The best fit of each, where a later one with less effort did not come as far."""
            nonlocal replaced
            found: dict[Hashable, Entry[CapacityResult]] = {}
            for entry in entries:
                known = found.setdefault(entry.payload.subject, entry)
                if entry.payload.fitted_kl <= known.payload.fitted_kl:
                    found[entry.payload.subject] = entry
            replaced += len(entries) - len(found)
            return [entry for entry in entries if found[entry.payload.subject] is entry]

        return cls(
            epochs=counting(_told_apart(loaded.take(EpochRecord))),
            evaluations=counting(loaded.take(EvaluationRecord)),
            dynamic_evaluations=counting(loaded.take(DynamicEvaluationRecord)),
            comparisons=counting(loaded.take(ComparisonRecord)),
            model_spectra=counting(loaded.take(ModelSpectrum)),
            spectra=loaded.take(Spectrum),
            rank_bounds=loaded.take(RankBounds),
            audits=loaded.take(Audit),
            capacities=best(counting(loaded.take(CapacityResult))),
            measurements=counting(loaded.take(Measurement)),
            trials=counting(loaded.take(TrialRecord)),
            paired_differences=counting(loaded.take(PairedDifferenceRecord)),
            replaced=replaced,
        )

    def heads(self) -> list[str]:
        """Every head that is named somewhere."""
        named = [epoch.payload.run.head for epoch in self.epochs]
        named += [evaluation.payload.run.head for evaluation in self.evaluations]
        named += [dynamic.payload.run.head for dynamic in self.dynamic_evaluations]
        named += [comparison.payload.run.head for comparison in self.comparisons]
        named += [spectrum.payload.run.head for spectrum in self.model_spectra]
        named += [trial.payload.run.head for trial in self.trials]
        named += [capacity.payload.head for capacity in self.capacities]
        named += [bounds.payload.head for bounds in self.rank_bounds]
        for audit in self.audits:
            named.append(audit.payload.layer.head)
            named += [head.head for head in audit.payload.target.heads] if audit.payload.target else []
        return [head for head in named if head]

    def published_heads(self) -> tuple[str, ...]:
        """Those of the paper, which stand in its tables whether or not they were run again."""
        return HEADS


def _told_apart(entries: list[Entry[EpochRecord]]) -> list[Entry[EpochRecord]]:
    """The epochs of runs that were made with both recurrences: those on the persistent kernels become another setting.

    Their masks are drawn in another order and their times are others, so that one is no repetition of the other, and
    heads must not be compared across them. A run that went on with the other recurrence has no epoch twice, but for
    those since its last checkpoint, and stays one run.
    """
    epochs: dict[tuple[RunIdentity, bool], set[int]] = {}
    for entry in entries:
        epochs.setdefault((entry.payload.run, entry.payload.is_persistent), set()).add(entry.payload.epoch)
    both = {
        run
        for run, is_persistent in epochs
        if is_persistent and 2 * len(epochs[run, True] & epochs.get((run, False), set())) > len(epochs[run, True])
    }
    return [
        replace(entry, payload=replace(entry.payload, run=replace(entry.payload.run, precision=precision)))
        if entry.payload.is_persistent and entry.payload.run in both
        else entry
        for entry in entries
        for precision in (f"{entry.payload.run.precision}, persistent recurrence",)
    ]


def run_label(run: RunIdentity) -> str:
    """What a run is but for head and seed: recipe, what differs from it, precision."""
    return ", ".join((run.recipe, *changes(run)))


def setting_label(run: RunIdentity) -> str:
    """The same where the head is said beside it: a recipe that is named for its head goes without saying."""
    return ", ".join(setting_parts(run))


def setting_parts(run: RunIdentity) -> tuple[str, ...]:
    head = re.escape(run.head.partition("(")[0])
    named_for_head = re.fullmatch(rf"[^-]+-{head}(-[\d.]+)?", run.recipe)
    return (*(() if named_for_head else (run.recipe,)), *changes(run))


def differing(descriptions: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Of each description the parts that not all of them have: what all have in common need not be said."""
    common = set.intersection(*map(set, descriptions)) if descriptions else set()
    return [tuple(part for part in parts if part not in common) for parts in descriptions]


def setting_labels(runs: Sequence[RunIdentity]) -> list[str]:
    """What tells runs of the same head apart, for each of them; empty where a head has one setting."""
    labels = [""] * len(runs)
    for head in {same_head(run.head) for run in runs}:
        places = [place for place, run in enumerate(runs) if same_head(run.head) == head]
        for place, parts in zip(places, differing([setting_parts(runs[place]) for place in places]), strict=True):
            labels[place] = ", ".join(parts)
    return labels


def changes(run: RunIdentity) -> tuple[str, ...]:
    """What differs from the named recipe in float32."""
    return (*run.overrides, *((run.precision,) if run.precision != "float32" else ()))


def corpus_label(corpus: str) -> str:
    return CORPORA.get(corpus, "a language of known truth" if corpus == "language" else corpus)
