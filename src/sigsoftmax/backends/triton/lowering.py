"""The paths of the backend ``triton``: the fastest that does not refuse a problem computes it.

A *fused* path is one or two launches with everything prepared. *Fused tokens* have the token arithmetic in kernels, in
few launches. What neither computes is the chunk loop, with rows by kernels. Importing this module does not need triton.
"""

from __future__ import annotations

import os

import torch

from sigsoftmax.backends.chunked.log_probs import ChunkedLogProbs
from sigsoftmax.backends.chunked.statistics import ChunkedStatistics
from sigsoftmax.contract.devices import has_triton
from sigsoftmax.contract.problem import AnyProblem, LogProbsPath, LossPath, Problem, Refusal, StatisticsPath
from sigsoftmax.contract.spec import LogProbsSpec, LossSpec, StatisticsSpec


def lower_loss(problem: Problem[LossSpec]) -> LossPath | Refusal:
    refusal = _refusal(problem)
    if refusal is not None:
        return refusal
    from sigsoftmax.backends.triton import fused_loss, fused_mixture, fused_tokens
    from sigsoftmax.backends.triton.chunk_loop import TritonLoss

    fused = (fused_loss if problem.spec.prior is None else fused_mixture).lower(problem)
    if not isinstance(fused, Refusal):
        return fused
    reason = fused_tokens.why_refused(problem)
    path = fused_tokens.FusedTokensLoss(problem) if reason is None else TritonLoss(problem)
    path.refused = {"fused": fused.reason} | ({} if reason is None else {"fused tokens": reason})
    return path


def lower_log_probs(problem: Problem[LogProbsSpec]) -> LogProbsPath | Refusal:
    refusal = _refusal(problem)
    if refusal is not None:
        return refusal
    from sigsoftmax.backends.triton import chunk_loop

    reason = chunk_loop.why_log_probs_refused(problem)
    if reason is None:
        return chunk_loop.MixtureLogProbs(problem)
    path = ChunkedLogProbs(problem)
    path.refused = {"values by kernels": reason}
    return path


def lower_statistics(problem: Problem[StatisticsSpec]) -> StatisticsPath | Refusal:
    return _refusal(problem) or ChunkedStatistics(problem, lower_loss)


def _refusal(problem: AnyProblem) -> Refusal | None:
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if problem.device.type != "cuda" and not is_interpreted:
        return Refusal(f"the tensors are on {problem.device.type}, not on a CUDA device")
    if torch.version.hip is not None and not is_interpreted:
        return Refusal("the kernels are written for NVIDIA's GPUs, and this torch is built for AMD's")
    if not has_triton():
        return Refusal("the package triton is not installed")
    from sigsoftmax.backends.triton import logits_kernels

    reason = logits_kernels.why_refused(problem.spec.member.form, problem.product_dtype)
    return None if reason is None else Refusal(reason)
