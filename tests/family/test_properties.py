"""The known properties of phi, held against its formula in mpmath with more digits than the answers need."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
import pytest
import torch
from tests.tables import by_label

from sigsoftmax import Learned, OutputFunction, register_function
from sigsoftmax.family.formulas import LOGISTIC, RELU, SOFTCAP
from sigsoftmax.family.properties import Properties

EXACT = mpmath.mpf(10) ** -60
"""A bound for numbers that are 0 in formulas, and not after rounding to 120 digits."""


def learned(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


@dataclass(frozen=True)
class Case:
    """A member with one value for each parameter, and its phi as mpmath computes it."""

    function: OutputFunction
    exact_phi: Callable[..., mpmath.mpf]

    @property
    def numbers(self) -> dict[str, float]:
        values = self.function.parameters.items()
        return {key: float(torch.as_tensor(value, dtype=torch.float64).detach()) for key, value in values}

    def __str__(self) -> str:
        inside = ", ".join(f"{key}={value:g}" for key, value in self.numbers.items())
        return f"{self.function.name}({inside})" + (" of tensors" if self.function.kinds else "")

    def phi(self, z: float | mpmath.mpf) -> mpmath.mpf:
        return self.exact_phi(mpmath.mpf(z), **{key: mpmath.mpf(value) for key, value in self.numbers.items()})

    def slope(self, z: float | mpmath.mpf) -> mpmath.mpf:
        step = mpmath.mpf(10) ** -40
        return (self.phi(z + step) - self.phi(z)) / step

    @property
    def width(self) -> float:
        """The unit in which the nonlinearity of every member is a few wide."""
        return self.numbers["c"] if self.function.name == "softcap" else 1.0

    @property
    def points(self) -> list[mpmath.mpf]:
        """Evenly spaced, to both sides of the nonlinearity as far as 120 digits tell phi from its asymptotes."""
        middle = mpmath.mpf(self.function.properties.nonlinear_at or 0.0)
        return [middle + self.width * mpmath.mpf(step) for step in range(-60, 61)]


def case(label: str, **values: Any) -> Case:
    member = by_label[label]
    return Case(OutputFunction(member.name, **values), member.exact_phi)


CASES = (
    *(case("softmax", alpha=alpha) for alpha in (1.0, 1.5, 1e-3, learned(2.0), learned(0.0), learned(-0.8))),
    case("sigsoftmax"),
    *(case("shifted(b=1.3)", b=b) for b in (1.3, -200.0, 2000.0, learned(-5.0))),
    case("sigmoid"),
    *(case("relu", eps=eps) for eps in (1e-8, 0.5)),
    *(case("gss(k=0)", k=k) for k in (-3.0, -1e-3, 0.0, 0.2, 1.0, 2.0, 5.0, learned(1.0), learned(-0.5))),
    *(case("gss(k=0)", k=k, c=c) for k in (-0.5, 0.0, 1.0, 1.7) for c in (-7.0, learned(30.0))),
    *(case("softcap(c=5)", c=c) for c in (0.5, 5.0, 1.0)),
)
every_case = pytest.mark.parametrize("known", CASES, ids=str)


@pytest.fixture(autouse=True)
def _digits() -> Any:
    with mpmath.workdps(120):
        yield


@every_case
def test_increasing_is_what_the_values_of_phi_do(known: Case) -> None:
    values = [known.phi(z) for z in known.points]
    steps = [after - before for before, after in itertools.pairwise(values)]
    properties = known.function.properties
    assert properties.is_increasing is all(step >= -EXACT for step in steps)
    assert properties.is_strictly_increasing is all(step > EXACT for step in steps)
    assert known.function.is_increasing is properties.is_increasing
    assert known.function.form.is_increasing(properties.values) is properties.is_increasing


@every_case
def test_concave_and_affine_are_what_second_differences_say(known: Case) -> None:
    values = [known.phi(z) for z in known.points]
    bends = [c - 2 * b + a for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    properties = known.function.properties
    assert properties.is_concave is all(bend <= EXACT for bend in bends)
    assert properties.is_affine is all(abs(bend) <= EXACT for bend in bends)
    if properties.is_affine:
        assert properties.affine_slope == pytest.approx(float(known.phi(1) - known.phi(0)))
    else:
        assert properties.affine_slope is None


@every_case
def test_steepest_is_the_least_bound_of_the_slope(known: Case) -> None:
    properties = known.function.properties
    # relu is steepest just right of 0.
    slopes = [abs(known.slope(z)) for z in (*known.points, mpmath.mpf(10) ** -20)]
    assert float(max(slopes)) == pytest.approx(properties.steepest, rel=1e-9)


@every_case
def test_asymptotes_are_lines_that_phi_comes_near_and_the_others_do_not_exist(known: Case) -> None:
    pieces = known.function.properties.linear_pieces
    assert pieces is not None
    names = [piece.where for piece in pieces]
    assert names == sorted(names, key=["left", "centre", "right"].index)
    for where, sign in (("left", -1), ("right", 1)):
        far = [sign * mpmath.mpf(10) ** power for power in (20, 30, 31)]
        slope = (known.phi(far[2]) - known.phi(far[1])) / (far[2] - far[1])
        constants = [known.phi(z) - slope * z for z in far]
        found = [piece for piece in pieces if piece.where == where]
        # What is left of a line is a constant; what is left of a logarithm, whose slope vanishes, goes on growing.
        assert len(found) == (abs(constants[0] - constants[1]) < EXACT)
        for piece in found:
            # The arguments of gss are 1 and k - 1, whose sum is k but for the rounding of float64.
            assert float(slope) == pytest.approx(piece.slope, rel=1e-15, abs=2e-16)
            assert float(constants[0]) == pytest.approx(piece.intercept, rel=1e-15, abs=2e-16)


@every_case
def test_the_line_between_two_parallel_asymptotes_is_the_tangent_halfway(known: Case) -> None:
    pieces = {piece.where: piece for piece in known.function.properties.linear_pieces or ()}
    is_bent_between = (
        not known.function.properties.is_affine and "right" in pieces and pieces["left"].slope == pieces["right"].slope
    )
    assert ("centre" in pieces) is is_bent_between
    if is_bent_between:
        centre = known.function.properties.nonlinear_at
        assert centre is not None
        assert known.phi(centre) == (pieces["left"].intercept + pieces["right"].intercept) / 2  # type: ignore[operator]
        assert known.phi(centre) == pieces["centre"].slope * centre + pieces["centre"].intercept  # type: ignore[operator]
        assert abs(known.slope(centre) - pieces["centre"].slope) < 1e-30


@every_case
def test_phi_is_nonlinear_where_its_slope_changes_most(known: Case) -> None:
    properties = known.function.properties
    if properties.is_affine:
        return
    points = known.points
    changes = [abs(known.slope(b) - known.slope(a)) for a, b in itertools.pairwise(points)]
    assert properties.nonlinear_at is not None
    assert abs(points[changes.index(max(changes))] - properties.nonlinear_at) <= known.width


@every_case
def test_softmax_and_sigsoftmax_are_recognised_by_their_values(known: Case) -> None:
    properties = known.function.properties
    # Around the nonlinearity: far from it everything is a softmax as far as float64 can tell.
    shift = properties.nonlinear_at or 0.0
    z = shift + torch.linspace(-9.0, 9.0, 31, dtype=torch.float64)
    log_f = torch.log_softmax(known.function.phi(z).detach(), -1)
    slope = float((log_f[-1] - log_f[0]) / 18.0)
    is_softmax = slope > 0.0 and torch.allclose(log_f, torch.log_softmax(slope * z, -1), rtol=0.0, atol=1e-9)
    is_sigsoftmax = torch.allclose(
        known.function.phi(z), z + torch.nn.functional.logsigmoid(z - shift), rtol=0.0, atol=1e-9
    )
    assert properties.is_softmax is is_softmax
    assert properties.is_sigsoftmax is is_sigsoftmax


def test_the_same_phi_is_recognised_by_its_values() -> None:
    # Less its value at 0, since a constant does not count.
    points = (-3000.0, -60.0, -1.0, 2.0, 3000.0)
    exact = [[known.phi(z) - known.phi(0) for z in points] for known in CASES]
    properties = [known.function.properties for known in CASES]
    for i, one in enumerate(properties):
        for j, other in enumerate(properties):
            is_same = all(abs(a - b) < 1e-9 for a, b in zip(exact[i], exact[j], strict=True))
            assert one.is_same_phi(other) is is_same, (str(CASES[i]), str(CASES[j]))
    assert OutputFunction("gss").properties.is_same_phi(OutputFunction("sigsoftmax").properties)


# What is not known


def answers(properties: Properties) -> dict[str, object]:
    names = set(Properties._fields) - {"values", "formula"}
    return {name: getattr(properties, name) for name in (*names, "is_softmax")}


def test_nothing_is_known_of_a_users_own_phi() -> None:
    function = register_function("leaning", lambda z, s: s * z, parameters={"s": 1.0})
    for properties in (function.properties, function.lasting_properties):
        found = answers(properties)
        assert found.pop("steepest") == math.inf
        assert set(found.values()) == {None}
    assert function.is_linear is function.is_increasing is False
    softmax = OutputFunction("softmax").properties
    assert function.properties.is_same_phi(softmax) is softmax.is_same_phi(function.properties) is None


def test_what_is_known_of_a_form_without_its_values() -> None:
    logistic = LOGISTIC.properties((None, None, None))
    found = answers(logistic)
    assert found.pop("steepest") == 2.0
    assert set(found.values()) == {None}
    assert answers(RELU.properties((None,))) == {
        **answers(RELU.properties((1e-8,))),
        "steepest": math.inf,
        "linear_pieces": (("left", 0.0, None),),
    }
    assert answers(SOFTCAP.properties((None,))) == {
        **answers(SOFTCAP.properties((30.0,))),
        "linear_pieces": (("left", 0.0, None), ("centre", 1.0, 0.0), ("right", 0.0, None)),
    }


def test_a_shift_for_each_class_leaves_the_slopes_known() -> None:
    function = OutputFunction("gss", k=0.2, c=torch.tensor([1.0, -1.0]))
    properties = function.properties
    assert properties.values == [1.0, -0.8, None]
    assert (properties.is_strictly_increasing, properties.is_concave, properties.is_affine) == (True, False, False)
    assert properties.linear_pieces == (("left", pytest.approx(0.2), None), ("right", 1.0, 0.0))
    assert properties.nonlinear_at is None
    assert properties.is_same_phi(properties) is None
    assert not function.is_increasing, "each phi increases, but classes do not share one"
    straight = function.with_parameters(k=1.0).properties
    assert (straight.is_softmax, straight.affine_slope) == (True, 1.0)
    assert straight.linear_pieces == (("left", 1.0, 0.0), ("right", 1.0, 0.0))
    assert OutputFunction("shifted_sigsoftmax", b=torch.zeros(2)).properties.is_sigsoftmax is None


def test_lasting_properties_hold_whatever_is_learned() -> None:
    k = torch.tensor(1.0)
    function = OutputFunction("gss", k=k)
    assert (function.properties.is_affine, function.lasting_properties.is_affine) == (True, None)
    assert not function.is_linear
    k.fill_(0.5)
    assert function.properties.is_affine is False
    for alpha in (torch.tensor(1.0), Learned()):
        lasting = OutputFunction("softmax", alpha=alpha).lasting_properties
        assert (lasting.is_affine, lasting.affine_slope, lasting.is_softmax) == (True, None, None)
    per_class = OutputFunction("shifted_sigsoftmax", b=Learned(per_class=True))
    assert per_class.lasting_properties.is_strictly_increasing
    assert OutputFunction("gss", k=1.0, c=Learned(per_class=True)).is_linear


def test_values_that_only_a_layer_can_make_are_not_read() -> None:
    with pytest.raises(
        ValueError, match=r"parameter 'k' of 'gss' is to be learned, and only a layer or a criterion can create it"
    ):
        _ = OutputFunction("gss", k=Learned()).properties
