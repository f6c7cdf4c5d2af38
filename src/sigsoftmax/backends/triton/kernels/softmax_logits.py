"""The logits kernel of softmax and sigsoftmax.

Programs with many long rows begin at different times, or else all of them would read and then all of them write.

Shapes: R rows, V classes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import intrinsics, pipelined_row, softmax_row, tokens

GROUPS = tl.constexpr(16)
"""number of groups of programs, each of which begins at the same time"""


@triton.jit
def stagger_start(stagger):
    """Delay groups of programs, the last of them by nearly ``stagger`` cycles."""
    cycles = tl.program_id(0) % GROUPS * (stagger // GROUPS)
    if cycles > 0:
        intrinsics.wait(cycles)


@triton.jit
def _coefficients(by_normalizer, by_target, z_slope, row, HAS_INDEX: tl.constexpr, HAS_Z_SLOPE: tl.constexpr):
    """The coefficients of a row: those of its normaliser, its target and its z-loss."""
    by_n = tl.load(by_normalizer + row)
    by_s = tl.full((), 0.0, tl.float32)
    if HAS_INDEX:
        by_s = tl.load(by_target + row)
    z_scale = tl.full((), 0.0, tl.float32)
    if HAS_Z_SLOPE:
        z_scale = tl.load(z_slope + row)
    return by_n, by_s, z_scale


@triton.jit
def softmax_logits_kernel(
    logits,
    out,
    index,
    by_normalizer,
    by_target,
    z_slope,
    peak_R,
    offset_R,
    normalizer_R,
    target_R,
    logits_stride,
    out_stride,
    R,
    V,
    rows_per_target,
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
    IS_PIPELINED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Compute the statistics of rows, write their gradient, or both; pipelined only if both. ``out`` may be ``logits``.

    If ``IS_EARLY``, coefficients are read before the row.
    """
    stagger_start(stagger)
    if IS_PIPELINED:
        tiles = pipelined_row.tiles_at(softmax_row.row_at(logits, tl.program_id(0), logits_stride), LANES)
    for turn in range(tl.program_id(0), R, tl.num_programs(0)):
        # Statistics alone begin with the last rows: a product has just written them, and the cache may hold them.
        row = turn if GRADIENT else R - 1 - turn
        pointer = softmax_row.row_at(logits, row, logits_stride)
        # What follows waits for loads in their order, so those that depend on others come last.
        y = tl.full((), 0, tl.int64)
        if HAS_INDEX:
            y = tl.load(index + row // rows_per_target) - first_class
        if GRADIENT and IS_EARLY:
            by_n, by_s, z_scale = _coefficients(by_normalizer, by_target, z_slope, row, HAS_INDEX, HAS_Z_SLOPE)
        if STATS and not IS_PIPELINED:
            first = softmax_row.first_tile(pointer, V, LANES)
        # A range of classes need not hold the target.
        has_target = (y >= 0) & (y < V)
        z_y = tl.full((), 0.0, tl.float32)
        if HAS_INDEX:
            z_y = tl.load(pointer + y, mask=has_target, other=0.0).to(tl.float32)
            if not STATS:
                # No thread has stored its part of a gradient in place before all others have read the target's logit.
                tl.debug_barrier()
        if STATS:
            if IS_PIPELINED:
                total, peak, fast_path, tiles = pipelined_row.forward_reduction(
                    tiles, pointer, alpha, c, V, IS_SIG, LANES
                )
            else:
                total, peak = softmax_row.forward_reduction(pointer, first, alpha, c, V, IS_SIG, LANES)
            offset = softmax_row.row_offset(peak, alpha, c, IS_SIG)
            normalizer = tl.log(total)
            tl.store(peak_R + row, peak)
            tl.store(offset_R + row, offset)
            tl.store(normalizer_R + row, normalizer)
            if HAS_INDEX:
                tl.store(target_R + row, softmax_row.gap_of(z_y, peak, alpha, c, IS_SIG))
        else:
            peak = tl.load(peak_R + row)
            offset = tl.load(offset_R + row)
            normalizer = tl.load(normalizer_R + row)
            total = tl.exp(normalizer)
        if GRADIENT:
            if not IS_EARLY:
                by_n, by_s, z_scale = _coefficients(by_normalizer, by_target, z_slope, row, HAS_INDEX, HAS_Z_SLOPE)
            if HAS_Z_SLOPE:
                by_n = tokens.with_z_slopes(by_n, z_scale, normalizer, offset, softmax_row.unit_of(alpha, IS_SIG))
            out_pointer = softmax_row.row_at(out, row, out_stride)
            if IS_PIPELINED:
                # After the last row of a program any will do: it is read and not used.
                next_row = tl.minimum(row + tl.num_programs(0), R - 1)
                tiles = pipelined_row.write_gradient(
                    tiles,
                    fast_path,
                    pointer,
                    softmax_row.row_at(logits, next_row, logits_stride),
                    out_pointer,
                    total,
                    peak,
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
                    softmax_row.write_target(
                        out_pointer, factor, peak, by_s, y, z_y, has_target & counts, alpha, c, IS_SIG
                    )
            else:
                softmax_row.write_gradient(
                    pointer,
                    out_pointer,
                    total,
                    peak,
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
