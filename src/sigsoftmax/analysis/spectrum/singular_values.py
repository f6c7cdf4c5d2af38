"""Singular values and numerical rank of a log-output matrix that fits in memory.

``streaming`` does the same for one that does not; both put their numbers together here.

Shapes: N contexts, V vocabulary, R = min(N, V) singular values, the largest first.
"""

from __future__ import annotations

import math
import time
import warnings

import torch
from torch import Tensor

from sigsoftmax.analysis.spectrum.entry_checks import SIXTEEN_BITS, EntryChecks, dtype_name
from sigsoftmax.analysis.spectrum.factorizations import SingularValues, exact_values
from sigsoftmax.records.schemas.spectra import RULES, Spectrum

__all__ = ["describe", "spectrum", "spectrum_of_values"]


def spectrum(
    log_probs_NV: Tensor,
    *,
    source: str = "log-probabilities",
    log_probs: bool = True,
    precision: torch.dtype | None = None,
) -> Spectrum:
    """The spectrum of a matrix of log-probabilities, one context per row, by a float64 SVD.

    ``log_probs=False`` takes any finite matrix. ``precision`` is the least precise dtype that the entries went through
    if that is not their own, for instance torch.bfloat16 for float32 log-probabilities of bf16 logits.
    """
    began = time.perf_counter()
    if log_probs_NV.ndim != 2 or not log_probs_NV.is_floating_point() or not log_probs_NV.numel():
        raise ValueError(
            "expected a floating-point matrix of log-probabilities with at least one row and one column, got "
            f"{log_probs_NV.dtype} of shape {tuple(log_probs_NV.shape)}"
        )
    values_NV = log_probs_NV.detach()
    checks = EntryChecks(log_probs=log_probs)
    checks.check(values_NV, 0)
    found = exact_values(values_NV.to(torch.float64))
    contexts, vocabulary = values_NV.shape
    return spectrum_of_values(
        found, contexts, vocabulary, values_NV.dtype, checks, source=source, precision=precision, began=began
    )


def spectrum_of_values(
    found: SingularValues,
    contexts: int,
    vocabulary: int,
    dtype: torch.dtype,
    checks: EntryChecks,
    *,
    source: str,
    precision: torch.dtype | None = None,
    contexts_expected: int | None = None,
    began: float,
) -> Spectrum:
    """The record of singular values, with the noise of entries of this dtype and of their precision, if given."""
    precision = precision or checks.precision(dtype)
    # As if every entry were off by eps of its precision, with independent signs: such a matrix has about this norm.
    root_mean_square = float(found.values_R.norm()) / math.sqrt(vocabulary * contexts)
    entry_noise = torch.finfo(precision).eps * root_mean_square * (math.sqrt(vocabulary) + math.sqrt(contexts))
    result = Spectrum(
        source=source,
        words=vocabulary,
        contexts=contexts,
        singular_values=tuple(found.values_R.tolist()),
        method=found.method,
        dtype=dtype_name(dtype),
        precision=dtype_name(precision),
        squared_error=found.squared_error,
        value_error=found.value_error + entry_noise,
        row_sum_error=checks.row_sum_error if checks.log_probs else None,
        contexts_expected=contexts_expected,
        seconds=time.perf_counter() - began,
    )
    if precision in SIXTEEN_BITS:
        _warn_of_noise(result)
    return result


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
    refused, counted = (
        ", ".join(f"{c.rule} ({c.threshold:.3g})" for c in found.ranks() if (c.rank is None) is is_refused)
        for is_refused in (True, False)
    )
    warnings.warn(
        f"the entries have the precision of {found.precision}, whose rounding makes singular values of up to "
        f"{found.noise_floor:.3g} ({found.noise_floor / found.largest if found.largest else 0.0:.2g} sigma_max). "
        f"Thresholds below that are not counted: {refused or 'none'}; above it lie {counted}",
        stacklevel=4,
    )
