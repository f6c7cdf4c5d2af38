"""Singular values and numerical rank of a log-output matrix that fits in memory.

``streaming`` does the same for one that does not; both put their numbers together here.

Shapes: M words, T contexts; R = min(M, T) singular values, the largest first.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from sigsoftmax.analysis.spectrum.blocked_qr import singular_values, svd_error
from sigsoftmax.analysis.spectrum.entry_checks import SIXTEEN_BITS, EntryChecks, dtype_name
from sigsoftmax.analysis.spectrum.gram import gram_error
from sigsoftmax.records.schemas.spectra import RULES, Spectrum

__all__ = ["Matrix", "describe", "spectrum"]


def spectrum(
    log_probs_TM: Tensor,
    *,
    source: str = "log-probabilities",
    log_probs: bool = True,
    precision: torch.dtype | None = None,
) -> Spectrum:
    """The spectrum of a matrix of log-probabilities, one context a row, by a float64 SVD.

    ``log_probs=False`` takes any finite matrix. ``precision`` is the least precise dtype that the entries went through
    if that is not their own, for instance torch.bfloat16 for float32 log-probabilities of bf16 logits.
    """
    began = time.perf_counter()
    if log_probs_TM.ndim != 2 or not log_probs_TM.is_floating_point() or not log_probs_TM.numel():
        raise ValueError(
            "expected a floating-point matrix of log-probabilities with at least one row and one column, got "
            f"{log_probs_TM.dtype} of shape {tuple(log_probs_TM.shape)}"
        )
    values_TM = log_probs_TM.detach()
    checks = EntryChecks(log_probs=log_probs)
    checks.check(values_TM, 0)
    contexts, words = values_TM.shape
    matrix = Matrix(
        source=source, words=words, contexts=contexts, dtype=values_TM.dtype, precision=precision, checks=checks
    )
    return matrix.spectrum(singular_values(values_TM.to(torch.float64)), method="svd", began=began)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """What is known of a matrix besides its singular values."""

    source: str
    words: int
    contexts: int
    dtype: torch.dtype
    checks: EntryChecks
    precision: torch.dtype | None = None
    """as the caller says; None: as the entries show"""
    contexts_expected: int | None = None

    def spectrum(self, values_R: Tensor, *, method: str, began: float) -> Spectrum:
        """Of singular values from ``svd`` or ``qr``."""
        return self._spectrum(values_R, method, 0.0, svd_error(float(values_R[0]), self.contexts, self.words), began)

    def gram_spectrum(self, squared_values: Tensor, *, began: float) -> Spectrum:
        """Of eigenvalues of a Gram matrix, which may be more than R."""
        error = gram_error(squared_values, self.contexts, self.words)
        values = squared_values[: min(self.words, self.contexts)].clamp(min=0.0).sqrt()
        return self._spectrum(values, "gram", error, 0.0, began)

    def _spectrum(
        self, values_R: Tensor, method: str, squared_error: float, svd_rounding: float, began: float
    ) -> Spectrum:
        precision = self.precision or self.checks.precision(self.dtype)
        # As if every entry were off by eps of its precision, with independent signs: such a matrix has about this norm.
        root_mean_square = float(values_R.norm()) / math.sqrt(self.words * self.contexts)
        entry_noise = torch.finfo(precision).eps * root_mean_square * (math.sqrt(self.words) + math.sqrt(self.contexts))
        found = Spectrum(
            source=self.source,
            words=self.words,
            contexts=self.contexts,
            singular_values=tuple(values_R.tolist()),
            method=method,
            dtype=dtype_name(self.dtype),
            precision=dtype_name(precision),
            squared_error=squared_error,
            value_error=svd_rounding + entry_noise,
            row_sum_error=self.checks.row_sum_error if self.checks.log_probs else None,
            contexts_expected=self.contexts_expected,
            seconds=time.perf_counter() - began,
        )
        if precision in SIXTEEN_BITS:
            _warn_of_noise(found)
        return found


def describe(found: Spectrum) -> str:
    """The ranks and what they rest on, in plain text."""
    relative = f"{found.noise_floor / found.largest:.1e} sigma_max" if found.largest else "0"
    broken_off = f", of {found.contexts_expected:,} expected" if found.contexts_expected else ""
    noise = f"noise floor {found.noise_floor:.3g} = {relative}"
    lines = [
        f"{found.source}: {found.words:,} words, {found.contexts:,} contexts{broken_off}",
        f"sigma_max {found.largest:.6g}, {noise} ({found.method}, entries of {found.precision or found.dtype})",
    ]
    for count in found.ranks():
        formula = RULES[count.rule].formula if count.rule in RULES else "the noise floor"
        rank = "not counted at" if count.rank is None else f"rank {count.text} above"
        lines.append(f"  {rank} {count.threshold:.3g} ({count.rule}: {formula})")
    lines.append(
        f"  stable rank {found.stable_rank:.4g} (sum sigma^2 / sigma_max^2), effective rank {found.effective_rank:.4g} "
        "(exp of the entropy of sigma / sum sigma)"
    )
    return "\n".join(lines)


def _warn_of_noise(found: Spectrum) -> None:
    refused = [f"{count.rule} ({count.threshold:.3g})" for count in found.ranks() if count.rank is None]
    counted = [f"{count.rule} ({count.threshold:.3g})" for count in found.ranks() if count.rank is not None]
    warnings.warn(
        f"the entries have the precision of {found.precision}, whose rounding makes singular values of up to "
        f"{found.noise_floor:.3g} ({found.noise_floor / found.largest if found.largest else 0.0:.2g} sigma_max). "
        f"Thresholds below that are not counted: {', '.join(refused) or 'none'}; above it lie {', '.join(counted)}",
        stacklevel=4,
    )
