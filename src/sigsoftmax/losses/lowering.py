"""Lowering: from what is asked for, of tensors of which kind, to a way to compute it.

``lower(spec, signature)`` validates, picks backend and path, and keeps the result for the calls that follow. What it
keeps holds no tensors. The cache is the only place that makes small calls cheap on the host.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from sigsoftmax.backends import reference
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Decision, Problem, Refusal
from sigsoftmax.contract.signature import BACKEND_VARIABLE, Signature, TensorSignature
from sigsoftmax.contract.spec import LogProbsSpec, LossSpec
from sigsoftmax.losses.validation import log_probs_problem, loss_problem

REFERENCE = "reference"
BACKENDS = {"triton": "sigsoftmax.backends.triton.lowering", "blocked": "sigsoftmax.backends.blocked.lowering"}
"""The fast ones, fastest first, each with the module that lowers to it. A new backend is one line here."""
MOST_LOWERED = 1024
NEEDS_AUTOGRAD = "probability targets and class weights that require a gradient need plain autograd"
PLAIN_AUTOGRAD = "plain torch with the logits of all tokens at once"

Spec = LossSpec | LogProbsSpec


@dataclass(frozen=True, eq=False)
class Lowered:
    """A way to compute all calls of one specification and signature."""

    problem: Problem[Any]
    decision: Decision
    path: Any
    """a ``LossPath`` or ``LogProbsPath``; None for plain autograd"""


class _Chosen(NamedTuple):
    """A backend that was asked for, None if none was, and by whom."""

    backend: str | None
    by: str


_lowered: dict[tuple[Spec, Signature], Lowered] = {}
_lock = threading.Lock()
_last: Decision | None = None


def lower(spec: Spec, signature: Signature) -> Lowered:
    """The way to compute a call, found again or decided now; ``explain`` will tell of it."""
    global _last
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
    _last = found.decision
    return found


def explain() -> Decision | None:
    """How the last operation in this process was computed, and why not faster; None before any."""
    return _last


def _decide(spec: Spec, signature: Signature) -> Lowered:
    problem: Problem[Any]
    if isinstance(spec, LossSpec):
        problem, operation = loss_problem(spec, signature), "lower_loss"
    else:
        problem, operation = log_probs_problem(spec, signature), "lower_log_probs"
    chosen = chosen_backend(spec.backend, signature.backend_variable)
    reason = why_only_reference(signature)
    if chosen.backend == REFERENCE:
        return _by_reference(problem, Decision(REFERENCE, chosen.by, PLAIN_AUTOGRAD))
    if reason is not None:
        if chosen.backend is not None:
            raise ValueError(f"backend {chosen.backend!r} cannot be used: {reason}; pass backend='reference'")
        refused = dict.fromkeys(BACKENDS, reason)
        return _by_reference(problem, Decision(REFERENCE, "the inputs", PLAIN_AUTOGRAD, refused))
    refused = {}
    for name, module in BACKENDS.items():
        if chosen.backend not in (None, name):
            continue
        lower_to: Callable[[Problem[Any]], Any] = getattr(importlib.import_module(module), operation)
        path = lower_to(problem)
        if not isinstance(path, Refusal):
            refused |= {f"{name}, {way}": why for way, why in getattr(path, "refused", {}).items()}
            return Lowered(problem, Decision(name, chosen.by, path.description, refused), path)
        if chosen.backend is not None:
            raise ValueError(f"backend {name!r} cannot be used: {path.reason}; leave the choice to the package")
        refused[name] = path.reason
    raise AssertionError("the last backend serves every operation")


def chosen_backend(asked: str | None, variable: str | None) -> _Chosen:
    """The backend that was asked for, and by whom; None if by nobody."""
    name, by = asked, "the argument backend="
    if name is None:
        name, by = variable, f"the environment variable {BACKEND_VARIABLE}"
    if name is None:
        return _Chosen(None, "default")
    known = (REFERENCE, *BACKENDS)
    if name not in known:
        raise ValueError(f"unknown backend {name!r} ({by}); known: {', '.join(known)}")
    return _Chosen(name, by)


def why_only_reference(signature: Signature) -> str | None:
    """Why nothing but plain autograd can compute a call; None if a fast backend can."""
    tensors = list(_tensors(signature.operands))
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


def _tensors(operands: Operands) -> Iterator[TensorSignature]:
    for operand in operands.flat:
        if isinstance(operand, TensorSignature):
            yield operand


def plain_loss(problem: Problem[LossSpec], operands: Operands) -> reference.LossValues:
    """The loss by plain autograd."""
    return reference.loss(problem, operands)


def plain_log_probs(problem: Problem[LogProbsSpec], operands: Operands) -> Tensor:
    """Log-probabilities by plain autograd."""
    return reference.log_probs_of(problem, operands)
