"""The paths of the backend ``blocked``: it computes every operation, on every device."""

from __future__ import annotations

import functools

from sigsoftmax.backends import blocked
from sigsoftmax.backends.chunked.log_probs import ROWS, ChunkedLogProbs
from sigsoftmax.backends.chunked.loss import ChunkedLoss
from sigsoftmax.backends.chunked.statistics import ChunkedStatistics
from sigsoftmax.contract.problem import LogProbsPath, LossPath, Problem, Refusal, StatisticsPath
from sigsoftmax.contract.spec import LogProbsSpec, LossSpec, StatisticsSpec


def lower_loss(problem: Problem[LossSpec]) -> LossPath | Refusal:
    wanted = problem.spec.member.flags(problem.wanted.arguments)
    return ChunkedLoss(problem, functools.partial(blocked.routines, wanted=wanted), ROWS)


def lower_log_probs(problem: Problem[LogProbsSpec]) -> LogProbsPath | Refusal:
    return ChunkedLogProbs(problem)


def lower_statistics(problem: Problem[StatisticsSpec]) -> StatisticsPath | Refusal:
    return ChunkedStatistics(problem, lower_loss)
