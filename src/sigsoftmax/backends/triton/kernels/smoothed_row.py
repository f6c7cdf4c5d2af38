"""Label smoothing of a row of softmax or sigsoftmax: every class is a target with a small weight.

On the fast path in 16 bits it takes an operation or two more per element and pass: with u = exp(z - peak) and
d = u + b, log g of a class is 2 (z - peak) - log d, and the slope of its phi 1 + b / d. Four elements share a
logarithm. Other rows are read once more.

Shapes: V logits in a row, those beyond the ``classes`` masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import formulas, intrinsics, softmax_row


@triton.jit
def _tile(pointer, peak, normalizer, alpha, c, start, classes, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """A mask of the lanes that are classes; and the scaled value, the weight and the slope of phi."""
    IS_ROUGH: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth == 16
    beta: tl.constexpr = 1.0 if IS_SIG else 0.0
    position = start + tl.arange(0, LANES)
    z = tl.load(pointer + position, mask=position < classes, other=-float("inf"))
    value, weight, slope = formulas.value_weight_and_slope(
        intrinsics.widened(z), peak, normalizer, alpha, beta, c, c, formulas.LOGISTIC, False, IS_ROUGH
    )
    return position < classes, value, weight, slope


@triton.jit
def _mean_gap(pointer, peak, alpha, c, classes, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """The mean of log g over all classes, less the offset of the row and divided by the unit."""
    sums = tl.zeros([LANES], tl.float32)
    # Divided before they are added: the sum of large gaps may overflow.
    share = 1.0 / classes
    for start in range(0, classes, LANES):
        is_class, value, _, _ = _tile(pointer, peak, 0.0, alpha, c, start, classes, IS_SIG, LANES)
        sums += tl.where(is_class, value * share, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _gap(z, d, scale, IS_SIG: tl.constexpr):
    """log2 g of a sum of logits and a product of denominators, not relative to the peak."""
    if IS_SIG:
        return z * (2.0 * scale) - intrinsics.log2(d)
    else:
        return z * scale


@triton.jit
def _sums(pointer, peak, alpha, c, classes, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """(sum g / e^offset, the mean of log g less the offset and divided by the unit) of a row on the fast path."""
    scale = alpha * formulas.LOG2_E
    shift, residual = softmax_row.shift_of(peak, scale)
    grown = tl.exp2(residual)
    b = softmax_row.sigmoid_terms(peak, c, IS_SIG)[1]
    b *= grown
    total = tl.zeros([LANES], tl.float32)
    gaps = tl.zeros([LANES], tl.float32)
    # The end of a row is taken for itself, and nothing else has to be compared with it.
    whole = classes // (4 * LANES) * (4 * LANES)
    for start in range(0, whole, 4 * LANES):
        tiles = softmax_row.four_tiles_at(pointer, start, classes, LANES, "evict_last")
        u0, u1, u2, u3 = softmax_row.four_powers_of(tiles, peak, scale, shift, True)
        powers, sigmas, d = softmax_row.sums_of_four(u0, u1, u2, u3, b, IS_SIG)
        total += softmax_row.total_of(powers, sigmas, b, IS_SIG)
        z01 = intrinsics.widened(tiles[0]) + intrinsics.widened(tiles[1])
        z23 = intrinsics.widened(tiles[2]) + intrinsics.widened(tiles[3])
        gaps += _gap(z01 + z23, d, scale, IS_SIG)
    for start in range(whole, classes, LANES):
        tile = softmax_row.tile_at(pointer, start, classes, LANES, "evict_last")
        is_class = start + tl.arange(0, LANES) < classes
        u = softmax_row.powers_of(tile, peak, scale, shift, True)
        total += u * (u * intrinsics.reciprocal(u + b)) if IS_SIG else u
        gaps += tl.where(is_class, _gap(intrinsics.widened(tile), u + b, scale, IS_SIG), 0.0)
    gap = tl.sum(gaps, 0) - classes * (2.0 * shift + residual if IS_SIG else shift + residual)
    return tl.sum(total, 0) / grown, gap * formulas.LOG_2 / (classes * softmax_row.unit_of(alpha, IS_SIG))


@triton.jit
def forward_reduction(pointer, first, alpha, c, V, classes, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """(sum g / e^offset, peak, the mean of log g less the offset and divided by the unit) of a row."""
    IS_ROUGH: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth == 16
    # Registers of so many threads would not do for more.
    TILE: tl.constexpr = LANES // 2 if IS_SIG and LANES > 4096 else LANES
    if IS_ROUGH:
        peak = tl.max(intrinsics.widened(first), 0)
        total = peak * 0.0
        gaps = peak * 0.0
        if softmax_row.takes_fast_path(peak, alpha * formulas.LOG2_E, c, IS_SIG):
            total, gaps = _sums(pointer, peak, alpha, c, classes, IS_SIG, TILE)
        # Of an infinite sum of gaps the mean may be finite; of a masked class it is not.
        if (not softmax_row.is_good_sum(total)) | (tl.abs(gaps) == float("inf")):
            peak = softmax_row.max_or_zero(softmax_row.largest(pointer, V, LANES))
            total = softmax_row.safe_sum(pointer, peak, alpha, c, V, IS_SIG, LANES)
            gaps = _mean_gap(pointer, peak, alpha, c, classes, IS_SIG, LANES)
    else:
        total, peak = softmax_row.forward_reduction_from_largest(pointer, alpha, c, V, IS_SIG, LANES)
        gaps = _mean_gap(pointer, peak, alpha, c, classes, IS_SIG, LANES)
    return total, peak, gaps


@triton.jit
def _smoothed(u, y, factor, steeper, evenly):
    """The gradient of sigsoftmax with smoothing."""
    return u * (factor - y * y) + (y * steeper + evenly)


@triton.jit
def _write_fast(
    pointer,
    out_pointer,
    total,
    peak,
    by_normalizer,
    by_class,
    alpha,
    c,
    V,
    classes,
    IS_SIG: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the gradient of a row on the fast path with no masked class, but for its target."""
    scale = alpha * formulas.LOG2_E
    shift, residual = softmax_row.shift_of(peak, scale)
    grown = tl.exp2(residual)
    b = softmax_row.sigmoid_terms(peak, c, IS_SIG)[1]
    b *= grown
    factor = by_normalizer / total * alpha / grown
    root = tl.sqrt(factor)
    evenly = by_class * alpha
    steeper = by_class / root
    whole = classes // (4 * LANES) * (4 * LANES)
    for start in range(0, whole, 4 * LANES):
        tiles = softmax_row.four_tiles_at(pointer, start, classes, LANES, "evict_first")
        u0, u1, u2, u3 = softmax_row.four_powers_of(tiles, peak, scale, shift, True)
        if IS_SIG:
            y0, y1, y2, y3 = softmax_row.scaled_complements(u0, u1, u2, u3, b, root)
            softmax_row.store_tile(out_pointer, start, _smoothed(u0, y0, factor, steeper, evenly), V, LANES)
            softmax_row.store_tile(out_pointer, start + LANES, _smoothed(u1, y1, factor, steeper, evenly), V, LANES)
            softmax_row.store_tile(out_pointer, start + 2 * LANES, _smoothed(u2, y2, factor, steeper, evenly), V, LANES)
            softmax_row.store_tile(out_pointer, start + 3 * LANES, _smoothed(u3, y3, factor, steeper, evenly), V, LANES)
        else:
            softmax_row.store_tile(out_pointer, start, u0 * factor + evenly, V, LANES)
            softmax_row.store_tile(out_pointer, start + LANES, u1 * factor + evenly, V, LANES)
            softmax_row.store_tile(out_pointer, start + 2 * LANES, u2 * factor + evenly, V, LANES)
            softmax_row.store_tile(out_pointer, start + 3 * LANES, u3 * factor + evenly, V, LANES)
    for start in range(whole, V, LANES):
        u = softmax_row.powers_of(
            softmax_row.tile_at(pointer, start, classes, LANES, "evict_first"), peak, scale, shift, True
        )
        gradient = u * factor + evenly
        if IS_SIG:
            y = (root * b) * intrinsics.reciprocal(u + b)
            gradient = _smoothed(u, y, factor, steeper, evenly)
        is_class = start + tl.arange(0, LANES) < classes
        softmax_row.store_tile(out_pointer, start, tl.where(is_class, gradient, 0.0), V, LANES)


@triton.jit
def write_gradient(
    pointer,
    out_pointer,
    total,
    peak,
    gaps,
    by_normalizer,
    by_target,
    by_class,
    y,
    z_y,
    is_used,
    alpha,
    c,
    V,
    classes,
    IS_SIG: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the gradient of a row, 0 where it is not used."""
    IS_ROUGH: tl.constexpr = out_pointer.dtype.element_ty.primitive_bitwidth == 16
    # Registers of so many threads would not do for more.
    TILE: tl.constexpr = LANES // 2 if LANES > 4096 else LANES
    # A masked class has a gap of -inf.
    is_fast = (
        softmax_row.takes_fast_path(peak, alpha * formulas.LOG2_E, c, IS_SIG)
        & (gaps > -float("inf"))
        & (by_normalizer > 0)
    )
    if IS_ROUGH & is_fast & is_used:
        _write_fast(pointer, out_pointer, total, peak, by_normalizer, by_class, alpha, c, V, classes, IS_SIG, TILE)
        softmax_row.write_target(
            out_pointer, by_normalizer / total * alpha, peak, by_target + by_class, y, z_y, True, alpha, c, IS_SIG
        )
    else:
        normalizer = tl.log(total)
        for start in range(0, V, LANES):
            is_class, _, weight, slope = _tile(pointer, peak, normalizer, alpha, c, start, classes, IS_SIG, LANES)
            position = start + tl.arange(0, LANES)
            by_phi = by_normalizer * weight + by_class + tl.where(position == y, by_target, 0.0)
            gradient = tl.where(is_class & is_used, by_phi * slope, 0.0)
            tl.store(out_pointer + position, gradient.to(out_pointer.dtype.element_ty), mask=position < V)
