"""The loss of a mixture on a GPU in few launches: class indices, no smoothing, no extras but the log normaliser.

As ``plain`` for K = 1. The rows of a chunk are measured, one kernel makes of them the losses of its tokens and the
coefficients of their gradient, and the gradient overwrites the rows.

Shapes: N tokens, K components, V classes; R = N K rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from sigsoftmax.backends.chunks import LossOptions, TokenLosses
from sigsoftmax.backends.interface import RowCoefficients
from sigsoftmax.backends.sources import Source
from sigsoftmax.backends.triton import plain, priors, ranges
from sigsoftmax.backends.triton.launches import launch
from sigsoftmax.backends.triton.rows import TritonRows
from sigsoftmax.backends.triton.token_kernels import mixture_kernel
from sigsoftmax.forms import Form


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
