"""A bound on what a softmax of width k could do for given distributions: log P cut down to rank k.

Any number may be added to the logits of a context, so log P counts less its mean over tokens; a class bias takes the
mean over contexts. What is left is truncated to its k leading singular values, and KL(P || softmax of that) bounds from
above the least KL that a softmax of width k with a class bias reaches on these contexts. A fit reaches less: squares of
log-probabilities are not nats. For the output of a softmax of width d it is 0 from k = d on, which says nothing about
what the softmax costs.

Shapes: N contexts, V vocabulary, C tokens of a part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.analysis.head_weights import TOKENS_AT_ONCE, blocks_of
from sigsoftmax.analysis.progress import Say, nothing_said
from sigsoftmax.analysis.spectrum.factorizations import add_product
from sigsoftmax.records.schemas.audits import Truncation, TruncationPoint

__all__ = ["truncation", "truncation_widths"]


def truncation_widths(contexts: int, vocabulary: int, width: int | None = None) -> tuple[int, ...]:
    """0, the powers of two, and the width of the layer, as far as the matrix goes."""
    full = min(contexts, vocabulary)
    doubling = [2**power for power in range(full.bit_length()) if 2**power <= full]
    return tuple(sorted({0, *doubling, full} | ({width} if width is not None and width <= full else set())))


def truncation(
    log_p_NV: Tensor, widths: Sequence[int], *, memory: int = 1 << 30, progress: Say = nothing_said
) -> Truncation:
    """The mean over contexts of KL(P || softmax of the truncated log P) at each width; holds one copy of log P."""
    contexts, vocabulary = log_p_NV.shape
    if not widths or min(widths) < 0 or max(widths) > min(contexts, vocabulary):
        raise ValueError(
            f"widths must lie between 0 and min(contexts, tokens) = {min(contexts, vocabulary)}, got {tuple(widths)}"
        )
    if torch.isinf(log_p_NV).any():
        raise ValueError("log P has entries of -inf, and cannot be truncated; leave tokens of probability zero out")
    centred_NV = log_p_NV.to(torch.float64, copy=True)
    centred_NV -= centred_NV.mean(1, keepdim=True)
    bias_V = centred_NV.mean(0)
    centred_NV -= bias_V
    progress("truncation: the leading directions")
    gram_NN = torch.zeros(contexts, contexts, dtype=torch.float64, device=log_p_NV.device)
    for part_NC in centred_NV.split(TOKENS_AT_ONCE, 1):
        add_product(gram_NN, part_NC)
    directions_NN = torch.linalg.eigh(gram_NN, UPLO="U")[1].flip(1)
    for part_NC in centred_NV.split(TOKENS_AT_ONCE, 1):
        part_NC.copy_(directions_NN.T @ part_NC)
    coefficients_NV = centred_NV

    order = sorted(set(widths))
    kls = torch.zeros(len(order), dtype=torch.float64)
    for rows in blocks_of(contexts, max(1, memory // (4 * 8 * vocabulary))):
        progress(f"truncation: context {rows.stop} of {contexts}")
        log_p = log_p_NV[rows].to(torch.float64)
        p, truncated, used = log_p.exp(), bias_V.repeat(log_p.shape[0], 1), 0
        for number, width in enumerate(order):
            truncated.addmm_(directions_NN[rows, used:width], coefficients_NV[used:width])
            used = width
            kls[number] += float((p * (log_p - torch.log_softmax(truncated, -1))).sum())
    # KL is not negative; rounding may be.
    means = (kls / contexts).clamp_min(0.0).tolist()
    bounds = itertools.accumulate(means, min)
    return Truncation(
        contexts=contexts,
        words=vocabulary,
        points=tuple(
            TruncationPoint(width=width, kl=kl, bound=bound)
            for width, kl, bound in zip(order, means, bounds, strict=True)
        ),
    )
