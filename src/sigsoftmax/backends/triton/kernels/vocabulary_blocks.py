"""Row statistics of parts of the vocabulary, joined into those of whole rows.

Shapes: R rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import formulas
from sigsoftmax.backends.triton.kernels.form_logits import argument


@triton.jit
def joined_parts(peak, offset, normalizer, alpha, beta, centre, FORM: tl.constexpr):
    """(peak, offset, normaliser) of rows, from those of their parts, which lie along the second axis.

    The part with the highest offset gives the peak. The peak of a part whose classes are all masked means nothing, and
    its normaliser is -inf.
    """
    is_kept = normalizer != -float("inf")
    highest = tl.max(tl.where(is_kept, offset, -float("inf")), 1)
    leads = is_kept & (offset == highest[:, None])
    leader = tl.max(tl.where(leads, peak, -float("inf")), 1)
    leader = tl.where(leader == -float("inf"), 0.0, leader)
    unit = formulas.unit_of(alpha, beta, FORM)
    gap = tl.where(is_kept, unit * formulas.offset_gap(peak, leader[:, None], alpha, beta, centre, FORM), 0.0)
    value = normalizer + gap
    top = tl.max(value, 1)
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp(value - top[:, None]), 1)
    return leader, tl.where(highest == -float("inf"), 0.0, highest), top + tl.log(total)


@triton.jit
def add_block_kernel(
    index,
    peak_R,
    offset_R,
    normalizer_R,
    target_R,
    part_peak_R,
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
    rows_per_target,
    first_class,
    last_class,
    FORM: tl.constexpr,
    ALPHA_IS_POINTER: tl.constexpr,
    BETA_IS_POINTER: tl.constexpr,
    C_IS_POINTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the statistics of a block of classes to those of others: the sum, and the target if the block has it.

    The larger sum gives the peak, so that no sum grows beyond that of the whole row at once.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < R
    alpha = argument(alpha_pointer, alpha_value, ALPHA_IS_POINTER)
    beta = argument(beta_pointer, beta_value, BETA_IS_POINTER)
    c = argument(c_pointer, c_value, C_IS_POINTER)
    peak = tl.load(peak_R + row, mask=inside, other=0.0)
    offset = tl.load(offset_R + row, mask=inside, other=0.0)
    normalizer = tl.load(normalizer_R + row, mask=inside, other=0.0)
    part_peak = tl.load(part_peak_R + row, mask=inside, other=0.0)
    part_offset = tl.load(part_offset_R + row, mask=inside, other=0.0)
    part_normalizer = tl.load(part_normalizer_R + row, mask=inside, other=0.0)
    unit = formulas.unit_of(alpha, beta, FORM)
    gap_in_units = formulas.offset_gap(part_peak, peak, alpha, beta, c, FORM)
    # The peak of a masked row means nothing.
    gap_in_units = tl.where((normalizer == -float("inf")) | (part_normalizer == -float("inf")), 0.0, gap_in_units)
    gap = unit * gap_in_units
    part_leads = part_normalizer + gap > normalizer
    leader = tl.where(part_leads, part_normalizer, normalizer)
    other = tl.where(part_leads, normalizer - gap, part_normalizer + gap)
    # inf - inf must not come of two masked rows.
    ratio = tl.where(other == -float("inf"), 0.0, tl.exp(other - leader))
    y = tl.load(index + row // rows_per_target, mask=inside, other=0)
    has_target = (y >= first_class) & (y < last_class)
    target = tl.load(target_R + row, mask=inside, other=0.0)
    part_target = tl.load(part_target_R + row, mask=inside, other=0.0)
    # Relative to the offset of whoever leads.
    target = tl.where(has_target, part_target, target)
    moved = tl.where(has_target, tl.where(part_leads, 0.0, gap_in_units), tl.where(part_leads, -gap_in_units, 0.0))
    tl.store(peak_R + row, tl.where(part_leads, part_peak, peak), mask=inside)
    tl.store(offset_R + row, tl.where(part_leads, part_offset, offset), mask=inside)
    tl.store(normalizer_R + row, leader + tl.log(1.0 + ratio), mask=inside)
    tl.store(target_R + row, target + moved, mask=inside)
