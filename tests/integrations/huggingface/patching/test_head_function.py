"""The output function of a patched model: what counts as plain softmax, composed functions, and kinds of parameters.

Shapes: V classes.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn

from sigsoftmax import Learned, OutputFunction, register_function
from sigsoftmax.family.parameters import ParameterKind
from sigsoftmax.integrations.huggingface.examination.output_layers import Examined, LogitAdjustment
from sigsoftmax.integrations.huggingface.patching.head_function import HeadFunction, capped, is_plain_softmax


def head(function, num_classes=4):
    return HeadFunction(function, Examined(num_classes=num_classes))


SCALAR, PER_CLASS = ParameterKind.SCALAR, ParameterKind.PER_CLASS


@pytest.mark.parametrize(
    ("function", "is_plain"),
    [
        (OutputFunction("softmax"), True),
        (OutputFunction("gss", k=1.0, c=3.0), True),
        (OutputFunction("softmax", alpha=1.5), False),
        (OutputFunction("softmax", alpha=torch.tensor(1.0)), False),
        (OutputFunction("gss", k=Learned(initial=1.0)), False),
        (OutputFunction("sigsoftmax"), False),
        (OutputFunction("softcap"), False),
    ],
    ids=str,
)
def test_plain_softmax_has_the_identity_for_phi(function: OutputFunction, is_plain: bool) -> None:
    assert is_plain_softmax(function) is is_plain


def test_nothing_is_known_of_a_users_identity() -> None:
    assert not is_plain_softmax(register_function("identity", lambda z: z))


def test_a_member_that_happens_to_be_softmax_is_stored_as_what_it_is() -> None:
    assert head("softmax").is_plain_softmax
    assert not head("gss(k=1)").is_plain_softmax
    assert head("gss(k=1)").stored()["function"] == "gss(k=1.0)"


def test_a_head_comes_back_from_what_is_stored_of_it() -> None:
    examined = Examined(num_classes=3, adjustment=LogitAdjustment(scale=0.5, cap=30.0), why_stored="of a reason")
    stored = HeadFunction("gss(k=learned:0.5, c=per_class)", examined, frozen=("k",)).stored()
    found = HeadFunction.restored(stored)
    assert found.stored() == stored
    assert (found.examined, found.frozen) == (examined, ("k",))
    assert not found.function_parameters["k"].requires_grad


@pytest.mark.parametrize("text", ["softmax", "softmax(alpha=1.5)", "gss(k=1, c=2)", "sigsoftmax", "gss(k=0.2)", "relu"])
def test_composed_functions_are_compositions(text: str) -> None:
    member = OutputFunction.parse(text)
    z = torch.linspace(-50.0, 50.0, 41, dtype=torch.float64)
    torch.testing.assert_close(capped(member, 20.0).phi(z), member.phi(20.0 * torch.tanh(z / 20.0)))


def test_composed_functions_that_are_members_have_their_kernels() -> None:
    assert str(capped(OutputFunction("gss", k=1.0), 30.0)) == "softcap(c=30.0)"


@pytest.mark.parametrize(
    ("text", "at_half", "left"),
    [
        ("softmax(alpha=1.5)", "softmax(alpha=3.0)", 1.0),
        ("gss(k=1)", "softmax(alpha=2.0)", 1.0),
        ("sigsoftmax", "sigsoftmax", 0.5),
        ("softmax(alpha=learned:1.5)", None, 0.5),
    ],
)
def test_the_temperature_of_a_linear_phi_is_in_its_scale(text: str, at_half: str | None, left: float) -> None:
    layer, hidden_Nd = nn.Linear(3, 5), torch.randn(4, 3)
    linear = HeadFunction(text, Examined(num_classes=5)).linear(hidden_Nd, layer)
    tempered, temperature = linear.tempered(0.5)
    assert temperature == left
    if at_half is None:
        assert tempered is linear
    else:
        assert str(tempered.function) == at_half


def test_kinds_stay_what_they_were_when_scalars_are_held_as_vectors() -> None:
    own = nn.Parameter(torch.tensor(0.5))
    for value, held in ((torch.tensor(0.5), (1,)), (Learned(), (1,)), (own, ())):
        function = head(OutputFunction("gss", k=value, c=torch.zeros(4)))
        assert function.kinds == {"k": SCALAR, "c": PER_CLASS}
        assert function.function.kinds == function.kinds
        assert function.function_parameters["k"].shape == held
        assert [function.differs_by_class(key) for key in ("k", "c")] == [False, True]


def test_one_class_has_a_number_per_class_all_the_same() -> None:
    function = head("shifted_sigsoftmax(b=per_class:2)", 1)
    assert function.differs_by_class("b")
    assert function.described() == "shifted_sigsoftmax(b=per_class)"
    function.resize(3)
    assert function.function_parameters["b"].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "function", ["softmax", "sigsoftmax", "gss(k=learned:0.5)", "shifted_sigsoftmax(b=per_class:1)"]
)
@pytest.mark.parametrize("adjustment", [LogitAdjustment(), LogitAdjustment(scale=0.5, cap=3.0)], ids=str)
def test_hidden_vectors_mean_what_their_logits_mean(function: str, adjustment: LogitAdjustment) -> None:
    layer = nn.Linear(3, 5).double()
    hidden_Nd, targets_N = 4.0 * torch.randn(7, 3, dtype=torch.float64), torch.arange(7) % 5
    made = HeadFunction(function, Examined(num_classes=5, adjustment=adjustment)).double()
    logits_NV = adjustment(layer(hidden_Nd))
    linear = made.linear(hidden_Nd, layer)
    torch.testing.assert_close(linear.cross_entropy(targets_N), made.cross_entropy(logits_NV, targets_N))
    returned_NV = made.transformed(logits_NV)
    torch.testing.assert_close(
        made.cross_entropy(returned_NV, targets_N, are_transformed=True), made.cross_entropy(logits_NV, targets_N)
    )
    chunks = [phi_nV for _, phi_nV in linear.logits_chunks(2 * 5 * 8)]
    assert [len(chunk) for chunk in chunks] == [2, 2, 2, 1]
    torch.testing.assert_close(torch.cat(chunks), returned_NV)
    for temperature in (1.0, 0.7):
        tempered, left = linear.tempered(temperature)
        statistics = tempered.token_statistics(targets_N, temperature=left, entropy=True)
        log_p_NV = torch.log_softmax(returned_NV / temperature, -1)
        torch.testing.assert_close(statistics.log_probs, log_p_NV.gather(-1, targets_N[:, None])[:, 0])
        torch.testing.assert_close(statistics.entropy, -(log_p_NV.exp() * log_p_NV).sum(-1))
