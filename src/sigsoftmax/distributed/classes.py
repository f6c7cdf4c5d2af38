"""Classes spread over processes: who holds which, and this process's part of whatever has a place for each.

Shapes: V classes, d width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sigsoftmax.contract.shard import classes_of
from sigsoftmax.contract.signature import is_dtensor
from sigsoftmax.distributed.exchange import Exchange, sum_gradients
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.parameters import ParameterKind
from sigsoftmax.losses.validation import check_floating, check_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ClassShards:
    """The numbers of consecutive classes that the ranks of a group hold, in the order of the ranks.

    Losses that are given it need not ask the other ranks, an answer that a GPU would have to be waited for. It holds as
    long as nobody's number of classes changes.
    """

    sizes: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @classmethod
    def even(cls, num_classes: int, group: dist.ProcessGroup | None = None) -> ClassShards:
        """Cut as ``torch.chunk`` and DTensor do: all ranks the same number, the last ones fewer or none."""
        return cls(even_sizes(num_classes, Exchange(group).size), group)

    @classmethod
    def gathered(cls, own_weight: Tensor, group: dist.ProcessGroup | None = None) -> ClassShards:
        """Ask every rank how many rows its part (V, d) of the output matrix has; all ranks must call this."""
        own = torch.tensor([own_weight.shape[0]], device=own_weight.device)
        return cls(tuple(Exchange(group).gather(own).flatten().tolist()), group)

    @property
    def num_classes(self) -> int:
        """The number of classes of all ranks."""
        return sum(self.sizes)

    @property
    def own(self) -> slice:
        """The classes of this rank, to cut its part out of something whole: ``weight[shards.own]``."""
        return classes_of(self.sizes, dist.get_rank(self.group))


def even_sizes(num_classes: int, ranks: int) -> tuple[int, ...]:
    most = -(-num_classes // ranks)
    return tuple(max(0, min(most, num_classes - rank * most)) for rank in range(ranks))


class LocalHead(NamedTuple):
    """An output layer as this process holds it."""

    weight_Vd: Tensor
    bias_V: Tensor | None
    member: OutputFunction
    exchange: Exchange
    sizes: tuple[int, ...] | None
    """the number of classes of each rank; None if nobody said"""
    mesh: Any
    """the mesh of the DTensors; None if the parts came as plain tensors"""


def own_head(
    weight: Tensor,
    bias: Tensor | None,
    member: OutputFunction,
    group: dist.ProcessGroup | None,
    shards: ClassShards | None,
) -> LocalHead:
    """Read what a caller passed: parts as plain tensors, or a DTensor that is sharded by classes."""
    check_floating("linear_weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"linear_weight must have the shape (classes, features), got {tuple(weight.shape)}")
    if is_dtensor(weight):
        if group is not None or shards is not None:
            raise ValueError("group and shards follow from a linear_weight that is a DTensor; leave them out")
        return _head_of_dtensor(weight, bias, member)  # type: ignore[arg-type]
    for name, tensor in (("linear_bias", bias), *member.given.items()):
        if is_dtensor(tensor):
            raise ValueError(
                f"{name} is a DTensor but linear_weight is not; pass both as DTensors, or this rank's part of both"
            )
    if shards is None:
        return LocalHead(weight, bias, member, Exchange(group), None, None)
    if group is not None and group is not shards.group:
        raise ValueError("group and shards.group differ; leave group out")
    exchange = Exchange(shards.group)
    if len(shards.sizes) != exchange.size:
        raise ValueError(f"shards speaks of {len(shards.sizes)} ranks, but the group has {exchange.size}")
    if shards.sizes[exchange.rank] != weight.shape[0]:
        raise ValueError(
            f"linear_weight has {weight.shape[0]} rows, but shards gives rank {exchange.rank} "
            f"{shards.sizes[exchange.rank]} of the {shards.num_classes} classes; pass this rank's part alone"
        )
    return LocalHead(weight, bias, member, exchange, shards.sizes, None)


def _head_of_dtensor(weight: DTensor, bias: Tensor | None, member: OutputFunction) -> LocalHead:
    from torch.distributed.tensor import Shard

    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1 or type(placements[0]) is not Shard or placements[0].dim != 0:
        raise ValueError(
            "linear_weight must be sharded by classes, placements (Shard(0),) on a mesh of one dimension, got "
            f"{placements} on {mesh}; pick the dimension of the tensor-parallel ranks (mesh['tp']), and under FSDP "
            "call the loss inside forward, or name it by torch.distributed.fsdp.register_fsdp_forward_method"
        )
    exchange = Exchange(mesh.get_group())
    sizes = even_sizes(weight.shape[0], exchange.size)
    own = weight.to_local()
    if own.shape[0] != sizes[exchange.rank]:
        raise ValueError(
            f"linear_weight has {own.shape[0]} rows on rank {exchange.rank}, but DTensor's own cut of "
            f"{weight.shape[0]} classes gives it {sizes[exchange.rank]}; make the DTensor by distribute_tensor, or "
            "pass plain parts"
        )

    def own_part(name: str, tensor: Tensor) -> Tensor:
        """This rank's part of one number per class. A plain tensor is one that every rank holds whole."""
        if tensor.shape != weight.shape[:1]:
            raise ValueError(
                f"{name} must hold one number per class, shape ({weight.shape[0]},), got {tuple(tensor.shape)}"
            )
        if is_dtensor(tensor):
            return _local(name, tensor, mesh, shard_dim=0)
        return sum_gradients(exchange, {name: tensor})[name][classes_of(sizes, exchange.rank)]

    given: dict[str, Any] = {}
    for key, kind in member.kinds.items():
        name, value = f"parameter {key!r} of {member.name!r}", member.given[key]
        if isinstance(value, Tensor):
            is_divided = kind is ParameterKind.PER_CLASS
            given[key] = own_part(name, value) if is_divided else replicated(name, value, mesh)
    own_bias = None if bias is None else own_part("linear_bias", bias)
    return LocalHead(own, own_bias, member.with_parameters(**given), exchange, sizes, mesh)


def replicated(name: str, tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """A tensor that every rank holds alike, as a plain tensor."""
    check_tensor(name, tensor)
    return _local(name, tensor, mesh) if is_dtensor(tensor) else tensor


def own_probabilities(target: Tensor, head: LocalHead) -> Tensor:
    """Probability targets of this rank's classes, the last dimension."""
    if head.mesh is None or head.sizes is None:
        return replicated("target", target, None)
    if is_dtensor(target):
        return _local("target", target, head.mesh, shard_dim=target.ndim - 1)
    if target.shape[-1:] != (sum(head.sizes),):
        raise ValueError(
            f"probability targets must have a number per token and class, (..., {sum(head.sizes)}), "
            f"got {tuple(target.shape)}"
        )
    return target[..., classes_of(head.sizes, head.exchange.rank)]


def _local(name: str, tensor: Any, mesh: DeviceMesh | None, shard_dim: int | None = None) -> Tensor:
    """This rank's part of a DTensor, divided along a dimension or (None) whole."""
    from torch.distributed.tensor import Replicate, Shard

    if mesh is None:
        raise ValueError(f"{name} is a DTensor but linear_weight is not; pass both as DTensors, or plain tensors")
    if tensor.device_mesh != mesh:
        raise ValueError(f"{name} is a DTensor on {tensor.device_mesh}, but linear_weight is on {mesh}; use one mesh")
    return tensor.redistribute(placements=[Replicate() if shard_dim is None else Shard(shard_dim)]).to_local()
