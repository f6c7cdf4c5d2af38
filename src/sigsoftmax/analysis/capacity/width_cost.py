"""What a width costs in nats, against distributions that count as the truth.

The least KL of each head at the width, with h, W and class bias free, is found by fits (see ``capacity``). A fit holds
contexts x words numbers, so of many words the likeliest are kept, and the distributions *given these words* are fitted.
That is honest for two reasons. KL splits into a part for "which words" and, weighted by their mass, a part given them,
and neither is negative; and a head restricted to some words is the same head over fewer words (for a mixture, with
another prior). So the least weighted KL of the restricted problem is at most the least KL of the whole one, at the same
width. Fewer contexts lower it too, since W has fewer to serve. The fits themselves end at or above the least.

Shapes: N contexts, V words of the target, M words that are fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sigsoftmax.analysis.capacity.curves import SOFTMAX, CapacityConfig, capacity_curves
from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.capacity.fits import softmax_width_of_equal_kl
from sigsoftmax.records.schemas.audits import HeadAtWidth
from sigsoftmax.records.schemas.capacity import CapacityResult

__all__ = ["Restricted", "heads_at_width", "least_kl", "mean_kl", "restricted", "widths_that_bind"]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Restricted:
    """The likeliest words of a target, and the distributions given them."""

    distributions: Distributions
    words_M: Tensor
    """their numbers in the whole vocabulary"""
    mass: float
    """their probability, averaged over contexts"""


def restricted(
    log_p_NV: Tensor, *, contexts: int, words: int, seed: int = 0, description: str = "given distributions"
) -> Restricted:
    """At most so many contexts (a random sample) and words (the likeliest on these contexts)."""
    if contexts < 1 or words < 2:
        raise ValueError(f"a fit needs at least 1 context and 2 words, got {contexts} and {words}")
    available, all_words = log_p_NV.shape
    if contexts < available:
        chosen = torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:contexts].sort().values
        log_p_NV = log_p_NV[chosen]
    # Contexts with the same distribution have the same best h: one of them serves for all.
    log_p_NV, times_N = torch.unique(log_p_NV.to(torch.float64), dim=0, return_counts=True)
    weights_N = times_N.to(torch.float64) / times_N.sum()
    if words >= all_words:
        whole = Distributions(log_p_NM=log_p_NV, weights_N=weights_N, description=description)
        return Restricted(whole, torch.arange(all_words), 1.0)
    words_M = (weights_N @ log_p_NV.exp()).topk(words).indices.sort().values
    log_p_NM = log_p_NV[:, words_M]
    log_mass_N = torch.logsumexp(log_p_NM, 1)
    # A context in which none of these words can follow says nothing about them.
    possible_N = log_mass_N > -torch.inf
    weighted_mass_N = weights_N[possible_N] * log_mass_N[possible_N].exp()
    given = Distributions(
        log_p_NM=log_p_NM[possible_N] - log_mass_N[possible_N, None],
        weights_N=weighted_mass_N,
        description=f"{description}, given the {words:,} likeliest of {all_words:,} words",
    )
    return Restricted(given, words_M, float(weighted_mass_N.sum()))


def widths_that_bind(width: int | None, contexts: int, words: int) -> tuple[int, ...]:
    """The layer's width if it is a restriction on so many contexts and words, else some that are.

    A softmax of width min(contexts, words) - 1 makes any distributions whatever.
    """
    full = min(contexts, words) - 1
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
    progress: Callable[[CapacityResult, int, int], None] | None = None,
) -> list[CapacityResult]:
    """Fit all heads at the widths, and softmax at wider ones for comparison; of ``config`` the effort is used."""
    full = min(target.log_p_NM.shape) - 1
    too_wide = [width for width in widths if width > max(full, 1)]
    if too_wide:
        raise ValueError(
            f"at width {too_wide[0]} a softmax makes any distributions over {target.log_p_NM.shape[1]} words in "
            f"{target.log_p_NM.shape[0]} contexts, so nothing can be measured; give more of both, or smaller widths"
        )
    wider = {min(full, round(width * factor)) for width in widths for factor in (0.5, 1.5, 2.0, 3.0, 4.0)}
    return capacity_curves(
        target,
        CapacityConfig(
            heads=tuple(heads),
            widths=tuple(sorted(set(widths))),
            softmax_widths=tuple(sorted(width for width in wider if width >= 1)),
            random_starts=config.random_starts,
            least_starts=config.least_starts,
            budget=config.budget,
            workers=config.workers,
            seed=config.seed,
        ),
        progress=progress,
    )


def heads_at_width(results: Sequence[CapacityResult], *, floor: float = 1e-6) -> tuple[HeadAtWidth, ...]:
    """Each fit with the softmax width of equal KL."""
    curve = {result.width: result.kl for result in results if result.head == str(SOFTMAX)}
    return tuple(
        HeadAtWidth(
            head=result.head,
            width=result.width,
            kl=result.kl,
            spread=result.spread,
            softmax_width=softmax_width_of_equal_kl(result.kl, curve, floor=floor),
        )
        for result in results
    )


def mean_kl(log_p_NV: Tensor, log_q_NV: Tensor) -> float:
    """The mean over contexts of KL(P || Q), in nats."""
    if log_p_NV.shape != log_q_NV.shape:
        raise ValueError(
            f"target and model must have the same contexts and words, got {tuple(log_p_NV.shape)} and "
            f"{tuple(log_q_NV.shape)}"
        )
    total = 0.0
    for log_p, log_q in zip(log_p_NV.split(64), log_q_NV.split(64), strict=True):
        p = log_p.to(torch.float64).exp()
        # A word that cannot occur costs nothing, whatever the model says.
        total += float(torch.where(p > 0.0, p * (log_p - log_q), torch.zeros_like(p)).sum())
    return max(total / log_p_NV.shape[0], 0.0)
