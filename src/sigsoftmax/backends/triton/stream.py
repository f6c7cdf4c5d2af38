"""Long rows of 16-bit logits as one stream of tiles, of which four are on their way at any time.

A loop that asks for tiles and then waits for them leaves the memory idle whenever it begins, twice a row. Here a tile
that has been used makes room at once for the one that comes four later: of the same pass, of the second pass over the
row, or of the next row. Between them the stream only waits for the sum.

Two logits are one integer. Triton would keep 16-bit values that a loop hands on in a register each.

Shapes: V classes, a multiple of 8, four tiles or more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton import fast, forms

TILES = 4
ELEMENT_BYTES = 2
ALIGNMENT = 16
"""bytes that rows begin at multiples of; a thread loads as many at a time"""
TWO_MASKED_BFLOAT16 = tl.constexpr(-8323200)
"""-inf and -inf, as one integer"""
TWO_MASKED_FLOAT16 = tl.constexpr(-67044352)


def takes(classes: int, stride: int, element_bytes: int, lanes: int) -> bool:
    """Whether such rows can be read as a stream, if the first of them begins at an aligned address."""
    is_aligned = classes * element_bytes % ALIGNMENT == 0 and stride * element_bytes % ALIGNMENT == 0
    return element_bytes == ELEMENT_BYTES and is_aligned and classes >= TILES * lanes


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
def _tile(pointer, start, V, LANES: tl.constexpr, POLICY: tl.constexpr):
    """A tile that may reach beyond the end of the row, where logits are -inf."""
    IS_BFLOAT16: tl.constexpr = pointer.dtype.element_ty == tl.bfloat16
    MASKED: tl.constexpr = TWO_MASKED_BFLOAT16 if IS_BFLOAT16 else TWO_MASKED_FLOAT16
    position = start // 2 + tl.arange(0, LANES // 2)
    pairs = pointer.to(tl.pointer_type(tl.int32)) + position
    return tl.load(pairs, mask=position < V // 2, other=MASKED, eviction_policy=POLICY)


@triton.jit
def _whole_tile(pointer, start, LANES: tl.constexpr, POLICY: tl.constexpr):
    position = start // 2 + tl.arange(0, LANES // 2)
    return tl.load(pointer.to(tl.pointer_type(tl.int32)) + position, eviction_policy=POLICY)


@triton.jit
def tiles_at(pointer, LANES: tl.constexpr):
    """The first four tiles of a row; with them the stream begins."""
    return (
        _whole_tile(pointer, 0, LANES, "evict_last"),
        _whole_tile(pointer, LANES, LANES, "evict_last"),
        _whole_tile(pointer, 2 * LANES, LANES, "evict_last"),
        _whole_tile(pointer, 3 * LANES, LANES, "evict_last"),
    )


@triton.jit
def _powers_of(tile, anchor, scale, shift, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """Of the first of every four elements, the second, the third and the fourth."""
    first, second = tl.split(tl.reshape(tile, [LANES // 4, 2]))
    return (
        fast.powers_of(_low(first, DTYPE), anchor, scale, shift, True),
        fast.powers_of(_high(first, DTYPE), anchor, scale, shift, True),
        fast.powers_of(_low(second, DTYPE), anchor, scale, shift, True),
        fast.powers_of(_high(second, DTYPE), anchor, scale, shift, True),
    )


@triton.jit
def _sum_of(tile, anchor, scale, shift, b, IS_SIG: tl.constexpr, DTYPE: tl.constexpr, LANES: tl.constexpr):
    u0, u1, u2, u3 = _powers_of(tile, anchor, scale, shift, DTYPE, LANES)
    return fast.sum_of_four(u0, u1, u2, u3, b, IS_SIG)[0]


@triton.jit
def _sum_row(t0, t1, t2, t3, pointer, anchor, scale, shift, b, V, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """sum g / e^offset over an easy row; and its first tiles once more, for the second pass."""
    DTYPE: tl.constexpr = pointer.dtype.element_ty
    total = tl.zeros([LANES // 4], tl.float32)
    for start in range(4 * LANES, V, 4 * LANES):
        total += _sum_of(t0, anchor, scale, shift, b, IS_SIG, DTYPE, LANES)
        t0 = _tile(pointer, start, V, LANES, "evict_last")
        total += _sum_of(t1, anchor, scale, shift, b, IS_SIG, DTYPE, LANES)
        t1 = _tile(pointer, start + LANES, V, LANES, "evict_last")
        total += _sum_of(t2, anchor, scale, shift, b, IS_SIG, DTYPE, LANES)
        t2 = _tile(pointer, start + 2 * LANES, V, LANES, "evict_last")
        total += _sum_of(t3, anchor, scale, shift, b, IS_SIG, DTYPE, LANES)
        t3 = _tile(pointer, start + 3 * LANES, V, LANES, "evict_last")
    total += _sum_of(t0, anchor, scale, shift, b, IS_SIG, DTYPE, LANES)
    t0 = _whole_tile(pointer, 0, LANES, "evict_first")
    total += _sum_of(t1, anchor, scale, shift, b, IS_SIG, DTYPE, LANES)
    t1 = _whole_tile(pointer, LANES, LANES, "evict_first")
    total += _sum_of(t2, anchor, scale, shift, b, IS_SIG, DTYPE, LANES)
    t2 = _whole_tile(pointer, 2 * LANES, LANES, "evict_first")
    total += _sum_of(t3, anchor, scale, shift, b, IS_SIG, DTYPE, LANES)
    t3 = _whole_tile(pointer, 3 * LANES, LANES, "evict_first")
    return tl.sum(total, 0), t0, t1, t2, t3


@triton.jit
def measured(t0, t1, t2, t3, pointer, alpha, c, V, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """(sum g / e^offset, anchor) of a row; and its first tiles, for the second pass."""
    DTYPE: tl.constexpr = pointer.dtype.element_ty
    anchor = fast.anchor_at(tl.max(tl.maximum(_low(t0, DTYPE), _high(t0, DTYPE)), 0))
    scale = alpha * forms.LOG2_E
    if fast.is_easy_row(anchor, scale, c, IS_SIG):
        shift, residual = fast.shift_of(anchor, scale)
        grown = tl.exp2(residual)
        b = fast.bend_of(anchor, c, IS_SIG)[1] * grown
        total, t0, t1, t2, t3 = _sum_row(t0, t1, t2, t3, pointer, anchor, scale, shift, b, V, IS_SIG, LANES)
        total = total / grown
    else:
        total = fast.hard_sum(pointer, anchor, alpha, c, V, IS_SIG, LANES)
    if not fast.is_good_sum(total):
        anchor = fast.anchor_at(fast.largest(pointer, V, LANES))
        total = fast.hard_sum(pointer, anchor, alpha, c, V, IS_SIG, LANES)
    return total, anchor, t0, t1, t2, t3


@triton.jit
def _joined(g0, g1, g2, g3, LANES: tl.constexpr):
    """What was taken apart into the first, second, third and fourth of every four elements."""
    even = tl.reshape(tl.join(g0, g2), [LANES // 2])
    odd = tl.reshape(tl.join(g1, g3), [LANES // 2])
    return tl.reshape(tl.join(even, odd), [LANES])


@triton.jit
def _store(
    tile,
    out_pointer,
    start,
    anchor,
    scale,
    shift,
    b,
    factor,
    root,
    V,
    IS_SIG: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
    LANES: tl.constexpr,
):
    """The gradient of a tile; root^2 is the factor."""
    u0, u1, u2, u3 = _powers_of(tile, anchor, scale, shift, DTYPE, LANES)
    g0, g1, g2, g3 = fast.gradients_of_four(u0, u1, u2, u3, b, factor, root, IS_SIG)
    gradient = _joined(g0, g1, g2, g3, LANES)
    fast.store_tile(out_pointer, start, gradient, V, LANES, IS_WHOLE)


@triton.jit
def _gradient_row(
    t0,
    t1,
    t2,
    t3,
    pointer,
    next_pointer,
    out_pointer,
    anchor,
    scale,
    shift,
    b,
    factor,
    V,
    IS_SIG: tl.constexpr,
    LANES: tl.constexpr,
):
    """The gradient of an easy row is written; returned are the first tiles of the next one."""
    DTYPE: tl.constexpr = pointer.dtype.element_ty
    root = tl.sqrt(factor)
    last = (V - 1) // (4 * LANES) * (4 * LANES)
    for start in range(0, last, 4 * LANES):
        _store(t0, out_pointer, start, anchor, scale, shift, b, factor, root, V, IS_SIG, True, DTYPE, LANES)
        t0 = _tile(pointer, start + 4 * LANES, V, LANES, "evict_first")
        _store(t1, out_pointer, start + LANES, anchor, scale, shift, b, factor, root, V, IS_SIG, True, DTYPE, LANES)
        t1 = _tile(pointer, start + 5 * LANES, V, LANES, "evict_first")
        _store(t2, out_pointer, start + 2 * LANES, anchor, scale, shift, b, factor, root, V, IS_SIG, True, DTYPE, LANES)
        t2 = _tile(pointer, start + 6 * LANES, V, LANES, "evict_first")
        _store(t3, out_pointer, start + 3 * LANES, anchor, scale, shift, b, factor, root, V, IS_SIG, True, DTYPE, LANES)
        t3 = _tile(pointer, start + 7 * LANES, V, LANES, "evict_first")
    _store(t0, out_pointer, last, anchor, scale, shift, b, factor, root, V, IS_SIG, False, DTYPE, LANES)
    t0 = _whole_tile(next_pointer, 0, LANES, "evict_last")
    _store(t1, out_pointer, last + LANES, anchor, scale, shift, b, factor, root, V, IS_SIG, False, DTYPE, LANES)
    t1 = _whole_tile(next_pointer, LANES, LANES, "evict_last")
    _store(t2, out_pointer, last + 2 * LANES, anchor, scale, shift, b, factor, root, V, IS_SIG, False, DTYPE, LANES)
    t2 = _whole_tile(next_pointer, 2 * LANES, LANES, "evict_last")
    _store(t3, out_pointer, last + 3 * LANES, anchor, scale, shift, b, factor, root, V, IS_SIG, False, DTYPE, LANES)
    t3 = _whole_tile(next_pointer, 3 * LANES, LANES, "evict_last")
    return t0, t1, t2, t3


@triton.jit
def write_gradient(
    t0,
    t1,
    t2,
    t3,
    pointer,
    next_pointer,
    out_pointer,
    total,
    anchor,
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
    """As ``fast.write_gradient``, from the first tiles of the row; returned are those of the next one."""
    scale = alpha * forms.LOG2_E
    factor = by_normalizer / total * alpha
    if fast.is_easy_row(anchor, scale, c, IS_SIG) & (factor > 0):
        shift, residual = fast.shift_of(anchor, scale)
        grown = tl.exp2(residual)
        b = fast.bend_of(anchor, c, IS_SIG)[1] * grown
        t0, t1, t2, t3 = _gradient_row(
            t0,
            t1,
            t2,
            t3,
            pointer,
            next_pointer,
            out_pointer,
            anchor,
            scale,
            shift,
            b,
            factor / grown,
            V,
            IS_SIG,
            LANES,
        )
    else:
        fast.write_hard_gradient(
            pointer, out_pointer, anchor, by_normalizer, by_target, factor, alpha, c, V, IS_SIG, LANES
        )
        t0, t1, t2, t3 = tiles_at(next_pointer, LANES)
    if HAS_INDEX:
        counts = (by_normalizer != 0) | (by_target != 0)
        fast.write_target(out_pointer, factor, anchor, by_target, y, z_y, has_target & counts, alpha, c, IS_SIG)
    return t0, t1, t2, t3
