"""All that a page is made of, typed; of what was measured again, the last measurement that is no less than others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

from sigsoftmax.records.grouping import grouped
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
from sigsoftmax.report.theme import Looks, same_head

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

EVERY = {"spectra", "rank_bounds", "audits"}
"""Records of these are all shown, whatever was measured again."""


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
        # The fields say which payloads they hold: list[Entry[EpochRecord]].
        hints = {name: get_args(hint) for name, hint in get_type_hints(cls).items()}
        taken = {name: loaded.take(get_args(inner[0])[0]) for name, inner in hints.items() if inner}
        found = {**taken, "epochs": _told_apart(taken["epochs"])}
        for name in found.keys() - EVERY:
            places = not_covered_later([(entry.payload, entry.environment) for entry in found[name]])
            found[name] = [found[name][place] for place in places]
        found["capacities"] = _best(found["capacities"])
        replaced = sum(len(taken[name]) - len(found[name]) for name in taken)
        return cls(**found, replaced=replaced)

    def looks(self, *others: str) -> Looks:
        """The looks of all heads: those of the paper, which stand in its tables, others, and those of records."""
        runs: tuple[Sequence[Entry[Any]], ...] = (
            *(self.epochs, self.evaluations, self.dynamic_evaluations),
            *(self.comparisons, self.model_spectra, self.trials),
        )
        named = [entry.payload.run.head for entries in runs for entry in entries]
        named += [entry.payload.head for entries in (self.capacities, self.rank_bounds) for entry in entries]
        for audit in (entry.payload for entry in self.audits):
            named += [audit.layer.head, *(head.head for head in (audit.target.heads if audit.target else ()))]
        return Looks([*HEADS, *others, *filter(None, named)])


def _best(entries: Sequence[Entry[CapacityResult]]) -> list[Entry[CapacityResult]]:
    """The best fit of each, where a later one with less effort did not come as far."""
    # Of equal fits the later one counts.
    in_order = sorted(enumerate(entries), key=lambda pair: (-pair[1].payload.fitted_kl, pair[0]))
    best = {entry.payload.subject: place for place, entry in in_order}
    return [entries[place] for place in sorted(best.values())]


def _told_apart(entries: list[Entry[EpochRecord]]) -> list[Entry[EpochRecord]]:
    """The epochs of runs that were made with both recurrences: those on the persistent kernels become another setting.

    Their masks are drawn in another order and their times are others, so that one is no repetition of the other, and
    heads must not be compared across them. A run that went on with the other recurrence has no epoch twice, but for
    those since its last checkpoint, and stays one run.
    """
    epochs = {
        key: {entry.payload.epoch for entry in found}
        for key, found in grouped(entries, lambda entry: (entry.payload.run, entry.payload.is_persistent)).items()
    }
    both = {
        run
        for (run, is_persistent), own in epochs.items()
        if is_persistent and 2 * len(own & epochs.get((run, False), set())) > len(own)
    }

    def told(entry: Entry[EpochRecord]) -> Entry[EpochRecord]:
        run = entry.payload.run
        if run not in both or not entry.payload.is_persistent:
            return entry
        setting = replace(run, precision=f"{run.precision}, persistent recurrence")
        return replace(entry, payload=replace(entry.payload, run=setting))

    return [told(entry) for entry in entries]


def run_label(run: RunIdentity) -> str:
    """A run but for head and seed: recipe, what differs from it, precision."""
    return ", ".join((run.recipe, *changes(run)))


def setting_label(run: RunIdentity) -> str:
    """The same where the head is said beside it: a recipe that is named for its head goes without saying."""
    return ", ".join(setting_parts(run))


def setting_parts(run: RunIdentity) -> tuple[str, ...]:
    head = re.escape(run.head.partition("(")[0])
    named_for_head = re.fullmatch(rf"[^-]+-{head}(-[\d.]+)?", run.recipe)
    return (*(() if named_for_head else (run.recipe,)), *changes(run))


def differing(descriptions: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The parts of each description that not all have: what all have in common need not be said."""
    common = set.intersection(*map(set, descriptions)) if descriptions else set()
    return [tuple(part for part in parts if part not in common) for parts in descriptions]


def setting_labels(runs: Sequence[RunIdentity]) -> list[str]:
    """The settings that tell runs of the same head apart, for each of them; empty where a head has one setting."""
    labels = [""] * len(runs)
    for places in grouped(range(len(runs)), lambda place: same_head(runs[place].head)).values():
        for place, parts in zip(places, differing([setting_parts(runs[place]) for place in places]), strict=True):
            labels[place] = ", ".join(parts)
    return labels


def changes(run: RunIdentity) -> tuple[str, ...]:
    """The changes to the named recipe in float32."""
    return (*run.overrides, *((run.precision,) if run.precision != "float32" else ()))


def corpus_label(corpus: str) -> str:
    return CORPORA.get(corpus, "a language of known truth" if corpus == "language" else corpus)
