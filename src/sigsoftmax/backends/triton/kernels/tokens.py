"""The arithmetic of tokens for the device: what ``contract.tokens`` computes in torch, on a few numbers per row.

Every kernel that finishes a loss calls these functions and has no formula of its own for class weights, reductions,
z-loss, label smoothing or mixtures. They are inlined, take blocks of any shape, and touch no memory.

In all of them ``normalizer`` is the log-sum-exp of phi over a row less the offset of the row, and the "log normaliser"
is their sum, the absolute log-sum-exp. A token counts ``scale`` in the result; ``is_kept`` is false for an ignored one.
What is said of targets is in units of phi, and so are losses, until all of them have been added up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite(x):
    """Replace what overflowed by the largest float."""
    return tl.minimum(tl.maximum(x, -3.4028234663852886e38), 3.4028234663852886e38)


@triton.jit
def scaled(value, scale):
    """Multiply, and return 0 where the scale is 0: an ignored row may have a value that is NaN."""
    return tl.where(scale == 0, 0.0, scale * value)


@triton.jit
def mean_scale(counted):
    """The weight of a kept token in a mean, given the sum of the weights of all kept tokens; inf if that is 0."""
    return 1.0 / counted


@triton.jit
def empty_mean(kept_tokens):
    """The term that a mean is added to: NaN where no token is kept, and 0 otherwise."""
    return tl.where(kept_tokens == 0, float("nan"), 0.0)


@triton.jit
def token_scales(is_kept, scale):
    """The weight of each token in the result: the scale if it is kept, 0 if it is ignored."""
    return tl.where(is_kept, scale, 0.0)


@triton.jit
def token_shares(loss, scale, is_kept):
    """The share of each token in a sum or a mean, in units; NaN where the scale is that of a mean of no tokens."""
    return tl.where(scale == float("inf"), float("nan"), tl.where(is_kept, scale * loss, 0.0))


@triton.jit
def finite_log_normalizers(normalizer, offset):
    """The log normaliser as z-loss takes it: at most the largest float, or its slope would be inf times 0."""
    # The offset is made finite first, and not only the sum: every kernel then rounds it before it adds, also where it
    # has just multiplied for it, and the paths of a loss agree in all bits.
    return finite(normalizer + finite(offset))


@triton.jit
def z_losses(log_normalizer, prior, z_loss):
    """z_loss prior n^2; multiplied so that a square overflows only if the product does. The prior of one row is 1."""
    return z_loss * prior * log_normalizer * log_normalizer


@triton.jit
def z_slopes(x, z_loss):
    """2 z_loss x, which for x = n is the derivative of z_loss n^2 by the log normaliser n.

    It is linear: whoever knows how much a token counts before its log normaliser takes this of the scale, and
    multiplies it by n later.
    """
    return 2.0 * z_loss * x


@triton.jit
def limited_slopes(by_normalizer, unit):
    """Limit what z-loss adds to a coefficient, so that its product with a slope of phi does not overflow."""
    return finite(by_normalizer * unit) / unit


@triton.jit
def _token_losses(negative_log_p, weight, z_part, HAS_WEIGHT: tl.constexpr, HAS_Z_LOSS: tl.constexpr):
    """The class weight multiplies the cross-entropy and not the z-loss."""
    loss = negative_log_p
    if HAS_WEIGHT:
        loss = scaled(loss, weight)
    if HAS_Z_LOSS:
        loss += z_part
    return loss


@triton.jit
def token_losses(
    normalizer,
    at_target,
    offset,
    weight,
    z_loss,
    unit,
    HAS_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
):
    """The loss of each token, in units.

    ``at_target`` is phi of its target less the offset, in units, and ``weight`` that of its class.
    """
    z_part = 0.0
    if HAS_Z_LOSS:
        z_part = z_losses(finite_log_normalizers(normalizer, offset), 1.0, z_loss) / unit
    return _token_losses(normalizer / unit - at_target, weight, z_part, HAS_WEIGHT, HAS_Z_LOSS)


@triton.jit
def class_coefficients(scale, weight, HAS_WEIGHT: tl.constexpr):
    """The derivative of the total by each normaliser, without z-loss; that by the target is its negative."""
    by_normalizer = scale
    if HAS_WEIGHT:
        by_normalizer = scaled(weight, scale)
    return by_normalizer


@triton.jit
def with_z_slopes(by_normalizer, z_slope, normalizer, offset, unit):
    """Add the derivative of z-loss to that by the normaliser; ``z_slope`` is that of the token's scale, or 0."""
    return by_normalizer + limited_slopes(scaled(finite_log_normalizers(normalizer, offset), z_slope), unit)


@triton.jit
def token_coefficients(normalizer, offset, scale, is_kept, z_loss, unit, HAS_Z_LOSS: tl.constexpr):
    """The derivatives of the total by normaliser and target of each token, all at once and without class weights."""
    by_normalizer = scale
    if HAS_Z_LOSS:
        # Ignored rows are sorted out below.
        slope = z_slopes(scale, z_loss) * finite_log_normalizers(normalizer, offset)
        by_normalizer = scale + limited_slopes(slope, unit)
    return token_scales(is_kept, by_normalizer), token_scales(is_kept, -scale)


@triton.jit
def smoothed_targets(at_target, mean, label_smoothing):
    """The replacement of phi of the target under label smoothing, by the mean of phi, all in units."""
    return (1.0 - label_smoothing) * at_target + label_smoothing * mean


@triton.jit
def smoothing_coefficients(by_target, label_smoothing, classes):
    """The derivatives of the total by phi of the target and, beside it, by phi of every class."""
    return by_target * (1.0 - label_smoothing), by_target * label_smoothing / classes


@triton.jit
def mixture_unit(unit):
    """The unit of the losses of a mixture: sums of a log-prior and a log f are finite in it."""
    return 2.0 * unit


@triton.jit
def mixture_responsibilities(log_prior, normalizer, at_target, inside, floor, unit, HAS_FLOOR: tl.constexpr):
    """The log-probability of each target under its mixture, and the responsibility of each component for it.

    Components lie along the second axis; those not ``inside`` do not exist. With a floor, the first is
    log(p + floor), and the second the derivative of that by log f, which is p / (p + floor) times the responsibility.
    The first is in units of a mixture, the phi of targets in the ``unit`` of rows.
    """
    log_f = at_target - normalizer / unit
    unit = mixture_unit(unit)
    joint = tl.where(inside, log_prior / unit + 0.5 * log_f, -float("inf"))
    top = tl.max(joint, 1)
    top = tl.where(top == -float("inf"), 0.0, top)
    shares = tl.exp((joint - top[:, None]) * unit)
    total = tl.sum(shares, 1)
    log_p = top + tl.log(total) / unit
    # Where all components are masked there is none to answer for the target.
    responsibility = tl.where(log_p[:, None] == -float("inf"), 0.0, shares / total[:, None])
    floored = log_p
    if HAS_FLOOR:
        log_floor = tl.log(floor)
        whole = log_p * unit
        higher = tl.maximum(whole, log_floor)
        floored = higher + tl.log(tl.exp(whole - higher) + tl.exp(log_floor - higher))
        responsibility *= tl.exp(whole - floored)[:, None]
        floored = floored / unit
    return floored, responsibility


@triton.jit
def mixture_losses(
    log_p,
    normalizer,
    offset,
    log_prior,
    inside,
    weight,
    z_loss,
    unit,
    HAS_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
):
    """The loss of each token of a mixture, in its unit, made of the ``unit`` of rows.

    Its z-loss is the mean of those of the components under the prior.
    """
    z_part = 0.0
    if HAS_Z_LOSS:
        of_components = z_losses(finite_log_normalizers(normalizer, offset), tl.exp(log_prior), z_loss)
        z_part = tl.sum(tl.where(inside, of_components, 0.0), 1) / mixture_unit(unit)
    return _token_losses(-log_p, weight, z_part, HAS_WEIGHT, HAS_Z_LOSS)


@triton.jit
def mixture_coefficients(
    responsibility,
    normalizer,
    offset,
    log_prior,
    weight,
    scale,
    z_loss,
    unit,
    HAS_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
):
    """The derivatives of the total by normaliser and target of each component; that by log prior is the second.

    ``weight`` and ``scale`` are those of the token, with an axis of one component. The prior in z-loss is a constant.
    """
    if HAS_WEIGHT:
        responsibility *= weight
    by_normalizer = scaled(responsibility, scale)
    by_target = -by_normalizer
    if HAS_Z_LOSS:
        slope = z_slopes(finite_log_normalizers(normalizer, offset), z_loss) * tl.exp(log_prior)
        by_normalizer += limited_slopes(scaled(slope, scale), unit)
    return by_normalizer, by_target
