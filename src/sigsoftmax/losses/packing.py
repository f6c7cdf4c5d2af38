"""Specifications, operands and gradients as the flat arguments and results of an op, and back.

An op of torch.library takes tensors, numbers and texts. Numbers stay numbers, so that torch.compile may make symbols
of them. The names of an op's arguments are those of its schema (:func:`fields_of`); an argument that is no operand, and
has no entry in :func:`pack`, is the field of that name of the specification.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigsoftmax import family
from sigsoftmax.contract.operands import Operands, Wanted
from sigsoftmax.contract.signature import BACKEND_VARIABLE, Signature, autocast_dtype, wants_gradient
from sigsoftmax.contract.spec import EXTRAS, CallSpec, MemberSpec
from sigsoftmax.family.parameters import ParameterKind
from sigsoftmax.losses.lowering import NEEDS_AUTOGRAD, REFERENCE, chosen_backend

KINDS: tuple[ParameterKind | None, ...] = (None, ParameterKind.SCALAR, ParameterKind.PER_CLASS)
"""The kind of a form's argument by its number in an op; the first is a fixed number."""
TENSORS = Operands._fields[:7]
OPERANDS = Operands._fields[:9]
DENSE = ("input", "weight", "bias", "prior_logits", "token_weights")
"""The operands that may want a gradient, besides the arguments of forms."""
NO_OPTIONS = {*OPERANDS, "by_output", "extras", "autocast", "wanted"}


class TracedSignature(NamedTuple):
    """The part of a signature that validation asks for, of tensors that torch.compile traces."""

    operands: Operands
    wanted: Wanted
    autocast: torch.dtype | None


def traced_signature(spec: CallSpec, operands: Operands) -> tuple[TracedSignature, str | None]:
    """A signature of tensors that torch.compile traces, and the backend that was asked for, or must be."""
    wanted = Wanted.of([wants_gradient(t) for t in operands.differentiable], len(operands.arguments))
    device = operands.input.device if isinstance(operands.input, Tensor) else torch.device("cpu")
    backend, _ = chosen_backend(spec.backend, os.environ.get(BACKEND_VARIABLE) or None)
    if wants_gradient(operands.target) or wants_gradient(operands.class_weight):
        if backend not in (None, REFERENCE):
            raise ValueError(f"backend {backend!r} cannot be used: {NEEDS_AUTOGRAD}; pass backend='reference'")
        backend = REFERENCE
    return TracedSignature(operands, wanted, autocast_dtype(device)), backend


def fields_of(schema: Callable[..., Any]) -> tuple[str, ...]:
    """The names of an op's arguments, from the function that its schema is read from."""
    return tuple(inspect.signature(schema).parameters)


def pack(
    fields: Sequence[str],
    spec: CallSpec,
    operands: Operands,
    signature: Signature | TracedSignature,
    backend: str | None,
    by_output: Tensor | None = None,
) -> tuple[Any, ...]:
    """The arguments of an op; with ``by_output``, the incoming gradient, it computes gradients."""
    given = {
        **operand_fields(operands),
        **_packed_member("", spec.member),
        **_packed_member("prior_", spec.prior),
        "by_output": by_output,
        "extras": [name in (getattr(spec, "extras", None) or ()) for name in EXTRAS],
        "backend": backend,
        "autocast": signature.autocast,
        "wanted": list(signature.wanted.flat),
    }
    return tuple(given[name] if name in given else getattr(spec, name) for name in fields)


class Unpacked(NamedTuple):
    """The arguments of an op, put together again."""

    spec: Any
    operands: Operands
    wanted: Wanted
    autocast: torch.dtype | None
    by_output: Tensor | None


def unpack(make_spec: Callable[..., CallSpec], fields: Sequence[str], packed: Sequence[Any]) -> Unpacked:
    """The inverse of :func:`pack`; ``make_spec`` is ``loss_spec`` or ``log_probs_spec``."""
    given = dict(zip(fields, packed, strict=True))
    options = {name: value for name, value in given.items() if name not in NO_OPTIONS}
    for name, prefix in (("member", ""), ("prior", "prior_")):
        form, numbers, kinds = (options.pop(prefix + field) for field in ("form", "values", "kinds"))
        if form is not None:
            values = tuple(KINDS[kind] or float(number) for number, kind in zip(numbers, kinds, strict=True))
            options[name] = MemberSpec(form, family.form_by_name(form), values)
    if "extras" in given:
        asked = zip(EXTRAS, given["extras"], strict=True)
        options["extras"] = tuple(name for name, is_asked in asked if is_asked) or None
    operands = operands_of(given)
    wanted = Wanted.of(given["wanted"], len(operands.arguments))
    return Unpacked(make_spec(**options), operands, wanted, given["autocast"], given["by_output"])


def _packed_member(prefix: str, member: MemberSpec | None) -> dict[str, Any]:
    name: str | None = None
    numbers: list[float] = []
    kinds: list[int] = []
    if member is not None:
        name = member.form.name
        numbers = [0.0 if value is None else value for value in member.numbers]
        kinds = [0 if isinstance(value, float) else KINDS.index(value) for value in member.values]
    return {f"{prefix}form": name, f"{prefix}values": numbers, f"{prefix}kinds": kinds}


def operand_fields(operands: Operands) -> dict[str, Any]:
    """The operands by the names of an op's arguments."""
    tensors = dict(zip(TENSORS, operands, strict=False))
    return tensors | {"arguments": list(operands.arguments), "prior_arguments": list(operands.prior_arguments)}


def operands_of(given: Mapping[str, Any]) -> Operands:
    """The operands among an op's arguments."""
    operands: dict[str, Any] = {name: given.get(name) for name in OPERANDS}
    return Operands(**operands)


# Gradients as results of an op: one tensor for each of DENSE, and one for all arguments of forms together


def packed_gradients(gradients: Sequence[Tensor | None], operands: Operands, numbers: Tensor) -> list[Tensor]:
    """Gradients in the order of ``Operands.differentiable`` as results; one that is absent has no elements.

    Those of arguments are joined in one vector like ``numbers``, 0 where one is not wanted. Outputs of an op must not
    share memory, be they empty.
    """
    dense, by_arguments = gradients[: len(DENSE)], gradients[len(DENSE) :]
    joined = torch.empty_like(numbers)
    if any(gradient is not None for gradient in by_arguments):
        joined = torch.cat(
            [
                numbers.new_zeros(t.numel()) if g is None else g.flatten().to(numbers.device, numbers.dtype)
                for g, t in zip(by_arguments, operands.all_arguments, strict=True)
            ]
        )
    return [*(torch.empty_like(numbers) if g is None else g for g in dense), joined]


def fake_gradients(operands: Operands, wanted: Sequence[bool], numbers: Tensor) -> list[Tensor]:
    """Tensors of the shapes and dtypes of :func:`packed_gradients`."""
    tensors = operands.differentiable[: len(DENSE)]
    count = sum(a.numel() for a in operands.all_arguments) if any(wanted[len(DENSE) :]) else 0
    return [
        *(
            torch.empty_like(t, memory_format=torch.contiguous_format)
            if t is not None and needed
            else torch.empty_like(numbers)
            for t, needed in zip(tensors, wanted[: len(DENSE)], strict=True)
        ),
        numbers.new_empty(count),
    ]


def unpacked_gradients(
    results: Sequence[Tensor], arguments: Sequence[Tensor], wanted: Sequence[bool]
) -> Sequence[Tensor | None]:
    """The inverse of :func:`packed_gradients`; None where a gradient is not wanted."""
    *dense, joined = results
    pieces: Sequence[Tensor | None] = [None] * len(arguments)
    if any(wanted[len(dense) :]):
        pieces = [
            piece.view(a.shape).to(a.device, a.dtype)
            for piece, a in zip(torch.split(joined, [a.numel() for a in arguments]), arguments, strict=True)
        ]
    return [g if want else None for g, want in zip((*dense, *pieces), wanted, strict=True)]


def gradients_by_field(
    gradients: Sequence[Tensor | None], fields: Sequence[str], options: Mapping[str, Any], arguments: int
) -> tuple[Any, ...]:
    """The return values of an op's backward; torch takes an empty list for one of tensors, and wants one back."""
    by_arguments = list(gradients[len(DENSE) :])
    given: dict[str, Any] = dict(zip(DENSE, gradients, strict=False))
    given |= {"arguments": by_arguments[:arguments], "prior_arguments": by_arguments[arguments:]}
    return tuple(given.get(name, [] if options.get(name) == [] else None) for name in fields)
