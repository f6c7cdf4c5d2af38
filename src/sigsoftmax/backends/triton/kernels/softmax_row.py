"""A row of softmax or sigsoftmax: one exponential per element and pass, two passes over the row.

The peak is the logit that the sum of a row is relative to. The first pass takes the largest logit of the row's first
tile for it, so nothing is rescaled or compared on the way; a row whose sum shows that its largest logit lies far above
is summed again. Nearly all rows take the fast path, whose formulas are the cheapest; the safe path holds for any row.
With about one row in flight per multiprocessor, and hints on what the L2 cache should keep, the second pass reads the
row from there. Sigsoftmax needs a reciprocal per element besides; two or four elements share one: 1/a = b / (a b).
Derivations: docs/mathematics.md.

Shapes: V classes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import formulas, intrinsics

LARGEST_SUM = tl.constexpr(1e9)
"""A row whose sum is larger, or not a number, is summed again from its largest logit: too much was rounded."""
SMALLEST_SUM = tl.constexpr(0.25)
"""The peak itself adds a half or more; a smaller sum is that of a row whose first tile is masked."""
SMALLEST_SIGMOID_TERM = tl.constexpr(1e-18)
"""Below it the nonlinearity of phi only touches classes whose probability is smaller still; its square is a float."""

LARGEST_FAST_SHIFT = tl.constexpr(16384.0)
HIGHEST_FAST_PEAK = tl.constexpr(20.0)


@triton.jit
def tile_at(pointer, start, V, LANES: tl.constexpr, POLICY: tl.constexpr):
    position = start + tl.arange(0, LANES)
    return tl.load(pointer + position, mask=position < V, other=-float("inf"), eviction_policy=POLICY)


@triton.jit
def four_tiles_at(pointer, start, V, LANES: tl.constexpr, POLICY: tl.constexpr):
    return (
        tile_at(pointer, start, V, LANES, POLICY),
        tile_at(pointer, start + LANES, V, LANES, POLICY),
        tile_at(pointer, start + 2 * LANES, V, LANES, POLICY),
        tile_at(pointer, start + 3 * LANES, V, LANES, POLICY),
    )


@triton.jit
def first_tile(pointer, V, LANES: tl.constexpr):
    return tile_at(pointer, 0, V, LANES, "evict_last")


@triton.jit
def sigmoid_terms(reference, c, IS_SIG: tl.constexpr):
    """Terms (a, b) with sigmoid(z - c) = a u / (a u + b) for u = exp(z - reference); both at most 1."""
    if IS_SIG:
        height = reference - c
        decay = tl.exp(-tl.abs(height))
        a = tl.where(height < 0, decay, 1.0)
        b = tl.where(height < 0, 1.0, tl.maximum(decay, SMALLEST_SIGMOID_TERM))
        return a, b
    else:
        return 1.0, 1.0


@triton.jit
def takes_fast_path(peak, scale, c, IS_SIG: tl.constexpr):
    """True if the cheapest formulas hold for the row; they do for rows of trained models."""
    is_fast = tl.abs(peak * scale) < LARGEST_FAST_SHIFT
    if IS_SIG:
        # Four denominators, each b or more, are multiplied.
        is_fast = is_fast & (peak >= c) & (peak - c < HIGHEST_FAST_PEAK)
    return is_fast


@triton.jit
def shift_of(peak, scale):
    """(shift, residual) with peak * scale = shift + residual, to twice the digits of a float."""
    shift = peak * scale
    return shift, intrinsics.fma(peak, scale, -shift)


@triton.jit
def powers_of(tile, peak, scale, shift, IS_FAST: tl.constexpr):
    """exp(alpha (z - peak)) of a tile; on the fast path 2^residual times that, in one operation, rounded once."""
    z = intrinsics.widened(tile)
    if IS_FAST:
        return tl.exp2(intrinsics.fma(z, scale, -shift))
    else:
        return tl.exp2((z - peak) * scale)


@triton.jit
def four_powers_of(tiles, peak, scale, shift, IS_FAST: tl.constexpr):
    return (
        powers_of(tiles[0], peak, scale, shift, IS_FAST),
        powers_of(tiles[1], peak, scale, shift, IS_FAST),
        powers_of(tiles[2], peak, scale, shift, IS_FAST),
        powers_of(tiles[3], peak, scale, shift, IS_FAST),
    )


@triton.jit
def _pair(u0, u1, b):
    """u0 + u1; and numerator and denominator of sigma0 + sigma1 = u0 / (u0 + b) + u1 / (u1 + b)."""
    s = u0 + u1
    q = u0 * u1 + b * s
    return s, u0 * u1 + q, q + b * b


@triton.jit
def sums_of_four(u0, u1, u2, u3, b, IS_SIG: tl.constexpr):
    """Four tiles added, on the fast path: u, sigma, and the product of their denominators."""
    if IS_SIG:
        s01, n01, d01 = _pair(u0, u1, b)
        s23, n23, d23 = _pair(u2, u3, b)
        # The product is infinite only if one u is more than a sum may be.
        product = d01 * d23
        return s01 + s23, (n01 * d23 + n23 * d01) * intrinsics.reciprocal(product), product
    else:
        return (u0 + u1) + (u2 + u3), 0.0, 1.0


@triton.jit
def total_of(powers, sigmas, b, IS_SIG: tl.constexpr):
    """g / e^offset on the fast path from sums of u and sigma: u sigma = u - b sigma."""
    return powers - b * sigmas if IS_SIG else powers


@triton.jit
def _sum_row(pointer, peak, scale, shift, a, b, V, IS_SIG: tl.constexpr, IS_FAST: tl.constexpr, LANES: tl.constexpr):
    """sum g / e^offset over the row."""
    total = tl.zeros([LANES], tl.float32)
    if IS_SIG and not IS_FAST:
        for start in range(0, V, 2 * LANES):
            u0 = powers_of(tile_at(pointer, start, V, LANES, "evict_last"), peak, scale, shift, IS_FAST)
            u1 = powers_of(tile_at(pointer, start + LANES, V, LANES, "evict_last"), peak, scale, shift, IS_FAST)
            d0 = a * u0 + b
            d1 = a * u1 + b
            total += (u0 * u0 * d1 + u1 * u1 * d0) * intrinsics.reciprocal(d0 * d1)
    else:
        for start in range(0, V, 4 * LANES):
            tiles = four_tiles_at(pointer, start, V, LANES, "evict_last")
            u0, u1, u2, u3 = four_powers_of(tiles, peak, scale, shift, IS_FAST)
            powers, sigmas, _ = sums_of_four(u0, u1, u2, u3, b, IS_SIG)
            total += total_of(powers, sigmas, b, IS_SIG)
    return tl.sum(total, 0)


@triton.jit
def store_tile(pointer, start, gradient, V, LANES: tl.constexpr, IS_WHOLE: tl.constexpr = False):
    """A tile is whole if all of it lies within the row."""
    position = start + tl.arange(0, LANES)
    rounded = gradient.to(pointer.dtype.element_ty)
    # Written once and not read here again, so it need not stay in the cache.
    if IS_WHOLE:
        tl.store(pointer + position, rounded, cache_modifier=".cs")
    else:
        tl.store(pointer + position, rounded, mask=position < V, cache_modifier=".cs")


@triton.jit
def scaled_complements(u0, u1, u2, u3, b, root):
    """root (1 - sigma) of four tiles, on the fast path."""
    d0 = u0 + b
    d1 = u1 + b
    d2 = u2 + b
    d3 = u3 + b
    d01 = d0 * d1
    d23 = d2 * d3
    shared = (root * b) * intrinsics.reciprocal(d01 * d23)
    y01 = shared * d23
    y23 = shared * d01
    return y01 * d1, y01 * d0, y23 * d3, y23 * d2


@triton.jit
def gradients_of_four(u0, u1, u2, u3, b, factor, root, IS_SIG: tl.constexpr):
    """The gradients of four tiles, on the fast path; root^2 is the factor."""
    if IS_SIG:
        # sigma (2 - sigma) = 1 - y^2 for y = 1 - sigma = b / d.
        y0, y1, y2, y3 = scaled_complements(u0, u1, u2, u3, b, root)
        return (
            u0 * (factor - y0 * y0),
            u1 * (factor - y1 * y1),
            u2 * (factor - y2 * y2),
            u3 * (factor - y3 * y3),
        )
    else:
        return u0 * factor, u1 * factor, u2 * factor, u3 * factor


@triton.jit
def _gradient_row(
    pointer,
    out_pointer,
    peak,
    scale,
    shift,
    a,
    b,
    factor,
    V,
    IS_SIG: tl.constexpr,
    IS_FAST: tl.constexpr,
    LANES: tl.constexpr,
):
    """factor g (slope of phi) / e^offset of every class."""
    if IS_SIG and not IS_FAST:
        twice = 2.0 * factor
        falling = factor * a
        for start in range(0, V, 2 * LANES):
            u0 = powers_of(tile_at(pointer, start, V, LANES, "evict_first"), peak, scale, shift, IS_FAST)
            u1 = powers_of(tile_at(pointer, start + LANES, V, LANES, "evict_first"), peak, scale, shift, IS_FAST)
            d0 = a * u0 + b
            d1 = a * u1 + b
            shared = intrinsics.reciprocal(d0 * d1)
            q0 = u0 * (d1 * shared)
            q1 = u1 * (d0 * shared)
            store_tile(out_pointer, start, (u0 * q0) * (twice - falling * q0), V, LANES)
            store_tile(out_pointer, start + LANES, (u1 * q1) * (twice - falling * q1), V, LANES)
    else:
        root = tl.sqrt(tl.abs(factor))
        for start in range(0, V, 4 * LANES):
            tiles = four_tiles_at(pointer, start, V, LANES, "evict_first")
            u0, u1, u2, u3 = four_powers_of(tiles, peak, scale, shift, IS_FAST)
            g0, g1, g2, g3 = gradients_of_four(u0, u1, u2, u3, b, factor, root, IS_SIG)
            store_tile(out_pointer, start, g0, V, LANES)
            store_tile(out_pointer, start + LANES, g1, V, LANES)
            store_tile(out_pointer, start + 2 * LANES, g2, V, LANES)
            store_tile(out_pointer, start + 3 * LANES, g3, V, LANES)


@triton.jit
def largest(pointer, V, LANES: tl.constexpr):
    highest = tl.full([LANES], -float("inf"), tl.float32)
    for start in range(0, V, LANES):
        highest = tl.maximum(highest, intrinsics.widened(tile_at(pointer, start, V, LANES, "evict_last")))
    return tl.max(highest, 0)


@triton.jit
def max_or_zero(highest):
    """The largest logit seen, or 0 where all were masked."""
    return tl.where(highest == -float("inf"), 0.0, highest)


@triton.jit
def safe_sum(pointer, peak, alpha, c, V, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """sum g / e^offset over any row, on the safe path."""
    a, b = sigmoid_terms(peak, c, IS_SIG)
    return _sum_row(pointer, peak, alpha * formulas.LOG2_E, 0.0, a, b, V, IS_SIG, False, LANES)


@triton.jit
def is_good_sum(total):
    """True if the terms of a sum were not rounded too much; NaN is no good sum."""
    return (total >= SMALLEST_SUM) & (total <= LARGEST_SUM)


@triton.jit
def _reduce_row(pointer, highest, alpha, c, V, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """(sum g / e^offset, peak)."""
    peak = max_or_zero(highest)
    scale = alpha * formulas.LOG2_E
    if takes_fast_path(peak, scale, c, IS_SIG):
        shift, residual = shift_of(peak, scale)
        grown = tl.exp2(residual)
        a, b = sigmoid_terms(peak, c, IS_SIG)
        total = _sum_row(pointer, peak, scale, shift, a, b * grown, V, IS_SIG, True, LANES) / grown
    else:
        total = safe_sum(pointer, peak, alpha, c, V, IS_SIG, LANES)
    return total, peak


@triton.jit
def forward_reduction(pointer, first, alpha, c, V, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """(sum g / e^offset, peak) of a row, given its first tile."""
    total, peak = _reduce_row(pointer, tl.max(intrinsics.widened(first), 0), alpha, c, V, IS_SIG, LANES)
    if not is_good_sum(total):
        total, peak = _reduce_row(pointer, largest(pointer, V, LANES), alpha, c, V, IS_SIG, LANES)
    return total, peak


@triton.jit
def forward_reduction_from_largest(pointer, alpha, c, V, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """The same relative to the largest logit, in one pass more: differences from it are rounded least."""
    return _reduce_row(pointer, largest(pointer, V, LANES), alpha, c, V, IS_SIG, LANES)


@triton.jit
def row_offset(peak, alpha, c, IS_SIG: tl.constexpr):
    if IS_SIG:
        return peak + tl.minimum(peak - c, 0.0)
    else:
        return alpha * peak


@triton.jit
def unit_of(alpha, IS_SIG: tl.constexpr):
    beta: tl.constexpr = 1.0 if IS_SIG else 0.0
    return formulas.unit_of(alpha, beta, formulas.LOGISTIC)


@triton.jit
def gap_of(z, peak, alpha, c, IS_SIG: tl.constexpr):
    """log g of a logit, less the offset of its row, in units."""
    unit = unit_of(alpha, IS_SIG)
    # Halved, because the gap of extreme floats overflows.
    half_gap = 0.5 * z - 0.5 * peak
    gap = half_gap * (2.0 * alpha / unit)
    if IS_SIG:
        # The line left of c is taken from the gap, as in the form's ``relative``.
        half_x = 0.5 * z - 0.5 * c
        tail = -tl.log(1.0 + tl.exp(-tl.abs(z - c)))
        half_line = tl.where(peak > c, tl.minimum(half_x, 0.0), tl.minimum(half_gap, 0.5 * c - 0.5 * peak))
        gap = gap + half_line * (2.0 / unit) + tail / unit
    # -inf is a mask: inf - inf must not come of it.
    return tl.where(z == -float("inf"), z, gap)


@triton.jit
def write_target(out_pointer, factor, peak, by_target, y, z_y, has_target, alpha, c, IS_SIG: tl.constexpr):
    """Write the gradient at the target, after that of all classes."""
    u = tl.exp2((z_y - peak) * (alpha * formulas.LOG2_E))
    slope = alpha + 0.0 * u
    at_target = factor * u
    if IS_SIG:
        a, b = sigmoid_terms(peak, c, IS_SIG)
        q = u / (a * u + b)
        at_target = (u * q) * (2.0 * factor - factor * a * q)
        slope = 2.0 - formulas.sigmoid(z_y - c)
    slope = tl.where(z_y == -float("inf"), 1.0, slope)
    # Every thread of the block has stored its tiles before the target is put right.
    tl.debug_barrier()
    by_y = (at_target + by_target * slope).to(out_pointer.dtype.element_ty)
    tl.store(out_pointer + y, by_y, mask=has_target)


@triton.jit
def write_safe_gradient(
    pointer,
    out_pointer,
    peak,
    by_normalizer,
    by_target,
    factor,
    alpha,
    c,
    V,
    IS_SIG: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the gradient of any row, on the safe path; 0 if the row does not count, whatever its logits are."""
    if (by_normalizer == 0) & (by_target == 0):
        for start in range(0, V, LANES):
            store_tile(out_pointer, start, tl.zeros([LANES], tl.float32), V, LANES)
    else:
        a, b = sigmoid_terms(peak, c, IS_SIG)
        scale = alpha * formulas.LOG2_E
        _gradient_row(pointer, out_pointer, peak, scale, 0.0, a, b, factor, V, IS_SIG, False, LANES)


@triton.jit
def write_gradient(
    pointer,
    out_pointer,
    total,
    peak,
    by_normalizer,
    by_target,
    y,
    z_y,
    has_target,
    alpha,
    c,
    V,
    IS_SIG: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the gradient of a row; with a target ``y`` of logit ``z_y``, where ``has_target``."""
    # 1 - y^2 has an absolute error of 6e-8, which a result of 16 bits does not show where it matters.
    IS_ROUGH: tl.constexpr = out_pointer.dtype.element_ty.primitive_bitwidth == 16
    scale = alpha * formulas.LOG2_E
    factor = by_normalizer / total * alpha
    if takes_fast_path(peak, scale, c, IS_SIG) & (factor > 0) & (IS_ROUGH or not IS_SIG):
        shift, residual = shift_of(peak, scale)
        grown = tl.exp2(residual)
        a, b = sigmoid_terms(peak, c, IS_SIG)
        _gradient_row(pointer, out_pointer, peak, scale, shift, a, b * grown, factor / grown, V, IS_SIG, True, LANES)
    else:
        write_safe_gradient(pointer, out_pointer, peak, by_normalizer, by_target, factor, alpha, c, V, IS_SIG, LANES)
    if HAS_INDEX:
        counts = (by_normalizer != 0) | (by_target != 0)
        write_target(out_pointer, factor, peak, by_target, y, z_y, has_target & counts, alpha, c, IS_SIG)


@triton.jit
def row_at(pointer, row, stride):
    return pointer + (tl.full((), 1, tl.int64) * row) * stride
