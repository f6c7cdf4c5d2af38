"""What label smoothing adds to a row of softmax or sigsoftmax: every class is a target to some small part.

Shapes: V logits in a row, those beyond the ``classes`` masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton import forms


@triton.jit
def _tile(pointer, anchor, normalizer, alpha, c, start, classes, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """Whether each of a tile is a class, and of its phi the value, the weight and the slope."""
    IS_ROUGH: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth == 16
    beta: tl.constexpr = 1.0 if IS_SIG else 0.0
    position = start + tl.arange(0, LANES)
    z = tl.load(pointer + position, mask=position < classes, other=-float("inf"))
    value, weight, slope = forms.value_weight_and_slope(
        forms.widened(z), anchor, normalizer, alpha, beta, c, c, forms.LOGISTIC, False, IS_ROUGH
    )
    return position < classes, value, weight, slope


@triton.jit
def sum_of_gaps(pointer, anchor, alpha, c, classes, IS_SIG: tl.constexpr, LANES: tl.constexpr):
    """log g of all classes, less the offset of the row."""
    sums = tl.zeros([LANES], tl.float32)
    for start in range(0, classes, LANES):
        is_class, value, _, _ = _tile(pointer, anchor, 0.0, alpha, c, start, classes, IS_SIG, LANES)
        sums += tl.where(is_class, value, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def write_gradient(
    pointer,
    out_pointer,
    anchor,
    normalizer,
    by_normalizer,
    by_target,
    by_class,
    y,
    is_used,
    alpha,
    c,
    V,
    classes,
    IS_SIG: tl.constexpr,
    LANES: tl.constexpr,
):
    """The gradient of a row, 0 where it is not used."""
    for start in range(0, V, LANES):
        is_class, _, weight, slope = _tile(pointer, anchor, normalizer, alpha, c, start, classes, IS_SIG, LANES)
        position = start + tl.arange(0, LANES)
        by_phi = by_normalizer * weight + by_class + tl.where(position == y, by_target, 0.0)
        gradient = tl.where(is_class & is_used, by_phi * slope, 0.0)
        tl.store(out_pointer + position, gradient.to(out_pointer.dtype.element_ty), mask=position < V)
