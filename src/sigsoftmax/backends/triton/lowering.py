"""Which operations the kernels compute, and by which path: the fastest that does not refuse.

A *fused* path is one or two launches with everything prepared. *Few launches* have the token arithmetic in kernels.
What neither computes is the chunk loop, with rows by kernels. Importing this module does not need triton.
"""

from __future__ import annotations

import os

import torch

from sigsoftmax.backends.chunked.log_probs import ChunkedLogProbs
from sigsoftmax.contract.devices import has_triton
from sigsoftmax.contract.problem import LogProbsPath, LossPath, Problem, Refusal
from sigsoftmax.contract.spec import LogProbsSpec, LossSpec


def lower_loss(problem: Problem[LossSpec]) -> LossPath | Refusal:
    refusal = _refusal(problem)
    if refusal is not None:
        return refusal
    from sigsoftmax.backends.triton import few_launches, fused, fused_mixture
    from sigsoftmax.backends.triton.paths import TritonLoss

    fused_path = (fused if problem.spec.prior is None else fused_mixture).lower(problem)
    if not isinstance(fused_path, Refusal):
        return fused_path
    refused = {"fused": fused_path.reason}
    reason = few_launches.why_refused(problem)
    path: TritonLoss
    if reason is None:
        path = few_launches.FewLaunchesLoss(problem)
    else:
        path = TritonLoss(problem)
        refused["few launches"] = reason
    path.refused = refused
    return path


def lower_log_probs(problem: Problem[LogProbsSpec]) -> LogProbsPath | Refusal:
    return _refusal(problem) or ChunkedLogProbs(problem)


def _refusal(problem: Problem[LossSpec] | Problem[LogProbsSpec]) -> Refusal | None:
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if problem.device.type != "cuda" and not is_interpreted:
        return Refusal(f"the tensors are on {problem.device.type}, not on a CUDA device")
    if torch.version.hip is not None and not is_interpreted:
        return Refusal("the kernels are written for NVIDIA's GPUs, and this torch is built for AMD's")
    if not has_triton():
        return Refusal("the package triton is not installed")
    from sigsoftmax.backends.triton import rows

    reason = rows.why_refused(problem.spec.member.form, problem.product_dtype)
    return None if reason is None else Refusal(reason)
