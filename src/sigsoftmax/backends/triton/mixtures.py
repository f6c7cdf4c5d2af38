"""The loss of a mixture on a GPU in few launches: class indices, no smoothing, no extras but the log normaliser.

As ``plain`` for K = 1. The rows of a chunk are measured, one kernel makes of them the losses of its tokens and the
coefficients of their gradient, and the gradient overwrites the rows.

Shapes: N tokens, K components, V classes; R = N K rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sigsoftmax.backends.chunks import LossOptions, TokenLosses
from sigsoftmax.backends.interface import RowCoefficients
from sigsoftmax.backends.sources import Source
from sigsoftmax.backends.triton import forms, plain, priors, ranges
from sigsoftmax.backends.triton.launches import launch
from sigsoftmax.backends.triton.rows import TritonRows
from sigsoftmax.forms import Form


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


def is_served(source: Source, target: Tensor, options: LossOptions) -> bool:
    """Whether :func:`mixture_loss` computes this."""
    is_rare = options.label_smoothing or options.argmax or options.entropy or target.is_floating_point()
    fits = 0 < source.num_tokens <= plain.MOST_TOKENS and source.components <= priors.MOST_COMPONENTS
    return not is_rare and fits


def mixture_loss(
    source: Source,
    form: Form,
    arguments: Sequence[Tensor],
    target_N: Tensor,
    log_prior_NK: Tensor,
    class_weight_V: Tensor | None,
    scale_N: Tensor | None,
    options: LossOptions,
    *,
    is_mean: bool,
    wants_gradient: bool,
    needs_arguments: bool,
) -> tuple[Tensor, TokenLosses, Tensor | None, list[Tensor]]:
    """As ``run_loss``."""
    components = source.components
    routines = TritonRows(form, arguments, source.logits_like, needs_arguments, rows_of_target=components)
    tokens = source.num_tokens
    rows = tokens * components
    device = target_N.device
    setup = plain.Setup(source, target_N, class_weight_V, scale_N, options, is_mean=is_mean)
    vectors = torch.empty(6, rows, dtype=torch.float32, device=device)
    by_normalizer, by_target = torch.empty(2, rows, dtype=torch.float32, device=device)
    log_prior_NK = log_prior_NK.float().contiguous()
    losses = torch.empty(tokens, dtype=torch.float32, device=device)
    log_normalizer_NK = torch.empty(tokens, components, dtype=torch.float32, device=device)
    by_prior_NK = torch.empty_like(log_normalizer_NK) if wants_gradient else None
    lanes = triton.next_power_of_2(components)
    tokens_of_program = max(1, priors.TILE // lanes)

    measured = vectors[1], vectors[2], vectors[3]

    def mix(first: int, last: int) -> None:
        launch(
            mixture_kernel,
            -(-(last - first) // tokens_of_program),
            (
                target_N,
                losses if setup.class_weight is None else setup.class_weight,
                setup.scale,
                log_prior_NK,
                *measured,
                losses,
                log_normalizer_NK,
                by_normalizer,
                by_target,
                losses if by_prior_NK is None else by_prior_NK,
            ),
            (first, last, components, options.ignore_index, options.floor, options.z_loss),
            {
                "HAS_WEIGHT": setup.class_weight is not None,
                "HAS_FLOOR": options.floor != 0,
                "HAS_Z_LOSS": options.z_loss != 0,
                "HAS_GRADIENT": wants_gradient,
                "TOKENS": tokens_of_program,
                "LANES": lanes,
            },
            num_warps=4,
        )

    walk = plain.walk_of(source) if wants_gradient else None
    if walk is not None and not routines.per_class:
        ranges.measure(routines, walk, setup.index, vectors)
        mix(0, tokens)
    else:
        for first, logits_RV in source.chunks():
            last = first + logits_RV.shape[0] // components
            of_tokens = plain.cut_to(first, last - first, tokens)
            of_rows = plain.cut_to(first * components, logits_RV.shape[0], rows)
            rows_RV = logits_RV if routines.per_class else source.whole_rows(logits_RV)
            index_n = of_tokens(setup.index)
            stats = routines.stats(rows_RV, index_n, None, False, False, of_rows(vectors))
            mix(first, last)
            if walk is None and wants_gradient:
                coefficients = RowCoefficients(of_rows(by_normalizer), of_rows(by_target), None, None)
                out_RV = source.gradient_rows(0, rows_RV)
                routines.gradient(rows_RV, stats, coefficients, index_n, None, out_RV)
                source.backpropagate()
    if walk is not None:
        coefficients = RowCoefficients(by_normalizer, by_target, None, None)
        ranges.write_gradients(routines, walk, vectors, coefficients, setup.index)
    total = setup.total(losses)
    result = TokenLosses(losses, log_normalizer_NK, None, None)
    return total, result, by_prior_NK, routines.argument_gradients()
