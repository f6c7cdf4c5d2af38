"""The loss of a mixture over few tokens, as ``plans`` has it for one component; the prior is computed with it.

Shapes: N tokens, K components, V classes, d features; R = n K rows of the n tokens of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from sigsoftmax.backends import products
from sigsoftmax.backends.sources import LinearLogits
from sigsoftmax.backends.triton import forms, plans, priors
from sigsoftmax.backends.triton.fixed import fixed_values
from sigsoftmax.backends.triton.launches import Launch
from sigsoftmax.backends.triton.rows import TritonRows
from sigsoftmax.backends.triton.scaling import Scaling
from sigsoftmax.backends.triton.token_kernels import planned_mixture_kernel
from sigsoftmax.forms import Form


class Launches(NamedTuple):
    """For the rows of a chunk."""

    measure: Launch
    mix: Launch
    backpropagate: Launch


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MixturePlan:
    """A plan for tensors of these sizes."""

    launches: Sequence[Launches]
    """of each chunk"""
    dtype: torch.dtype
    """of the loss"""
    product_dtype: torch.dtype
    chunk_bytes: int
    weight_gradient: str
    needs: tuple[bool, ...]
    """whether input, prior, weight and bias want a gradient"""
    scale: Scaling

    def compute(
        self, input: Tensor, prior_logits: Tensor, weight_Vd: Tensor, bias_V: Tensor | None, target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """``input`` is (..., K, d), ``prior_logits`` (..., K)."""
        needs_input, needs_prior, needs_weight, needs_bias = self.needs
        components, features = input.shape[-2:]
        source = LinearLogits(
            input.view(target.numel(), components, features),
            weight_Vd,
            bias_V,
            self.product_dtype,
            self.chunk_bytes,
            needs_hidden=needs_input,
            needs_weight=needs_weight,
            needs_bias=needs_bias,
            weight_gradient=self.weight_gradient,
        )
        device = input.device
        shares = torch.zeros(source.num_tokens + 1, dtype=torch.float32, device=device)
        total = torch.empty((), dtype=self.dtype, device=device)
        by_prior = torch.empty_like(prior_logits)
        vectors = torch.empty(6, source.chunk_tokens * components, dtype=torch.float32, device=device).unbind()
        anchor, offset, normalizer, at_target, by_normalizer, by_target = vectors
        target_N = target.view(-1)
        for (first, chunk_RV), launches in zip(source.chunks(), self.launches, strict=True):
            logits_RV = source.whole_rows(chunk_RV)
            statistics = (by_normalizer, by_target, anchor, anchor, offset, normalizer, at_target)
            rows = (logits_RV, logits_RV, target_N[first:], *statistics)
            launches.measure(*rows)
            launches.mix(
                *(target, prior_logits, offset, normalizer, at_target),
                *(shares, by_normalizer, by_target, by_prior, total),
            )
            launches.backpropagate(*rows)
            source.backpropagate()
        by_hidden, by_weight, by_bias = source.gradients()
        return (
            total,
            shares,
            None if by_hidden is None else by_hidden.view(input.shape),
            by_prior if needs_prior else None,
            by_weight,
            by_bias,
        )


def plan_of(
    form: Form,
    arguments: Sequence[Tensor],
    prior_form: Form,
    prior_arguments: Sequence[Tensor],
    input: Tensor,
    prior_logits: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    is_mean: bool,
    ignore_index: int,
    z_loss: float,
    floor: float,
    dtype: torch.dtype,
    product_dtype: torch.dtype,
    chunk_bytes: int,
    weight_gradient: str,
) -> MixturePlan | None:
    """How to compute the loss of few tokens; None where that is not the way."""
    prior_values = fixed_values(prior_arguments)
    tokens, components, classes = target.numel(), input.shape[-2], weight.shape[0]
    present = [t for t in (input, prior_logits, weight, bias) if t is not None]
    if (
        prior_values is None
        or prior_form.name not in forms.CODES
        or components > priors.MOST_COMPONENTS
        or not 0 < tokens <= plans.MOST_TOKENS
        or not plans.has_kernels(form, arguments, product_dtype)
        or not plans.is_simple([*present, target])
        or not any(plans.needed(present))
        or target.dtype != torch.int64
    ):
        return None
    source = LinearLogits(
        input.detach().view(tokens, *input.shape[-2:]),
        weight.detach(),
        None if bias is None else bias.detach(),
        product_dtype,
        chunk_bytes,
        needs_hidden=input.requires_grad,
        needs_weight=weight.requires_grad,
        needs_bias=False,
        weight_gradient=weight_gradient,
    )
    if source.walks_classes:
        return None
    width, chunk_tokens = products.rounded_up(classes, source.alignment), source.chunk_tokens
    routines = TritonRows(form, arguments, input, rows_of_target=components)
    lanes = triton.next_power_of_2(components)
    tokens_of_program = max(1, priors.TILE // lanes)
    spans = [(first, min(first + chunk_tokens, tokens)) for first in range(0, tokens, chunk_tokens)]
    programs = [-(-(last - first) // tokens_of_program) for first, last in spans]
    alpha, beta, c = (*prior_values, 0.0, 0.0)[:3]

    def launches(first: int, last: int, programs_of_chunk: int) -> Launches:
        logits_RV = torch.empty((last - first) * components, width, dtype=product_dtype, device="meta")
        rows = functools.partial(routines.fast_launch, logits_RV, logits_RV, has_index=True, has_z_slope=False)
        mix = Launch(
            planned_mixture_kernel,
            programs_of_chunk,
            (
                *(first, last, tokens, components, classes, sum(programs)),
                *(alpha, beta, c, ignore_index, floor, z_loss),
            ),
            {
                "FORM": forms.CODES[prior_form.name],
                "IS_INCREASING": prior_form.is_increasing(prior_values),
                "IS_MEAN": is_mean,
                "HAS_FLOOR": floor != 0,
                "HAS_Z_LOSS": z_loss != 0,
                "TOKENS": tokens_of_program,
                "LANES": lanes,
                "BLOCK": plans.BLOCK,
            },
            num_warps=4,
            **plans.CHECKED,
        )
        measure, backpropagate = rows(measure=True, has_gradient=False), rows(measure=False, has_gradient=True)
        return Launches(measure, mix, backpropagate)

    return MixturePlan(
        launches=[launches(*span, count) for span, count in zip(spans, programs, strict=True)],
        dtype=dtype,
        product_dtype=product_dtype,
        chunk_bytes=chunk_bytes,
        weight_gradient=weight_gradient,
        needs=plans.needed((input, prior_logits, weight, bias)),
        scale=plans.scaling_of((input, prior_logits, weight, bias)),
    )
