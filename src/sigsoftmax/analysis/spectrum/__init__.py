"""Singular values and ranks of log-output matrices."""

from sigsoftmax.analysis.spectrum.bounds import rank_bounds
from sigsoftmax.analysis.spectrum.singular_values import describe, spectrum
from sigsoftmax.analysis.spectrum.streaming import SpectrumOptions, streamed_spectrum

__all__ = ["SpectrumOptions", "describe", "rank_bounds", "spectrum", "streamed_spectrum"]
