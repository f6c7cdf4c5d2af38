"""Kernels of a loss that one launch computes: of logits they make the sum of all losses and their gradient.

Shapes: N tokens, V logits in a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import fast, fast_rows, smoothing, stream, tokens


@triton.jit
def token_scale(target, N, ignore_index, IS_MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """What a token that is not ignored counts in the sum or the mean; inf where there is none."""
    if IS_MEAN:
        kept = tl.zeros([BLOCK], tl.int32)
        for start in range(0, N, BLOCK):
            position = start + tl.arange(0, BLOCK)
            kept += (tl.load(target + position, mask=position < N, other=ignore_index) != ignore_index).to(tl.int32)
        return tokens.mean_scale(tl.sum(kept, 0).to(tl.float32))
    else:
        return tl.full((), 1.0, tl.float32)


@triton.jit
def add_up(shares, total, N, programs, BLOCK: tl.constexpr):
    """The program that comes last of so many adds what all tokens have, always in the same order.

    ``shares`` has a number more than tokens, which counts the programs that are done; it begins at 0.
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
        tl.store(total, tl.sum(sums, 0).to(total.dtype.element_ty))


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
    fast_rows.begin_late(stagger)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        pointer = fast.row_at(logits, row, V)
        y = tl.load(target + row)
        first = fast.first_tile(pointer, V, LANES)
        is_kept = y != ignore_index
        tl.device_assert((not is_kept) | ((y >= 0) & (y < classes)), "target out of range; see SIGSOFTMAX_CHECK=1")
        y = tl.where(is_kept, y, 0)
        z_y = tl.load(pointer + y).to(tl.float32)
        gaps = tl.full((), 0.0, tl.float32)
        if IS_SMOOTH:
            row_sum, anchor, gaps = smoothing.measured(pointer, first, alpha, c, V, classes, IS_SIG, LANES)
        else:
            row_sum, anchor = fast.measured(pointer, first, alpha, c, V, IS_SIG, LANES)
        gap = fast.gap_of(z_y, anchor, alpha, c, IS_SIG)
        if IS_SMOOTH:
            gap = tokens.smoothed_targets(gap, gaps, smoothing.unit_of(alpha, IS_SIG), label_smoothing)
        normalizer = tl.log(row_sum)
        offset = fast.row_offset(anchor, alpha, c, IS_SIG)
        loss = tokens.token_losses(normalizer, gap, offset, 1.0, z_loss, False, HAS_Z_LOSS)
        tl.store(shares + row, tokens.token_shares(loss, scale, is_kept))
        by_n, by_s = tokens.token_coefficients(normalizer, offset, scale, is_kept, z_loss, HAS_Z_LOSS)
        out_pointer = fast.row_at(out, row, V)
        if IS_SMOOTH:
            by_s, by_class = tokens.smoothing_coefficients(by_s, label_smoothing, classes)
            smoothing.write_gradient(
                pointer,
                out_pointer,
                row_sum,
                anchor,
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
            fast.write_gradient(
                pointer, out_pointer, row_sum, anchor, by_n, by_s, y, z_y, is_kept, alpha, c, V, IS_SIG, True, LANES
            )
    add_up(shares, total, N, tl.num_programs(0), BLOCK)


@triton.jit
def stream_kernel(
    logits,
    out,
    target,
    measures,
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
    """The gradient of long rows, as a stream, but for their targets.

    What a row needs once (logarithms, its target) every warp here would compute for itself, a tenth of the time of a
    row. So another kernel does that for all rows; ``measures`` keeps for it the sum and the anchor of each, and the
    scale.
    """
    scale = token_scale(target, N, ignore_index, IS_MEAN, BLOCK)
    tl.store(measures + 2 * N, scale)
    fast_rows.begin_late(stagger)
    tiles = stream.tiles_at(fast.row_at(logits, tl.program_id(0), V), LANES)
    next_y = tl.load(target + tl.program_id(0))
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        # After the last row of a program any will do: it is read and not used.
        next_row = tl.minimum(row + tl.num_programs(0), N - 1)
        is_kept = next_y != ignore_index
        next_y = tl.load(target + next_row)
        pointer = fast.row_at(logits, row, V)
        row_sum, anchor, easy, tiles = stream.measured(tiles, pointer, alpha, c, V, IS_SIG, LANES)
        tl.store(measures + row, row_sum)
        tl.store(measures + N + row, anchor)
        offset = fast.row_offset(anchor, alpha, c, IS_SIG)
        by_n, by_s = tokens.token_coefficients(tl.log(row_sum), offset, scale, is_kept, z_loss, HAS_Z_LOSS)
        tiles = stream.write_gradient(
            tiles,
            easy,
            pointer,
            fast.row_at(logits, next_row, V),
            fast.row_at(out, row, V),
            row_sum,
            anchor,
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
    measures,
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
    """After it: the gradients of targets, and the sum or the mean of all losses."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < N
    y = tl.load(target + row, mask=is_row, other=ignore_index)
    is_kept = y != ignore_index
    tl.device_assert((not is_kept) | ((y >= 0) & (y < classes)), "target out of range; see SIGSOFTMAX_CHECK=1")
    y = tl.where(is_kept, y, 0)
    scale = tl.load(measures + 2 * N)
    row_sum = tl.load(measures + row, mask=is_row, other=1.0)
    anchor = tl.load(measures + N + row, mask=is_row, other=0.0)
    z_y = tl.load(fast.row_at(logits, row, V) + y, mask=is_row, other=0.0).to(tl.float32)
    gap = fast.gap_of(z_y, anchor, alpha, c, IS_SIG)
    normalizer = tl.log(row_sum)
    offset = fast.row_offset(anchor, alpha, c, IS_SIG)
    loss = tokens.token_losses(normalizer, gap, offset, 1.0, z_loss, False, HAS_Z_LOSS)
    tl.store(shares + row, tokens.token_shares(loss, scale, is_kept), mask=is_row)
    by_n, by_s = tokens.token_coefficients(normalizer, offset, scale, is_kept, z_loss, HAS_Z_LOSS)
    out_pointer = fast.row_at(out, row, V)
    fast.write_target(out_pointer, by_n / row_sum * alpha, anchor, by_s, y, z_y, is_kept, alpha, c, IS_SIG)
    add_up(shares, total, N, tl.num_programs(0), BLOCK)
