"""The kinds of parameters: decided where a value is checked, and carried to the arguments of the form.

Shapes: V classes.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tests.tables import Member, every_member

from sigsoftmax import Learned, OutputFunction, family, register_function
from sigsoftmax.family.parameters import ParameterKind, kind_of

SCALAR, PER_CLASS = ParameterKind.SCALAR, ParameterKind.PER_CLASS
learnable = pytest.mark.parametrize(
    ("name", "key"),
    [(d.name, key) for d in family.table() for key, spec in d.parameters.items() if spec.can_be_learned],
)


@learnable
def test_the_kind_of_a_parameter_is_that_of_its_value(name: str, key: str) -> None:
    values = {1.5: None, torch.tensor(0.5): SCALAR, Learned(): SCALAR, Learned(initial=2.0): SCALAR}
    if family.definition_by_name(name).parameters[key].can_differ_by_class:
        # A vector of one value is one for each class too, where there is one class.
        values |= {torch.rand(5): PER_CLASS, torch.rand(1): PER_CLASS, Learned(per_class=True): PER_CLASS}
    for value, kind in values.items():
        function = OutputFunction(name, **{key: value})
        assert function.kinds == ({} if kind is None else {key: kind})
        assert function.has_shared_phi is (kind is not PER_CLASS)
        assert function.with_parameters(**{key: value}).kinds == function.kinds
    assert OutputFunction(name).kinds == {}


def test_kinds_travel_with_a_copy() -> None:
    function = OutputFunction("gss", k=torch.tensor(0.5), c=torch.zeros(3))
    assert copy.deepcopy(function).kinds == {"k": SCALAR, "c": PER_CLASS}


@every_member
def test_the_kind_of_an_argument_is_that_of_the_parameters_that_it_depends_on(member: Member) -> None:
    """Autograd sees which argument depends on which parameter; the shape must be what the kind says."""
    leaves = member.learned(4)
    function = member.make(4, **leaves)
    for argument, kind in zip(function.arguments(4), function.argument_kinds(), strict=True):
        assert argument.requires_grad is (kind is not None)
        if kind is not None:
            (seen,) = [function.kinds[key] for key, leaf in leaves.items() if _depends_on(argument, leaf)]
            assert seen is kind is kind_of(argument)
        assert argument.shape == ((4,) if kind is PER_CLASS else ())


def _depends_on(argument: torch.Tensor, leaf: torch.Tensor) -> bool:
    (gradient,) = torch.autograd.grad(argument.sum(), leaf, allow_unused=True, retain_graph=True)
    return gradient is not None


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (OutputFunction("softmax"), (None, None, None)),
        (OutputFunction("softmax", alpha=torch.tensor(-0.3)), (SCALAR, None, None)),
        (OutputFunction("sigsoftmax"), (None, None, None)),
        (OutputFunction("shifted_sigsoftmax", b=torch.zeros(3)), (None, None, PER_CLASS)),
        (OutputFunction("gss", k=torch.tensor(-1.0)), (None, SCALAR, None)),
        (OutputFunction("gss", k=Learned(), c=Learned(per_class=True)), (None, SCALAR, PER_CLASS)),
        (OutputFunction("relu"), (None,)),
        (OutputFunction("softcap", c=20.0), (None,)),
    ],
    ids=str,
)
def test_the_kinds_of_arguments(function: OutputFunction, kinds: tuple[ParameterKind | None, ...]) -> None:
    assert function.argument_kinds() == kinds


def test_the_kinds_of_a_users_own_member() -> None:
    register_function("leaning", lambda z, s, t: s * z + t, parameters={"s": 1.0, "t": 0.0})
    function = OutputFunction("leaning", t=torch.zeros(6))
    assert function.kinds == {"t": PER_CLASS}
    assert function.argument_kinds() == (None, PER_CLASS)
