"""The definitions: phi, slope and parameter derivatives of each member, what users may write, and what they are told.

Shapes: N rows, V classes.
"""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tables import MEMBERS, Member, assert_same, by_label, every_member
from torch import Tensor

import sigsoftmax
from sigsoftmax import Learned, OutputFunction, family, register_function

BUILT_IN = ("softmax", "sigsoftmax", "shifted_sigsoftmax", "sigmoid", "relu", "gss", "softcap")
LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max
with_arguments = pytest.mark.parametrize("member", [m for m in MEMBERS if m.label != "user, with slope"], ids=str)
one_value_for_all_classes = pytest.mark.parametrize("member", [m for m in MEMBERS if not m.per_class], ids=str)


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def wide_logits(num_rows: int = 9, num_classes: int = 7) -> Tensor:
    """Rows on both sides of every nonlinearity, near and far apart; no logit is 0, where relu has no derivative."""
    levels = torch.linspace(-30.0, 30.0, num_rows, dtype=torch.float64).unsqueeze(-1)
    return levels + 4.0 * torch.randn(num_rows, num_classes, dtype=torch.float64)


def arguments_of(member: OutputFunction, z: Tensor) -> list[Tensor]:
    return [a.to(z) for a in member.arguments(z.shape[-1])]


# phi, slope and the derivatives by arguments


@every_member
def test_phi_is_the_formula(member: Member) -> None:
    z = wide_logits()
    # relu's eps below a logit of this size is lost in float64 too, so that both sides round alike.
    assert_same(member.make(7).phi(z), member.phi(z), tolerance=1e-12)


@every_member
def test_slope_is_the_derivative_of_phi(member: Member) -> None:
    z = wide_logits().requires_grad_()
    function = member.make(7)
    (expected,) = torch.autograd.grad(member.phi(z).sum(), z)
    assert_same(function.slope(z.detach()), expected, tolerance=1e-9)
    (by_autograd,) = torch.autograd.grad(function.phi(z).sum(), z)
    assert_same(by_autograd, expected, tolerance=1e-9)


@every_member
def test_relative_plus_offset_is_phi(member: Member) -> None:
    z = wide_logits()
    function = member.make(7)
    relative, offset = function.form.relative(z, z.amax(-1, keepdim=True), *arguments_of(function, z))
    assert offset.shape == (9, 1)
    assert_same(relative + offset, member.phi(z), tolerance=1e-11)


@every_member
def test_relative_differentiates_to_the_slope(member: Member) -> None:
    z = wide_logits().requires_grad_()
    function = member.make(7)
    relative, _ = function.form.relative(z, z.detach().amax(-1, keepdim=True), *arguments_of(function, z))
    (by_z,) = torch.autograd.grad(relative.sum(), z)
    assert_same(by_z, function.slope(z.detach()), tolerance=1e-9)


@with_arguments
def test_argument_slopes_are_the_derivatives_of_relative_and_offset(member: Member) -> None:
    z = wide_logits()
    peak = z.amax(-1, keepdim=True)
    function = member.make(7)
    arguments = arguments_of(function, z)
    relative_slopes, offset_slopes = function.form.argument_slopes(z, peak, *arguments)
    assert len(relative_slopes) == len(offset_slopes) == len(arguments)
    for position, argument in enumerate(arguments):
        # One copy of the argument for every element, so that autograd keeps the elements apart.
        wide = argument.expand_as(z).clone().requires_grad_()
        phi = function.form.phi(z, *arguments[:position], wide, *arguments[position + 1 :])
        (by_argument,) = torch.autograd.grad(phi.sum(), wide)
        actual = (relative_slopes[position] + offset_slopes[position]).expand_as(z)
        assert_same(actual, by_argument, f"argument {position}", tolerance=1e-9)


@with_arguments
def test_parts_of_argument_slopes_are_the_derivatives_of_each_part(member: Member) -> None:
    """The offset's part matters where the absolute normaliser does: in a z-loss."""
    function = member.make(7)
    z = wide_logits()
    peak = z.amax(-1, keepdim=True)
    arguments = arguments_of(function, z)
    _, offset_slopes = function.form.argument_slopes(z, peak, *arguments)
    for position, argument in enumerate(arguments):
        if argument.ndim:
            continue
        wide = argument.expand_as(peak).clone().requires_grad_()
        replaced = [*arguments[:position], wide, *arguments[position + 1 :]]
        _, offset = function.form.relative(z, peak, *replaced)
        by_offset = torch.zeros_like(wide)
        if offset.requires_grad:
            (by_offset,) = torch.autograd.grad(offset.sum(), wide, materialize_grads=True)
        assert_same(offset_slopes[position].expand_as(peak), by_offset, f"argument {position}", tolerance=1e-9)


FAR_ROWS = tuple(
    [level + step for step in (0.0, -0.25, -1.5, -6.0, -40.0)] for level in (-1e4, -1e3, -20.0, 0.5, 20.0, 1e3, 1e4)
)


@one_value_for_all_classes
@pytest.mark.parametrize("row", FAR_ROWS, ids=lambda row: f"at {row[0]:g}")
def test_relative_is_exact_in_float32_far_from_zero(member: Member, row: list[float]) -> None:
    """Differences of phi keep float32's digits at any level, where differences of float32 values of phi do not."""
    z = torch.tensor(row, dtype=torch.float32)
    function = member.make(5)
    relative, _ = function.form.relative(z.unsqueeze(0), z.amax().view(1, 1), *arguments_of(function, z.unsqueeze(0)))
    actual = relative[0].double() - relative[0].double().max()
    # atan is flat out there, so its float32 values are all that a user's phi alone can give.
    slack = 4e-7 * (1.0 if function.form.is_builtin else 1.0 + float(function.phi(z).abs().max()))
    # The logarithms of relu are good to the digits of a number near 18.
    slack = 2e-6 if function.name == "relu" else slack
    with mpmath.workdps(60):
        numbers = {key: mpmath.mpf(value) for key, value in member.parameters.items()}
        values = [member.exact_phi(mpmath.mpf(float(x)), **numbers) for x in z]
        largest = max(values)
        for got, value in zip(actual.tolist(), values, strict=True):
            expected = float(value - largest)
            assert abs(got - expected) <= slack * (1.0 + abs(expected)), (got, expected)


@every_member
@pytest.mark.parametrize("level", [-1.0, 0.0, 1.0])
def test_relative_is_no_nan_at_the_largest_bfloat16(member: Member, level: float) -> None:
    top = level * LARGEST_BFLOAT16
    row = torch.tensor([[top, 0.5 * top, -LARGEST_BFLOAT16, -1.0, min(top, 0.0)]], dtype=torch.float32)
    function = member.make(5)
    relative, offset = function.form.relative(row, row.amax(-1, keepdim=True), *arguments_of(function, row))
    assert not relative.isnan().any()
    assert not offset.isnan().any()
    assert relative.amax() > -math.inf


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=6))
def test_relative_never_exceeds_the_peaks_by_more_than_rounding(row: list[float]) -> None:
    """Increasing members: no class beats the largest logit."""
    z = torch.tensor([row], dtype=torch.float32)
    for label in ("softmax", "sigsoftmax", "sigmoid", "relu", "gss(k=0)", "softcap(c=5)"):
        function = by_label[label].make(len(row))
        peak = z.amax(-1, keepdim=True)
        relative, _ = function.form.relative(z, peak, *arguments_of(function, z))
        (at_peak,), _ = function.form.relative(peak, peak, *arguments_of(function, z))
        assert (relative <= at_peak + 1e-6).all(), (label, row)


def test_a_wide_softcap_is_softmax_in_float32_too() -> None:
    z = torch.randn(4, 50)
    wide = OutputFunction("softcap", c=1e6)
    assert_same(sigsoftmax.log_probs(z + 100.0, function=wide), torch.log_softmax(z + 100.0, -1), tolerance=5e-6)


def test_the_slope_of_softcap_keeps_its_digits_where_tanh_is_1() -> None:
    cap = OutputFunction("softcap", c=2.0)
    with mpmath.workdps(40):
        expected = float(mpmath.sech(mpmath.mpf(20)) ** 2)
    assert float(cap.slope(torch.tensor(40.0))) == pytest.approx(expected, rel=1e-5)


# The names


def test_names_are_the_members_in_order_and_user_members_join_them() -> None:
    assert family.names() == BUILT_IN
    register_function("mine", torch.atan)
    assert family.names() == (*BUILT_IN, "mine")
    assert [definition.name for definition in family.table()] == [*BUILT_IN, "mine"]


def test_unknown_name_lists_the_names_and_suggests_one() -> None:
    with pytest.raises(ValueError, match="unknown output function 'sigsoftmx'") as caught:
        OutputFunction("sigsoftmx")
    text = str(caught.value)
    assert "did you mean 'sigsoftmax'?" in text
    assert text.endswith(", ".join(BUILT_IN))


def test_unknown_name_without_a_near_one_suggests_nothing() -> None:
    with pytest.raises(ValueError, match=r"^unknown output function 'xyzzy'; the known ones are softmax, ") as caught:
        OutputFunction.parse("xyzzy")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("text", ["mos(K=4)", "moss(K=2)", "mixture(gss(k=0), K=2)"])
def test_a_mixture_in_the_place_of_a_single_function_is_told_where_it_belongs(text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected a single output function, got the mixture .* MixtureOutputLayer"):
        OutputFunction.parse(text)


def test_members_of_the_table_behave_as_their_special_cases() -> None:
    z = wide_logits()
    pairs = [
        (OutputFunction("gss", k=2.0, c=0.0), OutputFunction("sigsoftmax")),
        (OutputFunction("gss", k=1.0, c=0.7), OutputFunction("softmax")),
        (OutputFunction("shifted_sigsoftmax"), OutputFunction("sigsoftmax")),
    ]
    for special, plain in pairs:
        assert_same(special.phi(z), plain.phi(z), str(special), tolerance=1e-12)
    assert_same(OutputFunction("gss", k=0.0).phi(z), torch.log1p(z.exp()), tolerance=1e-9)


def test_is_linear() -> None:
    texts = ("softmax", "softmax(alpha=2)", "gss(k=1)", "gss(k=1.5)", *BUILT_IN[1:])
    linear = [text for text in texts if OutputFunction.parse(text).is_linear]
    assert linear == ["softmax", "softmax(alpha=2)", "gss(k=1)"]


INCREASING = {
    "softmax": True,
    "sigsoftmax": True,
    "sigmoid": True,
    "shifted_sigsoftmax(b=-3)": True,
    "gss(k=0)": True,
    "gss(k=0.2, c=5)": True,
    "gss(k=-1, c=-200)": False,
    "gss(k=-1)": False,
    "relu": True,
    "softcap": True,
}


@pytest.mark.parametrize("text", INCREASING)
def test_is_increasing(text: str) -> None:
    assert OutputFunction.parse(text).is_increasing is INCREASING[text]


def test_is_increasing_goes_by_the_values_of_tensors_as_they_are_now() -> None:
    alpha = torch.tensor(0.5)
    function = OutputFunction("softmax", alpha=alpha)
    assert function.is_increasing
    alpha.neg_()
    assert not function.is_increasing
    assert not OutputFunction("shifted_sigsoftmax", b=torch.zeros(3)).is_increasing, (
        "one phi per class orders no logits"
    )
    assert not register_function("rising", lambda z: z).is_increasing, "nothing is known of it"


def test_is_increasing_of_a_form_is_what_is_known() -> None:
    known = family.form_by_name("logistic").is_increasing
    assert known((1.0, 0.5, None)), "a shift moves phi and leaves its slopes"
    assert not known((None, 0.0, 0.0))
    assert not known((1.0, None, 0.0))


def test_defaults_are_those_of_the_literature() -> None:
    assert OutputFunction("relu").parameters == {"eps": 1e-8}
    assert OutputFunction("gss").parameters == {"k": 2.0, "c": 0.0}
    assert OutputFunction("softmax").parameters == {"alpha": 1.0}
    assert OutputFunction("softcap").parameters == {"c": 30.0}
    assert OutputFunction("shifted_sigsoftmax").parameters == {"b": 0.0}


# Text and back

TEXTS = (
    "softmax",
    "softmax(alpha=1.5)",
    "sigsoftmax",
    "gss(k=0.2, c=-1.0)",
    "gss(k=learned)",
    "gss(k=learned:0.5, c=per_class)",
    "shifted_sigsoftmax(b=per_class:4.0)",
    "relu(eps=1e-08)",
    "softcap(c=30.0)",
)


@pytest.mark.parametrize("text", TEXTS)
def test_str_is_read_back(text: str) -> None:
    member = OutputFunction.parse(text)
    assert str(member) == text
    assert repr(member) == f"OutputFunction({text!r})"
    again = OutputFunction.parse(str(member))
    assert (again.name, again.given) == (member.name, member.given)


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive_the_way_through_text(k: float, c: float) -> None:
    member = OutputFunction("gss", k=k, c=c)
    assert OutputFunction.parse(str(member)).parameters == {"k": k, "c": c}


def test_parse_is_lenient_about_spaces_and_takes_members() -> None:
    member = OutputFunction.parse("  gss ( k = 0.2 , c=1 ) ")
    assert member.parameters == {"k": 0.2, "c": 1.0}
    assert OutputFunction.parse(member) is member


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gss(k)", r"cannot read 'k' in 'gss\(k\)'; write parameters like 'k=0.2'"),
        ("gss(k=0.2", r"cannot read the output function 'gss\(k=0.2'; write it like 'gss\(k=0.2\)'"),
        ("gss(k=two)", r"cannot read the value 'two' in 'gss\(k=two\)'; write a number, 'learned', "),
        ("gss(k=)", r"cannot read the value '' in 'gss\(k=\)'"),
        ("gss(k=learned:x)", r"cannot read the value 'x' in 'gss\(k=learned:x\)'"),
        ("gss(b=1)", "output function 'gss' has no parameter 'b'; its parameters are k, c"),
        ("gss(k=nan)", "parameter 'k' of output function 'gss' must be finite, got nan"),
        ("softmax(alpha=inf)", "parameter 'alpha' of output function 'softmax' must be finite, got inf"),
        ("", "cannot read the output function ''"),
        ("softmax(k=1)", "output function 'softmax' has no parameter 'k'; its parameters are alpha"),
        ("sigsoftmax(b=1)", "output function 'sigsoftmax' has no parameter 'b'; it has no parameters"),
        ("relu(eps=0)", "parameter 'eps' of output function 'relu' must be greater than 0, got 0"),
        ("relu(eps=-1e-8)", "parameter 'eps' of output function 'relu' must be greater than 0, got -1e-08"),
        ("relu(eps=learned)", "parameter 'eps' of output function 'relu' cannot be learned; give a number"),
        ("softmax(alpha=0)", "parameter 'alpha' of output function 'softmax' must be greater than 0, got 0"),
        ("softcap(c=-3)", "parameter 'c' of output function 'softcap' must be greater than 0, got -3"),
        ("gss(k=per_class)", "parameter 'k' of output function 'gss' cannot differ by class; learn one number"),
    ],
)
def test_text_that_cannot_be_read_says_why(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OutputFunction.parse(text)


def test_a_parameter_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter 'k' twice in 'gss\(k=1, k=2\)'"):
        OutputFunction.parse("gss(k=1, k=2)")


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        (
            "gss",
            {"k": torch.tensor(1)},
            r"must be a floating-point tensor of shape \(\) or \(num_classes,\)",
        ),
        ("gss", {"k": torch.zeros(2, 3)}, r"got torch.float32 of shape \(2, 3\)"),
        (
            "gss",
            {"k": torch.zeros(3)},
            "parameter 'k' of output function 'gss' cannot differ by class; give one number",
        ),
        ("softmax", {"alpha": torch.ones(3)}, "cannot differ by class; give one number, got 3"),
        ("relu", {"eps": torch.tensor(1.0)}, "must be a plain number, got a tensor; use .item()"),
        ("softcap", {"c": torch.tensor(1.0)}, "must be a plain number, got a tensor; use .item()"),
        ("gss", {"k": "0.2"}, "parameter 'k' of output function 'gss' must be a number or a tensor, got str"),
        ("gss", {"k": True}, "must be a number or a tensor, got bool"),
        ("gss", {"k": None}, "must be a number or a tensor, got NoneType"),
        ("gss", {"q": 1.0}, "output function 'gss' has no parameter 'q'; its parameters are k, c"),
    ],
)
def test_bad_parameters_are_refused_with_a_reason(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OutputFunction(name, **parameters)


def test_function_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="function must be a name or an OutputFunction, got int"):
        OutputFunction.parse(3)  # type: ignore[arg-type]


def test_a_value_per_class_must_fit_the_classes() -> None:
    member = OutputFunction("shifted_sigsoftmax", b=torch.zeros(4))
    with pytest.raises(ValueError, match="parameter 'b' of 'shifted_sigsoftmax' has 4 values, but there are 5 classes"):
        member.arguments(5)
    with pytest.raises(ValueError, match="give one number, or one per class"):
        sigsoftmax.log_probs(torch.zeros(2, 5), function=member)


def test_a_parameter_to_be_learned_needs_a_layer() -> None:
    member = OutputFunction("gss", k=Learned(0.5))
    with pytest.raises(
        ValueError, match=r"only a layer or a criterion can create it; pass a tensor: OutputFunction\('gss'"
    ):
        sigsoftmax.log_probs(torch.zeros(2, 5), function=member)


def test_a_member_is_written_with_its_tensors_shapes() -> None:
    assert str(OutputFunction("gss", k=torch.tensor(0.5), c=torch.zeros(3))) == "gss(k=tensor(), c=tensor(3,))"


def test_members_are_equal_if_they_are_the_same_function() -> None:
    k = torch.tensor(0.2)
    equal = [
        (OutputFunction("gss", k=0.2), OutputFunction.parse("gss(k=0.2)")),
        (OutputFunction("softmax"), OutputFunction("softmax", alpha=1.0)),
        (OutputFunction("gss", k=k), OutputFunction("gss", k=k)),
    ]
    for a, b in equal:
        assert a == b
        assert hash(a) == hash(b)
    # Numbers in tensors can change.
    others = [
        OutputFunction("gss", k=0.3),
        OutputFunction("gss", k=k),
        OutputFunction("gss", k=k.clone()),
        "gss(k=0.2)",
    ]
    for other in others:
        assert OutputFunction("gss", k=0.2) != other


def test_with_parameters_replaces_some_and_keeps_the_rest() -> None:
    member = OutputFunction("gss", k=0.2, c=1.0)
    changed = member.with_parameters(k=0.5)
    assert changed.parameters == {"k": 0.5, "c": 1.0}
    assert member.parameters == {"k": 0.2, "c": 1.0}


# Members of the user's own


def test_phi_alone_suffices() -> None:
    function = register_function("asinh", torch.asinh)
    assert (function.name, function.parameters) == ("asinh", {})
    z = wide_logits()
    assert_same(function.slope(z), 1.0 / torch.sqrt(1.0 + z**2), tolerance=1e-12)
    assert_same(sigsoftmax.log_probs(z, function="asinh"), torch.log_softmax(torch.asinh(z), -1), tolerance=1e-12)


def test_the_slope_that_is_given_is_the_one_that_is_used() -> None:
    """A wrong slope on purpose shows which one ran."""
    register_function("wrong", lambda z: z, lambda z: torch.full_like(z, 3.0))
    z = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3])
    (wrong,) = torch.autograd.grad(sigsoftmax.cross_entropy(z, target, function="wrong", backend="blocked"), z)
    (right,) = torch.autograd.grad(torch.nn.functional.cross_entropy(z, target), z)
    assert_same(wrong, 3.0 * right, tolerance=1e-12)


def test_parameters_have_defaults_and_may_be_numbers_tensors_or_one_per_class() -> None:
    function = register_function("scaled_atan", lambda z, s, t: s * torch.atan(z - t), parameters={"s": 2, "t": 0.5})
    assert function.parameters == {"s": 2.0, "t": 0.5}
    z = wide_logits()
    assert_same(function.phi(z), 2.0 * torch.atan(z - 0.5), tolerance=1e-12)
    assert_same(OutputFunction.parse("scaled_atan(s=1)").phi(z), torch.atan(z - 0.5), tolerance=1e-12)
    t_V = torch.linspace(0.0, 1.0, 7, dtype=torch.float64)
    assert_same(function.with_parameters(t=t_V).phi(z), 2.0 * torch.atan(z - t_V), tolerance=1e-12)
    with pytest.raises(ValueError, match="'scaled_atan' has no parameter 'u'; its parameters are s, t"):
        OutputFunction("scaled_atan", u=1.0)


def test_parameters_reach_phi_by_position_whatever_the_order_they_are_given_in() -> None:
    register_function("ordered", lambda z, a, b: a * z + b, parameters={"a": 1.0, "b": 0.0})
    z = wide_logits()
    assert_same(OutputFunction("ordered", b=5.0, a=2.0).phi(z), 2.0 * z + 5.0, tolerance=1e-12)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_name_cannot_be_taken(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is a member of the family already; choose another name"):
        register_function(name, torch.atan)


def test_the_name_of_a_built_in_form_cannot_be_taken() -> None:
    """The form behind five members has a name of its own; taking it must not change them."""
    z = torch.randn(3, 4)
    before = sigsoftmax.log_probs(z, function="sigsoftmax", backend="blocked")
    with pytest.raises(ValueError, match="'logistic'"):
        register_function("logistic", torch.atan)
    assert torch.equal(sigsoftmax.log_probs(z, function="sigsoftmax", backend="blocked"), before)


def test_a_users_own_name_can_be_defined_again() -> None:
    register_function("mine", torch.atan)
    register_function("mine", torch.tanh)
    z = wide_logits()
    assert_same(OutputFunction("mine").phi(z), torch.tanh(z), tolerance=1e-12)
    assert_same(
        sigsoftmax.log_probs(z, function="mine", backend="blocked"), torch.log_softmax(z.tanh(), -1), tolerance=1e-12
    )


@pytest.mark.parametrize("name", ["", "a b", "3d", "gss(k=1)", "a-b"])
def test_a_name_must_be_an_identifier(name: str) -> None:
    with pytest.raises(ValueError, match="the name of an output function must be an identifier"):
        register_function(name, torch.atan)


def test_a_members_largest_value_need_not_be_at_the_largest_logit() -> None:
    """Offsets come from phi for a user's member: far left of 0 a falling phi is large."""
    member = by_label["user, with slope"]
    z = torch.tensor([[-1e4, 0.0, 1e4]])
    log_p = sigsoftmax.log_probs(z, function=member.make(3))
    assert_same(log_p, torch.tensor([[0.0, -7000.0, -14000.0]]), tolerance=1e-6)


@pytest.mark.parametrize("text", ["softmax", "gss(k=0.2, c=1.0)", "shifted_sigsoftmax(b=per_class:2.0)"])
def test_members_survive_pickling_and_copying(text: str) -> None:
    member = OutputFunction.parse(text)
    for again in (pickle.loads(pickle.dumps(member)), copy.deepcopy(member)):  # noqa: S301 (our own bytes)
        assert str(again) == str(member)
        assert again.form is member.form


@pytest.mark.parametrize(
    ("initial", "message"), [(0.0, "must be greater than 0"), (float("inf"), "must be finite"), (-1.0, "first value")]
)
def test_the_first_value_of_a_learned_parameter_is_checked(initial: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OutputFunction("softmax", alpha=Learned(initial=initial))
