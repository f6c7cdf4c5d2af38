"""The loss of a mixture over few tokens, as ``few`` for one component; the prior is computed with it.

Shapes: N tokens, K components, V classes, d features; R = n K rows of the n tokens of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sigsoftmax.backends.sources import add_product, careful_sum, row_alignment
from sigsoftmax.backends.triton import few, forms, mixtures, priors
from sigsoftmax.backends.triton.launches import Launch
from sigsoftmax.backends.triton.rows import TritonRows, fixed_values
from sigsoftmax.backends.triton.scaling import Scaling
from sigsoftmax.forms import Form


@triton.jit
def few_mixture_kernel(
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
    scale = few.token_scale(target, N, ignore_index, IS_MEAN, BLOCK)
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
    log_prior = priors.log_prior_of(z, alpha, beta, c, FORM)
    n = tl.load(normalizer + row, mask=inside, other=0.0)
    gap = tl.load(at_target + row, mask=inside, other=0.0) - n
    log_p, share = mixtures.mixed(log_prior, gap, inside, floor, HAS_FLOOR)
    loss = -log_p
    log_sum = n + tl.load(offset + row, mask=inside, other=0.0)
    if HAS_Z_LOSS:
        loss += z_loss * tl.sum(tl.where(inside, tl.exp(log_prior) * log_sum * log_sum, 0.0), 1)
    added = tl.where(is_kept, scale * loss, 0.0)
    tl.store(shares + token, tl.where(scale == float("inf"), float("nan"), added), mask=is_token)
    by_n = tl.where(is_kept[:, None], share * scale, 0.0)
    tl.store(by_target + row, -by_n, mask=inside)
    by_z = priors.by_prior_logits(z, log_prior, tl.where(inside, -by_n, 0.0), alpha, beta, c, FORM)
    tl.store(by_prior + position, by_z.to(by_prior.dtype.element_ty), mask=inside)
    if HAS_Z_LOSS:
        by_n += tl.where(is_kept[:, None], 2.0 * z_loss * log_sum * tl.exp(log_prior) * scale, 0.0)
    tl.store(by_normalizer + row, by_n, mask=inside)
    few.add_up(shares, total, N, programs, BLOCK)


class Chunk(NamedTuple):
    """Some tokens and what is launched for their rows."""

    first: int
    last: int
    measure: Launch
    mix: Launch
    backpropagate: Launch


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class FewMixture:
    """A plan for tensors of these sizes."""

    tokens: int
    components: int
    chunks: Sequence[Chunk]
    sum_dtype: torch.dtype
    """in which the weight's gradient is summed over chunks"""
    needs: tuple[bool, ...]
    """whether input, prior, weight and bias want a gradient"""
    scale: Scaling

    def compute(
        self, input: Tensor, prior_logits: Tensor, weight_Vd: Tensor, bias_V: Tensor | None, target: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """``input`` is (..., K, d), ``prior_logits`` (..., K)."""
        features, K = input.shape[-1], self.components
        needs_input, needs_prior, needs_weight, needs_bias = self.needs
        hidden = input.view(-1, features)
        shares = torch.zeros(self.tokens + 1, dtype=torch.float32, device=input.device)
        total = input.new_empty(())
        by_prior = torch.empty_like(prior_logits)
        by_input = torch.empty_like(input) if needs_input else None
        by_hidden = None if by_input is None else by_input.view(-1, features)
        by_weight = torch.empty_like(weight_Vd, dtype=self.sum_dtype) if needs_weight else None
        by_bias = None
        most_rows = self.chunks[0].last * K
        slab = input.new_empty(most_rows, weight_Vd.shape[0])
        vectors = torch.empty(6, most_rows, dtype=torch.float32, device=input.device).unbind()
        anchor, offset, normalizer, at_target, by_normalizer, by_target = vectors
        weight_dV = weight_Vd.t()
        for first, last, measure, mix, backpropagate in self.chunks:
            rows = slice(first * K, last * K)
            is_whole = last - first == self.tokens
            logits_RV = slab if rows.stop - rows.start == most_rows else slab[: rows.stop - rows.start]
            rows_Rd, target_n = (hidden, target) if is_whole else (hidden[rows], target[first:last])
            if bias_V is None:
                torch.mm(rows_Rd, weight_dV, out=logits_RV)
            else:
                torch.addmm(bias_V, rows_Rd, weight_dV, out=logits_RV)
            statistics = (target_n, by_normalizer, by_target, anchor, anchor, offset, normalizer, at_target)
            measure(logits_RV, logits_RV, *statistics)
            mix(
                *(target, prior_logits, offset, normalizer, at_target),
                *(shares, by_normalizer, by_target, by_prior, total),
            )
            backpropagate(logits_RV, logits_RV, *statistics)
            if by_hidden is not None:
                torch.mm(logits_RV, weight_Vd, out=by_hidden if is_whole else by_hidden[rows])
            if by_weight is not None:
                add_product(by_weight, logits_RV.t(), rows_Rd, is_first=first == 0)
            if needs_bias:
                column_sums = logits_RV.sum(0, dtype=torch.float32)
                by_bias = column_sums if by_bias is None else by_bias.add_(column_sums)
        return (
            total,
            by_input,
            by_prior if needs_prior else None,
            None if by_weight is None else by_weight.to(weight_Vd.dtype),
            None if by_bias is None else by_bias.to(input.dtype),
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
    chunk_bytes: int,
    weight_gradient: str,
) -> FewMixture | None:
    """How to compute the loss of few tokens; None where that is not the way."""
    prior_values = fixed_values(prior_arguments)
    tokens, components, classes = target.numel(), input.shape[-2], weight.shape[0]
    products = [t for t in (input, weight, bias) if t is not None]
    if (
        prior_values is None
        or components > priors.MOST_COMPONENTS
        or not few.fits(form, arguments, tokens)
        or not few.is_simple(products, input.dtype)
        or not few.is_simple([prior_logits], prior_logits.dtype)
        or not few.is_simple([target], torch.int64)
        or not any(few.needed((*products, prior_logits)))
        or classes % row_alignment(input.device)
    ):
        return None
    token_bytes = components * classes * input.element_size()
    chunks = -(-tokens // max(1, chunk_bytes // token_bytes))
    sum_dtype = weight.dtype
    if chunks > 1 and weight.dtype.itemsize == 2:
        if weight_gradient == "auto":
            rows = tokens * components
            weight_gradient = careful_sum(input.device, classes, rows, input.shape[-1], chunk_bytes)
        if weight_gradient == "exact":
            return None
        if weight_gradient == "buffered":
            sum_dtype = torch.float32
    chunk_tokens = -(-tokens // chunks)
    routines = TritonRows(form, arguments, input, rows_of_target=components)
    lanes = triton.next_power_of_2(components)
    tokens_of_program = max(1, priors.TILE // lanes)
    spans = [(first, min(first + chunk_tokens, tokens)) for first in range(0, tokens, chunk_tokens)]
    programs = [-(-(last - first) // tokens_of_program) for first, last in spans]
    alpha, beta, c = (*prior_values, 0.0, 0.0)[:3]

    def chunk(first: int, last: int, programs_of_chunk: int) -> Chunk:
        logits_RV = input.new_empty((last - first) * components, classes, device="meta")
        rows = functools.partial(routines.fast_launch, logits_RV, logits_RV, has_index=True, has_z_slope=False)
        mix = Launch(
            few_mixture_kernel,
            programs_of_chunk,
            (
                *(first, last, tokens, components, classes, sum(programs)),
                *(alpha, beta, c, ignore_index, floor, z_loss),
            ),
            {
                "FORM": forms.CODES[prior_form.name],
                "IS_MEAN": is_mean,
                "HAS_FLOOR": floor != 0,
                "HAS_Z_LOSS": z_loss != 0,
                "TOKENS": tokens_of_program,
                "LANES": lanes,
                "BLOCK": few.BLOCK,
            },
            num_warps=4,
            **few.CHECKED,
        )
        measure, backpropagate = rows(measure=True, has_gradient=False), rows(measure=False, has_gradient=True)
        return Chunk(first, last, measure, mix, backpropagate)

    return FewMixture(
        tokens=tokens,
        components=components,
        chunks=[chunk(*span, count) for span, count in zip(spans, programs, strict=True)],
        sum_dtype=sum_dtype,
        needs=few.needed((input, prior_logits, weight, bias)),
        scale=few.scaling_of((input, prior_logits, weight, bias)),
    )
