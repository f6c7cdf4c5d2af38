"""The use that a layer makes of the nonlinearity of its phi: it may have become a softmax.

Away from its nonlinearity phi is a line, and where all logits of a context lie on one line the output is a softmax of
scaled logits. Two measures say how far a layer is from that: the share of logits (and of probability) on no line,
and KL(f(z) || softmax(a z)) for the best single slope a, which is the nearest affine phi.

Shapes: N contexts, K components, R = N * K rows, V vocabulary, L lines.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.analysis.probing import settled_slope
from sigsoftmax.analysis.progress import Say, nothing_said
from sigsoftmax.family import OutputFunction
from sigsoftmax.records.schemas.audits import ShareOnLine, UseOfNonlinearity

__all__ = ["lines_of", "nearest_slope", "use_of_nonlinearity"]

TOLERANCE = 0.05
"""A slope within this fraction of the distance between two lines counts as that of the nearer one."""


class Line(NamedTuple):
    """A stretch on which phi is a line."""

    name: str
    slope: Tensor
    """() or (V,)"""


def lines_of(function: OutputFunction, vocabulary: int) -> list[Line]:
    """The lines of phi: at its two ends, if it has asymptotes there, and at a steepest point between them.

    sigsoftmax has two (slopes 2 and 1), softcap three (flat, 1 at zero, flat), relu one (flat): its log never becomes a
    line. Those of a user's own phi are probed.
    """
    known = function.properties.linear_pieces
    if known is not None:
        return [Line(piece.where, torch.full((vocabulary,), piece.slope, dtype=torch.float64)) for piece in known]
    ends = (("left", settled_slope(function, vocabulary, -1.0)), ("right", settled_slope(function, vocabulary, 1.0)))
    found = [Line(name, slope) for name, slope in ends if slope is not None]
    centre = function.slope(torch.zeros(vocabulary, dtype=torch.float64)).detach()
    are_parallel = len(found) == 2 and torch.allclose(found[0].slope, found[1].slope, rtol=1e-6, atol=1e-9)
    if are_parallel and not torch.allclose(centre, found[0].slope):
        found.insert(1, Line("centre", centre))
    return found


def use_of_nonlinearity(
    layer: HeadWeights, contexts: Contexts, *, memory: int = 1 << 30, progress: Say = nothing_said
) -> UseOfNonlinearity:
    """Shares of logits and of probability on each line of phi and on none, and the nearest softmax."""
    lines = [] if layer.is_softmax else lines_of(layer.function, layer.vocabulary)
    # Columns: logits, and probability; the last row is that of no line.
    shares_L2 = torch.zeros(len(lines) + 1, 2, dtype=torch.float64)
    lowest, highest = math.inf, -math.inf
    for stop, chosen in layer.blocks(contexts, memory):
        progress(f"slopes of phi: context {stop} of {len(contexts)}")
        z_NKV, log_f_NKV, log_prior_NK = layer.by_component(chosen)
        # A component counts as much as its prior.
        f_NKV = log_f_NKV.exp_().mul_(log_prior_NK.exp()[..., None])
        lowest, highest = min(lowest, z_NKV.min().item()), max(highest, z_NKV.max().item())
        line_NKV = _line_of(layer.function.slope(z_NKV), lines)
        for number in range(len(lines) + 1):
            on_line = line_NKV == number
            shares_L2[number] += torch.stack([on_line.sum().double(), f_NKV[on_line].sum()]).cpu()
    shares_L2 /= len(contexts) * torch.tensor([layer.components * layer.vocabulary, 1.0], dtype=torch.float64)
    *on_lines, on_none = shares_L2.tolist()
    own_slope = layer.function.properties.affine_slope if layer.is_softmax else None
    if own_slope is None:
        slope, kl = nearest_slope(layer, contexts, memory=memory, progress=progress)
    else:
        slope, kl = own_slope, 0.0
    return UseOfNonlinearity(
        contexts=len(contexts),
        lines=tuple(
            ShareOnLine(name=line.name, slope=float(line.slope.mean()), logits=logits, probability=probability)
            for line, (logits, probability) in zip(lines, on_lines, strict=True)
        ),
        logits_in_bend=0.0 if layer.is_softmax else on_none[0],
        probability_in_bend=0.0 if layer.is_softmax else on_none[1],
        lowest_logit=lowest,
        highest_logit=highest,
        nearest_slope=slope,
        kl_to_nearest_softmax=kl,
    )


def _line_of(slope_NKV: Tensor, lines: list[Line]) -> Tensor:
    """The number of the line that each logit lies on; the number of lines if it lies on none."""
    slopes = [line.slope.to(slope_NKV) for line in lines]
    # With one line alone there is no distance to measure by: only the line itself counts.
    width = TOLERANCE * (torch.stack(slopes).amax(0) - torch.stack(slopes).amin(0)) if slopes else 0.0
    result = torch.full(slope_NKV.shape, len(lines), dtype=torch.int8, device=slope_NKV.device)
    for number, slope in enumerate(slopes):
        result.masked_fill_((slope_NKV - slope).abs() <= width, number)
    return result


def nearest_slope(
    layer: HeadWeights, contexts: Contexts, *, memory: int = 1 << 30, progress: Say = nothing_said
) -> tuple[float, float]:
    """The slope a that minimises the mean KL(f(z) || softmax(a z)), and that KL.

    For a mixture each component is replaced and the KL of components, weighted by their priors, is minimised: an upper
    bound of the KL between the mixtures. KL is convex in a, its derivative E_q z - E_f z and its curvature the variance
    of z under q = softmax(a z), so Newton's steps between two bounds suffice.
    """

    def derivatives(slope: float) -> list[float]:
        sums = torch.zeros(3, dtype=torch.float64)
        for _, chosen in layer.blocks(contexts, memory):
            z_RV, log_f_RV, log_prior_R = (part.flatten(0, 1) for part in layer.by_component(chosen))
            # Less the row's largest: the means cancel, and their difference is small.
            z_RV -= z_RV.amax(-1, keepdim=True)
            log_q_RV = torch.log_softmax(slope * z_RV, -1)
            f_RV, q_RV = log_f_RV.exp(), log_q_RV.exp()
            mean_R = (q_RV * z_RV).sum(-1)
            kl_R = (f_RV * (log_f_RV - log_q_RV)).sum(-1)
            tilt_R = mean_R - (f_RV * z_RV).sum(-1)
            variance_R = (q_RV * (z_RV - mean_R[:, None]).square_()).sum(-1)
            sums += (torch.stack([kl_R, tilt_R, variance_R]) @ log_prior_R.exp()).cpu()
        return (sums / len(contexts)).tolist()

    # q's mean of z rises with the slope: the root lies where it meets that of f.
    low, high, slope = 0.0, math.inf, 1.0
    best = (slope, math.inf)
    for step in range(30):
        progress(f"nearest softmax: step {step + 1}, slope {slope:.4g}")
        kl, tilt, variance = derivatives(slope)
        if kl < best[1]:
            best = (slope, kl)
        if tilt * tilt <= 2.0 * variance * (1e-6 * kl + 1e-12):
            # A Newton step would not lower KL by that much.
            break
        low, high = (low, slope) if tilt > 0.0 else (slope, high)
        newton = slope - tilt / variance if variance > 0.0 else math.inf
        following = newton if low < newton < high else (0.5 * (low + high) if high < math.inf else 2.0 * slope)
        if abs(following - slope) <= 1e-6 * slope or following > 1e9:
            break
        slope = following
    # KL is not negative; rounding may be.
    return best[0], max(best[1], 0.0)
