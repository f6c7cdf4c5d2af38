"""What the paths of losses and of log-probabilities share: logits, a prior, and gradients in the shapes of operands.

Shapes: N tokens, K components, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from sigsoftmax.backends.chunked import hugepages
from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.backends.chunked.providers import GivenLogits, LinearLogits, Source, plan_of
from sigsoftmax.contract import normalizing
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import MIB, Problem
from sigsoftmax.contract.spec import LogProbsSpec, LossSpec, MemberSpec

Spec = TypeVar("Spec", LossSpec, LogProbsSpec)


class Prior:
    """The log-probabilities of a mixture's components, and their gradient. K is small, so plain torch does."""

    def __init__(self, spec: MemberSpec, logits_NK: Tensor, tensors: Sequence[Tensor], needs_arguments: bool) -> None:
        self.spec, self.logits_NK = spec, logits_NK
        self.routines = FormRows(spec.form, spec.arguments(tensors), logits_NK, needs_arguments)

    def log_prior(self) -> Tensor:
        return self.routines.rows(self.logits_NK).log_probs

    def gradient(self, log_prior_NK: Tensor, by_log_prior_NK: Tensor) -> Tensor:
        """The gradient of the logits; those of the arguments are summed by the routines."""
        by_phi_NK = by_log_prior_NK - log_prior_NK.exp() * by_log_prior_NK.sum(-1, keepdim=True)
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

    def prior(self, operands: Operands) -> Prior:
        """The prior of a mixture."""
        spec = self.problem.spec.prior
        assert spec is not None
        logits_NK = self.problem.prior_logits(operands).detach()
        return Prior(spec, logits_NK, operands.prior_arguments, any(self.problem.wanted.prior_arguments))

    def source(self, operands: Operands, wants_rows: bool) -> tuple[Source, Tensor | None]:
        """Where logits come from, and the gradient of the input where these are given."""
        problem, wanted = self.problem, self.problem.wanted
        hidden_NKd = problem.hidden(operands)
        if operands.weight is None:
            logits_NV, by_logits_NV = hidden_NKd.squeeze(1), None
            if wants_rows:
                by_logits_NV = hugepages.advise(torch.empty_like(logits_NV, memory_format=torch.contiguous_format))
            return GivenLogits(logits_NV, by_logits_NV), by_logits_NV
        gradient_dtype = problem.product_dtype
        if wants_rows:
            arguments = problem.spec.member.arguments(operands.arguments)
            gradient_dtype = normalizing.gradient_dtype(problem.spec.member, arguments, problem.product_dtype)
        source = self.linear_logits(
            hidden_NKd,
            operands.weight,
            operands.bias,
            problem.product_dtype,
            problem.chunk_bytes,
            needs_hidden=wants_rows and wanted.input,
            needs_weight=wants_rows and wanted.weight,
            needs_bias=wants_rows and wanted.bias,
            weight_gradient=problem.spec.weight_gradient if isinstance(problem.spec, LossSpec) else "buffered",
            budget_classes=None if operands.shard is None else operands.shard.largest,
            gradient_dtype=gradient_dtype,
        )
        return source, None


def gradients_of_tensors(member: MemberSpec | None, by_arguments: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of those arguments that are tensors."""
    if member is None:
        return []
    if not by_arguments:
        return [None for value in member.values if not isinstance(value, float)]
    return [by for by, value in zip(by_arguments, member.values, strict=True) if not isinstance(value, float)]


def shaped(gradients: Sequence[Tensor | None], operands: Operands, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Gradients in the shapes, dtypes and places of their operands; None where not wanted."""
    return tuple(
        None if by is None or not want else by.view(of.shape).to(of.device, of.dtype)
        for by, of, want in zip(gradients, operands.differentiable, wanted, strict=True)
    )


def describe_logits(problem: Problem[LossSpec] | Problem[LogProbsSpec]) -> str:
    """Where the logits of a call come from, how they are cut, and how the gradient of a weight is summed."""
    operation = "loss" if isinstance(problem.spec, LossSpec) else "log-probabilities"
    if not problem.has_weight:
        return f"{operation} of given logits"
    kind = "linear" if problem.spec.prior is None else f"mixture ({problem.components} components)"
    cut, weight_gradient = plan_of(problem)
    row_bytes = cut.row_elements * problem.product_dtype.itemsize * problem.components
    size = min(cut.tokens, problem.num_tokens) * row_bytes / MIB
    chunks = f"{cut.chunks:,} chunk{'s' if cut.chunks != 1 else ''} of {cut.tokens:,} tokens ({size:,.1f} MiB)"
    parts = [f"{kind} {operation}", chunks]
    if isinstance(problem.spec, LossSpec) and problem.wanted.weight:
        parts.append(f"weight gradient {weight_gradient}")
    return ", ".join(parts)
