"""The formulas of ``family`` for the device: one entry here for each form there, and tests that hold them together.

A form takes up to three arguments; those it does not have are ignored. ``centre`` is the mean of c. The peak of a
row is its logit at which phi is largest, or one near it; the offset of the row belongs to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import intrinsics

LOGISTIC = tl.constexpr(0)
RELU = tl.constexpr(1)
SOFTCAP = tl.constexpr(2)
CODES = {"logistic": 0, "relu": 1, "softcap": 2}

LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Small arguments by their series: 1 - 2 / (e^2x + 1) has no digits there."""
    square = x * x
    series = x * (
        1.0
        + square
        * (-0.3333333333333333 + square * (0.13333333333333333 + square * (-0.05396825396825397 + square * 0.02186949)))
    )
    magnitude = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(square < 0.04, series, tl.where(x < 0, -magnitude, magnitude))


@triton.jit
def unit_of(alpha, beta, FORM: tl.constexpr):
    """The unit of :func:`scaled`: for the logistic form twice a power of two that is at least both slopes and 1."""
    if FORM == LOGISTIC:
        steepest = tl.maximum(tl.maximum(tl.abs(alpha), tl.abs(alpha + beta)), 1.0)
        # A mantissa beyond 1 is carried into the exponent: no logarithm, which is rounded, decides.
        bits = (steepest.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        return 2.0 * bits.to(tl.float32, bitcast=True)
    else:
        return 1.0


@triton.jit
def scaled(z, peak, alpha, beta, c, centre, FORM: tl.constexpr):
    """phi(z) less the offset of the row, divided by the unit: finite for every finite z."""
    if FORM == LOGISTIC:
        x = z - c
        left = x < 0
        tail = -tl.log(1.0 + tl.exp(-tl.abs(x)))
        unit = unit_of(alpha, beta, FORM)
        left_slope = 2.0 * (alpha + beta) / unit
        right_slope = 2.0 * alpha / unit
        half_peak = 0.5 * peak
        half_gap = 0.5 * z - half_peak
        right_of_centre = tl.where(
            left,
            left_slope * (0.5 * z - 0.5 * c) - right_slope * (half_peak - 0.5 * c),
            right_slope * half_gap,
        )
        left_of_centre = tl.where(
            left,
            left_slope * half_gap + (2.0 * beta / unit) * (0.5 * centre - 0.5 * c),
            right_slope * (0.5 * z - 0.5 * centre) - left_slope * (half_peak - 0.5 * centre),
        )
        return tl.where(peak > centre, right_of_centre, left_of_centre) + (beta / unit) * tail
    elif FORM == RELU:
        return tl.log(tl.maximum(z, 0.0) + alpha) - tl.log(tl.maximum(peak, 0.0) + alpha)
    else:
        return alpha * tanh((z - peak) / alpha) * (1.0 - tanh(z / alpha) * tanh(peak / alpha))


@triton.jit
def relative(z, peak, alpha, beta, c, centre, FORM: tl.constexpr):
    """phi(z) less the offset of the row."""
    return unit_of(alpha, beta, FORM) * scaled(z, peak, alpha, beta, c, centre, FORM)


@triton.jit
def peak_at(lowest, highest, alpha, beta, centre, FORM: tl.constexpr):
    """The end of a row at which phi is larger."""
    at_lowest = scaled(lowest, highest, alpha, beta, centre, centre, FORM)
    return tl.where(at_lowest > scaled(highest, highest, alpha, beta, centre, centre, FORM), lowest, highest)


@triton.jit
def offset(peak, alpha, beta, centre, FORM: tl.constexpr):
    if FORM == LOGISTIC:
        return tl.where(peak > centre, alpha * peak, (alpha + beta) * peak - beta * centre)
    elif FORM == RELU:
        return tl.log(tl.maximum(peak, 0.0) + alpha)
    else:
        return alpha * tanh(peak / alpha)


@triton.jit
def offset_gap(peak, other, alpha, beta, centre, FORM: tl.constexpr):
    """The offset of a row less that of another, in units, which rounded offsets do not give."""
    if FORM == LOGISTIC:
        # A line of slope alpha + beta left of c and of slope alpha right of it.
        left = tl.minimum(peak, centre) - tl.minimum(other, centre)
        right = tl.maximum(peak, centre) - tl.maximum(other, centre)
        unit = unit_of(alpha, beta, FORM)
        return (2.0 * (alpha + beta) / unit) * (0.5 * left) + (2.0 * alpha / unit) * (0.5 * right)
    else:
        return scaled(peak, other, alpha, beta, centre, centre, FORM)


@triton.jit
def slope(z, alpha, beta, c, FORM: tl.constexpr):
    if FORM == LOGISTIC:
        x = z - c
        beyond = beta * sigmoid(-tl.abs(x))
        return tl.where(x < 0, (alpha + beta) - beyond, alpha + beyond)
    elif FORM == RELU:
        return tl.where(z > 0, 1.0 / (tl.maximum(z, 0.0) + alpha), 0.0)
    else:
        return 4.0 * sigmoid(2.0 * (z / alpha)) * sigmoid(-2.0 * (z / alpha))


@triton.jit
def _rough_logistic(z, c):
    """Four numbers of x = z - c: true if it is negative, e^-|x|, log2(1 + e^-|x|) and sigmoid(-x)."""
    x = z - c
    left = x < 0
    fading = tl.exp2(tl.abs(x) * -LOG2_E)
    grown = 1.0 + fading
    return left, fading, intrinsics.log2(grown), intrinsics.reciprocal(grown) * tl.where(left, 1.0, fading)


@triton.jit
def _line(z, peak, normalizer, alpha, beta, c, centre, left, C_PER_CLASS: tl.constexpr):
    """Phi less offset and normalizer without its tail, divided by the unit.

    Left of c the slopes alpha and beta may cancel, so they are added first, and the line starts at c, or at the peak
    where that lies left too. Right of c it starts at the peak or, where that lies left, at the centre.
    """
    is_right_of_centre = peak > centre
    unit = unit_of(alpha, beta, LOGISTIC)
    left_slope = 2.0 * (alpha + beta) / unit
    right_slope = 2.0 * alpha / unit
    half_peak = 0.5 * peak
    half_c = 0.5 * c
    half_centre = 0.5 * centre
    scaled_normalizer = normalizer / unit
    from_c = -right_slope * (half_peak - half_c)
    half_z = 0.5 * z
    left_start = half_z - tl.where(is_right_of_centre, half_c, half_peak)
    if C_PER_CLASS:
        left_at = tl.where(is_right_of_centre, from_c, (2.0 * beta / unit) * (half_centre - half_c)) - scaled_normalizer
    else:
        left_at = tl.where(is_right_of_centre, from_c, 0.0) - scaled_normalizer
    right_start = half_z - tl.where(is_right_of_centre, half_peak, half_centre)
    right_at = tl.where(is_right_of_centre, 0.0, -left_slope * (half_peak - half_centre)) - scaled_normalizer
    # The normalizer may be as large as the line; scaled one by one they would not cancel.
    return tl.where(left, left_slope * left_start + left_at, right_slope * right_start + right_at)


@triton.jit
def logistic_argument_slopes(z, peak, c, centre, C_PER_CLASS: tl.constexpr, IS_ROUGH: tl.constexpr):
    """The derivatives of phi by alpha and beta, less those of the offset, and sigmoid(c - z): by c it is -beta that."""
    # -inf is a mask, and what overflows belongs to a class of probability 0: neither must meet a 0.
    gap = tl.minimum(tl.maximum(z - peak, -3.0e38), 3.0e38)
    if IS_ROUGH:
        _, _, log_grown, fall = _rough_logistic(z, c)
        is_right_of_centre = peak > centre
        if C_PER_CLASS:
            below = tl.where(is_right_of_centre, z - c, (z - peak) + (centre - c))
        else:
            below = z - tl.where(is_right_of_centre, c, peak)
        below = tl.minimum(below, tl.where(is_right_of_centre, 0.0, centre - peak))
        return gap, tl.maximum(below, -3.0e38) - LOG_2 * log_grown, fall
    else:
        safe_z = tl.where(z != -float("inf"), z, peak)
        return gap, relative(safe_z, peak, 0.0, 1.0, c, centre, LOGISTIC), sigmoid(c - safe_z)


@triton.jit
def value_weight_and_slope(
    z,
    peak,
    normalizer,
    alpha,
    beta,
    c,
    centre,
    FORM: tl.constexpr,
    C_PER_CLASS: tl.constexpr,
    IS_ROUGH: tl.constexpr,
):
    """phi less offset and normalizer, divided by the unit (-inf for a masked class); its exponential; the slope of phi.

    Rough: for logits of 16 bits, by what the hardware approximates.
    """
    is_kept = z != -float("inf")
    if not IS_ROUGH:
        safe_z = tl.where(is_kept, z, peak)
        unit = unit_of(alpha, beta, FORM)
        value = scaled(safe_z, peak, alpha, beta, c, centre, FORM) - normalizer / unit
        weight = tl.exp2(value * (unit * LOG2_E))
        slope_z = slope(safe_z, alpha, beta, c, FORM)
    elif FORM == LOGISTIC:
        left, _, log_grown, fall = _rough_logistic(z, c)
        line = _line(z, peak, normalizer, alpha, beta, c, centre, left, C_PER_CLASS)
        unit = unit_of(alpha, beta, FORM)
        value = line - (beta * LOG_2 / unit) * log_grown
        weight = tl.exp2(line * (unit * LOG2_E) - beta * log_grown)
        slope_z = alpha + beta * fall
    elif FORM == RELU:
        positive = tl.maximum(z, 0.0) + alpha
        weight = positive * (tl.exp(-normalizer) / (tl.maximum(peak, 0.0) + alpha))
        # A weight may round to 0 where its logarithm is none.
        value = intrinsics.log2(positive) * LOG_2 - (tl.log(tl.maximum(peak, 0.0) + alpha) + normalizer)
        slope_z = tl.where(z > 0, intrinsics.reciprocal(positive), 0.0)
    else:
        inverse = 1.0 / alpha
        fading = tl.exp2(tl.abs(z) * (inverse * (-2.0 * LOG2_E)))
        share = intrinsics.reciprocal(1.0 + fading)
        magnitude = (1.0 - fading) * share
        value = alpha * tl.where(z < 0, -magnitude, magnitude) - (alpha * tanh(peak * inverse) + normalizer)
        weight = tl.exp2(value * LOG2_E)
        slope_z = (4.0 * fading) * (share * share)
    # NaN where all classes are masked, as under torch's softmax.
    nothing = normalizer - normalizer
    value = tl.where(is_kept, value, -float("inf"))
    return value, tl.where(is_kept, weight, nothing), tl.where(is_kept, slope_z, 1.0)
