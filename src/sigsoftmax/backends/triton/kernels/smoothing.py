"""What label smoothing adds to a row of softmax or sigsoftmax: every class is a target to some small part.

For an easy row of 16 bits it is an operation or two more an element and pass: with u = exp(z - anchor) and d = u + b,
log g of a class is 2 (z - anchor) - log d, and the slope of its phi 1 + b / d. Four elements share a logarithm. Other
rows are read once more.

Shapes: V logits in a row, those beyond the ``classes`` masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import fast, forms, intrinsics


@triton.jit
def unit_of(alpha, IS_SIG: tl.constexpr):
    beta: tl.constexpr = 1.0 if IS_SIG else 0.0
    return forms.unit_of(alpha, beta, forms.LOGISTIC)


@triton.jit
def _tile(pointer, anchor, normalizer, alpha, c, start, classes, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """Whether each of a tile is a class, and of its phi the scaled value, the weight and the slope."""
    IS_ROUGH: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth == 16
    beta: tl.constexpr = 1.0 if IS_SIG else 0.0
    position = start + tl.arange(0, LANES)
    z = tl.load(pointer + position, mask=position < classes, other=-float("inf"))
    value, weight, slope = forms.value_weight_and_slope(
        intrinsics.widened(z), anchor, normalizer, alpha, beta, c, c, forms.LOGISTIC, False, IS_ROUGH
    )
    return position < classes, value, weight, slope


@triton.jit
def _mean_gap(pointer, anchor, alpha, c, classes, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """The mean of log g over all classes, less the offset of the row and divided by the unit."""
    sums = tl.zeros([LANES], tl.float32)
    # Divided before they are added: the sum of large gaps may overflow.
    share = 1.0 / classes
    for start in range(0, classes, LANES):
        is_class, value, _, _ = _tile(pointer, anchor, 0.0, alpha, c, start, classes, IS_SIG, LANES)
        sums += tl.where(is_class, value * share, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _gap(z, d, scale, IS_SIG: tl.constexpr):
    """Of a sum of logits and a product of denominators, to base 2 and not relative to the anchor."""
    if IS_SIG:
        return z * (2.0 * scale) - intrinsics.log2(d)
    else:
        return z * scale


@triton.jit
def _sums(pointer, anchor, alpha, c, classes, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """(sum g / e^offset, the mean of log g less the offset and divided by the unit) of an easy row."""
    scale = alpha * forms.LOG2_E
    shift, residual = fast.shift_of(anchor, scale)
    grown = tl.exp2(residual)
    b = fast.bend_of(anchor, c, IS_SIG)[1]
    b *= grown
    total = tl.zeros([LANES], tl.float32)
    gaps = tl.zeros([LANES], tl.float32)
    # The end of a row is taken for itself, and nothing else has to be compared with it.
    whole = classes // (4 * LANES) * (4 * LANES)
    for start in range(0, whole, 4 * LANES):
        tiles = fast.four_tiles_at(pointer, start, classes, LANES, "evict_last")
        u0, u1, u2, u3 = fast.four_powers_of(tiles, anchor, scale, shift, True)
        powers, sigmas, d = fast.sums_of_four(u0, u1, u2, u3, b, IS_SIG)
        total += fast.total_of(powers, sigmas, b, IS_SIG)
        z01 = intrinsics.widened(tiles[0]) + intrinsics.widened(tiles[1])
        z23 = intrinsics.widened(tiles[2]) + intrinsics.widened(tiles[3])
        gaps += _gap(z01 + z23, d, scale, IS_SIG)
    for start in range(whole, classes, LANES):
        tile = fast.tile_at(pointer, start, classes, LANES, "evict_last")
        is_class = start + tl.arange(0, LANES) < classes
        u = fast.powers_of(tile, anchor, scale, shift, True)
        total += u * (u * intrinsics.reciprocal(u + b)) if IS_SIG else u
        gaps += tl.where(is_class, _gap(intrinsics.widened(tile), u + b, scale, IS_SIG), 0.0)
    gap = tl.sum(gaps, 0) - classes * (2.0 * shift + residual if IS_SIG else shift + residual)
    return tl.sum(total, 0) / grown, gap * forms.LOG_2 / (classes * unit_of(alpha, IS_SIG))


@triton.jit
def measured(pointer, first, alpha, c, V, classes, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """(sum g / e^offset, anchor, the mean of log g less the offset and divided by the unit) of a row."""
    IS_ROUGH: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth == 16
    # Registers of so many threads would not do for more.
    TILE: tl.constexpr = LANES // 2 if IS_SIG and LANES > 4096 else LANES
    if IS_ROUGH:
        anchor = tl.max(intrinsics.widened(first), 0)
        total = anchor * 0.0
        gaps = anchor * 0.0
        if fast.is_easy_row(anchor, alpha * forms.LOG2_E, c, IS_SIG):
            total, gaps = _sums(pointer, anchor, alpha, c, classes, IS_SIG, TILE)
        # Of an infinite sum of gaps the mean may be finite; of a masked class it is not.
        if (not fast.is_good_sum(total)) | (tl.abs(gaps) == float("inf")):
            anchor = fast.anchor_at(fast.largest(pointer, V, LANES))
            total = fast.hard_sum(pointer, anchor, alpha, c, V, IS_SIG, LANES)
            gaps = _mean_gap(pointer, anchor, alpha, c, classes, IS_SIG, LANES)
    else:
        total, anchor = fast.measured_from_the_largest(pointer, alpha, c, V, IS_SIG, LANES)
        gaps = _mean_gap(pointer, anchor, alpha, c, classes, IS_SIG, LANES)
    return total, anchor, gaps


@triton.jit
def _bent(u, y, factor, steeper, evenly):
    """A gradient of sigsoftmax."""
    return u * (factor - y * y) + (y * steeper + evenly)


@triton.jit
def _write_easy(
    pointer,
    out_pointer,
    total,
    anchor,
    by_normalizer,
    by_class,
    alpha,
    c,
    V,
    classes,
    IS_SIG: tl.constexpr,
    LANES: tl.constexpr,
):
    """The gradient of an easy row with no masked class, but for its target."""
    scale = alpha * forms.LOG2_E
    shift, residual = fast.shift_of(anchor, scale)
    grown = tl.exp2(residual)
    b = fast.bend_of(anchor, c, IS_SIG)[1]
    b *= grown
    factor = by_normalizer / total * alpha / grown
    root = tl.sqrt(factor)
    evenly = by_class * alpha
    steeper = by_class / root
    whole = classes // (4 * LANES) * (4 * LANES)
    for start in range(0, whole, 4 * LANES):
        tiles = fast.four_tiles_at(pointer, start, classes, LANES, "evict_first")
        u0, u1, u2, u3 = fast.four_powers_of(tiles, anchor, scale, shift, True)
        if IS_SIG:
            y0, y1, y2, y3 = fast.scaled_complements(u0, u1, u2, u3, b, root)
            fast.store_tile(out_pointer, start, _bent(u0, y0, factor, steeper, evenly), V, LANES)
            fast.store_tile(out_pointer, start + LANES, _bent(u1, y1, factor, steeper, evenly), V, LANES)
            fast.store_tile(out_pointer, start + 2 * LANES, _bent(u2, y2, factor, steeper, evenly), V, LANES)
            fast.store_tile(out_pointer, start + 3 * LANES, _bent(u3, y3, factor, steeper, evenly), V, LANES)
        else:
            fast.store_tile(out_pointer, start, u0 * factor + evenly, V, LANES)
            fast.store_tile(out_pointer, start + LANES, u1 * factor + evenly, V, LANES)
            fast.store_tile(out_pointer, start + 2 * LANES, u2 * factor + evenly, V, LANES)
            fast.store_tile(out_pointer, start + 3 * LANES, u3 * factor + evenly, V, LANES)
    for start in range(whole, V, LANES):
        u = fast.powers_of(fast.tile_at(pointer, start, classes, LANES, "evict_first"), anchor, scale, shift, True)
        gradient = u * factor + evenly
        if IS_SIG:
            y = (root * b) * intrinsics.reciprocal(u + b)
            gradient = _bent(u, y, factor, steeper, evenly)
        is_class = start + tl.arange(0, LANES) < classes
        fast.store_tile(out_pointer, start, tl.where(is_class, gradient, 0.0), V, LANES)


@triton.jit
def write_gradient(
    pointer,
    out_pointer,
    total,
    anchor,
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
    """The gradient of a row, 0 where it is not used."""
    IS_ROUGH: tl.constexpr = out_pointer.dtype.element_ty.primitive_bitwidth == 16
    # Registers of so many threads would not do for more.
    TILE: tl.constexpr = LANES // 2 if LANES > 4096 else LANES
    # A masked class has a gap of -inf.
    is_easy = fast.is_easy_row(anchor, alpha * forms.LOG2_E, c, IS_SIG) & (gaps > -float("inf")) & (by_normalizer > 0)
    if IS_ROUGH & is_easy & is_used:
        _write_easy(pointer, out_pointer, total, anchor, by_normalizer, by_class, alpha, c, V, classes, IS_SIG, TILE)
        fast.write_target(
            out_pointer, by_normalizer / total * alpha, anchor, by_target + by_class, y, z_y, True, alpha, c, IS_SIG
        )
    else:
        normalizer = tl.log(total)
        for start in range(0, V, LANES):
            is_class, _, weight, slope = _tile(pointer, anchor, normalizer, alpha, c, start, classes, IS_SIG, LANES)
            position = start + tl.arange(0, LANES)
            by_phi = by_normalizer * weight + by_class + tl.where(position == y, by_target, 0.0)
            gradient = tl.where(is_class & is_used, by_phi * slope, 0.0)
            tl.store(out_pointer + position, gradient.to(out_pointer.dtype.element_ty), mask=position < V)
