"""Whether a layer uses the bend of its phi, or has become a softmax.

Away from its bend phi is a line, and where all logits of a context lie on one line the output is a softmax of scaled
logits. Two measures say how far a layer is from that: the share of logits (and of probability) that lie in the bend,
and KL(f(z) || softmax(a z)) for the best single slope a, which is the nearest affine phi.

Shapes: N contexts, V words, R rows of logits (N times the components), L lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.analysis.output_layer import Contexts, OutputLayer, blocks_of
from sigsoftmax.analysis.probing import slopes_of_ends
from sigsoftmax.contract import normalizing
from sigsoftmax.family import OutputFunction
from sigsoftmax.records.schemas.audits import Bend, ShareOnLine

__all__ = ["bend", "lines_of", "nearest_slope"]

TOLERANCE = 0.05
"""A slope within this fraction of the distance between two lines counts as that of the nearer one."""

Progress = Callable[[str], None]


class Line(NamedTuple):
    """A stretch on which phi is a line."""

    name: str
    slope: Tensor
    """() or (V,)"""


def lines_of(function: OutputFunction, words: int) -> list[Line]:
    """The lines of phi: at its two ends, if it has asymptotes there, and at a steepest point between them.

    sigsoftmax has two (slopes 2 and 1), softcap three (flat, 1 at zero, flat), relu one (flat): its log never becomes a
    line. Those of a user's own phi are probed.
    """
    known = function.properties.linear_pieces
    if known is None:
        return _probed_lines(function, words)
    return [Line(piece.where, torch.full((words,), piece.slope, dtype=torch.float64)) for piece in known]


def _probed_lines(function: OutputFunction, words: int) -> list[Line]:
    left, right, centre = slopes_of_ends(function, words)
    found = [Line(name, slope) for name, slope in (("left", left), ("right", right)) if slope is not None]
    are_parallel = left is not None and right is not None and torch.allclose(left, right, rtol=1e-6, atol=1e-9)
    if are_parallel and not torch.allclose(centre, found[0].slope):
        found.insert(1, Line("centre", centre))
    return found


def bend(layer: OutputLayer, contexts: Contexts, *, memory: int = 1 << 30, progress: Progress = lambda _: None) -> Bend:
    """Shares of logits and of probability on each line of phi and in the bend, and the nearest softmax."""
    function = layer.function
    lines = [] if layer.is_softmax else lines_of(function, layer.words)
    form, arguments = function.form, function.arguments(layer.words)
    by_count = torch.zeros(len(lines) + 1, dtype=torch.float64)
    by_mass = torch.zeros_like(by_count)
    rows = 0
    lowest, highest = math.inf, -math.inf
    size = layer.rows_at_once(memory)
    for block in blocks_of(len(contexts), size):
        progress(f"slopes of phi: context {block.stop} of {len(contexts)}")
        chosen = contexts[block]
        z_RV = layer.logits(chosen.hidden_NKd.flatten(0, 1))
        f_RV = normalizing.log_probs(z_RV, form, arguments).exp_()
        log_prior_NK = layer.log_prior(chosen)
        if log_prior_NK is not None:
            # A component counts as much as its prior.
            f_RV *= log_prior_NK.to(f_RV).exp().flatten()[:, None]
        rows += len(chosen)
        lowest, highest = min(lowest, z_RV.min().item()), max(highest, z_RV.max().item())
        line_RV = _line_of(function.slope(z_RV), lines)
        for number in range(len(lines) + 1):
            on_line = line_RV == number
            by_count[number] += on_line.sum().double().cpu()
            by_mass[number] += f_RV[on_line].sum().double().cpu()
    by_count /= rows * layer.components * layer.words
    by_mass /= rows
    own_slope = function.properties.affine_slope if layer.is_softmax else None
    if own_slope is None:
        slope, kl = nearest_slope(layer, contexts, memory=memory, progress=progress)
    else:
        slope, kl = own_slope, 0.0
    return Bend(
        contexts=len(contexts),
        lines=tuple(
            ShareOnLine(
                name=line.name, slope=float(line.slope.mean()), logits=float(by_count[i]), probability=float(by_mass[i])
            )
            for i, line in enumerate(lines)
        ),
        logits_in_bend=0.0 if layer.is_softmax else float(by_count[-1]),
        probability_in_bend=0.0 if layer.is_softmax else float(by_mass[-1]),
        lowest_logit=lowest,
        highest_logit=highest,
        nearest_slope=slope,
        kl_to_nearest_softmax=kl,
    )


def _line_of(slope_RV: Tensor, lines: list[Line]) -> Tensor:
    """The number of the line that each logit lies on; the number of lines for the bend."""
    slopes = [line.slope.to(slope_RV) for line in lines]
    # With one line alone there is no distance to measure by: only the line itself counts.
    width = TOLERANCE * (torch.stack(slopes).amax(0) - torch.stack(slopes).amin(0)) if slopes else 0.0
    result = torch.full(slope_RV.shape, len(lines), dtype=torch.int8, device=slope_RV.device)
    for number, slope in enumerate(slopes):
        result.masked_fill_((slope_RV - slope).abs() <= width, number)
    return result


def nearest_slope(
    layer: OutputLayer, contexts: Contexts, *, memory: int = 1 << 30, progress: Progress = lambda _: None
) -> tuple[float, float]:
    """The slope a that minimises the mean KL(f(z) || softmax(a z)), and that KL.

    For a mixture each component is replaced and the KL of components, weighted by their priors, is minimised: an upper
    bound of the KL between the mixtures. KL is convex in a, its derivative E_q z - E_f z and its curvature the variance
    of z under q = softmax(a z), so Newton's steps between two bounds suffice.
    """
    form, arguments = layer.function.form, layer.function.arguments(layer.words)

    def derivatives(slope: float) -> tuple[float, float, float]:
        sums = torch.zeros(3, dtype=torch.float64)
        for block in blocks_of(len(contexts), layer.rows_at_once(memory)):
            chosen = contexts[block]
            z_RV = layer.logits(chosen.hidden_NKd.flatten(0, 1))
            log_f_RV = normalizing.log_probs(z_RV, form, arguments)
            # Less the row's largest: the means cancel, and their difference is small.
            z_RV -= z_RV.amax(-1, keepdim=True)
            log_q_RV = torch.log_softmax(slope * z_RV, -1)
            f_RV, q_RV = log_f_RV.exp(), log_q_RV.exp()
            mean_R = (q_RV * z_RV).sum(-1)
            kl_R = (f_RV * (log_f_RV - log_q_RV)).sum(-1)
            tilt_R = mean_R - (f_RV * z_RV).sum(-1)
            variance_R = (q_RV * (z_RV - mean_R[:, None]).square_()).sum(-1)
            log_prior_NK = layer.log_prior(chosen)
            weights_R = torch.ones_like(kl_R) if log_prior_NK is None else log_prior_NK.to(kl_R).exp().flatten()
            sums += torch.stack([weights_R @ kl_R, weights_R @ tilt_R, weights_R @ variance_R]).cpu()
        kl, tilt, variance = (sums / len(contexts)).tolist()
        return kl, tilt, variance

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
