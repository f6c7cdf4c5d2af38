"""Softmax and sigsoftmax on a GPU: one exponential an element and pass, two passes over the row.

The first pass sums relative to the largest logit of the row's first tile, so nothing is rescaled or compared on the
way; a row whose sum shows that its largest logit lies far above is summed again. With about one row in flight per
multiprocessor, and hints on what the L2 cache should keep, the second pass reads the row from there. Sigsoftmax needs
a reciprocal an element besides; two elements share one: 1/a = b / (a b). Derivations: docs/mathematics.md.

Shapes: R rows, V classes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton import forms

LARGEST_SUM = tl.constexpr(1e9)
"""A row whose sum is larger, or not a number, is summed again from its largest logit: too much was rounded."""
SMALLEST_SUM = tl.constexpr(0.25)
"""The anchor itself adds a half or more; a smaller sum is that of a row whose first tile is masked."""
SMALLEST_BEND = tl.constexpr(1e-18)
"""Below it the bend of sigsoftmax only touches classes whose probability is smaller still; its square is a float."""


@triton.jit
def _tile(pointer, start, V, LANES: tl.constexpr, POLICY: tl.constexpr):
    position = start + tl.arange(0, LANES)
    value = tl.load(pointer + position, mask=position < V, other=-float("inf"), eviction_policy=POLICY)
    return value.to(tl.float32)


@triton.jit
def _bend(reference, c, IS_SIG: tl.constexpr):
    """(a, b) with sigmoid(z - c) = a u / (a u + b) for u = exp(z - reference); both at most 1."""
    if IS_SIG:
        height = reference - c
        decay = tl.exp(-tl.abs(height))
        a = tl.where(height < 0, decay, 1.0)
        b = tl.where(height < 0, 1.0, tl.maximum(decay, SMALLEST_BEND))
        return a, b
    else:
        return 1.0, 1.0


@triton.jit
def _row_offset(reference, alpha, c, IS_SIG: tl.constexpr):
    if IS_SIG:
        return reference + tl.minimum(reference - c, 0.0)
    else:
        return alpha * reference


@triton.jit
def _sum_row(pointer, anchor, scale, a, b, V, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """sum g / e^offset over the row."""
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, V, 2 * LANES):
        u0 = tl.exp2((_tile(pointer, start, V, LANES, "evict_last") - anchor) * scale)
        u1 = tl.exp2((_tile(pointer, start + LANES, V, LANES, "evict_last") - anchor) * scale)
        if IS_SIG:
            d0 = a * u0 + b
            d1 = a * u1 + b
            total += (u0 * u0 * d1 + u1 * u1 * d0) * forms.reciprocal(d0 * d1)
        else:
            total += u0 + u1
    return tl.sum(total, 0)


@triton.jit
def _largest(pointer, V, LANES: tl.constexpr):
    largest = tl.full([LANES], -float("inf"), tl.float32)
    for start in range(0, V, LANES):
        largest = tl.maximum(largest, _tile(pointer, start, V, LANES, "evict_last"))
    return tl.max(largest, 0)


@triton.jit
def rows_kernel(
    logits,
    logits_stride,
    out,
    out_stride,
    index,
    by_normalizer,
    by_target,
    z_slope,
    anchor_R,
    offset_R,
    normalizer_R,
    target_R,
    R,
    V,
    first_class,
    alpha,
    c,
    IS_SIG: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_Z_SLOPE: tl.constexpr,
    STATS: tl.constexpr,
    GRADIENT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Measure rows, write their gradient, or both. ``out`` may be ``logits``."""
    scale = alpha * forms.LOG2_E
    for row in range(tl.program_id(0), R, tl.num_programs(0)):
        pointer = logits + (tl.full((), 1, tl.int64) * row) * logits_stride
        if HAS_INDEX:
            # A range of classes need not hold the target.
            y = tl.load(index + row) - first_class
            has_target = (y >= 0) & (y < V)
            z_y = tl.load(pointer + y, mask=has_target, other=0.0).to(tl.float32)
        if STATS:
            anchor = tl.max(_tile(pointer, 0, V, LANES, "evict_last"), 0)
            anchor = tl.where(anchor == -float("inf"), 0.0, anchor)
            a, b = _bend(anchor, c, IS_SIG)
            total = _sum_row(pointer, anchor, scale, a, b, V, IS_SIG, LANES)
            if not ((total >= SMALLEST_SUM) & (total <= LARGEST_SUM)):
                anchor = _largest(pointer, V, LANES)
                anchor = tl.where(anchor == -float("inf"), 0.0, anchor)
                a, b = _bend(anchor, c, IS_SIG)
                total = _sum_row(pointer, anchor, scale, a, b, V, IS_SIG, LANES)
            offset = _row_offset(anchor, alpha, c, IS_SIG)
            normalizer = tl.log(total)
            tl.store(anchor_R + row, anchor)
            tl.store(offset_R + row, offset)
            tl.store(normalizer_R + row, normalizer)
            if HAS_INDEX:
                gap = (z_y - anchor) * alpha
                if IS_SIG:
                    # The line left of the bend is taken from the gap, as in the form's ``relative``.
                    x = z_y - c
                    tail = -tl.log(1.0 + tl.exp(-tl.abs(x)))
                    line = tl.where(anchor > c, tl.minimum(x, 0.0), tl.minimum(z_y - anchor, c - anchor))
                    gap = gap + line + tail
                # -inf is a mask: inf - inf must not come of it.
                tl.store(target_R + row, tl.where(z_y == -float("inf"), z_y, gap))
        else:
            anchor = tl.load(anchor_R + row)
            offset = tl.load(offset_R + row)
            normalizer = tl.load(normalizer_R + row)
            a, b = _bend(anchor, c, IS_SIG)
            total = tl.exp(normalizer)
        if GRADIENT:
            by_n = tl.load(by_normalizer + row)
            if HAS_Z_SLOPE:
                z_scale = tl.load(z_slope + row)
                by_n += tl.where(z_scale == 0, 0.0, z_scale * (offset + normalizer))
            by_s = tl.full((), 0.0, tl.float32)
            if HAS_INDEX:
                by_s = tl.load(by_target + row)
            is_unused = (by_n == 0) & (by_s == 0)
            target_pointer = out + (tl.full((), 1, tl.int64) * row) * out_stride
            factor = by_n / total * alpha
            twice = 2.0 * factor
            falling = factor * a
            if is_unused:
                for start in range(0, V, LANES):
                    position = start + tl.arange(0, LANES)
                    tl.store(
                        target_pointer + position,
                        tl.zeros([LANES], tl.float32).to(out.dtype.element_ty),
                        mask=position < V,
                    )
            else:
                for start in range(0, V, 2 * LANES):
                    position0 = start + tl.arange(0, LANES)
                    position1 = position0 + LANES
                    u0 = tl.exp2((_tile(pointer, start, V, LANES, "evict_first") - anchor) * scale)
                    u1 = tl.exp2((_tile(pointer, start + LANES, V, LANES, "evict_first") - anchor) * scale)
                    if IS_SIG:
                        d0 = a * u0 + b
                        d1 = a * u1 + b
                        shared = forms.reciprocal(d0 * d1)
                        q0 = u0 * (d1 * shared)
                        q1 = u1 * (d0 * shared)
                        g0 = (u0 * q0) * (twice - falling * q0)
                        g1 = (u1 * q1) * (twice - falling * q1)
                    else:
                        g0 = factor * u0
                        g1 = factor * u1
                    tl.store(
                        target_pointer + position0,
                        g0.to(out.dtype.element_ty),
                        mask=position0 < V,
                        cache_modifier=".cs",
                    )
                    tl.store(
                        target_pointer + position1,
                        g1.to(out.dtype.element_ty),
                        mask=position1 < V,
                        cache_modifier=".cs",
                    )
                if HAS_INDEX:
                    u = tl.exp2((z_y - anchor) * scale)
                    slope = alpha + 0.0 * u
                    at_target = factor * u
                    if IS_SIG:
                        q = u / (a * u + b)
                        at_target = (u * q) * (twice - falling * q)
                        slope = 2.0 - forms.sigmoid(z_y - c)
                    slope = tl.where(z_y == -float("inf"), 1.0, slope)
                    # Every thread of the block has stored its tiles before the target is put right.
                    tl.debug_barrier()
                    tl.store(target_pointer + y, (at_target + by_s * slope).to(out.dtype.element_ty), mask=has_target)
