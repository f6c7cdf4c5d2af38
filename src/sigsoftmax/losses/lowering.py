"""Lowering: from what is asked for, of tensors of which kind, to a way to compute it.

``lower(spec, signature)`` validates, picks backend and path, and keeps the result for the calls that follow. What it
keeps holds no tensors. The cache is the only place that makes small calls cheap on the host.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sigsoftmax.backends import reference
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Decision, Problem, Refusal
from sigsoftmax.contract.signature import BACKEND_VARIABLE, Signature, TensorSignature
from sigsoftmax.contract.spec import CallSpec, LogProbsSpec, LossSpec, StatisticsSpec
from sigsoftmax.losses.validation import log_probs_problem, loss_problem, statistics_problem

REFERENCE = "reference"
BACKENDS = {"triton": "sigsoftmax.backends.triton.lowering", "blocked": "sigsoftmax.backends.blocked.lowering"}
"""The fast ones, fastest first, each with the module that lowers to it. A new backend is one line here."""
MOST_LOWERED = 1024
NEEDS_AUTOGRAD = "probability targets and class weights that require a gradient need plain autograd"
EXPORTED = "programs that run an exported graph know torch's own operations alone"
PLAIN_AUTOGRAD = "plain torch with the logits of all tokens at once"

OPERATIONS: dict[type[CallSpec], tuple[Callable[..., Problem[Any]], str]] = {
    LossSpec: (loss_problem, "lower_loss"),
    LogProbsSpec: (log_probs_problem, "lower_log_probs"),
    StatisticsSpec: (statistics_problem, "lower_statistics"),
}
"""For each kind of specification its validation, and the function of a backend's lowering that serves it."""

plain_loss, plain_log_probs, plain_statistics = reference.loss, reference.log_probs_of, reference.statistics_of
"""Losses, log-probabilities and statistics of tokens by plain autograd."""


@dataclass(frozen=True, eq=False)
class Lowered:
    """A way to compute all calls of one specification and signature."""

    problem: Problem[Any]
    decision: Decision
    path: Any
    """a ``LossPath``, ``LogProbsPath`` or ``StatisticsPath``; None for plain autograd"""


_lowered: dict[tuple[CallSpec, Signature], Lowered] = {}
_lock = threading.Lock()
_last: Decision | None = None


def lower(spec: CallSpec, signature: Signature) -> Lowered:
    """The way to compute a call, found again or decided now; ``explain`` will tell of it."""
    key = (spec, signature)
    try:
        found = _lowered.get(key)
    except TypeError:
        # Sizes that are symbols cannot be looked up.
        found = _decide(spec, signature)
    if found is None:
        found = _decide(spec, signature)
        with _lock:
            if len(_lowered) >= MOST_LOWERED:
                _lowered.clear()
            _lowered[key] = found
    told(found.decision)
    return found


def told(decision: Decision) -> Decision:
    """The decision that ``explain`` tells from now on."""
    global _last
    _last = decision
    return decision


def explain() -> Decision | None:
    """The decision of the last operation in this process: its path, and why none was faster; None before any."""
    return _last


def plain_result(lowered: Lowered, operands: Operands) -> Tensor:
    """The result of a lowered call by plain autograd, for derivatives that its path has not; ``explain`` tells it."""
    problem = lowered.problem
    refused = {lowered.decision.backend: "its gradients cannot be differentiated again"}
    told(Decision(REFERENCE, "create_graph=True", PLAIN_AUTOGRAD, refused))
    if isinstance(problem.spec, LossSpec):
        return plain_loss(problem, operands).loss
    return plain_log_probs(problem, operands).log_probs_NV


def _decide(spec: CallSpec, signature: Signature) -> Lowered:
    validated, operation = OPERATIONS[type(spec)]
    problem = validated(spec, signature)
    chosen, chosen_by = chosen_backend(spec.backend, signature.backend_variable)
    reason = why_only_reference(signature)
    if chosen == REFERENCE:
        return _by_reference(problem, Decision(REFERENCE, chosen_by, PLAIN_AUTOGRAD))
    if reason is not None:
        return _by_reference(problem, only_by_reference(chosen, reason))
    refused: dict[str, str] = {}
    for name in BACKENDS if chosen is None else (chosen,):
        path = getattr(importlib.import_module(BACKENDS[name]), operation)(problem)
        if not isinstance(path, Refusal):
            refused |= {f"{name}, {way}": why for way, why in getattr(path, "refused", {}).items()}
            return Lowered(problem, Decision(name, chosen_by, path.description, refused), path)
        if chosen is not None:
            raise ValueError(f"backend {name!r} cannot be used: {path.reason}; leave the choice to the package")
        refused[name] = path.reason
    raise AssertionError("the last backend serves every operation")


def only_by_reference(chosen: str | None, reason: str) -> Decision:
    """The decision for a call that the reference alone can compute; another backend that was asked for raises."""
    if chosen not in (None, REFERENCE):
        raise ValueError(f"backend {chosen!r} cannot be used: {reason}; pass backend='reference'")
    by = "the export" if reason is EXPORTED else "the inputs"
    return Decision(REFERENCE, by, PLAIN_AUTOGRAD, dict.fromkeys(BACKENDS, reason))


def chosen_backend(asked: str | None, variable: str | None) -> tuple[str | None, str]:
    """The backend that was asked for, None if none was, and by whom."""
    name, by = asked, "the argument backend="
    if name is None:
        name, by = variable, f"the environment variable {BACKEND_VARIABLE}"
    if name is None:
        return None, "default"
    known = (REFERENCE, *BACKENDS)
    if name not in known:
        raise ValueError(f"unknown backend {name!r} ({by}); known: {', '.join(known)}")
    return name, by


def why_only_reference(signature: Signature) -> str | None:
    """The reason why nothing but plain autograd can compute a call; None if a fast backend can."""
    tensors = [operand for operand in signature.operands.flat if isinstance(operand, TensorSignature)]
    if signature.wants_plain_autograd:
        return NEEDS_AUTOGRAD
    if signature.in_transform or any(tensor.is_wrapped for tensor in tensors):
        return "the inputs are inside torch.func (vmap, grad, jvp, ...), which the fast backends do not support"
    if any(tensor.has_tangent for tensor in tensors):
        return "forward-mode derivatives need plain autograd"
    return None


def _by_reference(problem: Problem[Any], decision: Decision) -> Lowered:
    if problem.is_sharded:
        ranks = len(problem.signature.operands.shard[0])
        raise ValueError(
            "backend 'reference' cannot be used: it needs all classes in one process, and those of a "
            f"vocabulary-parallel loss are spread over {ranks} ({decision}); gather the weight and use the functions "
            "of sigsoftmax itself"
        )
    return Lowered(problem, decision, None)
