"""Software-pipelined rows of many 16-bit logits: the loads of four tiles are in flight at any time.

A loop that loads tiles and then waits for them leaves the memory idle whenever it begins, twice per row. Here a tile
that has been used makes room at once for the one that comes four later: of the same pass, of the second pass over the
row, or of the next row. Between the passes the pipeline only waits for the sum.

Two logits are one integer. Triton would keep 16-bit values that a loop hands on in a register each.

Shapes: V classes, a multiple of 8, four tiles or more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import formulas, softmax_row

TWO_MASKED_BFLOAT16 = tl.constexpr(-8323200)
"""-inf and -inf, as one integer"""
TWO_MASKED_FLOAT16 = tl.constexpr(-67044352)


@triton.jit
def _low(pair, DTYPE: tl.constexpr):
    """The first of two logits."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300 - of types that Triton compares
        return (pair << 16).to(tl.float32, bitcast=True)
    else:
        return pair.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _high(pair, DTYPE: tl.constexpr):
    if DTYPE == tl.bfloat16:  # noqa: SIM300 - of types that Triton compares
        return (pair & -65536).to(tl.float32, bitcast=True)
    else:
        return (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _tile(used, pointer, start, INDEX: tl.constexpr, V, IS_WHOLE: tl.constexpr, POLICY: tl.constexpr):
    """Load one of the four tiles from ``start`` on in place of a used one; -inf beyond the end of the row."""
    IS_BFLOAT16: tl.constexpr = pointer.dtype.element_ty == tl.bfloat16
    MASKED: tl.constexpr = TWO_MASKED_BFLOAT16 if IS_BFLOAT16 else TWO_MASKED_FLOAT16
    PAIRS: tl.constexpr = used.shape[0]
    pairs = (pointer + start).to(tl.pointer_type(tl.int32))
    position = INDEX * PAIRS + tl.arange(0, PAIRS)
    if IS_WHOLE:
        # The condition holds. Without one the assembler asks for all tiles at the end of a loop.
        is_asked_for = tl.full([PAIRS], V, tl.int32) > 0
        return tl.load(pairs + position, mask=is_asked_for, other=used, eviction_policy=POLICY)
    else:
        return tl.load(pairs + position, mask=position < (V - start) // 2, other=MASKED, eviction_policy=POLICY)


@triton.jit
def _first_tile(pointer, INDEX: tl.constexpr, LANES: tl.constexpr):
    position = INDEX * (LANES // 2) + tl.arange(0, LANES // 2)
    return tl.load(pointer.to(tl.pointer_type(tl.int32)) + position, eviction_policy="evict_last")


@triton.jit
def tiles_at(pointer, LANES: tl.constexpr):
    """The first four tiles of a row, with which the pipeline begins."""
    return (
        _first_tile(pointer, 0, LANES),
        _first_tile(pointer, 1, LANES),
        _first_tile(pointer, 2, LANES),
        _first_tile(pointer, 3, LANES),
    )


@triton.jit
def _fast_path(peak, alpha, c, IS_SIG: tl.constexpr):
    """Decide on the fast path; with the peak, scale and shift of its powers, b, and the factor of both."""
    scale = alpha * formulas.LOG2_E
    shift, residual = softmax_row.shift_of(peak, scale)
    grown = tl.exp2(residual)
    b = softmax_row.sigmoid_terms(peak, c, IS_SIG)[1] * grown
    return softmax_row.takes_fast_path(peak, scale, c, IS_SIG), (peak, scale, shift), b, grown


@triton.jit
def _powers_of(tile, line, DTYPE: tl.constexpr):
    """Powers of a tile, deinterleaved: of the first, second, third and fourth of every four elements."""
    peak, scale, shift = line
    first, second = tl.split(tl.reshape(tile, [tile.shape[0] // 2, 2]))
    return (
        softmax_row.powers_of(_low(first, DTYPE), peak, scale, shift, True),
        softmax_row.powers_of(_high(first, DTYPE), peak, scale, shift, True),
        softmax_row.powers_of(_low(second, DTYPE), peak, scale, shift, True),
        softmax_row.powers_of(_high(second, DTYPE), peak, scale, shift, True),
    )


@triton.jit
def _added(sums, tile, line, b, IS_SIG: tl.constexpr, DTYPE: tl.constexpr):
    """The sums of u and sigma, with those of a tile."""
    u0, u1, u2, u3 = _powers_of(tile, line, DTYPE)
    powers, sigmas, _ = softmax_row.sums_of_four(u0, u1, u2, u3, b, IS_SIG)
    return sums[0] + powers, sums[1] + sigmas


@triton.jit
def _add_four(
    tiles, sums, pointer, start, line, b, V, IS_SIG: tl.constexpr, IS_WHOLE: tl.constexpr, POLICY: tl.constexpr
):
    """Four tiles are added, and make room for those from ``start`` on."""
    DTYPE: tl.constexpr = pointer.dtype.element_ty
    t0, t1, t2, t3 = tiles
    sums = _added(sums, t0, line, b, IS_SIG, DTYPE)
    t0 = _tile(t0, pointer, start, 0, V, IS_WHOLE, POLICY)
    sums = _added(sums, t1, line, b, IS_SIG, DTYPE)
    t1 = _tile(t1, pointer, start, 1, V, IS_WHOLE, POLICY)
    sums = _added(sums, t2, line, b, IS_SIG, DTYPE)
    t2 = _tile(t2, pointer, start, 2, V, IS_WHOLE, POLICY)
    sums = _added(sums, t3, line, b, IS_SIG, DTYPE)
    t3 = _tile(t3, pointer, start, 3, V, IS_WHOLE, POLICY)
    return (t0, t1, t2, t3), sums


@triton.jit
def _sum_row(tiles, pointer, line, b, V, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """sum g / e^offset over a row on the fast path; and its first tiles once more, for the second pass."""
    sums = (tl.zeros([LANES // 4], tl.float32), tl.zeros([LANES // 4], tl.float32))
    whole = V // (4 * LANES) * (4 * LANES)
    for start in range(4 * LANES, whole, 4 * LANES):
        tiles, sums = _add_four(tiles, sums, pointer, start, line, b, V, IS_SIG, True, "evict_last")
    if whole < V:
        tiles, sums = _add_four(tiles, sums, pointer, whole, line, b, V, IS_SIG, False, "evict_last")
    tiles, sums = _add_four(tiles, sums, pointer, 0, line, b, V, IS_SIG, True, "evict_first")
    return tl.sum(softmax_row.total_of(sums[0], sums[1], b, IS_SIG), 0), tiles


@triton.jit
def forward_reduction(tiles, pointer, alpha, c, V, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """(sum g / e^offset, peak) of a row; the fast path's numbers for the second pass, and its first tiles."""
    DTYPE: tl.constexpr = pointer.dtype.element_ty
    peak = softmax_row.max_or_zero(tl.max(tl.maximum(_low(tiles[0], DTYPE), _high(tiles[0], DTYPE)), 0))
    fast_path = _fast_path(peak, alpha, c, IS_SIG)
    if fast_path[0]:
        total, tiles = _sum_row(tiles, pointer, fast_path[1], fast_path[2], V, IS_SIG, LANES)
        total = total / fast_path[3]
    else:
        total = softmax_row.safe_sum(pointer, peak, alpha, c, V, IS_SIG, LANES)
    if not softmax_row.is_good_sum(total):
        peak = softmax_row.max_or_zero(softmax_row.largest(pointer, V, LANES))
        fast_path = _fast_path(peak, alpha, c, IS_SIG)
        total = softmax_row.safe_sum(pointer, peak, alpha, c, V, IS_SIG, LANES)
    return total, peak, fast_path, tiles


@triton.jit
def _joined(g0, g1, g2, g3):
    """Inverse of the 4-way deinterleave."""
    QUARTER: tl.constexpr = g0.shape[0]
    even = tl.reshape(tl.join(g0, g2), [2 * QUARTER])
    odd = tl.reshape(tl.join(g1, g3), [2 * QUARTER])
    return tl.reshape(tl.join(even, odd), [4 * QUARTER])


@triton.jit
def _store(
    tile,
    out_pointer,
    INDEX: tl.constexpr,
    line,
    b,
    factor,
    root,
    V,
    IS_SIG: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Store the gradient of one of four tiles; root^2 is the factor."""
    LANES: tl.constexpr = 2 * tile.shape[0]
    u0, u1, u2, u3 = _powers_of(tile, line, DTYPE)
    g0, g1, g2, g3 = softmax_row.gradients_of_four(u0, u1, u2, u3, b, factor, root, IS_SIG)
    softmax_row.store_tile(out_pointer, INDEX * LANES, _joined(g0, g1, g2, g3), V, LANES, IS_WHOLE)


@triton.jit
def _store_four(
    tiles,
    out_pointer,
    start,
    pointer,
    next_start,
    line,
    b,
    factor,
    V,
    IS_SIG: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_NEXT_WHOLE: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Store the gradient of four tiles, which make room for those from ``next_start`` on."""
    DTYPE: tl.constexpr = pointer.dtype.element_ty
    t0, t1, t2, t3 = tiles
    out_pointer += start
    V_left = V - start
    root = tl.sqrt(factor)
    _store(t0, out_pointer, 0, line, b, factor, root, V_left, IS_SIG, IS_WHOLE, DTYPE)
    t0 = _tile(t0, pointer, next_start, 0, V, IS_NEXT_WHOLE, POLICY)
    _store(t1, out_pointer, 1, line, b, factor, root, V_left, IS_SIG, IS_WHOLE, DTYPE)
    t1 = _tile(t1, pointer, next_start, 1, V, IS_NEXT_WHOLE, POLICY)
    _store(t2, out_pointer, 2, line, b, factor, root, V_left, IS_SIG, IS_WHOLE, DTYPE)
    t2 = _tile(t2, pointer, next_start, 2, V, IS_NEXT_WHOLE, POLICY)
    _store(t3, out_pointer, 3, line, b, factor, root, V_left, IS_SIG, IS_WHOLE, DTYPE)
    t3 = _tile(t3, pointer, next_start, 3, V, IS_NEXT_WHOLE, POLICY)
    return t0, t1, t2, t3


@triton.jit
def _gradient_row(
    tiles,
    pointer,
    next_pointer,
    out_pointer,
    line,
    b,
    factor,
    V,
    IS_SIG: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the gradient of a row on the fast path; returns the first tiles of the next row."""
    whole = V // (4 * LANES) * (4 * LANES)
    last = whole - 4 * LANES
    for start in range(0, last, 4 * LANES):
        tiles = _store_four(
            tiles,
            out_pointer,
            start,
            pointer,
            start + 4 * LANES,
            line,
            b,
            factor,
            V,
            IS_SIG,
            True,
            True,
            "evict_first",
        )
    if whole < V:
        tiles = _store_four(
            tiles, out_pointer, last, pointer, whole, line, b, factor, V, IS_SIG, True, False, "evict_first"
        )
        last = whole
    return _store_four(tiles, out_pointer, last, next_pointer, 0, line, b, factor, V, IS_SIG, False, True, "evict_last")


@triton.jit
def write_gradient(
    tiles,
    fast_path,
    pointer,
    next_pointer,
    out_pointer,
    total,
    peak,
    by_normalizer,
    by_target,
    alpha,
    c,
    V,
    IS_SIG: tl.constexpr,
    LANES: tl.constexpr,
):
    """Like ``softmax_row.write_gradient`` but for the target; returns the first tiles of the next row."""
    factor = by_normalizer / total * alpha
    is_fast, line, b, grown = fast_path
    if is_fast & (factor > 0):
        tiles = _gradient_row(tiles, pointer, next_pointer, out_pointer, line, b, factor / grown, V, IS_SIG, LANES)
    else:
        softmax_row.write_safe_gradient(
            pointer, out_pointer, peak, by_normalizer, by_target, factor, alpha, c, V, IS_SIG, LANES
        )
        tiles = tiles_at(next_pointer, LANES)
    return tiles
