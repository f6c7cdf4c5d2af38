"""The kinds of records that this version knows."""

from __future__ import annotations

from collections.abc import Mapping

from sigsoftmax.records.schemas.audits import Audit
from sigsoftmax.records.schemas.base import MeasuredPayload
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.records.schemas.classifiers import ClassifierResult
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.spectra import RankBounds, Spectrum
from sigsoftmax.records.schemas.speed import Measurement
from sigsoftmax.records.schemas.sweeps import PairedDifferenceRecord, TrialRecord
from sigsoftmax.records.schemas.training import ComparisonRecord, DynamicEvaluationRecord, EpochRecord, EvaluationRecord

__all__ = ["IN_SERIES", "PAYLOADS"]


PAYLOADS: Mapping[str, type[MeasuredPayload]] = {
    payload.KIND: payload
    for payload in (
        Audit,
        CapacityResult,
        ClassifierResult,
        ComparisonRecord,
        DynamicEvaluationRecord,
        EpochRecord,
        EvaluationRecord,
        Measurement,
        ModelSpectrum,
        PairedDifferenceRecord,
        RankBounds,
        Spectrum,
        TrialRecord,
    )
}
"""By the name of the kind."""

IN_SERIES = frozenset({Measurement.KIND})
"""Kinds of which several records are one measurement: the implementations of a case, whose times compare within one run
alone. A record of any other kind is a measurement by itself."""
