"""The cost of a width in nats, against distributions that count as the truth.

The least KL of each head at the width, with h, W and class bias free, is found by fits (see ``fits``). A fit holds
contexts x tokens numbers, so of many tokens the likeliest are kept, and the distributions *given these* are fitted.
That is honest for two reasons. KL splits into a part for "which tokens" and, weighted by their mass, a part given them,
and neither is negative; and a head restricted to some tokens is the same head over fewer tokens (for a mixture, with
another prior). So the least weighted KL of the restricted problem is at most the least KL of the whole one, at the same
width. Fewer contexts lower it too, since W has fewer to serve. The fits themselves end at or above the least.

Shapes: N contexts, V tokens of the target, C tokens that are fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sigsoftmax.analysis.capacity.curves import SOFTMAX, CapacityConfig, Progress, capacity_curves
from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.head_weights import sample_rows
from sigsoftmax.records.schemas.audits import HeadAtWidth
from sigsoftmax.records.schemas.capacity import CapacityResult, softmax_width_of_equal_kl
from sigsoftmax.synthetic import row_kl

__all__ = ["heads_at_width", "least_kl", "mean_kl", "restricted", "widths_that_bind"]


def restricted(
    log_p_NV: Tensor, *, contexts: int, vocabulary: int, seed: int = 0, description: str = "given distributions"
) -> Distributions:
    """The distributions of at most so many contexts (a random sample) given the likeliest tokens on these contexts.

    Their weights sum to the probability of these tokens, averaged over contexts.
    """
    if contexts < 1 or vocabulary < 2:
        raise ValueError(f"a fit needs at least 1 context and 2 tokens, got {contexts} and {vocabulary}")
    available, all_tokens = log_p_NV.shape
    chosen = sample_rows(available, contexts, seed)
    # Contexts with the same distribution have the same best h: one of them serves for all.
    log_p_NV, times_N = torch.unique(log_p_NV[chosen].to(torch.float64), dim=0, return_counts=True)
    weights_N = times_N.to(torch.float64) / times_N.sum()
    if vocabulary >= all_tokens:
        return Distributions(log_p_NV=log_p_NV, weights_N=weights_N, description=description)
    tokens_C = (weights_N @ log_p_NV.exp()).topk(vocabulary).indices.sort().values
    log_p_NC = log_p_NV[:, tokens_C]
    log_mass_N = torch.logsumexp(log_p_NC, 1)
    # A context in which none of these tokens can follow says nothing about them.
    possible_N = log_mass_N > -torch.inf
    return Distributions(
        log_p_NV=log_p_NC[possible_N] - log_mass_N[possible_N, None],
        weights_N=weights_N[possible_N] * log_mass_N[possible_N].exp(),
        description=f"{description}, given the {vocabulary:,} likeliest of {all_tokens:,} tokens",
    )


def widths_that_bind(width: int | None, contexts: int, vocabulary: int) -> tuple[int, ...]:
    """The layer's width if it is a restriction on so many contexts and tokens, else some that are.

    A softmax of width min(contexts, vocabulary) - 1 makes any distributions whatever.
    """
    full = min(contexts, vocabulary) - 1
    if width is not None and 2 * width <= full:
        return (width,)
    smaller = {max(1, full // part) for part in (32, 16, 8, 4)}
    return tuple(sorted(smaller | ({width} if width is not None and width < full else set())))


def least_kl(
    target: Distributions,
    heads: Sequence[str],
    widths: Sequence[int],
    config: CapacityConfig,
    *,
    progress: Progress | None = None,
) -> list[CapacityResult]:
    """Fit all heads at the widths, and softmax at wider ones for comparison; of ``config`` the effort is used."""
    full = min(target.log_p_NV.shape) - 1
    too_wide = [width for width in widths if width > max(full, 1)]
    if too_wide:
        raise ValueError(
            f"at width {too_wide[0]} a softmax makes any distributions over {target.log_p_NV.shape[1]} tokens in "
            f"{target.log_p_NV.shape[0]} contexts, so nothing can be measured; give more of both, or smaller widths"
        )
    wider = {min(full, round(width * factor)) for width in widths for factor in (0.5, 1.5, 2.0, 3.0, 4.0)}
    asked = replace(
        config,
        heads=tuple(heads),
        widths=tuple(sorted(set(widths))),
        softmax_widths=tuple(sorted(width for width in wider if width >= 1)),
        thorough_widths=(),
    )
    return capacity_curves(target, asked, progress=progress)


def heads_at_width(results: Sequence[CapacityResult]) -> tuple[HeadAtWidth, ...]:
    """Each fit with the softmax width of equal KL."""
    curve = {result.width: result.kl for result in results if result.head == str(SOFTMAX)}
    return tuple(
        HeadAtWidth(
            head=result.head,
            width=result.width,
            kl=result.kl,
            spread=result.spread,
            softmax_width=softmax_width_of_equal_kl(result.kl, curve),
        )
        for result in results
    )


def mean_kl(log_p_NV: Tensor, log_q_NV: Tensor) -> float:
    """The mean over contexts of KL(P || Q), in nats."""
    if log_p_NV.shape != log_q_NV.shape:
        raise ValueError(
            f"target and model must have the same contexts and vocabulary, got {tuple(log_p_NV.shape)} and "
            f"{tuple(log_q_NV.shape)}"
        )
    parts = zip(log_p_NV.split(64), log_q_NV.split(64), strict=True)
    return max(sum(float(row_kl(log_p, log_q).sum()) for log_p, log_q in parts) / log_p_NV.shape[0], 0.0)
