"""Heads that are DTensors, and layers under DDP and FSDP2, against the same in one process.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sigsoftmax
from sigsoftmax import Learned, MixtureOutputLayer, OutputFunction, OutputLayer, distributed

N, K, V, D = 12, 3, 31, 8
STEPS = 4
TOLERANCE = 1e-5


def assert_near(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    from torch.distributed.tensor import DTensor

    whole, expected = (actual.full_tensor() if isinstance(actual, DTensor) else actual).detach(), expected.detach()
    assert whole.shape == expected.shape, what
    error = float((whole - expected).norm())
    assert error <= tolerance * (1e-3 + float(expected.norm())), f"{what}: {error:.2e}"


def assert_same_parameters(module: nn.Module, one: nn.Module, what: str, tolerance: float = TOLERANCE) -> None:
    expected = dict(one.named_parameters())
    found = {name.removeprefix("module."): p for name, p in module.named_parameters()}
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert_near(parameter.detach(), expected[name].detach(), f"{what}: {name}", tolerance)


class Model(nn.Module):
    """A small language model whose forward is its loss, as DDP and FSDP want it."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.body = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        if head == "mixture":
            self.head: OutputLayer | MixtureOutputLayer = MixtureOutputLayer(D, D, V, K, function="sigsoftmax")
        else:
            learned = {"tied": Learned(per_class=True), "plain": Learned()}[head]
            tie = self.embedding.weight if head == "tied" else None
            self.head = OutputLayer(D, V, function=OutputFunction("shifted_sigsoftmax", b=learned), weight=tie)

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        return self.head.loss(self.body(self.embedding(words)), target)


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    words, target = torch.randint(V, (2, N), generator=generator)
    return words, target


def train(model: nn.Module, part: slice = slice(None)) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        words, target = data(step)
        loss = model(words[part], target[part])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def made(head: str) -> Model:
    torch.manual_seed(3)
    return Model(head)


def check_layers() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    check_functions(mesh)
    check_refusals(mesh)
    # Layers whose classes are divided train as whole ones do.
    for head in ("plain", "mixture"):
        one, divided = made(head), made(head)
        distributed.shard_classes(divided.head, mesh)
        for expected, found in zip(train(one), train(divided), strict=True):
            assert found == pytest.approx(expected, rel=TOLERANCE)
        assert_same_parameters(divided, one, head)
    check_tied(mesh)


def check_functions(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(4)
    linear = nn.Linear(D, V)
    hidden, target = torch.randn(N, D), torch.randint(V, (N,))
    shift = torch.randn(V)
    whole = [t.detach().clone().requires_grad_() for t in (hidden, linear.weight, linear.bias, shift)]
    function = OutputFunction("shifted_sigsoftmax", b=whole[3])
    options: dict[str, Any] = {"label_smoothing": 0.1, "weight": torch.linspace(0.5, 1.0, V)}
    expected = sigsoftmax.linear_cross_entropy(
        whole[0], whole[1], target, function=function, linear_bias=whole[2], **options
    )
    expected.backward()
    parallel = parallelize_module(copy.deepcopy(linear), mesh, ColwiseParallel())
    assert isinstance(parallel.weight, DTensor)

    def check(what: str, own_hidden: Tensor, bias: Tensor, own_shift: Tensor, target: Tensor = target) -> None:
        parts = (own_hidden, parallel.weight, bias, own_shift)
        for t in parts:
            t.requires_grad_().grad = None
        member = OutputFunction("shifted_sigsoftmax", b=own_shift)
        loss = distributed.linear_cross_entropy(
            own_hidden, parallel.weight, target, function=member, linear_bias=bias, **options
        )
        assert not isinstance(loss, DTensor)
        assert_near(loss, expected, what)
        loss.backward()
        for name, mine, one in zip(("input", "weight", "bias", "b"), parts, whole, strict=True):
            assert mine.grad is not None
            assert one.grad is not None
            assert isinstance(mine.grad, DTensor) == isinstance(mine, DTensor)
            assert_near(mine.grad, one.grad, f"{what}: gradient of {name}")

    def spread(tensor: Tensor, placement: Any) -> Tensor:
        return distribute_tensor(tensor.detach(), mesh, [placement])

    check("plain tensors", hidden.clone(), linear.bias.detach().clone(), shift.clone())
    check("DTensors", spread(hidden, Replicate()), parallel.bias, spread(shift, Shard(0)), spread(target, Replicate()))
    check("tokens sharded", spread(hidden, Shard(0)), parallel.bias, spread(shift, Replicate()))

    probabilities = torch.softmax(torch.randn(N, V), -1)
    wanted = sigsoftmax.linear_cross_entropy(hidden, linear.weight, probabilities, function="softmax")
    for given in (probabilities, spread(probabilities, Shard(1)), spread(probabilities, Replicate())):
        loss = distributed.linear_cross_entropy(hidden, parallel.weight, given, function="softmax")
        assert_near(loss, wanted, "probability targets")
    scale = torch.tensor(1.3, requires_grad=True)
    member = OutputFunction("softmax", alpha=spread(scale, Replicate()).requires_grad_())
    loss = distributed.linear_cross_entropy(hidden, parallel.weight, target, function=member)
    one = sigsoftmax.linear_cross_entropy(
        hidden, linear.weight, target, function=OutputFunction("softmax", alpha=scale)
    )
    one.backward()
    loss.backward()
    assert_near(member.given["alpha"].grad, scale.grad, "gradient of a replicated scalar")  # type: ignore[union-attr, arg-type]


def check_refusals(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(5)
    weight, hidden, target = torch.randn(V, D), torch.randn(N, D), torch.randint(V, (N,))
    by_class = distribute_tensor(weight, mesh, [Shard(0)])

    def fails(message: str, hidden: Tensor = hidden, weight: Tensor = by_class, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            distributed.linear_cross_entropy(hidden, weight, target, function="sigsoftmax", **options)

    fails("must be sharded by classes", weight=distribute_tensor(weight, mesh, [Shard(1)]))
    fails("must be sharded by classes", weight=distribute_tensor(weight, mesh, [Replicate()]))
    fails("group and shards follow", shards=distributed.ClassShards.even(V))
    fails("linear_weight is not", hidden=distribute_tensor(hidden, mesh, [Replicate()]), weight=weight)
    fails("linear_bias is a DTensor but", weight=weight, linear_bias=distribute_tensor(weight[:, 0], mesh, [Shard(0)]))
    fails(r"shape \(31,\), got \(5,\)", linear_bias=torch.zeros(5))
    with pytest.raises(ValueError, match="whole on every rank, got a DTensor"):
        distributed.linear_cross_entropy(
            hidden, by_class, target, function="softmax", weight=distribute_tensor(weight[:, 0], mesh, [Shard(0)])
        )
    with pytest.raises(ValueError, match=r"linear_weight is a DTensor.*sigsoftmax\.distributed"):
        sigsoftmax.linear_cross_entropy(hidden, by_class, target, function="softmax")


def check_tied(mesh: Any) -> None:
    """An embedding that is sharded by words, and an output layer with the same weight."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    one, divided = made("tied"), made("tied")
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate(), use_local_output=True)
    parallelize_module(divided.embedding, mesh, style)
    fresh = OutputLayer(
        D, V, function=OutputFunction("shifted_sigsoftmax", b=Learned(per_class=True)), weight=divided.embedding.weight
    )
    divided.head = distributed.shard_classes(fresh, mesh)
    assert divided.head.weight is divided.embedding.weight
    for expected, found in zip(train(one), train(divided), strict=True):
        assert found == pytest.approx(expected, rel=TOLERANCE)
    assert_same_parameters(divided, one, "tied")


def check_data_parallel() -> None:
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    rank, size = dist.get_rank(), dist.get_world_size()
    part = slice(rank * N // size, (rank + 1) * N // size)
    for head in ("plain", "tied", "mixture"):
        one = made(head)
        expected = train(one)
        wrapped = DistributedDataParallel(made(head))
        losses = train(wrapped, part)
        assert_mean_over_ranks(losses, expected)
        assert_same_parameters(wrapped, one, f"DDP, {head}", 1e-4)
        sharded = made(head)
        scalars = distributed.keep_scalars_whole(sharded)
        assert len(scalars) == (head == "plain")
        if head != "tied":
            # The body and the head as groups of their own; loss is not forward, so it is named.
            fully_shard(sharded.body)
            fully_shard(sharded.head, ignored_params=scalars)
            register_fsdp_forward_method(sharded.head, "loss")
        fully_shard(sharded, ignored_params=scalars)
        losses = train(sharded, part)
        assert_mean_over_ranks(losses, expected)
        assert_same_parameters(sharded, one, f"FSDP2, {head}", 1e-4)
    # The loss of a layer whose classes FSDP has divided, called where FSDP does not gather them.
    model = made("tied")
    fully_shard(model)
    _, target = data(0)
    with pytest.raises(ValueError, match=r"differ in targets.*FSDP"):
        model.head.loss(torch.randn(N // size, D), target[part])


def assert_mean_over_ranks(losses: list[float], expected: list[float]) -> None:
    total = torch.tensor(losses)
    dist.all_reduce(total)
    torch.testing.assert_close(total / dist.get_world_size(), torch.tensor(expected), rtol=TOLERANCE, atol=0.0)


def check_both_ways() -> None:
    """Two ranks divide the classes, two of these pairs the tokens: tensor parallel under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    one, model = made("plain"), made("plain")
    expected = train(one)
    distributed.shard_classes(model.head, mesh["tp"])
    scalars = distributed.keep_scalars_whole(model, mesh["dp"].get_group())
    fully_shard(model, mesh=mesh["dp"], ignored_params=scalars)
    half = mesh["dp"].get_local_rank()
    losses = train(model, slice(half * N // 2, (half + 1) * N // 2))
    assert_mean_over_ranks(losses, expected)
    assert_same_parameters(model, one, "FSDP2 with tensor parallelism", 1e-4)
    _, target = data(0)
    with pytest.raises(ValueError, match=r"mesh of one dimension.*FSDP"):
        model.head.loss(torch.randn(N, D), target)
    with pytest.raises(ValueError, match=r"one dimension.*mesh\['tp'\]"):
        distributed.shard_classes(made("plain").head, mesh)


@pytest.mark.parametrize("size", [2, 3])
def test_heads_that_are_dtensors(size: int, tmp_path: Path) -> None:
    on_ranks(tmp_path, size, check_layers)


def test_data_parallel_training_gives_the_numbers_of_one_process(tmp_path: Path) -> None:
    on_ranks(tmp_path, 2, check_data_parallel)


def test_tensor_parallel_within_data_parallel(tmp_path: Path) -> None:
    on_ranks(tmp_path, 4, check_both_ways)
