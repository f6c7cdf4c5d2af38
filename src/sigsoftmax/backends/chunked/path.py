"""The common part of the paths of losses and of log-probabilities: logits, a prior, and gradients of the operands.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Generic

import torch
from torch import Tensor

from sigsoftmax.backends import hugepages
from sigsoftmax.backends.chunked.chunk_plan import plan_chunks
from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.backends.chunked.logits import GivenLogits, LinearLogits, LogitsProvider
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import MIB, AnyProblem, Problem, Spec
from sigsoftmax.contract.rows import Logarithms
from sigsoftmax.contract.spec import MemberSpec


class Prior:
    """The log-probabilities of a mixture's components, and their gradient. K is small, so plain torch does."""

    def __init__(self, spec: MemberSpec, logits_NK: Tensor, tensors: Sequence[Tensor], needs_arguments: bool) -> None:
        self.logits_NK = logits_NK
        self.routines = FormRows(spec.form, spec.arguments(tensors), logits_NK, needs_arguments)

    @functools.cached_property
    def log_prior(self) -> Logarithms:
        """(N, K)"""
        return self.routines.rows(self.logits_NK).log_probs_in_units

    def gradient(self, by_log_prior_NK: Tensor) -> Tensor:
        """The gradient of the logits; those of the arguments are summed by the routines."""
        by_phi_NK = by_log_prior_NK - self.log_prior.values.exp() * by_log_prior_NK.sum(-1, keepdim=True)
        # Those of a token that does not count are 0, also where its prior is NaN.
        by_phi_NK.masked_fill_((by_log_prior_NK == 0).all(-1, keepdim=True), 0.0)
        by_logits_NK = torch.empty_like(self.logits_NK, memory_format=torch.contiguous_format)
        self.routines.backpropagate(self.logits_NK, by_phi_NK, by_logits_NK)
        return by_logits_NK

    def argument_gradients(self) -> list[Tensor]:
        return self.routines.argument_gradients()


class ChunkedPath(Generic[Spec]):
    """A way to compute something of the logits of a call, a chunk of them at a time."""

    linear_logits: type[LinearLogits] = LinearLogits
    """the products of hidden vectors and the output matrix"""

    def __init__(self, problem: Problem[Spec], rows_description: str) -> None:
        self.problem: Problem[Spec] = problem
        self.description = f"{describe_logits(problem)}, {rows_description}"
        self.refused: dict[str, str] = {}
        """faster paths, and why they were refused"""

    def prior(self, operands: Operands) -> Prior | None:
        """The prior of a mixture."""
        spec = self.problem.spec.prior
        if spec is None:
            return None
        logits_NK = self.problem.prior_logits(operands).detach()
        return Prior(spec, logits_NK, operands.prior_arguments, any(self.problem.wanted.prior_arguments))

    def provider(self, operands: Operands, wants_gradient: bool) -> LogitsProvider:
        """The provider of the logits of a call."""
        if operands.weight is not None:
            return self.linear_logits(self.problem, operands, wants_gradient=wants_gradient)
        logits_NV, by_logits_NV = self.problem.hidden(operands).squeeze(1), None
        if wants_gradient:
            by_logits_NV = hugepages.advise(torch.empty_like(logits_NV, memory_format=torch.contiguous_format))
        return GivenLogits(logits_NV, by_logits_NV)

    def operand_gradients(
        self,
        operands: Operands,
        provider: LogitsProvider,
        by_arguments: Sequence[Tensor],
        prior: Prior | None,
        by_log_prior_NK: Tensor | None,
        by_token_weights: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Gradients in the shapes, dtypes and places of their operands; None where not wanted."""
        member: MemberSpec = self.problem.spec.member
        prior_member: MemberSpec | None = self.problem.spec.prior
        wanted = self.problem.wanted
        by_prior: Tensor | None = None
        by_prior_arguments: list[Tensor] = []
        if prior is not None and by_log_prior_NK is not None and (wanted.prior_logits or any(wanted.prior_arguments)):
            by_prior = prior.gradient(by_log_prior_NK.to(prior.log_prior.multiples.dtype))
            by_prior_arguments = prior.argument_gradients()
        gradients = (
            *provider.gradients(),
            by_prior,
            by_token_weights,
            *_gradients_of_tensors(member, by_arguments),
            *_gradients_of_tensors(prior_member, by_prior_arguments),
        )
        return tuple(
            None if by is None or not want else by.view(of.shape).to(of.device, of.dtype)
            for by, of, want in zip(gradients, operands.differentiable, wanted.flat, strict=True)
        )


def _gradients_of_tensors(member: MemberSpec | None, by_arguments: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of those arguments that are tensors; None for each if there are none."""
    values = () if member is None else member.values
    gradients: Sequence[Tensor | None] = by_arguments or [None] * len(values)
    return [by for by, value in zip(gradients, values, strict=True) if not isinstance(value, float)]


def describe_logits(problem: AnyProblem) -> str:
    """The origin of the logits of a call, the size of their chunks, and the way to sum the gradient of a weight."""
    operation = problem.spec.operation
    if not problem.has_weight:
        return f"{operation} of given logits"
    kind = "linear" if problem.spec.prior is None else f"mixture ({problem.components} components)"
    plan = plan_chunks(problem)
    row_bytes = plan.row_elements * problem.product_dtype.itemsize * problem.components
    size = min(plan.tokens, problem.num_tokens) * row_bytes / MIB
    parts = [f"{kind} {operation}", f"{chunks_text(plan.chunks, plan.tokens)} ({size:,.1f} MiB)"]
    if problem.wanted.weight:
        parts.append(f"weight gradient {plan.weight_gradient}")
    return ", ".join(parts)


def chunks_text(chunks: int, tokens: int) -> str:
    return f"{chunks:,} chunk{'s' if chunks != 1 else ''} of {tokens:,} tokens"
