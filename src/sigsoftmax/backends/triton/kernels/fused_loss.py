"""Kernels of the fused loss: one launch computes the total loss and the gradient of the logits, or two launches do.

Shapes: N tokens, V logits in a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import pipelined_row, smoothed_row, softmax_logits, softmax_row, tokens


@triton.jit
def token_scale(target, N, ignore_index, IS_MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of a kept token in the sum or the mean; inf where no token is kept."""
    if IS_MEAN:
        kept = tl.zeros([BLOCK], tl.int32)
        for start in range(0, N, BLOCK):
            position = start + tl.arange(0, BLOCK)
            kept += (tl.load(target + position, mask=position < N, other=ignore_index) != ignore_index).to(tl.int32)
        return tokens.mean_scale(tl.sum(kept, 0).to(tl.float32))
    else:
        return tl.full((), 1.0, tl.float32)


@triton.jit
def add_up(shares, total, N, programs, unit, BLOCK: tl.constexpr):
    """The last of the programs to finish adds up the shares of all tokens, always in the same order.

    They are in units, and the total is not. ``shares`` has one element more than there are tokens; it counts the
    programs that are done and begins at 0.
    """
    # All threads have stored what they share before one of them says so.
    tl.debug_barrier()
    done = (shares + N).to(tl.pointer_type(tl.int32))
    if tl.atomic_add(done, 1) == programs - 1:
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            position = start + tl.arange(0, BLOCK)
            # Not from a cache of this multiprocessor: others have stored them.
            sums += tl.load(shares + position, mask=position < N, other=0.0, cache_modifier=".cg")
        tl.store(total, (tl.sum(sums, 0) * unit).to(total.dtype.element_ty))


@triton.jit
def loss_kernel(
    logits,
    out,
    target,
    shares,
    total,
    N,
    V,
    classes,
    alpha,
    c,
    ignore_index,
    z_loss,
    label_smoothing,
    stagger,
    IS_SIG: tl.constexpr,
    IS_MEAN: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    IS_SMOOTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum or the mean of all losses, and its gradient.

    Every program counts the targets of all tokens. The mean of no token is NaN. Rows of V logits may have masked ones
    beyond the ``classes``.
    """
    scale = token_scale(target, N, ignore_index, IS_MEAN, BLOCK)
    unit = softmax_row.unit_of(alpha, IS_SIG)
    softmax_logits.stagger_start(stagger)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        pointer = softmax_row.row_at(logits, row, V)
        y = tl.load(target + row)
        first = softmax_row.first_tile(pointer, V, LANES)
        is_kept = y != ignore_index
        tl.device_assert((not is_kept) | ((y >= 0) & (y < classes)), "target out of range; see SIGSOFTMAX_CHECK=1")
        y = tl.where(is_kept, y, 0)
        z_y = tl.load(pointer + y).to(tl.float32)
        gaps = tl.full((), 0.0, tl.float32)
        if IS_SMOOTH:
            row_sum, peak, gaps = smoothed_row.forward_reduction(pointer, first, alpha, c, V, classes, IS_SIG, LANES)
        else:
            row_sum, peak = softmax_row.forward_reduction(pointer, first, alpha, c, V, IS_SIG, LANES)
        gap = softmax_row.gap_of(z_y, peak, alpha, c, IS_SIG)
        if IS_SMOOTH:
            gap = tokens.smoothed_targets(gap, gaps, label_smoothing)
        normalizer = tl.log(row_sum)
        offset = softmax_row.row_offset(peak, alpha, c, IS_SIG)
        loss = tokens.token_losses(normalizer, gap, offset, 1.0, z_loss, unit, False, HAS_Z_LOSS)
        tl.store(shares + row, tokens.token_shares(loss, scale, is_kept))
        by_n, by_s = tokens.token_coefficients(normalizer, offset, scale, is_kept, z_loss, unit, HAS_Z_LOSS)
        out_pointer = softmax_row.row_at(out, row, V)
        if IS_SMOOTH:
            by_s, by_class = tokens.smoothing_coefficients(by_s, label_smoothing, classes)
            smoothed_row.write_gradient(
                pointer,
                out_pointer,
                row_sum,
                peak,
                gaps,
                by_n,
                by_s,
                by_class,
                y,
                z_y,
                is_kept,
                alpha,
                c,
                V,
                classes,
                IS_SIG,
                LANES,
            )
        else:
            softmax_row.write_gradient(
                pointer, out_pointer, row_sum, peak, by_n, by_s, y, z_y, is_kept, alpha, c, V, IS_SIG, True, LANES
            )
    add_up(shares, total, N, tl.num_programs(0), unit, BLOCK)


@triton.jit
def pipelined_kernel(
    logits,
    out,
    target,
    statistics,
    N,
    V,
    alpha,
    c,
    ignore_index,
    z_loss,
    stagger,
    IS_SIG: tl.constexpr,
    IS_MEAN: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of long rows but for their targets, software-pipelined.

    Every warp here would compute for itself what a row needs once (logarithms, its target), a tenth of the time of a
    row. So another kernel does that for all rows; ``statistics`` keeps for it the sum and the peak of each, and the
    scale.
    """
    scale = token_scale(target, N, ignore_index, IS_MEAN, BLOCK)
    tl.store(statistics + 2 * N, scale)
    unit = softmax_row.unit_of(alpha, IS_SIG)
    softmax_logits.stagger_start(stagger)
    tiles = pipelined_row.tiles_at(softmax_row.row_at(logits, tl.program_id(0), V), LANES)
    next_y = tl.load(target + tl.program_id(0))
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        # After the last row of a program any will do: it is read and not used.
        next_row = tl.minimum(row + tl.num_programs(0), N - 1)
        is_kept = next_y != ignore_index
        next_y = tl.load(target + next_row)
        pointer = softmax_row.row_at(logits, row, V)
        row_sum, peak, fast_path, tiles = pipelined_row.forward_reduction(tiles, pointer, alpha, c, V, IS_SIG, LANES)
        tl.store(statistics + row, row_sum)
        tl.store(statistics + N + row, peak)
        offset = softmax_row.row_offset(peak, alpha, c, IS_SIG)
        by_n, by_s = tokens.token_coefficients(tl.log(row_sum), offset, scale, is_kept, z_loss, unit, HAS_Z_LOSS)
        tiles = pipelined_row.write_gradient(
            tiles,
            fast_path,
            pointer,
            softmax_row.row_at(logits, next_row, V),
            softmax_row.row_at(out, row, V),
            row_sum,
            peak,
            by_n,
            by_s,
            alpha,
            c,
            V,
            IS_SIG,
            LANES,
        )


@triton.jit
def finish_kernel(
    logits,
    out,
    target,
    shares,
    statistics,
    total,
    N,
    V,
    classes,
    alpha,
    c,
    ignore_index,
    z_loss,
    IS_SIG: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finish what :func:`pipelined_kernel` leaves: gradients at the targets, and the sum or the mean of all losses."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < N
    y = tl.load(target + row, mask=is_row, other=ignore_index)
    is_kept = y != ignore_index
    tl.device_assert((not is_kept) | ((y >= 0) & (y < classes)), "target out of range; see SIGSOFTMAX_CHECK=1")
    y = tl.where(is_kept, y, 0)
    scale = tl.load(statistics + 2 * N)
    unit = softmax_row.unit_of(alpha, IS_SIG)
    row_sum = tl.load(statistics + row, mask=is_row, other=1.0)
    peak = tl.load(statistics + N + row, mask=is_row, other=0.0)
    z_y = tl.load(softmax_row.row_at(logits, row, V) + y, mask=is_row, other=0.0).to(tl.float32)
    gap = softmax_row.gap_of(z_y, peak, alpha, c, IS_SIG)
    normalizer = tl.log(row_sum)
    offset = softmax_row.row_offset(peak, alpha, c, IS_SIG)
    loss = tokens.token_losses(normalizer, gap, offset, 1.0, z_loss, unit, False, HAS_Z_LOSS)
    tl.store(shares + row, tokens.token_shares(loss, scale, is_kept), mask=is_row)
    by_n, by_s = tokens.token_coefficients(normalizer, offset, scale, is_kept, z_loss, unit, HAS_Z_LOSS)
    out_pointer = softmax_row.row_at(out, row, V)
    softmax_row.write_target(out_pointer, by_n / row_sum * alpha, peak, by_s, y, z_y, is_kept, alpha, c, IS_SIG)
    add_up(shares, total, N, tl.num_programs(0), unit, BLOCK)
