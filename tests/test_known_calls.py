"""What is remembered of calls, with plans that compute nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from sigsoftmax import OutputFunction, known_calls, validation
from sigsoftmax.backends import dispatch
from sigsoftmax.known_calls import key_of, learn, loss_of

plans = pytest.importorskip("sigsoftmax.backends.triton.plans", reason="the package triton is not installed")
OPTIONS = ("sigsoftmax", "mean", -100)
DECISION = dispatch.Decision("triton", "a test")


class Twice:
    """A plan for a loss that is twice the input's sum."""

    scale = staticmethod(lambda tensors, factor: None)

    def compute(self, input: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return 2.0 * input.sum(), torch.zeros(4), torch.full_like(input, 2.0)


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "_known", {})
    monkeypatch.setattr(validation, "wants_messages", lambda device: False)
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor]:
    return torch.ones(3, 4, requires_grad=True), torch.zeros(3, dtype=torch.int64)


def known(key: known_calls.Key | None) -> bool:
    return key is not None and key in known_calls._known


def test_a_known_call_is_computed_by_its_plan(tensors: tuple[Tensor, Tensor]) -> None:
    key = key_of(tensors, OPTIONS)
    assert key is not None
    assert loss_of(key, tensors) is None
    assert learn(key, Twice(), DECISION, tensors) == 24.0
    dispatch.recall(dispatch.Decision("reference", "another"))
    again = torch.full((3, 4), 0.5, requires_grad=True), torch.ones(3, dtype=torch.int64)
    assert key_of(again, OPTIONS) == key
    loss = loss_of(key, again)
    assert loss == 12.0
    assert dispatch.explain() is DECISION
    assert loss is not None
    (by_input,) = torch.autograd.grad(3.0 * loss, [again[0]])
    assert torch.equal(by_input, torch.full((3, 4), 6.0))


def test_a_call_without_a_plan_is_not_asked_about_again(tensors: tuple[Tensor, Tensor]) -> None:
    key = key_of(tensors, OPTIONS)
    assert key is not None
    assert learn(key, None, DECISION, tensors) is None
    assert key_of(tensors, OPTIONS) is None


@pytest.mark.parametrize(
    "other",
    [
        lambda input, target: (input[:2], target[:2]),
        lambda input, target: (input.double(), target),
        lambda input, target: (input.detach(), target),
        lambda input, target: (input.t().contiguous().t(), target),
        lambda input, target: (input, target.int()),
        lambda input, target: (input, None, target),
    ],
    ids=["shape", "dtype", "gradient", "stride", "targets", "a tensor more"],
)
def test_other_tensors_make_another_call(other: Any, tensors: tuple[Tensor, Tensor]) -> None:
    assert key_of(other(*tensors), OPTIONS) not in (None, key_of(tensors, OPTIONS))


def test_other_options_make_another_call(tensors: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key_of(tensors, options) for options in ((1,), (2,), ("1",), (1, None), (OutputFunction("gss", k=1.0),))]
    keys += [key_of(tensors, (OutputFunction("gss", k=2.0),))]
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "blocked")
    keys.append(key_of(tensors, (1,)))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            keys.append(key_of(tensors, (1,)))
    assert len(set(keys)) == len(keys)
    assert None not in keys


def test_equal_functions_make_the_same_call(tensors: tuple[Tensor, Tensor]) -> None:
    first, second = (key_of(tensors, (OutputFunction("gss", k=0.5),)) for _ in range(2))
    assert first == second


class Named(Tensor):
    pass


def test_where_decisions_depend_on_more_there_is_no_key(tensors: tuple[Tensor, Tensor]) -> None:
    input, target = tensors
    with torch.no_grad():
        assert key_of(tensors, OPTIONS) is None
    with forward_ad.dual_level():
        assert key_of(tensors, OPTIONS) is None
    assert key_of((input.detach().as_subclass(Named), target), OPTIONS) is None
    assert key_of((input, [0]), OPTIONS) is None
    assert key_of(tensors, ([],)) is None
    assert key_of((torch._neg_view(input.detach()), target), OPTIONS) is None
    with torch.inference_mode(), torch.enable_grad():
        assert key_of(tensors, OPTIONS) is None
    found = []
    torch.func.vmap(lambda row: found.append(key_of((row, target), OPTIONS)) or row)(input)
    torch.func.grad(lambda x: found.append(key_of(tensors, OPTIONS)) or x)(torch.tensor(1.0))
    assert found == [None, None]


@pytest.mark.parametrize("option", [torch.tensor(0.1), OutputFunction("gss", k=torch.tensor(0.2))], ids=["z_loss", "k"])
def test_numbers_in_tensors_are_not_remembered(option: Any, tensors: tuple[Tensor, Tensor]) -> None:
    """They can change; and a key would keep them alive, and all that they were computed from."""
    key = key_of(tensors, ("sigsoftmax", option))
    assert key is not None
    assert learn(key, Twice(), DECISION, tensors) is None
    assert not known_calls._known
    if isinstance(option, OutputFunction):
        assert key_of(tensors, (option,)) is None


def test_where_targets_are_checked_by_value_there_is_no_key(
    tensors: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "wants_messages", lambda device: True)
    assert key_of(tensors, OPTIONS) is None


def test_calls_are_forgotten_before_they_fill_the_memory(
    tensors: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_calls, "MOST_KNOWN", 3)
    for i in range(10):
        key = key_of(tensors, (i,))
        assert key is not None
        learn(key, Twice(), DECISION, tensors)
        assert known(key)
        assert len(known_calls._known) <= 3
