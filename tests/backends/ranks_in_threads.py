"""Threads in the place of processes: each holds some of the classes and meets the others in ``gather``.

What they find is held against one loss over all classes: the losses, and the sums or parts of the gradients.

Shapes: N tokens, K components, V classes, d width, P processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tests.tables import LEAST, assert_same
from torch import Tensor

import sigsoftmax
from sigsoftmax import OutputFunction
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.shard import Shard
from sigsoftmax.contract.spec import loss_spec, member_of, prior_of
from sigsoftmax.losses.op import loss as loss_of

N, K, V, D = 7, 3, 11, 4
SMALL_CHUNKS = 200
"""bytes: a few tokens a chunk"""


class Meeting:
    """P threads that exchange tensors; what each sent is counted."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60.0)
        self.left: list[Tensor | None] = [None] * size
        self.sent: list[list[Tensor]] = [[] for _ in range(size)]

    def gather(self, rank: int, own: Tensor) -> Tensor:
        self.left[rank] = own.detach().clone()
        self.sent[rank].append(self.left[rank])
        self.barrier.wait()
        every = torch.stack([t for t in self.left if t is not None])
        self.barrier.wait()
        return every

    def run(self, compute: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.left)
        errors: list[BaseException] = []

        def thread(rank: int) -> None:
            try:
                results[rank] = compute(rank)
            except BaseException as error:  # noqa: BLE001 - raised again by ``run``
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(len(self.left))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


class Outcome(NamedTuple):
    loss: Tensor
    extras: Any
    gradients: dict[str, Tensor]


def inputs(
    mixture: bool, dtype: torch.dtype = torch.float64, deviation: float = 1.5, classes: int = V
) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return (deviation * torch.randn(*shape, dtype=torch.float64)).to(dtype)

    found = {
        "hidden": normal(N, K, D) if mixture else normal(N, D),
        "weight": normal(classes, D),
        "bias": normal(classes),
    }
    return found | {"prior": normal(N, K)} if mixture else found


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}


def backward(loss: Tensor) -> None:
    # Other weights for every token, where there is a loss of every token.
    (loss * torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()


def in_one_process(
    function: OutputFunction, tensors: dict[str, Tensor], learned: dict[str, Tensor], target: Tensor, **options: Any
) -> Outcome:
    mine, parameters = leaves(tensors), leaves(learned)
    member = function.with_parameters(**parameters)
    if "prior" in mine:
        arguments = (mine["hidden"], mine["prior"], mine["weight"], target)
        result = sigsoftmax.mixture_cross_entropy(*arguments, function=member, linear_bias=mine["bias"], **options)
    else:
        result = sigsoftmax.linear_cross_entropy(
            mine["hidden"], mine["weight"], target, function=member, linear_bias=mine["bias"], **options
        )
    loss, extras = result if isinstance(result, tuple) else (result, None)
    backward(loss)
    return Outcome(loss.detach(), extras, {n: t.grad for n, t in (mine | parameters).items() if t.grad is not None})


def in_threads(
    sizes: tuple[int, ...],
    function: OutputFunction,
    tensors: dict[str, Tensor],
    learned: dict[str, Tensor],
    target: Tensor,
    *,
    chunk_bytes: int = SMALL_CHUNKS,
    meeting: Meeting | None = None,
    **options: Any,
) -> list[Outcome]:
    """The results of every rank; gradients of what is shared are those of the rank's own classes."""
    meeting = meeting or Meeting(len(sizes))

    def one(rank: int) -> Outcome:
        shard = Shard(sizes=sizes, rank=rank, gather=lambda own: meeting.gather(rank, own))
        own = shard.classes

        def part(tensor: Tensor) -> Tensor:
            cut = tensor[..., own] if tensor.is_floating_point() and tensor.ndim == 2 else tensor[own]
            stands_in = torch.zeros(*cut.shape[:-1], 1, dtype=cut.dtype)
            return torch.cat([cut, stands_in], -1) if shard.is_empty else cut

        mine, parameters = leaves(tensors), leaves(learned)
        weight, bias = mine["weight"][own], mine["bias"][own]
        if shard.is_empty:
            weight = torch.cat([weight, torch.zeros_like(mine["weight"][:1])])
            bias = torch.cat([bias, torch.full_like(mine["bias"][:1], LEAST)])
        held = {key: value for key, value in function.given.items() if isinstance(value, Tensor)} | parameters
        member = function.with_parameters(**{key: part(v) if v.ndim else v for key, v in held.items()})
        settings = dict(options)
        class_weight, token_weights = settings.pop("weight", None), settings.pop("token_weights", None)
        spec_of_member, arguments = member_of(member)
        prior = member_of(prior_of(member, None))[0] if "prior" in mine else None
        spec = loss_spec(member=spec_of_member, prior=prior, chunk_bytes=chunk_bytes, **settings)
        own_target = part(target) if target.is_floating_point() else target
        tensors_of = (mine["hidden"], weight, bias, mine.get("prior"), own_target, class_weight, token_weights)
        result = loss_of(spec, Operands(*tensors_of, arguments=arguments, shard=shard))
        loss, extras = result if isinstance(result, tuple) else (result, None)
        backward(loss)
        return Outcome(loss.detach(), extras, {n: t.grad for n, t in (mine | parameters).items() if t.grad is not None})

    return meeting.run(one)


def assert_equals_one(one: Outcome, ranks: list[Outcome], tolerance: float = 1e-11) -> None:
    for outcome in ranks:
        assert torch.equal(outcome.loss.nan_to_num(7.0), ranks[0].loss.nan_to_num(7.0)), "ranks must agree to the bit"
        assert_same(outcome.loss, one.loss, tolerance=tolerance)
        if one.extras is not None:
            for mine, whole in zip(outcome.extras, one.extras, strict=True):
                assert (mine is None) == (whole is None)
                if whole is not None:
                    assert_same(mine, whole, tolerance=tolerance)
    for name, whole in one.gradients.items():
        if name == "prior":
            for outcome in ranks:
                assert_same(outcome.gradients[name], whole, tolerance=tolerance)
        else:
            # Classes of others have a gradient of 0 in each rank's copy.
            assert_same(sum(o.gradients[name] for o in ranks), whole, tolerance=tolerance)
