"""Kernels of the token arithmetic before and after the logits kernel, of one component and of a mixture.

A mixture has two: what it needs for the losses of targets, and the log-probability of every class.

Shapes: N tokens, K components, V classes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import formulas, fused_loss, intrinsics, priors, tokens
from sigsoftmax.backends.triton.kernels.form_logits import argument
from sigsoftmax.backends.triton.kernels.vocabulary_blocks import joined_parts


@triton.jit
def prepare_tokens_kernel(
    target,
    class_weight,
    given_scale,
    index,
    scale,
    by_normalizer,
    by_target,
    z_slope,
    empty,
    N,
    V,
    ignore_index,
    z_loss,
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Check the targets, and write the weight of each token: 1 over the sum of weights for a mean."""
    counted = tl.zeros([BLOCK], tl.float32)
    kept_tokens = tl.zeros([BLOCK], tl.int32)
    for start in range(0, N, BLOCK):
        position = start + tl.arange(0, BLOCK)
        y = tl.load(target + position, mask=position < N, other=ignore_index)
        is_kept = y != ignore_index
        tl.device_assert((y == ignore_index) | ((y >= 0) & (y < V)), "target out of range; see SIGSOFTMAX_CHECK=1")
        weight = tokens.token_scales(is_kept, 1.0)
        if HAS_WEIGHT:
            weight = tl.load(class_weight + y, mask=is_kept, other=0.0)
        counted += weight
        kept_tokens += is_kept.to(tl.int32)
    share = tl.full((), 1.0, tl.float32)
    if IS_MEAN:
        share = tokens.mean_scale(tl.sum(counted, 0))
        tl.store(empty, tokens.empty_mean(tl.sum(kept_tokens, 0)))
    else:
        tl.store(empty, 0.0)
    for start in range(0, N, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < N
        y = tl.load(target + position, mask=inside, other=ignore_index)
        is_kept = y != ignore_index
        token_scale = tokens.token_scales(is_kept, share)
        if HAS_SCALE:
            token_scale = tokens.token_scales(is_kept, tl.load(given_scale + position, mask=inside, other=0.0))
        weight = 1.0
        if HAS_WEIGHT:
            weight = tl.load(class_weight + y, mask=is_kept, other=0.0)
        by_n = tokens.class_coefficients(token_scale, weight, HAS_WEIGHT)
        tl.store(index + position, tl.where(is_kept, y, 0), mask=inside)
        tl.store(scale + position, token_scale, mask=inside)
        tl.store(by_normalizer + position, by_n, mask=inside)
        tl.store(by_target + position, -by_n, mask=inside)
        tl.store(z_slope + position, tokens.z_slopes(token_scale, z_loss), mask=inside)


@triton.jit
def finish_tokens_kernel(
    target,
    class_weight,
    scale,
    offset,
    normalizer,
    at_target,
    empty,
    losses,
    log_normalizer,
    total,
    alpha_pointer,
    beta_pointer,
    alpha_value,
    beta_value,
    N,
    ignore_index,
    z_loss,
    FORM: tl.constexpr,
    ALPHA_IS_POINTER: tl.constexpr,
    BETA_IS_POINTER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The loss of each token in units, 0 for an ignored one, and their weighted total, the same in units after it."""
    alpha = argument(alpha_pointer, alpha_value, ALPHA_IS_POINTER)
    unit = formulas.unit_of(alpha, argument(beta_pointer, beta_value, BETA_IS_POINTER), FORM)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < N
        y = tl.load(target + position, mask=inside, other=ignore_index)
        is_kept = y != ignore_index
        n = tl.load(normalizer + position, mask=inside, other=0.0)
        row_offset = tl.load(offset + position, mask=inside, other=0.0)
        tl.store(log_normalizer + position, n + row_offset, mask=inside)
        gap = tl.load(at_target + position, mask=inside, other=0.0)
        weight = 1.0
        if HAS_WEIGHT:
            weight = tl.load(class_weight + y, mask=is_kept, other=0.0)
        loss = tokens.token_losses(n, gap, row_offset, weight, z_loss, unit, HAS_WEIGHT, HAS_Z_LOSS)
        loss = tl.where(is_kept, loss, 0.0)
        tl.store(losses + position, loss, mask=inside)
        sums += tokens.scaled(loss, tl.load(scale + position, mask=inside, other=0.0))
    in_units = tl.sum(sums, 0) + tl.load(empty)
    tl.store(total, in_units * unit)
    tl.store(total + 1, in_units)


@triton.jit
def total_kernel(
    scale,
    losses,
    empty,
    total,
    alpha_pointer,
    beta_pointer,
    alpha_value,
    beta_value,
    N,
    FORM: tl.constexpr,
    ALPHA_IS_POINTER: tl.constexpr,
    BETA_IS_POINTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weighted total of the losses of a mixture, and after it the same in units."""
    alpha = argument(alpha_pointer, alpha_value, ALPHA_IS_POINTER)
    unit = formulas.unit_of(alpha, argument(beta_pointer, beta_value, BETA_IS_POINTER), FORM)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < N
        token_scale = tl.load(scale + position, mask=inside, other=0.0)
        sums += tokens.scaled(tl.load(losses + position, mask=inside, other=0.0), token_scale)
    in_units = tl.sum(sums, 0) + tl.load(empty)
    tl.store(total, in_units * tokens.mixture_unit(unit))
    tl.store(total + 1, in_units)


@triton.jit
def mixture_kernel(
    target,
    class_weight,
    scale,
    log_prior,
    offset,
    normalizer,
    at_target,
    losses,
    log_normalizer,
    by_normalizer,
    by_target,
    by_prior,
    alpha_pointer,
    beta_pointer,
    alpha_value,
    beta_value,
    first,
    N,
    K,
    ignore_index,
    floor,
    z_loss,
    FORM: tl.constexpr,
    ALPHA_IS_POINTER: tl.constexpr,
    BETA_IS_POINTER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Losses in units of the tokens from ``first`` to N, and the derivatives of their total by the row statistics."""
    alpha = argument(alpha_pointer, alpha_value, ALPHA_IS_POINTER)
    unit = formulas.unit_of(alpha, argument(beta_pointer, beta_value, BETA_IS_POINTER), FORM)
    token = first + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < N
    component = tl.arange(0, LANES)[None, :]
    inside = is_token[:, None] & (component < K)
    position = token[:, None] * K + component
    y = tl.load(target + token, mask=is_token, other=ignore_index)
    is_kept = y != ignore_index
    n = tl.load(normalizer + position, mask=inside, other=0.0)
    row_offset = tl.load(offset + position, mask=inside, other=0.0)
    tl.store(log_normalizer + position, n + row_offset, mask=inside)
    prior = tl.load(log_prior + position, mask=inside, other=-float("inf"))
    gap = tl.load(at_target + position, mask=inside, other=0.0)
    log_p, responsibility = tokens.mixture_responsibilities(prior, n, gap, inside, floor, unit, HAS_FLOOR)
    weight = tl.full([TOKENS], 1.0, tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(class_weight + y, mask=is_kept, other=0.0)
    loss = tokens.mixture_losses(log_p, n, row_offset, prior, inside, weight, z_loss, unit, HAS_WEIGHT, HAS_Z_LOSS)
    tl.store(losses + token, tl.where(is_kept, loss, 0.0), mask=is_token)
    if HAS_GRADIENT:
        token_scale = tl.load(scale + token, mask=is_token, other=0.0)[:, None]
        by_n, by_s = tokens.mixture_coefficients(
            responsibility, n, row_offset, prior, weight[:, None], token_scale, z_loss, unit, HAS_WEIGHT, HAS_Z_LOSS
        )
        tl.store(by_target + position, by_s, mask=inside)
        tl.store(by_prior + position, by_s, mask=inside)
        tl.store(by_normalizer + position, by_n, mask=inside)


@triton.jit
def mixture_log_probs_kernel(
    logits,
    log_prior,
    peak,
    offset,
    normalizer,
    out,
    log_normalizer,
    alpha_pointer,
    beta_pointer,
    c_pointer,
    centre_pointer,
    logits_stride,
    V,
    K,
    blocks,
    floor,
    alpha_value,
    beta_value,
    c_value,
    FORM: tl.constexpr,
    ALPHA_IS_POINTER: tl.constexpr,
    BETA_IS_POINTER: tl.constexpr,
    C_IS_POINTER: tl.constexpr,
    C_PER_CLASS: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    HAS_NORMALIZER: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mixed log-probability of a block of classes of one token, from its K rows of logits.

    Row statistics are those of each of the ``PARTS`` of every row, which this kernel joins; the program of a token's
    first block writes the log normalisers of its components.
    """
    alpha = argument(alpha_pointer, alpha_value, ALPHA_IS_POINTER)
    beta = argument(beta_pointer, beta_value, BETA_IS_POINTER)
    if C_PER_CLASS:
        centre = tl.load(centre_pointer).to(tl.float32)
    else:
        centre = argument(c_pointer, c_value, C_IS_POINTER)
    token = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    component = tl.arange(0, LANES)
    is_component = component < K
    row = token * K + component
    part = row[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    part_peak = tl.load(peak + part, mask=is_component[:, None], other=0.0)
    part_offset = tl.load(offset + part, mask=is_component[:, None], other=0.0)
    part_normalizer = tl.load(normalizer + part, mask=is_component[:, None], other=0.0)
    row_peak, row_offset, n = joined_parts(part_peak, part_offset, part_normalizer, alpha, beta, centre, FORM)
    if HAS_NORMALIZER and block == 0:
        tl.store(log_normalizer + row, n + row_offset, mask=is_component)
    prior = tl.load(log_prior + row, mask=is_component, other=-float("inf"))
    position = block * BLOCK + tl.arange(0, BLOCK)
    is_class = position < V
    c = centre
    if C_PER_CLASS:
        c = tl.load(c_pointer + position, mask=is_class, other=0.0).to(tl.float32)[:, None]
    inside = is_class[:, None] & is_component[None, :]
    pointer = logits + row.to(tl.int64)[None, :] * logits_stride + position[:, None]
    z = intrinsics.widened(tl.load(pointer, mask=inside, other=-float("inf")))
    IS_ROUGH: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth == 16
    value, _, _ = formulas.value_weight_and_slope(
        z, row_peak[None, :], n[None, :], alpha, beta, c, centre, FORM, C_PER_CLASS, IS_ROUGH
    )
    # NaN where all classes of a row are masked, as under torch's softmax.
    unit = formulas.unit_of(alpha, beta, FORM)
    log_f = value + (n - n)[None, :]
    log_p, _ = tokens.mixture_responsibilities(prior[None, :], 0.0, log_f, inside, floor, unit, HAS_FLOOR)
    log_p *= tokens.mixture_unit(unit)
    tl.store(out + token.to(tl.int64) * V + position, log_p.to(out.dtype.element_ty), mask=is_class)


@triton.jit
def fused_mixture_kernel(
    target,
    prior_logits,
    offset,
    normalizer,
    at_target,
    shares,
    by_normalizer,
    by_target,
    by_prior,
    total,
    first,
    last,
    N,
    K,
    V,
    programs,
    alpha,
    beta,
    c,
    unit,
    ignore_index,
    floor,
    z_loss,
    FORM: tl.constexpr,
    IS_INCREASING: tl.constexpr,
    IS_MEAN: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Shares of the tokens from ``first`` to ``last`` in the loss, and its derivatives by their row statistics.

    Targets, prior and shares are those of all N tokens, row statistics those of the chunk, in the ``unit`` of phi. The
    other numbers and the form are those of the prior. The last of the ``programs`` of all chunks adds up the loss.
    """
    scale = fused_loss.token_scale(target, N, ignore_index, IS_MEAN, BLOCK)
    token = first + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < last
    component = tl.arange(0, LANES)[None, :]
    inside = is_token[:, None] & (component < K)
    position = token[:, None] * K + component
    row = (token - first)[:, None] * K + component
    y = tl.load(target + token, mask=is_token, other=ignore_index)
    is_kept = y != ignore_index
    tl.device_assert((y == ignore_index) | ((y >= 0) & (y < V)), "target out of range; see SIGSOFTMAX_CHECK=1")
    z = tl.load(prior_logits + position, mask=inside, other=-float("inf")).to(tl.float32)
    log_prior = priors.log_prior_of(z, alpha, beta, c, FORM, IS_INCREASING)
    n = tl.load(normalizer + row, mask=inside, other=0.0)
    gap = tl.load(at_target + row, mask=inside, other=0.0)
    row_offset = tl.load(offset + row, mask=inside, other=0.0)
    log_p, responsibility = tokens.mixture_responsibilities(log_prior, n, gap, inside, floor, unit, HAS_FLOOR)
    loss = tokens.mixture_losses(log_p, n, row_offset, log_prior, inside, 1.0, z_loss, unit, False, HAS_Z_LOSS)
    tl.store(shares + token, tokens.token_shares(loss, scale, is_kept), mask=is_token)
    token_scale = tokens.token_scales(is_kept, scale)[:, None]
    by_n, by_s = tokens.mixture_coefficients(
        responsibility, n, row_offset, log_prior, 1.0, token_scale, z_loss, unit, False, HAS_Z_LOSS
    )
    tl.store(by_target + row, by_s, mask=inside)
    by_z = priors.by_prior_logits(z, log_prior, tl.where(inside, by_s, 0.0), alpha, beta, c, FORM)
    tl.store(by_prior + position, by_z.to(by_prior.dtype.element_ty), mask=inside)
    tl.store(by_normalizer + row, by_n, mask=inside)
    fused_loss.add_up(shares, total, N, programs, tokens.mixture_unit(unit), BLOCK)
