"""The paths of the backend ``blocked``: it computes every operation, on every device."""

from __future__ import annotations

from sigsoftmax.backends import blocked
from sigsoftmax.backends.chunked.log_probs import ChunkedLogProbs
from sigsoftmax.backends.chunked.loss import ChunkedLoss
from sigsoftmax.contract.problem import LogProbsPath, LossPath, Problem, Refusal
from sigsoftmax.contract.spec import LogProbsSpec, LossSpec


def lower_loss(problem: Problem[LossSpec]) -> LossPath | Refusal:
    return ChunkedLoss(problem, blocked.routines, "rows in blocks by torch operations")


def lower_log_probs(problem: Problem[LogProbsSpec]) -> LogProbsPath | Refusal:
    return ChunkedLogProbs(problem)
