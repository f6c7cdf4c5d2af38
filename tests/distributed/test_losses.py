"""Vocabulary-parallel losses on processes, against the same loss in one process.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import on_ranks
from torch import Tensor

import sigsoftmax
from sigsoftmax import OutputFunction, distributed
from sigsoftmax.distributed import ClassShards, exchange

N, K, V, D = 24, 3, 101, 16
TOLERANCE = 1e-5
"""relative, in float32"""

Tensors = dict[str, Tensor]


def tensors(*, mixture: bool = False, per_class: bool = False, classes: int = V, seed: int = 0) -> Tensors:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    found = {"input": normal(N, K, D) if mixture else normal(4, N // 4, D)}
    found |= {"weight": normal(classes, D), "bias": normal(classes)}
    found["b"] = normal(classes) if per_class else torch.tensor(0.3)
    return found | {"prior": normal(N, K)} if mixture else found


def loss_of(module: Any, parts: Tensors, target: Tensor, function: str, **options: Any) -> Any:
    """The loss of a module of functions, ``sigsoftmax`` or ``sigsoftmax.distributed``."""
    member = OutputFunction(function, **({"b": parts["b"]} if function == "shifted_sigsoftmax" else {}))
    if "prior" in parts:
        arguments = (parts["input"], parts["prior"], parts["weight"], target)
        return module.mixture_cross_entropy(*arguments, function=member, linear_bias=parts["bias"], **options)
    return module.linear_cross_entropy(
        parts["input"], parts["weight"], target, function=member, linear_bias=parts["bias"], **options
    )


def own_leaves(whole: Tensors, own: slice) -> Tensors:
    per_class = ("weight", "bias", "b")
    parts = {name: t[own] if name in per_class and t.ndim else t for name, t in whole.items()}
    return {name: t.detach().clone().requires_grad_() for name, t in parts.items()}


def assert_near(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    actual, expected = actual.detach(), expected.detach()
    assert actual.shape == expected.shape, what
    error = float((actual - expected).norm())
    assert error <= tolerance * float(expected.norm()), f"{what}: {error:.2e} of {float(expected.norm()):.2e}"


def assert_same_as_one_process(
    whole: Tensors, target: Tensor, function: str, shards: ClassShards, what: str, *, known: bool = True, **options: Any
) -> None:
    one = own_leaves(whole, slice(None))
    expected = loss_of(sigsoftmax, one, target, function, **options)
    mine = own_leaves(whole, shards.own)
    where: dict[str, Any] = {"shards": shards} if known else {"group": shards.group}
    loss = loss_of(distributed, mine, target, function, **where, **options)
    for value, wanted in (
        ((loss, expected),)
        if isinstance(loss, Tensor)
        else zip((loss[0], *loss[1]), (expected[0], *expected[1]), strict=True)
    ):
        if wanted is not None:
            assert_near(value.float(), wanted.float(), what)
    loss, expected = (loss, expected) if isinstance(loss, Tensor) else (loss[0], expected[0])
    factors = torch.linspace(0.5, 1.5, expected.numel()).view(expected.shape)
    (loss * factors).sum().backward()
    (expected * factors).sum().backward()
    for name, leaf in mine.items():
        if name == "b" and function != "shifted_sigsoftmax":
            continue
        wanted = one[name].grad
        assert wanted is not None
        assert leaf.grad is not None, f"{what}: no gradient of {name}"
        if name in ("weight", "bias", "b") and leaf.ndim:
            wanted = wanted[shards.own]
            if not wanted.numel():
                continue
        assert_near(leaf.grad, wanted, f"{what}: gradient of {name}")


def cases() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    members = (("sigsoftmax", {}), ("shifted_sigsoftmax", {}), ("shifted_sigsoftmax", {"per_class": True}))
    class_weight = torch.linspace(0.1, 2.0, V)
    token_weights = torch.linspace(0.0, 2.0, N)
    settings: list[dict[str, Any]] = [
        {},
        {"label_smoothing": 0.1, "z_loss": 1e-3, "weight": class_weight, "token_weights": token_weights},
        {"reduction": "none", "label_smoothing": 0.1},
        {"reduction": "sum", "extras": ("argmax", "entropy", "log_normalizer"), "chunk_bytes": 4 * 40 * 5},
    ]
    for (function, kind), mixture, options in itertools.product(members, (False, True), settings):
        shape = (N,) if mixture else (4, N // 4)
        given = {k: v.view(shape) if k == "token_weights" else v for k, v in options.items()}
        yield f"{function} {kind}, mixture {mixture}, {sorted(options)}", function, {"mixture": mixture, **kind}, given


def check_losses() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    even = ClassShards.even(V)
    uneven = ClassShards(((1,) * (size - 1)) + (V - size + 1,))
    with_none = ClassShards((0,) + (V,) + (0,) * (size - 2))
    assert even.num_classes == uneven.num_classes == with_none.num_classes == V
    for number, (what, function, kind, options) in enumerate(cases()):
        target = torch.randint(V, (N,), generator=torch.Generator().manual_seed(1))
        target[::5] = -100
        target = target if kind["mixture"] else target.view(4, N // 4)
        shards = (even, uneven, with_none)[number % 3]
        assert_same_as_one_process(tensors(**kind), target, function, shards, what, known=number % 2 == 0, **options)
    # Every rank has the same number, to the last bit, and may go backward twice.
    whole = tensors()
    target = torch.randint(V, (4, N // 4), generator=torch.Generator().manual_seed(1))
    mine = own_leaves(whole, even.own)
    loss = loss_of(distributed, mine, target, "sigsoftmax", shards=even)
    every = exchange.Exchange().gather(loss.detach())
    assert torch.equal(every, loss.detach().expand(size))
    loss.backward(retain_graph=True)
    first = {name: t.grad.clone() for name, t in mine.items() if t.grad is not None}
    loss.backward()
    assert all(torch.equal(mine[name].grad, 2.0 * gradient) for name, gradient in first.items())  # type: ignore[arg-type]
    # A rank's classes all masked; probabilities as targets.
    masked = tensors()
    masked["bias"][even.sizes[0] :] = -torch.inf
    inside = target % even.sizes[0]
    assert_same_as_one_process(masked, inside, "sigsoftmax", even, "masked classes of other ranks")
    probabilities = torch.softmax(torch.randn(4, N // 4, V, generator=torch.Generator().manual_seed(2)), -1)
    one, mine = own_leaves(whole, slice(None)), own_leaves(whole, uneven.own)
    expected = loss_of(sigsoftmax, one, probabilities, "sigsoftmax", label_smoothing=0.1)
    loss = loss_of(distributed, mine, probabilities[..., uneven.own], "sigsoftmax", shards=uneven, label_smoothing=0.1)
    assert_near(loss, expected, "probability targets")
    expected.backward()
    loss.backward()
    assert_near(mine["input"].grad, one["input"].grad, "probability targets: gradient of the input")
    # No token at all, and none that counts.
    nothing = {**whole, "input": torch.empty(0, D)}
    empty = loss_of(
        distributed,
        own_leaves(nothing, even.own),
        torch.empty(0, dtype=torch.int64),
        "sigsoftmax",
        shards=even,
        reduction="sum",
    )
    empty.backward()
    assert empty == 0.0
    ignored = loss_of(distributed, own_leaves(whole, even.own), torch.full_like(target, -100), "sigsoftmax")
    assert ignored.isnan(), "the mean of nothing, as in torch"
    # bfloat16 hidden vectors and a float32 weight.
    half = {**whole, "input": whole["input"].bfloat16()}
    one, mine = own_leaves(half, slice(None)), own_leaves(half, even.own)
    expected, loss = loss_of(sigsoftmax, one, target, "sigsoftmax"), loss_of(distributed, mine, target, "sigsoftmax")
    assert loss.dtype == expected.dtype == torch.bfloat16
    assert_near(loss.float(), expected.float(), "bfloat16", 1e-2)
    expected.backward()
    loss.backward()
    assert_near(mine["input"].grad.float(), one["input"].grad.float(), "bfloat16: gradient of the input", 1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert loss_of(distributed, own_leaves(whole, even.own), target, "sigsoftmax").dtype == torch.float32
    with torch.no_grad():
        assert not loss_of(distributed, own_leaves(whole, even.own), target, "sigsoftmax").requires_grad
    if size == 4:
        check_two_groups(rank)


def check_two_groups(rank: int) -> None:
    """Two pairs of ranks, each pair with tokens of its own: tensor parallel within, data parallel across."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = rank // 2
    shards = ClassShards.even(V, pairs[pair])
    target = torch.randint(V, (4, N // 4), generator=torch.Generator().manual_seed(10 + pair))
    assert_same_as_one_process(tensors(seed=pair), target, "sigsoftmax", shards, "pairs", known=False)
    with pytest.raises(ValueError, match="no member of the group"):
        exchange.Exchange(pairs[1 - pair])


@pytest.mark.parametrize("size", [2, 4])
def test_losses_and_gradients_are_those_of_one_process(size: int, tmp_path: Path) -> None:
    on_ranks(tmp_path, size, check_losses)


class Counted:
    """Bytes that this rank hands to torch.distributed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gathered: list[int] = []
        self.stated: list[int] = []
        """bytes that a rank says of itself before a loss: a few integers"""
        self.reduced: list[int] = []
        gather, reduce = exchange._gather_into, dist.all_reduce

        def counting_gather(every: Tensor, own: Tensor, **keywords: Any) -> Any:
            (self.gathered if own.is_floating_point() else self.stated).append(own.numel() * own.element_size())
            return gather(every, own, **keywords)

        def counting_reduce(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            self.reduced.append(tensor.numel() * tensor.element_size())
            return reduce(tensor, *arguments, **keywords)

        monkeypatch.setattr(exchange, "_gather_into", counting_gather)
        monkeypatch.setattr(dist, "all_reduce", counting_reduce)


def check_bytes_and_errors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    check_bytes()
    whole = tensors()
    target = torch.randint(V, (4, N // 4), generator=torch.Generator().manual_seed(1))
    even = ClassShards.even(V)
    mine = own_leaves(whole, even.own)

    def fails(message: str, parts: Tensors = mine, target: Tensor = target, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            loss_of(distributed, parts, target, "sigsoftmax", **options)

    # Each rank of the group raises: nobody is left waiting.
    fails("the ranks of the group differ in targets", target=(target + rank) % V)
    fails("differ in targets", target=(target + rank) % V, shards=even)
    fails(
        r"differ in the shape of input: \(4, 6, 16\) on this rank" if rank == 0 else "differ in the shape of input",
        parts={**mine, "input": mine["input"][: 4 - rank]},
        target=target[: 4 - rank],
    )
    fails("differ in label_smoothing", label_smoothing=0.1 * (rank + 1))
    fails("differ in which gradients", parts={**mine, "input": mine["input"].detach().requires_grad_(rank == 0)})
    fails("differ in whether there is a bias", parts={**mine, "bias": mine["bias"] if rank else None})
    fails("out of range", target=target + V)
    fails(r"shards speaks of 5 ranks, but the group has \d", shards=ClassShards((1,) * 5))
    fails("pass this rank's part alone", parts=own_leaves(whole, slice(None)), shards=even)
    fails(r"weight must hold one number per class, shape \(101,\)", weight=torch.ones(even.sizes[rank]))
    fails("has no classes on any rank", parts=own_leaves(whole, slice(0, 0)))
    fails("group and shards.group differ", shards=even, group=dist.new_group(list(range(size))))
    fails("'reference' cannot be used", backend="reference")
    wrong = OutputFunction("shifted_sigsoftmax", b=torch.zeros(V))
    with pytest.raises(ValueError, match="one number, or one per class"):
        distributed.linear_cross_entropy(mine["input"], mine["weight"], target, function=wrong)
    loss = loss_of(distributed, mine, target, "sigsoftmax")
    (by_input,) = torch.autograd.grad(loss, mine["input"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        by_input.sum().backward()


def check_bytes() -> None:
    """A token costs four float32 a component forward, five more with smoothing, and its gradient backward."""
    found = {}
    for classes, mixture, smoothing in itertools.product((64, 6400), (False, True), (0.0, 0.1)):
        shards = ClassShards.even(classes)
        parts = own_leaves(tensors(mixture=mixture, classes=classes), shards.own)
        target = torch.randint(classes, (N,), generator=torch.Generator().manual_seed(1))
        target = target if mixture else target.view(4, N // 4)
        with pytest.MonkeyPatch.context() as monkeypatch:
            counted = Counted(monkeypatch)
            loss = loss_of(distributed, parts, target, "sigsoftmax", shards=shards, label_smoothing=smoothing)
            forward = (sum(counted.gathered), sum(counted.reduced))
            loss.backward()
        assert forward[1] == 0
        assert sum(counted.stated) < 256, "before the loss, however many tokens and classes"
        assert sum(counted.gathered) == forward[0], "backward gathers nothing"
        found.setdefault((mixture, smoothing), []).append((forward[0], sum(counted.reduced)))
    for (mixture, smoothing), (few, many) in found.items():
        assert few == many, "bytes must not depend on the number of classes"
        gathered, reduced = few
        rows = N * K if mixture else N
        assert reduced == rows * D * 4, "dX, once"
        per_token = {
            (False, 0.0): 4,  # row maximum, offset, normaliser, target
            (False, 0.1): 6,  # and the smoothing sum with its weight
            (True, 0.0): 4 * K,
            (True, 0.1): 3 * K + 1 + K,  # normalisers; the loss; dL/dlog prior
        }[mixture, smoothing]
        assert gathered == 4 * per_token * N, (mixture, smoothing)


def test_bytes_do_not_grow_with_the_classes_and_errors_reach_every_rank(tmp_path: Path) -> None:
    on_ranks(tmp_path, 2, check_bytes_and_errors)


def test_without_torch_distributed_there_is_a_message() -> None:
    with pytest.raises(ValueError, match=r"not initialised.*torchrun"):
        loss_of(distributed, tensors(), torch.zeros(4, N // 4, dtype=torch.int64), "sigsoftmax")
