"""The spectrum of a trained model's log-output matrix: which run, on which text."""

from __future__ import annotations

from dataclasses import dataclass

from sigsoftmax.records.schemas.base import Extent
from sigsoftmax.records.schemas.spectra import Spectrum
from sigsoftmax.records.schemas.training import SplitMeasurement

__all__ = ["ModelSpectrum"]


@dataclass(frozen=True, kw_only=True)
class ModelSpectrum(SplitMeasurement):
    """The spectrum of one model, as in the paper's table 3 and its two figures, where all models were finetuned."""

    KIND = "model-spectrum"
    VERSION = 2
    SUBJECT = ("run", "split", "spectrum.precision")

    spectrum: Spectrum
    epoch: int | None = None
    """epoch of training whose weights these were; None in records of version 1"""

    @property
    def extent(self) -> Extent:
        return self.spectrum.extent
