"""Singular values and numerical rank of a log-output matrix that fits in memory.

``streaming`` does the same for one that does not.

Shapes: N contexts, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sigsoftmax.analysis.spectrum.accumulator import SpectrumOptions, SpectrumStream
from sigsoftmax.analysis.spectrum.entry_checks import check_matrix
from sigsoftmax.records.schemas.spectra import RULES, Spectrum

__all__ = ["describe", "spectrum"]


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
    check_matrix(log_probs_NV, source)
    contexts, vocabulary = log_probs_NV.shape
    options = SpectrumOptions(method="exact", log_probs=log_probs, precision=precision, device=log_probs_NV.device)
    stream = SpectrumStream(
        vocabulary=vocabulary, dtype=log_probs_NV.dtype, contexts=contexts, options=options, description=source
    )
    stream.add(log_probs_NV)
    return stream.spectrum()


def describe(found: Spectrum) -> str:
    """The ranks and what they rest on, in plain text."""
    relative = f"{found.noise_floor / found.largest:.1e} sigma_max" if found.largest else "0"
    broken_off = f", of {found.contexts_expected:,} expected" if found.contexts_expected else ""
    noise = f"noise floor {found.noise_floor:.3g} = {relative}"
    lines = [
        f"{found.source}: {found.words:,} tokens, {found.contexts:,} contexts{broken_off}",
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
