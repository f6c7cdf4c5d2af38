"""The kernel of a loss that one launch computes: of logits it makes the sum of all losses and their gradient.

Shapes: N tokens, V logits in a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton import fast, fast_rows, smoothing, stream


@triton.jit
def token_scale(target, N, ignore_index, IS_MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """What a token that is not ignored counts in the sum or the mean; inf where there is none."""
    if IS_MEAN:
        kept = tl.zeros([BLOCK], tl.int32)
        for start in range(0, N, BLOCK):
            position = start + tl.arange(0, BLOCK)
            kept += (tl.load(target + position, mask=position < N, other=ignore_index) != ignore_index).to(tl.int32)
        return 1.0 / tl.sum(kept, 0).to(tl.float32)
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
    IS_STREAM: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum or the mean of all losses, and its gradient.

    Every program counts the targets of all tokens. The mean of no token is NaN. Rows of V logits may have masked ones
    beyond the ``classes``.
    """
    scale = token_scale(target, N, ignore_index, IS_MEAN, BLOCK)
    fast_rows.begin_late(stagger)
    if IS_STREAM:
        t0, t1, t2, t3 = stream.tiles_at(fast.row_at(logits, tl.program_id(0), V), LANES)
        next_y = tl.load(target + tl.program_id(0))
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        pointer = fast.row_at(logits, row, V)
        if IS_STREAM:
            # After the last row of a program any will do: it is read and not used.
            next_row = tl.minimum(row + tl.num_programs(0), N - 1)
            y = next_y
            next_y = tl.load(target + next_row)
        else:
            y = tl.load(target + row)
            first = fast.first_tile(pointer, V, LANES)
        is_kept = y != ignore_index
        tl.device_assert((not is_kept) | ((y >= 0) & (y < classes)), "target out of range; see SIGSOFTMAX_CHECK=1")
        y = tl.where(is_kept, y, 0)
        z_y = tl.load(pointer + y).to(tl.float32)
        gaps = tl.full((), 0.0, tl.float32)
        if IS_STREAM:
            row_sum, anchor, t0, t1, t2, t3 = stream.measured(t0, t1, t2, t3, pointer, alpha, c, V, IS_SIG, LANES)
        elif IS_SMOOTH:
            row_sum, anchor, gaps = smoothing.measured(pointer, first, alpha, c, V, classes, IS_SIG, LANES)
        else:
            row_sum, anchor = fast.measured(pointer, first, alpha, c, V, IS_SIG, LANES)
        normalizer = tl.log(row_sum)
        gap = fast.gap_of(z_y, anchor, alpha, c, IS_SIG)
        if IS_SMOOTH:
            gap = (1.0 - label_smoothing) * gap + label_smoothing / classes * gaps
        loss = normalizer - gap
        by_n = scale
        if HAS_Z_LOSS:
            log_sum = fast.row_offset(anchor, alpha, c, IS_SIG) + normalizer
            loss += z_loss * log_sum * log_sum
            by_n += 2.0 * z_loss * scale * log_sum
        share = tl.where(is_kept, scale * loss, 0.0)
        tl.store(shares + row, tl.where(scale == float("inf"), float("nan"), share))
        out_pointer = fast.row_at(out, row, V)
        if IS_SMOOTH:
            by_s = -scale * (1.0 - label_smoothing)
            by_class = -scale * label_smoothing / classes
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
            by_n = tl.where(is_kept, by_n, 0.0)
            by_s = tl.where(is_kept, -scale, 0.0)
            if IS_STREAM:
                t0, t1, t2, t3 = stream.write_gradient(
                    t0,
                    t1,
                    t2,
                    t3,
                    pointer,
                    fast.row_at(logits, next_row, V),
                    out_pointer,
                    row_sum,
                    anchor,
                    by_n,
                    by_s,
                    y,
                    z_y,
                    is_kept,
                    alpha,
                    c,
                    V,
                    IS_SIG,
                    True,
                    LANES,
                )
            else:
                fast.write_gradient(
                    pointer, out_pointer, row_sum, anchor, by_n, by_s, y, z_y, is_kept, alpha, c, V, IS_SIG, True, LANES
                )
    add_up(shares, total, N, tl.num_programs(0), BLOCK)
