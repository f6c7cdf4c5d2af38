"""The spectrum of a trained model's log-output matrix: which run, on which text."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from sigsoftmax.records.schemas.spectra import Spectrum
from sigsoftmax.records.schemas.training import RunIdentity

__all__ = ["ModelSpectrum"]


@dataclass(frozen=True, kw_only=True)
class ModelSpectrum:
    """The spectrum of one model, as in the paper's table 3 and its two figures."""

    KIND: ClassVar[str] = "model-spectrum"
    VERSION: ClassVar[int] = 1

    run: RunIdentity
    """its phase tells whether the model was finetuned, as the paper's were"""
    split: str
    """``valid`` or ``test``"""
    spectrum: Spectrum

    @property
    def subject(self) -> Hashable:
        return self.run, self.split, self.spectrum.precision

    @property
    def extent(self) -> Mapping[Hashable, float]:
        return self.spectrum.extent
