"""The loss of a mixture over few tokens, with all launches prepared (``fused_loss``); the prior is computed with it.

Shapes: N tokens, K components, V classes, d width; R = n K rows of the n tokens of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.chunk_plan import plan_chunks, row_width
from sigsoftmax.backends.chunked.path import chunks_text
from sigsoftmax.backends.triton import fused_loss, fused_tokens, priors
from sigsoftmax.backends.triton.chunk_loop import TritonLinearLogits
from sigsoftmax.backends.triton.kernels.token_losses import fused_mixture_kernel
from sigsoftmax.backends.triton.launch import Launch
from sigsoftmax.backends.triton.logits_kernels import LogitsKernels
from sigsoftmax.backends.triton.scaling import Scaling
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import LossResults, Problem, Refusal, first_reason
from sigsoftmax.contract.spec import LossSpec


class Launches(NamedTuple):
    """The prepared launches for the rows of a chunk."""

    reduce: Launch
    mix: Launch
    backpropagate: Launch


def lower(problem: Problem[LossSpec]) -> FusedMixture | Refusal:
    """The loss with all launches prepared, or why not."""
    prior, most = problem.spec.prior, fused_loss.MOST_TOKENS
    assert prior is not None
    plan = plan_chunks(problem)
    is_exact = plan.weight_gradient == "exact" and problem.wanted.weight
    reasons = {
        f"the prior's function {prior.name} has no kernel, or learned parameters": not priors.is_known(prior),
        **priors.too_many_components(problem),
        **fused_loss.too_many(problem.num_tokens, most),
        "the gradient of the weight is computed exactly, a block of the vocabulary at a time": is_exact,
    }
    # Without extras, the options are those of the token arithmetic by kernels.
    reason = fused_loss.why_refused(problem, fused_tokens.OPTIONS) or first_reason(reasons)
    return FusedMixture(problem, plan.tokens) if reason is None else Refusal(reason)


class FusedMixture:
    """A mixture whose prior, losses and coefficients are one launch for each chunk."""

    def __init__(self, problem: Problem[LossSpec], chunk_tokens: int) -> None:
        self.problem = problem
        self.scale = Scaling.of(problem)
        self.launches = self._prepared(chunk_tokens)
        self.description = (
            f"mixture loss ({problem.components} components), {chunks_text(len(self.launches), chunk_tokens)}, "
            "prior and token arithmetic fused in one launch"
        )

    def _prepared(self, chunk_tokens: int) -> Sequence[Launches]:
        """The launches of each chunk."""
        problem, spec = self.problem, self.problem.spec
        assert spec.prior is not None
        tokens, components = problem.num_tokens, problem.components
        like = torch.empty(0, dtype=problem.product_dtype, device=problem.device)
        kernels = LogitsKernels(spec.member.form, spec.member.arguments(()), like, rows_per_target=components)
        tile = priors.TokenTile.of(components)
        spans = [(first, min(first + chunk_tokens, tokens)) for first in range(0, tokens, chunk_tokens)]
        programs = sum(tile.programs(last - first) for first, last in spans)
        prior_numbers, prior_constants = priors.arguments_of(spec.prior)

        def launches(first: int, last: int) -> Launches:
            shape = ((last - first) * components, row_width(problem))
            logits_RV = torch.empty(shape, dtype=problem.product_dtype, device="meta")
            rows = functools.partial(kernels.softmax_launch, logits_RV, logits_RV, has_index=True, has_z_slope=False)
            mix = Launch(
                fused_mixture_kernel,
                tile.programs(last - first),
                (
                    *(first, last, tokens, components, problem.num_classes, programs),
                    *(*prior_numbers, float(kernels.unit), spec.ignore_index, spec.floor, spec.z_loss),
                ),
                {
                    **prior_constants,
                    "IS_MEAN": spec.reduction == "mean",
                    "HAS_FLOOR": spec.floor != 0,
                    "HAS_Z_LOSS": spec.z_loss != 0,
                    "TOKENS": tile.tokens,
                    "LANES": tile.lanes,
                    "BLOCK": fused_loss.BLOCK,
                },
                num_warps=4,
                **fused_loss.CHECKED,
            )
            return Launches(rows(reduces=True, has_gradient=False), mix, rows(reduces=False, has_gradient=True))

        return [launches(*span) for span in spans]

    def compute(self, operands: Operands, by_losses: Tensor | None = None) -> LossResults:
        assert by_losses is None, "a fused loss is a mean or a sum"
        prior_logits, target, wanted = operands.prior_logits, operands.target, self.problem.wanted
        provider = TritonLinearLogits(self.problem, operands)
        device = self.problem.device
        shares = torch.zeros(provider.num_tokens + 1, dtype=torch.float32, device=device)
        total = torch.empty((), dtype=self.problem.dtype, device=device)
        by_prior = torch.empty_like(prior_logits)
        rows = provider.chunk_tokens * provider.components
        vectors = torch.empty(6, rows, dtype=torch.float32, device=device).unbind()
        peak, offset, normalizer, at_target, by_normalizer, by_target = vectors
        target_N = target.view(-1)
        for (first, chunk_RV), launches in zip(provider.chunks(), self.launches, strict=True):
            logits_RV = provider.whole_rows(chunk_RV)
            statistics = (by_normalizer, by_target, peak, peak, offset, normalizer, at_target)
            of_rows = (logits_RV, logits_RV, target_N[first:], *statistics)
            launches.reduce(*of_rows)
            launches.mix(
                *(target, prior_logits, offset, normalizer, at_target),
                *(shares, by_normalizer, by_target, by_prior, total),
            )
            launches.backpropagate(*of_rows)
            provider.backpropagate()
        by_hidden, by_weight, by_bias = provider.gradients()
        by_input = None if by_hidden is None else by_hidden.view(operands.input.shape)
        gradients = (by_input, by_weight, by_bias, by_prior if wanted.prior_logits else None, None)
        return LossResults(total, shares, None, None, None, gradients)
