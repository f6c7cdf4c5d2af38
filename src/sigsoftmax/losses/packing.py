"""Calls as flat arguments of an op, and gradients as its results.

An op of torch.library takes tensors, numbers and texts. Numbers stay numbers, so that torch.compile may make symbols
of them. The schema of an op follows from its specification: after the operands and what every call has come the fields
of the specification, each of the type that torch has for the field's.
"""

from __future__ import annotations

import dataclasses
import math
import os
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from sigsoftmax import family, torch_internals
from sigsoftmax.contract.operands import Operands, Wanted
from sigsoftmax.contract.problem import Problem, dtypes_of
from sigsoftmax.contract.rows import compute_dtype
from sigsoftmax.contract.signature import (
    BACKEND_VARIABLE,
    Signature,
    autocast_dtype,
    is_exporting,
    signature_inside_op,
    wants_gradient,
)
from sigsoftmax.contract.spec import EXTRAS, CallSpec, MemberSpec
from sigsoftmax.family.parameters import ParameterKind
from sigsoftmax.losses.gradients import Gradients, not_differentiable_again
from sigsoftmax.losses.lowering import (
    EXPORTED,
    NEEDS_AUTOGRAD,
    Lowered,
    chosen_backend,
    lower,
    only_by_reference,
    told,
)

KINDS: tuple[ParameterKind | None, ...] = (None, ParameterKind.SCALAR, ParameterKind.PER_CLASS)
"""The kind of a form's argument by its number in an op; the first is a fixed number."""
OPERANDS = {
    "input": "Tensor",
    **dict.fromkeys(Operands._fields[1:7], "Tensor?"),
    "arguments": "Tensor[]",
    "prior_arguments": "Tensor[]",
}
"""The operands of an op with their types in its schema."""
MEMBERS = {"form": "str", "values": "float[]", "kinds": "SymInt[]"}
OF_CALLS = {
    "by_output": "Tensor?",
    **MEMBERS,
    **{f"prior_{name}": kind + "?" * (name == "form") for name, kind in MEMBERS.items()},
    "autocast": "ScalarType?",
    "wanted": "bool[]",
}
"""The arguments that every op has after its operands."""
SCHEMA_TYPES = {bool: "bool", int: "SymInt", float: "float", str: "str"}
DENSE = ("input", "weight", "bias", "prior_logits", "token_weights")
"""The operands that may want a gradient, besides the arguments of forms."""


class TracedSignature(NamedTuple):
    """The part of a signature that validation asks for, of tensors that are traced for a graph."""

    operands: Operands
    wanted: Wanted
    autocast: torch.dtype | None


def traced_problem(
    validate: Callable[[Any, Any], Problem[Any]], spec: CallSpec, operands: Operands
) -> tuple[Problem[Any], str | None]:
    """A call on tensors that are traced, and the backend that was asked for, or must be.

    Graphs that are exported are run by programs that know torch's own operations alone, which the reference is made of.
    """
    wanted = Wanted.of([wants_gradient(t) for t in operands.differentiable], len(operands.arguments))
    device = operands.input.device if isinstance(operands.input, Tensor) else torch.device("cpu")
    backend, _ = chosen_backend(spec.backend, os.environ.get(BACKEND_VARIABLE) or None)
    if is_exporting():
        decision = only_by_reference(backend, EXPORTED)
        backend = decision.backend
        # A graph that Dynamo records (torch.export with strict=True) changes nothing outside itself.
        if not torch.compiler.is_dynamo_compiling():
            told(decision)
    elif wants_gradient(operands.target) or wants_gradient(operands.class_weight):
        backend = only_by_reference(backend, NEEDS_AUTOGRAD).backend
    signature = TracedSignature(operands, wanted, autocast_dtype(device))
    if not torch_internals.is_jit_tracing():
        return validate(spec, signature), backend
    with warnings.catch_warnings():
        # Sizes are compared once, for the example that is traced.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        return validate(spec, signature), backend


def _options_schema(spec: type[CallSpec]) -> dict[str, str]:
    """The arguments of an op that are fields of its specification, with their types in its schema."""

    def schema_type(field: Any) -> str:
        if isinstance(field, types.UnionType):
            return f"{schema_type(get_args(field)[0])}?"
        return "str" if get_origin(field) is Literal else SCHEMA_TYPES[field]

    hints = get_type_hints(spec)
    names = [field.name for field in dataclasses.fields(spec) if field.name not in ("member", "prior")]
    # Of extras an op has a flag for each that there is.
    return {name: "bool[]" if name == "extras" else schema_type(hints[name]) for name in names}


class TracedCall(NamedTuple):
    """The part of a call that the shapes of its results depend on."""

    operands: Operands
    options: Mapping[str, Any]
    """all arguments of the op by their names"""
    leading: tuple[int, ...]
    components: int

    @property
    def tokens(self) -> int:
        return math.prod(self.leading)

    @property
    def rows(self) -> int:
        """The number of rows of results that a call computes unless it is given ``by_output``."""
        return self.tokens if self.options["by_output"] is None else 0

    @property
    def needed(self) -> list[bool]:
        """Flags for the gradients that are computed if the call is given ``by_output``."""
        return [flag and self.options["by_output"] is not None for flag in self.options["wanted"]]

    def dtypes(self, *, is_loss: bool = False) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the arithmetic and of the result."""
        has_weight = self.operands.weight is not None
        products, dtype = dtypes_of(
            self.operands.input.dtype, self.options["autocast"], has_weight=has_weight, is_loss=is_loss
        )
        return compute_dtype(products), dtype


class PackedOp:
    """An op of torch.library whose arguments are a packed call, and whose last results are packed gradients.

    The gradients are those of its first result if it is given the incoming gradient, ``by_output``. ``make_spec`` makes
    a specification of the class ``spec``; ``compute`` has as many ``results``, besides the gradients, as ``fake``.
    """

    def __init__(
        self,
        name: str,
        spec: type[CallSpec],
        make_spec: Callable[..., CallSpec],
        results: int,
        compute: Callable[[Lowered, Operands, Tensor | None], tuple[Tensor, ...]],
        fake: Callable[[TracedCall], tuple[Tensor, ...]],
    ) -> None:
        self.make_spec = make_spec
        options = _options_schema(spec)
        arguments = {**OPERANDS, **OF_CALLS, **options}
        self.options, self.fields = tuple(options), tuple(arguments)

        def compute_packed(*packed: Any) -> tuple[Tensor, ...]:
            call_spec, operands, wanted, autocast, by_output = self.unpack(packed)
            return compute(lower(call_spec, signature_inside_op(operands, wanted, autocast)), operands, by_output)

        def fake_packed(*packed: Any) -> tuple[Tensor, ...]:
            given = dict(zip(self.fields, packed, strict=True))
            operands = _unpacked_operands(given)
            *leading, components = operands.input.shape[:-1] if given["prior_form"] else (*operands.input.shape[:-1], 1)
            return fake(TracedCall(operands, given, tuple(leading), components))

        listed = ", ".join(f"{kind} {name}" for name, kind in arguments.items())
        tensors = ", ".join(["Tensor"] * (results + len(DENSE) + 1))
        self.op = torch.library.custom_op(name, compute_packed, mutates_args=(), schema=f"({listed}) -> ({tensors})")
        self.op.register_fake(fake_packed)

    def pack(
        self,
        spec: CallSpec,
        operands: Operands,
        signature: Signature | TracedSignature,
        backend: str | None,
        by_output: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """The arguments of the op."""
        given = {
            **_packed_operands(operands),
            **_packed_member("", spec.member),
            **_packed_member("prior_", spec.prior),
            "by_output": by_output,
            "extras": [name in (getattr(spec, "extras", None) or ()) for name in EXTRAS],
            "backend": backend,
            "autocast": signature.autocast,
            "wanted": list(signature.wanted.flat),
        }
        return tuple(given[name] if name in given else getattr(spec, name) for name in self.fields)

    def unpack(self, packed: Sequence[Any]) -> tuple[Any, Operands, Wanted, torch.dtype | None, Tensor | None]:
        """The inverse of :meth:`pack`: specification, operands, wanted gradients, autocast's dtype, ``by_output``."""
        given = dict(zip(self.fields, packed, strict=True))
        options = {name: given[name] for name in self.options}
        for name, prefix in (("member", ""), ("prior", "prior_")):
            form, numbers, kinds = (given[prefix + field] for field in MEMBERS)
            if form is not None:
                values = tuple(KINDS[kind] or float(number) for number, kind in zip(numbers, kinds, strict=True))
                options[name] = MemberSpec(form, family.form_by_name(form), values)
        if "extras" in options:
            asked = zip(EXTRAS, options["extras"], strict=True)
            options["extras"] = tuple(name for name, is_asked in asked if is_asked) or None
        operands = _unpacked_operands(given)
        wanted = Wanted.of(given["wanted"], len(operands.arguments))
        return self.make_spec(**options), operands, wanted, given["autocast"], given["by_output"]

    def gradients(self, problem: Problem[Any], operands: Operands, by_output: Tensor) -> Gradients:
        """The gradients of a call that was made outside torch.compile, while its backward is traced."""
        backend = problem.spec.backend or problem.signature.backend_variable
        results = self.op(*self.pack(problem.spec, operands, problem.signature, backend, by_output))
        return unpacked_gradients(results, operands.all_arguments, problem.wanted.flat)

    def keep_options(self, ctx: Any, inputs: Sequence[Any]) -> Operands:
        """Keep the arguments for the op's backward, except its operands, which the caller is to save."""
        given = dict(zip(self.fields, inputs, strict=True))
        operands = _unpacked_operands(given)
        ctx.arguments = len(operands.arguments)
        ctx.options = {name: value for name, value in given.items() if name not in OPERANDS}
        return operands

    def register_recomputing_backward(self) -> None:
        """Register a backward for which the op saves its operands and is called again."""

        def save_operands(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            ctx.save_for_backward(*self.keep_options(ctx, inputs).flat)

        def backward(ctx: Any, by_output: Tensor, *_: Any) -> tuple[Any, ...]:
            return self.recomputed(ctx, by_output)

        self.op.register_autograd(backward, setup_context=save_operands)

    def recomputed(self, ctx: Any, by_output: Tensor) -> tuple[Any, ...]:
        """The backward of an op that saved its operands."""
        saved = ctx.saved_tensors
        operands = Operands.from_flat(saved, ctx.arguments)
        given = {**ctx.options, **_packed_operands(operands), "by_output": by_output}
        with torch.no_grad():
            results = self.op(*(given[name] for name in self.fields))
        gradients = unpacked_gradients(results, operands.all_arguments, given["wanted"])
        return self.by_argument(ctx, not_differentiable_again(gradients, (by_output, *saved)))

    def by_argument(self, ctx: Any, gradients: Gradients) -> tuple[Any, ...]:
        """The return values of the op's backward; torch takes an empty list for one of tensors, and wants one back."""
        by_arguments = list(gradients[len(DENSE) :])
        given: dict[str, Any] = dict(zip(DENSE, gradients, strict=False))
        given |= {"arguments": by_arguments[: ctx.arguments], "prior_arguments": by_arguments[ctx.arguments :]}
        return tuple(given.get(name, [] if ctx.options.get(name) == [] else None) for name in self.fields)


def _packed_member(prefix: str, member: MemberSpec | None) -> dict[str, Any]:
    name, numbers, kinds = None, [], []
    if member is not None:
        name = member.form.name
        numbers = [0.0 if value is None else value for value in member.numbers]
        kinds = [0 if isinstance(value, float) else KINDS.index(value) for value in member.values]
    return {f"{prefix}form": name, f"{prefix}values": numbers, f"{prefix}kinds": kinds}


def _packed_operands(operands: Operands) -> dict[str, Any]:
    lists = {"arguments": list(operands.arguments), "prior_arguments": list(operands.prior_arguments)}
    return dict(zip(OPERANDS, operands, strict=False)) | lists


def _unpacked_operands(given: Mapping[str, Any]) -> Operands:
    operands: dict[str, Any] = {name: given.get(name) for name in OPERANDS}
    return Operands(**operands)


def packed_gradients(gradients: Gradients, operands: Operands, numbers: Tensor) -> list[Tensor]:
    """Gradients as results: one tensor for each of DENSE, and one for all arguments together, 0 where not wanted.

    One that is absent has no elements. Outputs of an op must not share memory, be they empty.
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

    def fake(tensor: Tensor | None, is_wanted: bool) -> Tensor:
        if tensor is None or not is_wanted:
            return torch.empty_like(numbers)
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    count = sum(a.numel() for a in operands.all_arguments) if any(wanted[len(DENSE) :]) else 0
    tensors = operands.differentiable[: len(DENSE)]
    return [*map(fake, tensors, wanted), numbers.new_empty(count)]


def unpacked_gradients(results: Sequence[Tensor], arguments: Sequence[Tensor], wanted: Sequence[bool]) -> Gradients:
    """The inverse of :func:`packed_gradients`, from the last results of an op; None where one is not wanted."""
    *dense, joined = results[-len(DENSE) - 1 :]
    pieces: Gradients = [None] * len(arguments)
    if any(wanted[len(DENSE) :]):
        pieces = [
            piece.view(a.shape).to(a.device, a.dtype)
            for piece, a in zip(torch.split(joined, [a.numel() for a in arguments]), arguments, strict=True)
        ]
    return [g if want else None for g, want in zip((*dense, *pieces), wanted, strict=True)]
