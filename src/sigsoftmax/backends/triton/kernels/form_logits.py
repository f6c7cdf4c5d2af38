"""The logits kernel of any built-in form, with weights over all classes, entropy and gradients of the arguments.

The peak of a row is its logit at which phi is largest. The sum of a row is first tried relative to that of its first
tile, and is kept unless it shows that phi is far larger elsewhere. Then, and for the entropy, a pass over the row finds
its peak and another sums relative to the largest phi met so far. As in ``softmax_row``, few rows are in flight,
so that passes after the first read from the L2 cache.

Shapes: R rows, V classes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import formulas, intrinsics, tokens

LARGEST_SUM = tl.constexpr(1e9)
SMALLEST_SUM = tl.constexpr(1e-4)
"""A sum relative to the peak is kept if it lies between these; the part of the peak itself is near 1."""


@triton.jit
def argument(pointer, value, IS_POINTER: tl.constexpr):
    if IS_POINTER:
        return tl.load(pointer).to(tl.float32)
    else:
        return value


@triton.jit
def peak_of(lowest, highest, alpha, beta, centre, FORM: tl.constexpr, IS_INCREASING: tl.constexpr):
    """The logit at which phi is largest, from the ends of rows of which each lane saw a part; 0 for a masked row."""
    peak = tl.max(highest, 0)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    if not IS_INCREASING:
        least = tl.min(lowest, 0)
        peak = formulas.peak_at(tl.where(least == float("inf"), peak, least), peak, alpha, beta, centre, FORM)
    return peak


@triton.jit
def without_masks(z):
    """Replaces masks by +inf, so that the lowest logit is found."""
    return tl.where(z == -float("inf"), float("inf"), z)


@triton.jit
def form_logits_kernel(
    logits,
    out,
    index,
    dense,
    by_normalizer,
    by_target,
    by_dense,
    z_slope,
    peak_R,
    offset_R,
    normalizer_R,
    target_R,
    dense_R,
    entropy_R,
    by_arguments_R3,
    alpha_pointer,
    beta_pointer,
    c_pointer,
    centre_pointer,
    logits_stride,
    out_stride,
    dense_stride,
    alpha_value,
    beta_value,
    c_value,
    R,
    V,
    rows_per_target,
    first_class,
    FORM: tl.constexpr,
    ALPHA_IS_POINTER: tl.constexpr,
    BETA_IS_POINTER: tl.constexpr,
    C_IS_POINTER: tl.constexpr,
    C_PER_CLASS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_DENSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_Z_SLOPE: tl.constexpr,
    STATS: tl.constexpr,
    GRADIENT: tl.constexpr,
    ARGUMENTS: tl.constexpr,
    IS_INCREASING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the statistics of rows, write their gradient, or both; ``out`` may be ``logits``."""
    alpha = argument(alpha_pointer, alpha_value, ALPHA_IS_POINTER)
    beta = argument(beta_pointer, beta_value, BETA_IS_POINTER)
    if C_PER_CLASS:
        c = 0.0
        centre = tl.load(centre_pointer).to(tl.float32)
    else:
        c = argument(c_pointer, c_value, C_IS_POINTER)
        centre = c
    lanes = tl.arange(0, BLOCK)
    unit = formulas.unit_of(alpha, beta, FORM)
    IS_ROUGH: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth == 16
    for row in range(tl.program_id(0), R, tl.num_programs(0)):
        row64 = tl.full((), 1, tl.int64) * row
        pointer = logits + row64 * logits_stride
        dense_pointer = dense + row64 * dense_stride
        if HAS_INDEX:
            # A range of classes need not hold the target.
            y = tl.load(index + row // rows_per_target) - first_class
            has_target = (y >= 0) & (y < V)
            z_y = tl.load(pointer + y, mask=has_target, other=0.0).to(tl.float32)
            if not STATS:
                # No thread has stored its part of a gradient in place before all others have read the target's logit.
                tl.debug_barrier()
            if C_PER_CLASS:
                c_y = tl.load(c_pointer + y, mask=has_target, other=0.0).to(tl.float32)
            else:
                c_y = c
        if STATS:
            IS_TRIED: tl.constexpr = not HAS_ENTROPY
            peak = tl.full((), 0.0, tl.float32)
            normalizer = tl.full((), 0.0, tl.float32)
            is_found = False
            if IS_TRIED:
                first = tl.load(pointer + lanes, mask=lanes < V, other=-float("inf")).to(tl.float32)
                peak = peak_of(without_masks(first), first, alpha, beta, centre, FORM, IS_INCREASING)
                sums = tl.zeros([BLOCK], tl.float32)
                dense_sum = tl.zeros([BLOCK], tl.float32)
                for start in range(0, V, BLOCK):
                    position = start + lanes
                    z = tl.load(
                        pointer + position, mask=position < V, other=-float("inf"), eviction_policy="evict_last"
                    )
                    shift = c
                    if C_PER_CLASS:
                        shift = tl.load(c_pointer + position, mask=position < V, other=0.0).to(tl.float32)
                    scaled, weight, _ = formulas.value_weight_and_slope(
                        intrinsics.widened(z), peak, 0.0, alpha, beta, shift, centre, FORM, C_PER_CLASS, IS_ROUGH
                    )
                    sums += weight
                    if HAS_DENSE:
                        share = tl.load(dense_pointer + position, mask=position < V, other=0.0)
                        dense_sum += tl.where(position < V, share * scaled, 0.0)
                row_total = tl.sum(sums, 0)
                normalizer = tl.log(row_total)
                is_found = (row_total >= SMALLEST_SUM) & (row_total <= LARGEST_SUM)
                if HAS_DENSE:
                    # Written again where it is not found.
                    tl.store(dense_R + row, tl.sum(dense_sum, 0))
            if not is_found:
                highest = tl.full([BLOCK], -float("inf"), tl.float32)
                lowest = tl.full([BLOCK], float("inf"), tl.float32)
                for start in range(0, V, BLOCK):
                    position = start + lanes
                    z = tl.load(pointer + position, mask=position < V, other=-float("inf")).to(tl.float32)
                    highest = tl.maximum(highest, z)
                    if not IS_INCREASING:
                        lowest = tl.minimum(lowest, without_masks(z))
                peak = peak_of(lowest, highest, alpha, beta, centre, FORM, IS_INCREASING)
                # With a shift per class the peak need not have the largest phi.
                top = tl.full([BLOCK], -float("inf"), tl.float32)
                total = tl.zeros([BLOCK], tl.float32)
                weighted = tl.zeros([BLOCK], tl.float32)
                dense_sum = tl.zeros([BLOCK], tl.float32)
                for start in range(0, V, BLOCK):
                    position = start + lanes
                    z = tl.load(pointer + position, mask=position < V, other=-float("inf")).to(tl.float32)
                    is_kept = z != -float("inf")
                    shift = c
                    if C_PER_CLASS:
                        shift = tl.load(c_pointer + position, mask=position < V, other=0.0).to(tl.float32)
                    scaled = formulas.scaled(tl.where(is_kept, z, peak), peak, alpha, beta, shift, centre, FORM)
                    scaled = tl.where(is_kept, scaled, -float("inf"))
                    value = unit * scaled
                    new_top = tl.maximum(top, value)
                    safe_top = tl.where(new_top == -float("inf"), 0.0, new_top)
                    shrink = tl.exp(top - safe_top)
                    weight = tl.exp(value - safe_top)
                    total = total * shrink + weight
                    if HAS_ENTROPY:
                        weighted = weighted * shrink + tl.where(weight == 0, 0.0, weight * value)
                    top = new_top
                    if HAS_DENSE:
                        share = tl.load(dense_pointer + position, mask=position < V, other=0.0)
                        dense_sum += tl.where(position < V, share * scaled, 0.0)
                row_top = tl.max(top, 0)
                row_top = tl.where(row_top == -float("inf"), 0.0, row_top)
                lane_scale = tl.exp(top - row_top)
                row_total = tl.sum(total * lane_scale, 0)
                normalizer = row_top + tl.log(row_total)
                if HAS_DENSE:
                    tl.store(dense_R + row, tl.sum(dense_sum, 0))
                if HAS_ENTROPY:
                    tl.store(entropy_R + row, normalizer - tl.sum(weighted * lane_scale, 0) / row_total)
            row_offset = formulas.offset(peak, alpha, beta, centre, FORM)
            tl.store(peak_R + row, peak)
            tl.store(offset_R + row, row_offset)
            tl.store(normalizer_R + row, normalizer)
            if HAS_INDEX:
                at_target = formulas.scaled(
                    tl.where(z_y == -float("inf"), peak, z_y), peak, alpha, beta, c_y, centre, FORM
                )
                tl.store(target_R + row, tl.where(z_y == -float("inf"), z_y, at_target))
        else:
            peak = tl.load(peak_R + row)
            row_offset = tl.load(offset_R + row)
            normalizer = tl.load(normalizer_R + row)
        if GRADIENT:
            by_n = tl.load(by_normalizer + row)
            if HAS_Z_SLOPE:
                by_n = tokens.with_z_slopes(by_n, tl.load(z_slope + row), normalizer, row_offset, unit)
            by_s = tl.full((), 0.0, tl.float32)
            if HAS_INDEX:
                by_s = tl.load(by_target + row)
            by_d = tl.full((), 0.0, tl.float32)
            if HAS_DENSE:
                by_d = tl.load(by_dense + row)
            is_used = (by_n != 0) | (by_s != 0) | (by_d != 0)
            target_pointer = out + row64 * out_stride
            by_alpha = tl.zeros([BLOCK], tl.float32)
            by_beta = tl.zeros([BLOCK], tl.float32)
            by_c = tl.zeros([BLOCK], tl.float32)
            sum_by_phi = tl.zeros([BLOCK], tl.float32)
            if is_used:
                for start in range(0, V, BLOCK):
                    position = start + lanes
                    z = intrinsics.widened(tl.load(pointer + position, mask=position < V, other=-float("inf")))
                    shift = c
                    if C_PER_CLASS:
                        shift = tl.load(c_pointer + position, mask=position < V, other=0.0).to(tl.float32)
                    _, weight, slope = formulas.value_weight_and_slope(
                        z, peak, normalizer, alpha, beta, shift, centre, FORM, C_PER_CLASS, IS_ROUGH
                    )
                    by_phi = by_n * weight
                    if HAS_DENSE:
                        by_phi += by_d * tl.load(dense_pointer + position, mask=position < V, other=0.0)
                    gradient = by_phi * slope
                    tl.store(target_pointer + position, gradient.to(out.dtype.element_ty), mask=position < V)
                    if ARGUMENTS:
                        counted = tl.where(z == -float("inf"), 0.0, by_phi)
                        gap, log_sigmoid, fall = formulas.logistic_argument_slopes(
                            z, peak, shift, centre, C_PER_CLASS, IS_ROUGH
                        )
                        sum_by_phi += counted
                        by_alpha += counted * gap
                        by_beta += counted * log_sigmoid
                        by_c -= counted * fall
            else:
                # A NaN in a row that the loss does not depend on must not reach the gradient.
                for start in range(0, V, BLOCK):
                    position = start + lanes
                    tl.store(target_pointer + position, sum_by_phi.to(out.dtype.element_ty), mask=position < V)
            row_sum = tl.sum(sum_by_phi, 0)
            row_by_alpha = tl.sum(by_alpha, 0)
            row_by_beta = tl.sum(by_beta, 0)
            row_by_c = tl.sum(by_c, 0)
            if HAS_INDEX and is_used:
                _, weight, slope = formulas.value_weight_and_slope(
                    z_y, peak, normalizer, alpha, beta, c_y, centre, FORM, C_PER_CLASS, IS_ROUGH
                )
                by_phi = by_n * weight + by_s
                if HAS_DENSE:
                    by_phi += by_d * tl.load(dense_pointer + y, mask=has_target, other=0.0)
                gradient = by_phi * slope
                # Every thread of the block has stored its tiles before the target is put right.
                tl.debug_barrier()
                tl.store(target_pointer + y, gradient.to(out.dtype.element_ty), mask=has_target)
                if ARGUMENTS:
                    counted = tl.where(has_target & (z_y != -float("inf")), by_s, 0.0)
                    gap, log_sigmoid, fall = formulas.logistic_argument_slopes(
                        z_y, peak, c_y, centre, C_PER_CLASS, IS_ROUGH
                    )
                    row_sum += counted
                    row_by_alpha += counted * gap
                    row_by_beta += counted * log_sigmoid
                    row_by_c -= counted * fall
            if ARGUMENTS:
                row_by_alpha += tl.where(row_sum == 0, 0.0, row_sum * peak)
                row_by_beta += tl.where(row_sum == 0, 0.0, row_sum * tl.minimum(peak - centre, 0.0))
                tl.store(by_arguments_R3 + row * 3, row_by_alpha)
                tl.store(by_arguments_R3 + row * 3 + 1, row_by_beta)
                tl.store(by_arguments_R3 + row * 3 + 2, row_by_c * beta)
