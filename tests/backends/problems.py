"""Losses and log-probabilities that have been specified and validated, for tests of what backends make of them."""

from __future__ import annotations

from typing import Any

from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Problem
from sigsoftmax.contract.signature import signature_of
from sigsoftmax.contract.spec import LogProbsSpec, LossSpec, log_probs_spec, loss_spec, member_of
from sigsoftmax.losses.validation import log_probs_problem, loss_problem


def log_probs_problem_of(operands: Operands, function: str = "sigsoftmax", **options: Any) -> Problem[LogProbsSpec]:
    """The log-probabilities of a mixture that are specified so, validated; the prior has the function of the member."""
    member, _ = member_of(function)
    return log_probs_problem(log_probs_spec(member=member, prior=member, **options), signature_of(operands))


def problem_of(operands: Operands, function: str = "sigsoftmax", **options: Any) -> Problem[LossSpec]:
    """The loss that is specified so, validated; a mixture has the same function as its prior."""
    member, _ = member_of(function)
    spec = loss_spec(member=member, prior=None if operands.prior_logits is None else member, **options)
    return loss_problem(spec, signature_of(operands))
