"""All that a page is made of, typed, with what was measured again replaced by its last measurement."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from sigsoftmax.records import Payload
from sigsoftmax.records.audits import Audit
from sigsoftmax.records.capacity import CapacityResult
from sigsoftmax.records.model_spectra import ModelSpectrum
from sigsoftmax.records.paper import CORPORA, HEADS
from sigsoftmax.records.spectra import RankBounds, Spectrum
from sigsoftmax.records.speed import Measurement
from sigsoftmax.records.sweeps import PairedDifferenceRecord, TrialRecord
from sigsoftmax.records.training import (
    ComparisonRecord,
    DynamicEvaluationRecord,
    EpochRecord,
    EvaluationRecord,
    RunIdentity,
)
from sigsoftmax.report.loading import Entry, Loaded

__all__ = ["Material", "changes", "corpus_label", "run_label", "setting_label"]

P = TypeVar("P", bound=Payload)


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

        def last(entries: list[Entry[P]], same: Callable[[P], Hashable]) -> list[Entry[P]]:
            nonlocal replaced
            kept: dict[Hashable, Entry[P]] = {}
            for entry in sorted(entries, key=lambda entry: entry.environment.time_utc):
                kept[same(entry.payload)] = entry
            replaced += len(entries) - len(kept)
            chosen = {id(entry) for entry in kept.values()}
            return [entry for entry in entries if id(entry) in chosen]

        return cls(
            epochs=last(loaded.take(EpochRecord), lambda p: (p.run, p.epoch)),
            evaluations=last(loaded.take(EvaluationRecord), lambda p: (p.run, p.split, p.batch)),
            dynamic_evaluations=last(
                loaded.take(DynamicEvaluationRecord),
                lambda p: (p.run, p.split, p.learning_rate, p.decay, p.epsilon, p.window, p.complete),
            ),
            comparisons=last(loaded.take(ComparisonRecord), lambda p: (p.run, p.epochs)),
            model_spectra=last(loaded.take(ModelSpectrum), lambda p: (p.run, p.split, p.spectrum.precision)),
            spectra=loaded.take(Spectrum),
            rank_bounds=loaded.take(RankBounds),
            audits=loaded.take(Audit),
            capacities=last(
                loaded.take(CapacityResult), lambda p: (p.language, p.contexts, p.words, p.seed, p.head, p.width)
            ),
            measurements=last(loaded.take(Measurement), lambda p: (p.suite, p.case, p.implementation)),
            trials=last(loaded.take(TrialRecord), lambda p: (p.run, p.point)),
            paired_differences=last(
                loaded.take(PairedDifferenceRecord),
                lambda p: (p.recipe, p.point, p.baseline_recipe, p.baseline_point, p.quantity),
            ),
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


def run_label(run: RunIdentity) -> str:
    """What a run is but for head and seed: recipe, what differs from it, precision."""
    return ", ".join((run.recipe, *changes(run)))


def setting_label(run: RunIdentity) -> str:
    """The same where the head is said beside it: a recipe that is named for its head goes without saying."""
    head = re.escape(run.head.partition("(")[0])
    named_for_head = re.fullmatch(rf"[^-]+-{head}(-[\d.]+)?", run.recipe)
    return ", ".join((*(() if named_for_head else (run.recipe,)), *changes(run)))


def changes(run: RunIdentity) -> tuple[str, ...]:
    """What differs from the named recipe in float32."""
    return (*run.overrides, *((run.precision,) if run.precision != "float32" else ()))


def corpus_label(corpus: str) -> str:
    return CORPORA.get(corpus, "a language of known truth" if corpus == "language" else corpus)
