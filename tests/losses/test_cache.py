"""Calls that are lowered anew, calls that are found again, and the contents of the cache of lowered calls.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import functools
import gc
import math
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import pytest
import torch
from tests.recording import record_results
from torch import Tensor
from torch.autograd import forward_ad

import sigsoftmax
from sigsoftmax import OutputFunction
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.signature import BACKEND_VARIABLE, CHECK_VARIABLE, signature_of
from sigsoftmax.contract.spec import LossSpec, loss_spec, member_of
from sigsoftmax.losses import lowering
from sigsoftmax.losses.lowering import Lowered, lower

N, K, V, D = 4, 2, 6, 3
Call = dict[str, Any]
Change = Callable[[Call], Any]


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "_lowered", {})
    monkeypatch.setattr(lowering, "_last", None)
    for variable in (BACKEND_VARIABLE, CHECK_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[Lowered]:
    """The calls that were lowered, and not found again."""
    return record_results(monkeypatch, lowering, "_decide")


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def mixture(**changes: Any) -> Call:
    """A call of a loss that has every option."""
    return {
        "input": leaf(N, K, D),
        "prior_logits": leaf(N, K),
        "linear_weight": leaf(V, D),
        "linear_bias": leaf(V),
        "target": torch.randint(V, (N,)),
        "function": "sigsoftmax",
        **changes,
    }


def loss(call: Call) -> Tensor:
    result = sigsoftmax.mixture_cross_entropy(**call)
    return result[0] if isinstance(result, tuple) else result


def results(value: Tensor, call: Call) -> list[Tensor]:
    """A value, and the gradients of its sum."""
    leaves = [t for t in call.values() if isinstance(t, Tensor) and t.requires_grad]
    found = torch.autograd.grad(value.sum(), leaves) if value.requires_grad else ()
    return [value.detach(), *(gradient.detach() for gradient in found)]


def plain_inputs() -> Call:
    return {"input": leaf(N, V), "target": torch.randint(V, (N,)), "function": "sigsoftmax"}


def linear_inputs() -> Call:
    return {
        "input": leaf(N, D),
        "linear_weight": leaf(V, D),
        "target": torch.randint(V, (N,)),
        "function": "gss(k=0.3)",
        "reduction": "none",
    }


def mixture_log_probs_inputs() -> Call:
    call = mixture()
    del call["target"]
    return call


OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[[], Call]]] = {
    "cross_entropy": (sigsoftmax.cross_entropy, plain_inputs),
    "linear_cross_entropy": (sigsoftmax.linear_cross_entropy, linear_inputs),
    "mixture_cross_entropy": (sigsoftmax.mixture_cross_entropy, mixture),
    "log_probs": (sigsoftmax.log_probs, lambda: {"input": leaf(N, V), "function": "softmax"}),
    "mixture_log_probs": (sigsoftmax.mixture_log_probs, mixture_log_probs_inputs),
}


# Calls that are found again


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_same_call_is_lowered_once_and_computes_the_same(name: str, decided: list[Lowered]) -> None:
    operation, inputs = OPERATIONS[name]
    call = inputs()
    first = results(operation(**call), call)
    again = results(operation(**call), call)
    assert len(decided) == 1
    for a, b in zip(again, first, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OPERATIONS)
def test_other_numbers_in_the_same_kind_of_tensors(name: str, decided: list[Lowered]) -> None:
    """A way to compute is kept, and no result."""
    operation, inputs = OPERATIONS[name]
    for _ in range(3):
        call = inputs()
        found = results(operation(**call), call)
        expected = results(operation(**call, backend="reference"), call)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert [lowered.decision.backend for lowered in decided] == ["blocked", "reference"]


def test_a_repeated_call_is_explained_too() -> None:
    call = mixture()
    loss(call)
    first = sigsoftmax.explain()
    assert first is not None
    loss({**call, "backend": "reference"})
    assert sigsoftmax.explain() is not first
    loss(call)
    assert sigsoftmax.explain() is first
    assert first.path.startswith("mixture (2 components) loss")
    assert "triton" in first.refused


def test_equal_functions_make_the_same_call(decided: list[Lowered]) -> None:
    call = mixture()
    functions = (OutputFunction("gss", k=0.5), OutputFunction("gss", k=0.5), "gss(k=0.5)", "gss(k=0.50)", "gss( k=.5 )")
    for function in functions:
        loss({**call, "function": function})
    loss({**call, "function": OutputFunction("gss", k=0.25)})
    assert len(decided) == 2


def test_names_of_extras_in_a_list_or_a_tuple(decided: list[Lowered]) -> None:
    call = mixture()
    for extras in (("argmax",), ["argmax"], ["argmax", "entropy"]):
        loss({**call, "extras": extras})
    assert len(decided) == 2


@pytest.mark.parametrize("name", ["label_smoothing", "z_loss", "floor"])
@pytest.mark.parametrize(("ignore_index", "first"), [(-7, -0.0), (-8, torch.tensor(-0.0))], ids=["number", "tensor"])
def test_zeros_are_one_number(ignore_index: int, first: Any, name: str, decided: list[Lowered]) -> None:
    """Also where a negative one came first, in a specification that nobody asked for before."""
    call = mixture(ignore_index=ignore_index, chunk_bytes=1000 * len(name))
    for zero in (first, -0.0, 0.0, 0, torch.tensor(0.0)):
        loss({**call, name: zero})
    loss(call)
    (lowered,) = decided
    assert math.copysign(1.0, getattr(lowered.problem.spec, name)) == 1.0


def test_zeros_among_parameters_are_one_number(decided: list[Lowered]) -> None:
    call = mixture()
    for zero in (-0.0, 0.0, 0):
        loss({**call, "function": OutputFunction("gss", k=0.4711, c=zero)})
    (lowered,) = decided
    assert [math.copysign(1.0, number) for number in lowered.problem.spec.member.values if number == 0.0] == [1.0]


@pytest.mark.parametrize("name", ["ignore_index", "chunk_bytes"])
def test_true_is_not_1(name: str) -> None:
    call = mixture(target=torch.zeros(N, dtype=torch.int64))
    for _ in range(2):
        loss({**call, name: 1})
        with pytest.raises(ValueError, match=f"{name} must be a .*, got True"):
            loss({**call, name: True})


# Calls that are others


def moved(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda call: call.update({name: change(call[name])})


def every_double(call: Call) -> None:
    for name, value in call.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            call[name] = value.detach().double().requires_grad_()


class Named(Tensor):
    """A subclass that adds nothing."""


def transposed(tensor: Tensor) -> Tensor:
    """The same numbers in another order of memory."""
    return tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()


TENSORS: dict[str, Change] = {
    "fewer tokens": lambda call: call.update(
        {name: call[name].detach()[1:].requires_grad_() for name in ("input", "prior_logits")},
        target=call["target"][1:],
    ),
    "another leading dimension": lambda call: call.update(
        {name: call[name].detach().unsqueeze(0).requires_grad_() for name in ("input", "prior_logits")},
        target=call["target"].unsqueeze(0),
    ),
    "more classes": lambda call: call.update(linear_weight=leaf(V + 1, D), linear_bias=leaf(V + 1)),
    "dtype": every_double,
    "dtype of one": moved("linear_weight", lambda t: t.detach().bfloat16().requires_grad_()),
    "targets of another dtype": moved("target", Tensor.int),
    "strides": moved("input", transposed),
    "strides of the weight": moved("linear_weight", transposed),
    "no gradient of the input": moved("input", Tensor.detach),
    "no gradient of the weight": moved("linear_weight", Tensor.detach),
    "no gradient at all": lambda call: call.update({n: v.detach() for n, v in call.items() if isinstance(v, Tensor)}),
    "no bias": lambda call: call.update(linear_bias=None),
    "a parameter of a module": moved("linear_weight", lambda t: torch.nn.Parameter(t.detach())),
    "a subclass": moved("linear_weight", lambda t: t.detach().as_subclass(Named).requires_grad_()),
    "a view of negative numbers": moved("linear_weight", lambda t: torch._neg_view(t.detach()).requires_grad_()),
    "class weights": lambda call: call.update(weight=torch.rand(V)),
    "token weights": lambda call: call.update(token_weights=torch.rand(N)),
    "token weights that are learned": lambda call: call.update(token_weights=leaf(N)),
}


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS)
def test_other_tensors_make_another_call(change: Change, decided: list[Lowered]) -> None:
    call = mixture(reduction="sum")
    other = dict(call)
    change(other)
    loss(call)
    for _ in range(2):
        found = results(loss(other), other)
        expected = results(loss({**other, "backend": "reference"}), other)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05 if b.dtype == torch.bfloat16 else 1e-4, atol=1e-3)
    assert [lowered.decision.backend for lowered in decided] == ["blocked", "blocked", "reference"]
    loss(call)
    assert len(decided) == 3


def test_each_change_makes_a_call_of_its_own(decided: list[Lowered]) -> None:
    for change in TENSORS.values():
        call = mixture()
        change(call)
        loss(call)
    assert len(decided) == len(TENSORS)


OPTIONS: dict[str, Any] = {
    "member": {"function": "gss(k=0.5)", "prior_function": "softmax"},
    "prior": {"prior_function": "sigsoftmax"},
    "reduction": {"reduction": "sum"},
    "ignore_index": {"ignore_index": 0},
    "label_smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.1},
    "floor": {"floor": 1e-3},
    "weight_gradient": {"weight_gradient": "fast"},
    "chunk_bytes": {"chunk_bytes": 200},
    "extras": {"extras": ("argmax",)},
    "backend": {"backend": "blocked"},
}


def test_every_option_is_among_them() -> None:
    assert set(OPTIONS) == {field.name for field in fields(LossSpec)}


@pytest.mark.parametrize("name", OPTIONS)
def test_other_options_make_another_call(name: str, decided: list[Lowered]) -> None:
    call = mixture(prior_function="softmax")
    loss(call)
    other = {**call, **OPTIONS[name]}
    for _ in range(2):
        found = results(loss(other), other)
        assert len(decided) == 2
    for field in fields(LossSpec):
        before, after = (getattr(lowered.problem.spec, field.name) for lowered in decided)
        assert (before != after) == (field.name == name)
    expected = results(loss({**other, "backend": "reference"}), other)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_numbers_in_tensors_are_read_anew(decided: list[Lowered]) -> None:
    call, z_loss = mixture(), torch.tensor(0.5)
    for value in (0.5, 0.25, 0.5):
        z_loss.fill_(value)
        found = loss({**call, "z_loss": z_loss})
        assert torch.equal(found, loss({**call, "z_loss": value}))
    assert len(decided) == 2


@pytest.mark.parametrize("shape", [(), (V,)], ids=["scalar", "per class"])
def test_parameters_in_tensors_are_read_anew(shape: tuple[int, ...], decided: list[Lowered]) -> None:
    """The specification has the kind of a parameter, and not its numbers."""
    c = torch.zeros(shape)
    call = mixture(function=OutputFunction("gss", k=0.5, c=c))
    found = []
    for value in (0.0, 1.0):
        c.fill_(value)
        found.append(loss(call))
        torch.testing.assert_close(found[-1], loss({**call, "function": f"gss(k=0.5, c={value})"}))
    assert found[0] != found[1]
    # By the tensor once, and by each of two numbers.
    assert len(decided) == 3


def test_kinds_of_a_parameter_make_other_calls(decided: list[Lowered]) -> None:
    call = mixture()
    kinds = (torch.zeros(()), torch.zeros(V), leaf(), leaf(V), torch.zeros((), dtype=torch.float64), 0.0)
    for c in kinds:
        loss({**call, "function": OutputFunction("gss", k=0.5, c=c)})
    assert len(decided) == len(kinds)


def test_a_name_that_is_registered_again(decided: list[Lowered]) -> None:
    call = mixture(function="bent")
    found = []
    for slope in (1.0, 3.0):
        sigsoftmax.register_function("bent", functools.partial(torch.mul, slope))
        found += [loss(call), loss(call)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    torch.testing.assert_close(found[2], loss({**call, "function": "softmax(alpha=3)", "prior_function": "bent"}))
    assert found[0] != found[2]
    assert len(decided) == 3


def autocast(dtype: torch.dtype) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch.autocast("cpu", dtype)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast to bfloat16": autocast(torch.bfloat16),
    "autocast to float16": autocast(torch.float16),
}


def test_other_modes_make_other_calls(decided: list[Lowered]) -> None:
    call = mixture()
    for _ in range(2):
        exact = loss(call)
        assert exact.requires_grad
        for name, mode in MODES.items():
            with mode():
                found = loss(call)
            assert found.requires_grad == name.startswith("autocast")
            torch.testing.assert_close(found, exact, rtol=0.03, atol=0.0)
            if not found.requires_grad:
                assert torch.equal(found, exact)
    assert len(decided) == 1 + len(MODES)


def test_inference_leaves_nothing_that_training_cannot_use() -> None:
    call = mixture()
    with torch.inference_mode():
        loss(call)
        loss({**call, "z_loss": 0.1})
    for options in ({}, {"z_loss": 0.1}):
        other = {**call, **options}
        for a, b in zip(
            results(loss(other), other), results(loss({**other, "backend": "reference"}), other), strict=True
        ):
            torch.testing.assert_close(a, b)


# torch's own formulas of forward mode still call torch.jit.script.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode_makes_another_call(decided: list[Lowered]) -> None:
    call = plain_inputs()
    tangent = torch.randn(N, V)
    by_input = results(sigsoftmax.cross_entropy(**call), call)[1]
    for _ in range(2):
        with forward_ad.dual_level():
            # A level that is open changes nothing for tensors that carry no derivative.
            sigsoftmax.cross_entropy(**call)
            dual = forward_ad.make_dual(call["input"].detach(), tangent)
            found = sigsoftmax.cross_entropy(**{**call, "input": dual})
            torch.testing.assert_close(forward_ad.unpack_dual(found).tangent, (by_input * tangent).sum())
    assert [lowered.decision.backend for lowered in decided] == ["blocked", "reference"]


def test_transforms_make_other_calls(decided: list[Lowered]) -> None:
    logits, y = torch.randn(N, V), torch.randint(V, (N,))

    def of(z: Tensor) -> Tensor:
        return sigsoftmax.cross_entropy(z, y, function="sigsoftmax")

    factor = torch.tensor(2.0)
    for _ in range(2):
        plain = of(logits)
        torch.testing.assert_close(torch.func.vmap(of)(torch.stack([logits, logits]))[1], plain)
        torch.testing.assert_close(torch.func.grad(lambda x: x * of(logits))(factor), plain)
        leaf = logits.clone().requires_grad_()
        torch.testing.assert_close(torch.func.grad(of)(logits), torch.autograd.grad(of(leaf), leaf)[0])
    kinds = ["blocked", "reference", "reference", "reference", "blocked"]
    assert [lowered.decision.backend for lowered in decided] == kinds


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_the_environment_makes_another_call(
    backend: str, decided: list[Lowered], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = mixture()
    loss(call)
    for _ in range(2):
        monkeypatch.setenv(BACKEND_VARIABLE, backend)
        loss(call)
        decision = sigsoftmax.explain()
        assert decision is not None
        assert (decision.backend, decision.chosen_by) == (backend, f"the environment variable {BACKEND_VARIABLE}")
        monkeypatch.delenv(BACKEND_VARIABLE)
        loss(call)
        decision = sigsoftmax.explain()
        assert decision is not None
        assert (decision.backend, decision.chosen_by) == ("blocked", "default")
    assert len(decided) == 2


def lowered_on(device: str) -> Lowered:
    member, _ = member_of("sigsoftmax")
    target = torch.zeros(N, dtype=torch.int64, device=device)
    operands = Operands(torch.zeros(N, V, device=device, requires_grad=True), target=target)
    return lower(loss_spec(member=member), signature_of(operands))


def test_another_device_makes_another_call(decided: list[Lowered]) -> None:
    for _ in range(2):
        for device in ("cpu", "meta"):
            assert lowered_on(device).problem.device == torch.device(device)
    assert len(decided) == 2


def test_checks_of_values_make_another_call(decided: list[Lowered], monkeypatch: pytest.MonkeyPatch) -> None:
    """This is for devices where values are not checked anyway, as they are on a CPU."""
    for _ in range(2):
        monkeypatch.delenv(CHECK_VARIABLE, raising=False)
        assert not lowered_on("meta").problem.signature.checks_values
        monkeypatch.setenv(CHECK_VARIABLE, "1")
        assert lowered_on("meta").problem.signature.checks_values
    assert len(decided) == 2


# Calls that are wrong


def test_a_wrong_call_is_not_remembered(decided: list[Lowered]) -> None:
    call = mixture()
    loss(call)
    for _ in range(2):
        with pytest.raises(ValueError, match="one class index per token"):
            loss({**call, "target": call["target"][1:]})
        with pytest.raises(ValueError, match="linear_weight must be a tensor, got list"):
            loss({**call, "linear_weight": [1.0]})
        with pytest.raises(ValueError, match="unknown backend 'quick'"):
            loss({**call, "backend": "quick"})
        with pytest.raises(ValueError, match="target 17 at row 2 is out of range"):
            loss({**call, "target": torch.tensor([0, 1, 17, 2])})
    assert len(decided) == len(lowering._lowered) == 1


# What the cache holds


def reachable(root: Any) -> Iterator[Any]:
    """All objects that are held by one, other than through modules, classes and the globals of functions."""
    seen, waiting = set(), [root]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(found))
        yield found
        waiting += gc.get_referents(found)


def test_no_tensor_is_held() -> None:
    for operation, inputs in OPERATIONS.values():
        call = inputs()
        for backend in ("blocked", "reference"):
            results(operation(**call, backend=backend), call)
    loss(mixture(function=OutputFunction("gss", k=leaf(), c=leaf(V)), weight=torch.rand(V), token_weights=leaf(N)))
    assert lowering._lowered
    assert not [found for found in reachable(lowering._lowered) if isinstance(found, Tensor)]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tensors_live_no_longer_than_their_owner_wants(reduction: str) -> None:
    k = leaf()
    call = mixture(
        function=OutputFunction("gss", k=k, c=leaf(V)),
        reduction=reduction,
        token_weights=leaf(N),
        weight=torch.rand(V),
        z_loss=torch.tensor(0.1),
    )
    tensors = [k, call["function"].given["c"], *(v for v in call.values() if isinstance(v, Tensor))]
    alive = [weakref.ref(tensor) for tensor in tensors]
    value = loss(call)
    value.sum().backward()
    alive.append(weakref.ref(value))
    del k, tensors, value
    call.clear()
    gc.collect()
    assert lowering._lowered
    assert [reference() for reference in alive] == [None] * len(alive)


def test_calls_are_forgotten_before_they_fill_the_memory(
    decided: list[Lowered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowering, "MOST_LOWERED", 3)
    call = mixture()
    for i in range(10):
        loss({**call, "z_loss": float(i)})
        loss({**call, "z_loss": float(i)})
        assert 0 < len(lowering._lowered) <= 3
    assert len(decided) == 10


def test_threads_share_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """More kinds of calls than are kept, so that some are forgotten while others look for them."""
    monkeypatch.setattr(lowering, "MOST_LOWERED", 5)
    call = mixture()
    calls = [{**call, "z_loss": 0.1 * i} for i in range(8)]
    expected = [results(loss(each), each) for each in calls]
    begin = threading.Barrier(4)
    wrong: list[Any] = []

    def work(place: int) -> None:
        try:
            begin.wait(60.0)
            for turn in range(40):
                i = (place + turn) % len(calls)
                found = results(loss(calls[i]), calls[i])
                if not all(torch.equal(a, b) for a, b in zip(found, expected[i], strict=True)):
                    wrong.append(i)
        except BaseException as error:  # noqa: BLE001 - told by the assertion
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(lowering._lowered) <= 5
