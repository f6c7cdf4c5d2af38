"""The kernel for rows of softmax and sigsoftmax.

Programs with many long rows begin at different times, or else all of them would read and then all of them write.

Shapes: R rows, V classes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import fast, intrinsics, stream, tokens

GROUPS = tl.constexpr(16)
"""of programs that begin at the same time"""


@triton.jit
def begin_late(stagger):
    """Programs begin in groups, up to so many cycles after the first."""
    cycles = tl.program_id(0) % GROUPS * (stagger // GROUPS)
    if cycles > 0:
        intrinsics.wait(cycles)


@triton.jit
def _coefficients(by_normalizer, by_target, z_slope, row, HAS_INDEX: tl.constexpr, HAS_Z_SLOPE: tl.constexpr):
    """Of a row: what multiplies its normaliser, its target and its z-loss."""
    by_n = tl.load(by_normalizer + row)
    by_s = tl.full((), 0.0, tl.float32)
    if HAS_INDEX:
        by_s = tl.load(by_target + row)
    z_scale = tl.full((), 0.0, tl.float32)
    if HAS_Z_SLOPE:
        z_scale = tl.load(z_slope + row)
    return by_n, by_s, z_scale


@triton.jit
def rows_kernel(
    logits,
    out,
    index,
    by_normalizer,
    by_target,
    z_slope,
    anchor_R,
    offset_R,
    normalizer_R,
    target_R,
    logits_stride,
    out_stride,
    R,
    V,
    rows_of_target,
    first_class,
    alpha,
    c,
    stagger,
    IS_SIG: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_Z_SLOPE: tl.constexpr,
    STATS: tl.constexpr,
    GRADIENT: tl.constexpr,
    IS_EARLY: tl.constexpr,
    IS_STREAM: tl.constexpr,
    LANES: tl.constexpr,
):
    """Measure rows, write their gradient, or both; only both as a stream. ``out`` may be ``logits``.

    Coefficients are read before the row, where early.
    """
    begin_late(stagger)
    if IS_STREAM:
        tiles = stream.tiles_at(fast.row_at(logits, tl.program_id(0), logits_stride), LANES)
    for turn in range(tl.program_id(0), R, tl.num_programs(0)):
        # What only measures begins with the last rows: a product has just written them, and the cache may hold them.
        row = turn if GRADIENT else R - 1 - turn
        pointer = fast.row_at(logits, row, logits_stride)
        # What follows waits for loads in their order, so those that depend on others come last.
        y = tl.full((), 0, tl.int64)
        if HAS_INDEX:
            y = tl.load(index + row // rows_of_target) - first_class
        if GRADIENT and IS_EARLY:
            by_n, by_s, z_scale = _coefficients(by_normalizer, by_target, z_slope, row, HAS_INDEX, HAS_Z_SLOPE)
        if STATS and not IS_STREAM:
            first = fast.first_tile(pointer, V, LANES)
        # A range of classes need not hold the target.
        has_target = (y >= 0) & (y < V)
        z_y = tl.full((), 0.0, tl.float32)
        if HAS_INDEX:
            z_y = tl.load(pointer + y, mask=has_target, other=0.0).to(tl.float32)
            if not STATS:
                # No thread has stored its part of a gradient in place before all others have read the target's logit.
                tl.debug_barrier()
        if STATS:
            if IS_STREAM:
                total, anchor, easy, tiles = stream.measured(tiles, pointer, alpha, c, V, IS_SIG, LANES)
            else:
                total, anchor = fast.measured(pointer, first, alpha, c, V, IS_SIG, LANES)
            offset = fast.row_offset(anchor, alpha, c, IS_SIG)
            normalizer = tl.log(total)
            tl.store(anchor_R + row, anchor)
            tl.store(offset_R + row, offset)
            tl.store(normalizer_R + row, normalizer)
            if HAS_INDEX:
                tl.store(target_R + row, fast.gap_of(z_y, anchor, alpha, c, IS_SIG))
        else:
            anchor = tl.load(anchor_R + row)
            offset = tl.load(offset_R + row)
            normalizer = tl.load(normalizer_R + row)
            total = tl.exp(normalizer)
        if GRADIENT:
            if not IS_EARLY:
                by_n, by_s, z_scale = _coefficients(by_normalizer, by_target, z_slope, row, HAS_INDEX, HAS_Z_SLOPE)
            if HAS_Z_SLOPE:
                by_n = tokens.with_z_slopes(by_n, z_scale, normalizer, offset)
            out_pointer = fast.row_at(out, row, out_stride)
            if IS_STREAM:
                # After the last row of a program any will do: it is read and not used.
                next_row = tl.minimum(row + tl.num_programs(0), R - 1)
                tiles = stream.write_gradient(
                    tiles,
                    easy,
                    pointer,
                    fast.row_at(logits, next_row, logits_stride),
                    out_pointer,
                    total,
                    anchor,
                    by_n,
                    by_s,
                    alpha,
                    c,
                    V,
                    IS_SIG,
                    LANES,
                )
                if HAS_INDEX:
                    factor = by_n / total * alpha
                    counts = (by_n != 0) | (by_s != 0)
                    fast.write_target(out_pointer, factor, anchor, by_s, y, z_y, has_target & counts, alpha, c, IS_SIG)
            else:
                fast.write_gradient(
                    pointer,
                    out_pointer,
                    total,
                    anchor,
                    by_n,
                    by_s,
                    y,
                    z_y,
                    has_target,
                    alpha,
                    c,
                    V,
                    IS_SIG,
                    HAS_INDEX,
                    LANES,
                )
