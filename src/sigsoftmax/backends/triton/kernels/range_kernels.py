"""The kernel that adds what was measured of one range of classes to what was measured of others.

Shapes: R rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import forms
from sigsoftmax.backends.triton.kernels.general import argument


@triton.jit
def add_kernel(
    index,
    anchor_R,
    offset_R,
    normalizer_R,
    target_R,
    part_anchor_R,
    part_offset_R,
    part_normalizer_R,
    part_target_R,
    alpha_pointer,
    beta_pointer,
    c_pointer,
    centre_pointer,
    alpha_value,
    beta_value,
    c_value,
    R,
    rows_of_target,
    first_class,
    last_class,
    FORM: tl.constexpr,
    ALPHA_IS_POINTER: tl.constexpr,
    BETA_IS_POINTER: tl.constexpr,
    C_IS_POINTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a range of classes to what was measured of others: the sum, and the target if the range has it.

    Whoever has the larger sum gives the anchor, so that no sum grows beyond what a row at once would have.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < R
    alpha = argument(alpha_pointer, alpha_value, ALPHA_IS_POINTER)
    beta = argument(beta_pointer, beta_value, BETA_IS_POINTER)
    c = argument(c_pointer, c_value, C_IS_POINTER)
    anchor = tl.load(anchor_R + row, mask=inside, other=0.0)
    offset = tl.load(offset_R + row, mask=inside, other=0.0)
    normalizer = tl.load(normalizer_R + row, mask=inside, other=0.0)
    part_anchor = tl.load(part_anchor_R + row, mask=inside, other=0.0)
    part_offset = tl.load(part_offset_R + row, mask=inside, other=0.0)
    part_normalizer = tl.load(part_normalizer_R + row, mask=inside, other=0.0)
    gap = forms.offset_gap(part_anchor, anchor, alpha, beta, c, FORM)
    # The anchor of a masked row means nothing.
    gap = tl.where((normalizer == -float("inf")) | (part_normalizer == -float("inf")), 0.0, gap)
    part_leads = part_normalizer + gap > normalizer
    leader = tl.where(part_leads, part_normalizer, normalizer)
    other = tl.where(part_leads, normalizer - gap, part_normalizer + gap)
    # inf - inf must not come of two masked rows.
    ratio = tl.where(other == -float("inf"), 0.0, tl.exp(other - leader))
    y = tl.load(index + row // rows_of_target, mask=inside, other=0)
    has_target = (y >= first_class) & (y < last_class)
    target = tl.load(target_R + row, mask=inside, other=0.0)
    part_target = tl.load(part_target_R + row, mask=inside, other=0.0)
    # Relative to the offset of whoever leads.
    target = tl.where(has_target, part_target, target)
    moved = tl.where(has_target, tl.where(part_leads, 0.0, gap), tl.where(part_leads, -gap, 0.0))
    tl.store(anchor_R + row, tl.where(part_leads, part_anchor, anchor), mask=inside)
    tl.store(offset_R + row, tl.where(part_leads, part_offset, offset), mask=inside)
    tl.store(normalizer_R + row, leader + tl.log(1.0 + ratio), mask=inside)
    tl.store(target_R + row, target + moved, mask=inside)
