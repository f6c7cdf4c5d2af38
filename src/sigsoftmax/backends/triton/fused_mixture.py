"""The loss of a mixture over few tokens, with all launches prepared (``fused``); the prior is computed with it.

Shapes: N tokens, K components, V classes, d features; R = n K rows of the n tokens of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import triton
from torch import Tensor

from sigsoftmax.backends.chunked import matmul, providers
from sigsoftmax.backends.triton import fused, priors
from sigsoftmax.backends.triton.kernels import forms
from sigsoftmax.backends.triton.kernels.token_kernels import planned_mixture_kernel
from sigsoftmax.backends.triton.launches import Launch
from sigsoftmax.backends.triton.paths import Scaler, TritonLinearLogits
from sigsoftmax.backends.triton.rows import TritonRows
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import LossResults, Problem, Refusal
from sigsoftmax.contract.spec import LossSpec

OPTIONS = (
    *("member", "prior", "reduction", "ignore_index", "z_loss", "floor", "weight_gradient", "chunk_bytes", "backend"),
)
"""the options of a loss that the kernels compute"""


class Launches(NamedTuple):
    """Prepared for the rows of a chunk."""

    measure: Launch
    mix: Launch
    backpropagate: Launch


def lower(problem: Problem[LossSpec]) -> FusedMixture | Refusal:
    """The loss with all launches prepared, or why not."""
    reason = fused.why_refused(problem, OPTIONS)
    if reason is not None:
        return Refusal(reason)
    spec, tokens = problem.spec, problem.num_tokens
    assert spec.prior is not None
    if not spec.prior.is_fixed or spec.prior.form.name not in forms.CODES:
        return Refusal(f"the prior's function {spec.prior.name} has no kernel, or learned parameters")
    if problem.components > priors.MOST_COMPONENTS:
        return Refusal(f"{problem.components:,} components exceed its {priors.MOST_COMPONENTS:,}")
    if not 0 < tokens <= fused.MOST_TOKENS:
        return Refusal(f"{tokens:,} tokens exceed its {fused.MOST_TOKENS:,}" if tokens else "no tokens")
    plan = providers.plan_of(problem)
    if plan.weight_gradient == "exact" and problem.wanted.weight:
        return Refusal("the gradient of the weight is computed exactly, a range of classes at a time")
    return FusedMixture(problem, plan.cut.tokens)


def _source(problem: Problem[LossSpec], input: Tensor, weight_Vd: Tensor, bias_V: Tensor | None) -> TritonLinearLogits:
    wanted = problem.wanted
    return TritonLinearLogits(
        input.view(problem.num_tokens, problem.components, input.shape[-1]),
        weight_Vd,
        bias_V,
        problem.product_dtype,
        problem.chunk_bytes,
        needs_hidden=wanted.input,
        needs_weight=wanted.weight,
        needs_bias=wanted.bias,
        weight_gradient=problem.spec.weight_gradient,
    )


class FusedMixture:
    """A mixture whose prior, losses and coefficients are one launch for each chunk."""

    def __init__(self, problem: Problem[LossSpec], chunk_tokens: int) -> None:
        self.problem = problem
        self.scale = Scaler(problem)
        self.chunk_tokens = chunk_tokens
        self.launches = self._prepared()
        count = len(self.launches)
        self.description = (
            f"mixture loss ({problem.components} components), {count:,} chunk{'s' if count != 1 else ''} of "
            f"{chunk_tokens:,} tokens, prior and token arithmetic fused in one launch"
        )

    def _prepared(self) -> Sequence[Launches]:
        """The launches of each chunk."""
        problem, spec = self.problem, self.problem.spec
        prior = spec.prior
        assert prior is not None
        tokens, components, chunk_tokens = problem.num_tokens, problem.components, self.chunk_tokens
        width = matmul.rounded_up(problem.num_classes, providers.row_alignment(problem.device))
        like = torch.empty(0, dtype=problem.product_dtype, device=problem.device)
        routines = TritonRows(spec.member.form, spec.member.arguments(()), like, rows_of_target=components)
        lanes = triton.next_power_of_2(components)
        tokens_of_program = max(1, priors.TILE // lanes)
        spans = [(first, min(first + chunk_tokens, tokens)) for first in range(0, tokens, chunk_tokens)]
        programs = [-(-(last - first) // tokens_of_program) for first, last in spans]
        prior_values = cast("tuple[float, ...]", prior.numbers)
        alpha, beta, c = (*prior_values, 0.0, 0.0)[:3]

        def launches(first: int, last: int, programs_of_chunk: int) -> Launches:
            logits_RV = torch.empty((last - first) * components, width, dtype=problem.product_dtype, device="meta")
            rows = functools.partial(routines.fast_launch, logits_RV, logits_RV, has_index=True, has_z_slope=False)
            mix = Launch(
                planned_mixture_kernel,
                programs_of_chunk,
                (
                    *(first, last, tokens, components, problem.num_classes, sum(programs)),
                    *(alpha, beta, c, spec.ignore_index, spec.floor, spec.z_loss),
                ),
                {
                    "FORM": forms.CODES[prior.form.name],
                    "IS_INCREASING": prior.form.is_increasing(prior_values),
                    "IS_MEAN": spec.reduction == "mean",
                    "HAS_FLOOR": spec.floor != 0,
                    "HAS_Z_LOSS": spec.z_loss != 0,
                    "TOKENS": tokens_of_program,
                    "LANES": lanes,
                    "BLOCK": fused.BLOCK,
                },
                num_warps=4,
                **fused.CHECKED,
            )
            measure, backpropagate = rows(measure=True, has_gradient=False), rows(measure=False, has_gradient=True)
            return Launches(measure, mix, backpropagate)

        return [launches(*span, count) for span, count in zip(spans, programs, strict=True)]

    def compute(self, operands: Operands, by_losses: Tensor | None = None) -> LossResults:
        assert by_losses is None, "a fused loss is a mean or a sum"
        prior_logits, target, wanted = operands.prior_logits, operands.target, self.problem.wanted
        source = _source(self.problem, operands.input, operands.weight, operands.bias)
        device = self.problem.device
        shares = torch.zeros(source.num_tokens + 1, dtype=torch.float32, device=device)
        total = torch.empty((), dtype=self.problem.dtype, device=device)
        by_prior = torch.empty_like(prior_logits)
        rows = source.chunk_tokens * source.components
        vectors = torch.empty(6, rows, dtype=torch.float32, device=device).unbind()
        anchor, offset, normalizer, at_target, by_normalizer, by_target = vectors
        target_N = target.view(-1)
        for (first, chunk_RV), launches in zip(source.chunks(), self.launches, strict=True):
            logits_RV = source.whole_rows(chunk_RV)
            statistics = (by_normalizer, by_target, anchor, anchor, offset, normalizer, at_target)
            of_rows = (logits_RV, logits_RV, target_N[first:], *statistics)
            launches.measure(*of_rows)
            launches.mix(
                *(target, prior_logits, offset, normalizer, at_target),
                *(shares, by_normalizer, by_target, by_prior, total),
            )
            launches.backpropagate(*of_rows)
            source.backpropagate()
        by_hidden, by_weight, by_bias = source.gradients()
        by_input = None if by_hidden is None else by_hidden.view(operands.input.shape)
        gradients = (by_input, by_weight, by_bias, by_prior if wanted.prior_logits else None, None)
        return LossResults(total, shares, None, None, None, gradients)
