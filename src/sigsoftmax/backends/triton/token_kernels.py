"""The kernels that finish the losses of tokens around the kernels of rows, of one component and of a mixture.

Shapes: N tokens, K components, V classes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton import forms, plan_kernels, priors


@triton.jit
def before_kernel(
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
    """Check the targets, and write what each token counts: 1 over the sum of weights for a mean."""
    counted = tl.zeros([BLOCK], tl.float32)
    kept_tokens = tl.zeros([BLOCK], tl.int32)
    for start in range(0, N, BLOCK):
        position = start + tl.arange(0, BLOCK)
        y = tl.load(target + position, mask=position < N, other=ignore_index)
        is_kept = y != ignore_index
        tl.device_assert((y == ignore_index) | ((y >= 0) & (y < V)), "target out of range; see SIGSOFTMAX_CHECK=1")
        weight = tl.where(is_kept, 1.0, 0.0)
        if HAS_WEIGHT:
            weight = tl.load(class_weight + y, mask=is_kept, other=0.0)
        counted += weight
        kept_tokens += is_kept.to(tl.int32)
    share = tl.full((), 1.0, tl.float32)
    if IS_MEAN:
        share = 1.0 / tl.sum(counted, 0)
        tl.store(empty, tl.where(tl.sum(kept_tokens, 0) == 0, float("nan"), 0.0))
    else:
        tl.store(empty, 0.0)
    for start in range(0, N, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < N
        y = tl.load(target + position, mask=inside, other=ignore_index)
        is_kept = y != ignore_index
        token_scale = tl.where(is_kept, share, 0.0)
        if HAS_SCALE:
            token_scale = tl.where(is_kept, tl.load(given_scale + position, mask=inside, other=0.0), 0.0)
        coefficient = token_scale
        if HAS_WEIGHT:
            weight = tl.load(class_weight + y, mask=is_kept, other=0.0)
            coefficient = tl.where(token_scale == 0, 0.0, token_scale * weight)
        tl.store(index + position, tl.where(is_kept, y, 0), mask=inside)
        tl.store(scale + position, token_scale, mask=inside)
        tl.store(by_normalizer + position, coefficient, mask=inside)
        tl.store(by_target + position, -coefficient, mask=inside)
        tl.store(z_slope + position, 2.0 * z_loss * token_scale, mask=inside)


@triton.jit
def after_kernel(
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
    N,
    ignore_index,
    z_loss,
    HAS_WEIGHT: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The loss of each token, 0 for an ignored one, and their weighted total."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < N
        y = tl.load(target + position, mask=inside, other=ignore_index)
        is_kept = y != ignore_index
        n = tl.load(normalizer + position, mask=inside, other=0.0)
        log_sum = n + tl.load(offset + position, mask=inside, other=0.0)
        tl.store(log_normalizer + position, log_sum, mask=inside)
        loss = n - tl.load(at_target + position, mask=inside, other=0.0)
        if HAS_WEIGHT:
            weight = tl.load(class_weight + y, mask=is_kept, other=0.0)
            loss = tl.where(weight == 0, 0.0, loss * weight)
        if HAS_Z_LOSS:
            finite_sum = forms.finite(log_sum)
            loss += z_loss * finite_sum * finite_sum
        loss = tl.where(is_kept, loss, 0.0)
        tl.store(losses + position, loss, mask=inside)
        token_scale = tl.load(scale + position, mask=inside, other=0.0)
        sums += tl.where(token_scale == 0, 0.0, token_scale * loss)
    tl.store(total, tl.sum(sums, 0) + tl.load(empty))


@triton.jit
def total_kernel(scale, losses, empty, total, N, BLOCK: tl.constexpr):
    """The weighted total of losses."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < N
        token_scale = tl.load(scale + position, mask=inside, other=0.0)
        loss = tl.load(losses + position, mask=inside, other=0.0)
        sums += tl.where(token_scale == 0, 0.0, token_scale * loss)
    tl.store(total, tl.sum(sums, 0) + tl.load(empty))


@triton.jit
def mixed(log_prior, log_f, inside, floor, HAS_FLOOR: tl.constexpr):
    """(log p of the target with the floor, what each component answers for in it)."""
    joint = tl.where(inside, log_prior + log_f, -float("inf"))
    top = tl.max(joint, 1)
    top = tl.where(top == -float("inf"), 0.0, top)
    shares = tl.exp(joint - top[:, None])
    total = tl.sum(shares, 1)
    log_p = top + tl.log(total)
    # Where all components are masked there is none to answer for the target.
    share = tl.where(log_p[:, None] == -float("inf"), 0.0, shares / total[:, None])
    floored = log_p
    if HAS_FLOOR:
        log_floor = tl.log(floor)
        higher = tl.maximum(log_p, log_floor)
        floored = higher + tl.log(tl.exp(log_p - higher) + tl.exp(log_floor - higher))
        share *= tl.exp(log_p - floored)[:, None]
    return floored, share


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
    first,
    N,
    K,
    ignore_index,
    floor,
    z_loss,
    HAS_WEIGHT: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Losses of the tokens from ``first`` to N, and the derivatives of their total by what was measured."""
    token = first + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < N
    component = tl.arange(0, LANES)[None, :]
    inside = is_token[:, None] & (component < K)
    position = token[:, None] * K + component
    y = tl.load(target + token, mask=is_token, other=ignore_index)
    is_kept = y != ignore_index
    n = tl.load(normalizer + position, mask=inside, other=0.0)
    log_sum = n + tl.load(offset + position, mask=inside, other=0.0)
    tl.store(log_normalizer + position, log_sum, mask=inside)
    prior = tl.load(log_prior + position, mask=inside, other=-float("inf"))
    gap = tl.load(at_target + position, mask=inside, other=0.0) - n
    floored, share = mixed(prior, gap, inside, floor, HAS_FLOOR)
    loss = -floored
    if HAS_WEIGHT:
        weight = tl.load(class_weight + y, mask=is_kept, other=0.0)
        loss = tl.where(weight == 0, 0.0, loss * weight)
        share *= weight[:, None]
    finite_sum = forms.finite(log_sum)
    if HAS_Z_LOSS:
        squares = tl.where(inside, z_loss * tl.exp(prior) * finite_sum * finite_sum, 0.0)
        loss += tl.sum(squares, 1)
    tl.store(losses + token, tl.where(is_kept, loss, 0.0), mask=is_token)
    if HAS_GRADIENT:
        token_scale = tl.load(scale + token, mask=is_token, other=0.0)[:, None]
        is_used = token_scale != 0
        by_n = tl.where(is_used, share * token_scale, 0.0)
        tl.store(by_target + position, -by_n, mask=inside)
        tl.store(by_prior + position, -by_n, mask=inside)
        if HAS_Z_LOSS:
            by_n += tl.where(is_used, 2.0 * z_loss * finite_sum * tl.exp(prior) * token_scale, 0.0)
        tl.store(by_normalizer + position, by_n, mask=inside)


@triton.jit
def planned_mixture_kernel(
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
    """What the tokens from ``first`` to ``last`` add to the loss, and its derivatives by what was measured of them.

    Targets, prior and shares are those of all N tokens, what was measured that of the chunk. The last of the
    ``programs`` of all chunks adds up the loss.
    """
    scale = plan_kernels.token_scale(target, N, ignore_index, IS_MEAN, BLOCK)
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
    gap = tl.load(at_target + row, mask=inside, other=0.0) - n
    log_p, share = mixed(log_prior, gap, inside, floor, HAS_FLOOR)
    loss = -log_p
    log_sum = n + tl.load(offset + row, mask=inside, other=0.0)
    finite_sum = forms.finite(log_sum)
    if HAS_Z_LOSS:
        loss += tl.sum(tl.where(inside, z_loss * tl.exp(log_prior) * finite_sum * finite_sum, 0.0), 1)
    added = tl.where(is_kept, scale * loss, 0.0)
    tl.store(shares + token, tl.where(scale == float("inf"), float("nan"), added), mask=is_token)
    by_n = tl.where(is_kept[:, None], share * scale, 0.0)
    tl.store(by_target + row, -by_n, mask=inside)
    by_z = priors.by_prior_logits(z, log_prior, tl.where(inside, -by_n, 0.0), alpha, beta, c, FORM)
    tl.store(by_prior + position, by_z.to(by_prior.dtype.element_ty), mask=inside)
    if HAS_Z_LOSS:
        by_n += tl.where(is_kept[:, None], 2.0 * z_loss * finite_sum * tl.exp(log_prior) * scale, 0.0)
    tl.store(by_normalizer + row, by_n, mask=inside)
    plan_kernels.add_up(shares, total, N, programs, BLOCK)
