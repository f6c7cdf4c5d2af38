"""Specifications as flat arguments of an op, and back.

An op of torch.library takes tensors, numbers and texts. Numbers stay numbers, so that torch.compile may make symbols
of them. This is the only place that lists the fields of a specification one by one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigsoftmax import family
from sigsoftmax.contract.operands import Operands, Wanted
from sigsoftmax.contract.signature import BACKEND_VARIABLE, autocast_dtype, wants_gradient
from sigsoftmax.contract.spec import (
    EXTRAS,
    LogProbsSpec,
    LossSpec,
    MemberSpec,
    log_probs_spec,
    loss_spec,
)
from sigsoftmax.family.parameters import ParameterKind
from sigsoftmax.losses.lowering import NEEDS_AUTOGRAD, REFERENCE, chosen_backend

KINDS: tuple[ParameterKind | None, ...] = (None, ParameterKind.SCALAR, ParameterKind.PER_CLASS)
"""of an argument by its number in an op; the first is a fixed number"""
TENSORS = ("input", "weight", "bias", "prior_logits", "target", "class_weight", "token_weights")
MEMBERS = ("form", "values", "kinds", "prior_form", "prior_values", "prior_kinds")
LOSS_OPTIONS = ("reduction", "ignore_index", "label_smoothing", "z_loss", "floor", "weight_gradient", "chunk_bytes")
LOSS_FIELDS = (
    *TENSORS,
    *("arguments", "prior_arguments", "by_losses"),
    *MEMBERS,
    *LOSS_OPTIONS,
    *("extras", "backend", "autocast", "wanted"),
)
"""the arguments of the op of losses, in their order"""


class TracedSignature(NamedTuple):
    """What validation asks of a signature, of tensors that torch.compile traces."""

    operands: Operands
    wanted: Wanted
    autocast: torch.dtype | None


def traced_signature(spec: LossSpec | LogProbsSpec, operands: Operands) -> tuple[TracedSignature, str | None]:
    """A signature of tensors that torch.compile traces, and the backend that was asked for, or must be."""
    wanted = Wanted.of([wants_gradient(t) for t in operands.differentiable], len(operands.arguments))
    device = operands.input.device if isinstance(operands.input, Tensor) else torch.device("cpu")
    signature = TracedSignature(operands, wanted, autocast_dtype(device))
    backend = chosen_backend(spec.backend, os.environ.get(BACKEND_VARIABLE) or None).backend
    if wants_gradient(operands.target) or wants_gradient(operands.class_weight):
        if backend not in (None, REFERENCE):
            raise ValueError(f"backend {backend!r} cannot be used: {NEEDS_AUTOGRAD}; pass backend='reference'")
        backend = REFERENCE
    return signature, backend


def _packed_member(member: MemberSpec | None) -> tuple[str | None, list[float], list[int]]:
    if member is None:
        return None, [], []
    numbers = [0.0 if value is None else value for value in member.numbers]
    kinds = [0 if isinstance(value, float) else KINDS.index(value) for value in member.values]
    return member.form.name, numbers, kinds


def _unpacked_member(form: str | None, numbers: Sequence[float], kinds: Sequence[int]) -> MemberSpec | None:
    if form is None:
        return None
    values = tuple(KINDS[kind] or float(number) for number, kind in zip(numbers, kinds, strict=True))
    return MemberSpec(form, family.form_by_name(form), values)


def _packed_operands(operands: Operands) -> tuple[Any, ...]:
    return (*operands[:7], list(operands.arguments), list(operands.prior_arguments))


def pack_loss(
    spec: LossSpec,
    operands: Operands,
    by_losses: Tensor | None,
    wanted: Wanted,
    autocast: torch.dtype | None,
    backend: str | None,
) -> tuple[Any, ...]:
    """The arguments of the op, in the order of :data:`LOSS_FIELDS`."""
    return (
        *_packed_operands(operands),
        by_losses,
        *_packed_member(spec.member),
        *_packed_member(spec.prior),
        *(getattr(spec, name) for name in LOSS_OPTIONS),
        [name in (spec.extras or ()) for name in EXTRAS],
        backend,
        autocast,
        list(wanted.flat),
    )


def unpack_loss(
    *packed: Any,
) -> tuple[LossSpec, Operands, Wanted, torch.dtype | None, Tensor | None]:
    """The specification, the operands, which gradients are wanted, autocast's dtype and the losses' gradient."""
    given = dict(zip(LOSS_FIELDS, packed, strict=True))
    member, prior = _members(given)
    operands = _operands(given)
    spec = loss_spec(
        member=member,
        prior=prior,
        extras=tuple(name for name, asked in zip(EXTRAS, given["extras"], strict=True) if asked) or None,
        backend=given["backend"],
        **{name: given[name] for name in LOSS_OPTIONS},
    )
    return spec, operands, Wanted.of(given["wanted"], len(operands.arguments)), given["autocast"], given["by_losses"]


def _members(given: dict[str, Any]) -> tuple[MemberSpec | None, MemberSpec | None]:
    member, prior = MEMBERS[:3], MEMBERS[3:]
    return _unpacked_member(*(given[name] for name in member)), _unpacked_member(*(given[name] for name in prior))


def _operands(given: dict[str, Any]) -> Operands:
    tensors = [given.get(name) for name in TENSORS]
    arguments = given["arguments"]
    return Operands.from_flat([*tensors, *arguments, *given["prior_arguments"]], len(arguments))


LOG_PROBS_FIELDS = (
    *("input", "weight", "bias", "prior_logits", "arguments", "prior_arguments"),
    *MEMBERS,
    *("floor", "chunk_bytes", "backend", "autocast", "wanted"),
)
"""the arguments of the op of log-probabilities, in their order"""


def pack_log_probs(
    spec: LogProbsSpec, operands: Operands, wanted: Wanted, autocast: torch.dtype | None, backend: str | None
) -> tuple[Any, ...]:
    """The arguments of the op, in the order of :data:`LOG_PROBS_FIELDS`."""
    return (
        *operands[:4],
        list(operands.arguments),
        list(operands.prior_arguments),
        *_packed_member(spec.member),
        *_packed_member(spec.prior),
        *(spec.floor, spec.chunk_bytes, backend, autocast, list(wanted.flat)),
    )


def unpack_log_probs(*packed: Any) -> tuple[LogProbsSpec, Operands, Wanted, torch.dtype | None]:
    """The specification, the operands, which gradients are wanted, and autocast's dtype."""
    given = dict(zip(LOG_PROBS_FIELDS, packed, strict=True))
    member, prior = _members(given)
    operands = _operands(given)
    options = {name: given[name] for name in ("floor", "chunk_bytes", "backend")}
    spec = log_probs_spec(member=member, prior=prior, **options)
    return spec, operands, Wanted.of(given["wanted"], len(operands.arguments)), given["autocast"]
