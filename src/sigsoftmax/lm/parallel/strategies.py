"""Distributed strategies: processes that train one model together, on torch.distributed.

- :class:`DDPStrategy` (``ddp``): every rank holds the model and trains its own columns of the batch.
- :class:`FSDPStrategy` (``fsdp``): the same, with every parameter sharded over the ranks between its uses.
- :class:`VocabularyParallelStrategy` (``vocabulary``): the tied matrix is sharded by rows of the vocabulary; all ranks
  read all columns.

An update is that of one process, to rounding: the ranks draw the masks of the whole batch from the same random numbers
and keep those of their columns; losses, penalties and gradients are means over the batch, and the norm that is clipped
is that of the whole gradient.

Shapes: B columns of text, H hidden features, V vocabulary, D embedding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from sigsoftmax.distributed import keep_scalars_whole, shard_classes
from sigsoftmax.distributed.exchange import Exchange, explained
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.parallel.single_process import Kind, OwnColumns, SingleProcessStrategy
from sigsoftmax.lm.training.nt_asgd import joint_squares

__all__ = ["STRATEGIES", "DDPStrategy", "FSDPStrategy", "VocabularyParallelStrategy", "broadcast_from_first"]

PATIENCE = timedelta(hours=24)
"""for what the first rank does alone, such as an evaluation in one column; that it has died is noticed at once"""

T = TypeVar("T")


class _DistributedStrategy(SingleProcessStrategy):
    """Numbers, flags, waiting and gradients of all ranks, and parameters of which a rank holds a part.

    A parameter that is sharded is a DTensor, divided along its first dimension; every rank holds the others whole.
    """

    can_capture = False

    def __init__(self, model: LanguageModel) -> None:
        self._exchange = Exchange()
        if "gloo" not in str(dist.get_backend_config()):
            raise ValueError(
                f"the processes are joined by {dist.get_backend_config()} alone, and what hosts decide is exchanged by "
                "gloo; join them by sigsoftmax.distributed.processes, or name the backends cpu:gloo,cuda:nccl"
            )
        super().__init__(model)
        self.rank, self.size = self._exchange.rank, self._exchange.size
        self._distribute(model)
        parameters = dict(model.named_parameters())
        self._parameters = list(parameters.values())
        self._sharded_shapes = {name: p.shape for name, p in parameters.items() if isinstance(p, DTensor)}
        self.parts = {name: _local(p.detach()) for name, p in parameters.items()}

    def _distribute(self, model: LanguageModel) -> None:
        """Wrap the model, or shard its parameters in place."""

    def _summed(self, own: Tensor) -> Tensor:
        """One number, added up in the order of the ranks: all of them then decide by the same bits."""
        return self._exchange.gather(own).sum(0)

    def any(self, own: bool) -> bool:
        return bool(self._exchange.sum(torch.tensor(int(own))))

    def check_same(self, position: Sequence[int], what: str) -> None:
        every = self._exchange.gather(torch.tensor(position)).tolist()
        if any(other != every[0] for other in every):
            raise ValueError(
                f"the ranks do not find the same at {what}: rank {self.rank} of {self.size} is at {list(position)}, "
                f"the first one at {every[0]}; all ranks read the folder of the run, so that it must be on a disk that "
                "they share"
            )

    def wait_for_first(self) -> None:
        with explained("waiting for"):
            dist.barrier(group=_patient_group())

    def add_gradients(self, objective: Tensor) -> None:
        objective.backward()

    def take_gradients(self) -> list[Tensor]:
        gradients = [_local(parameter.grad) for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return gradients

    def squares(self, gradients: Sequence[Tensor]) -> Tensor:
        sharded, whole = (
            [g for g, name in zip(gradients, self.parts, strict=True) if (name in self._sharded_shapes) == wanted]
            for wanted in (True, False)
        )
        squares = [self._summed(joint_squares(sharded).sum()).reshape(1)] if sharded else []
        return torch.cat([*squares, joint_squares(whole)] if whole else squares)

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self._gathered(name, part) if name in self._sharded_shapes else part for name, part in parts.items()
        }

    def _gathered(self, name: str, part: Tensor) -> Tensor:
        shape = self._sharded_shapes[name]
        padded = part.new_zeros(-(-shape[0] // self.size), *shape[1:])
        padded[: part.shape[0]] = part
        return self._exchange.gather(padded).flatten(0, 1)[: shape[0]]

    def own(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._cut(tensor) if name in self._sharded_shapes else tensor for name, tensor in whole.items()}

    def _cut(self, whole: Tensor) -> Tensor:
        parts = whole.chunk(self.size)
        return parts[self.rank] if self.rank < len(parts) else whole[:0]


class _BatchParallelStrategy(_DistributedStrategy):
    """Ranks that each train their own columns, consecutive ones."""

    def columns(self, batch: int, group: int) -> slice:
        own = batch // self.size
        if batch % self.size:
            raise ValueError(
                f"the batch of {batch} columns must be divisible by the number of processes, {self.size}; set "
                "training.batch (finetuning.batch) to a multiple, or start a number of processes that divides it"
            )
        if own % group and group % own:
            raise ValueError(
                f"each of {self.size} processes has {own} of the {batch} columns, which must be a part of a group of "
                f"{group} that share dropout masks, or a multiple of it; start another number of processes"
            )
        return slice(self.rank * own, (self.rank + 1) * own)

    def evaluated_columns(self, batch: int) -> OwnColumns:
        # Ranks may have one column more than others; all make equally many passes, as FSDP needs it.
        most, longer = divmod(batch, self.size)
        if not most and self.rank >= longer:
            return OwnColumns(slice(0, 1), counts=False)
        first = self.rank * most + min(self.rank, longer)
        return OwnColumns(slice(first, first + most + (self.rank < longer)))

    def every_column(self, own_1BH: Tensor) -> Tensor:
        return torch.cat(self._exchange.gather(own_1BH).unbind(), dim=1)

    def mean(self, own: Tensor) -> Tensor:
        return self._summed(own) / self.size

    def sum(self, own: Tensor) -> Tensor:
        return self._summed(own)


class DDPStrategy(_BatchParallelStrategy):
    """torch's DistributedDataParallel."""

    def _distribute(self, model: LanguageModel) -> None:
        self._wrapped = self.forward = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def training_pass(self, *, is_last: bool) -> AbstractContextManager[Any]:
        # Gradients of earlier passes stay on the rank until the last one sends their sum.
        return nullcontext() if is_last else self._wrapped.no_sync()


class FSDPStrategy(_BatchParallelStrategy):
    """torch's FSDP2: a group of parameters for each LSTM layer, and one for the tied matrix with the head."""

    def _distribute(self, model: LanguageModel) -> None:
        mesh = init_device_mesh(model.embedding.device.type, (self.size,))
        scalars = keep_scalars_whole(model)
        for layer in model.stack.in_order():
            fully_shard(layer, mesh=mesh)
        # Parameters that stayed gathered after an evaluation would outlive a change of the weights.
        fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)
        assert isinstance(model, FSDPModule)
        self._sharded = model

    def training_pass(self, *, is_last: bool) -> AbstractContextManager[Any]:
        self._sharded.set_requires_gradient_sync(is_last)
        return nullcontext()


class VocabularyParallelStrategy(_DistributedStrategy):
    """The tied matrix, the bias and parameters per token are sharded by rows; the loss is vocabulary-parallel."""

    def _distribute(self, model: LanguageModel) -> None:
        mesh = init_device_mesh(model.embedding.device.type, (self.size,))
        model.embedding = nn.Parameter(distribute_tensor(model.embedding.detach(), mesh, [Shard(0)]))
        model.output.weight = model.embedding
        shard_classes(model.output, mesh)  # type: ignore[type-var]


STRATEGIES: dict[Kind, Callable[[LanguageModel], SingleProcessStrategy]] = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "vocabulary": VocabularyParallelStrategy,
}


def broadcast_from_first(work: Callable[[], T]) -> T:
    """The result of the first rank's ``work``, on all ranks; the others wait for it, however long it takes."""
    box: list[Any] = [work()] if dist.get_rank() == 0 else [None]
    with explained("waiting for"):
        dist.broadcast_object_list(box, src=0, group=_patient_group())
    result: T = box[0]
    return result


_patient: weakref.ref[dist.ProcessGroup] | None = None


def _patient_group() -> dist.ProcessGroup:
    """All ranks; made once for as long as they are joined."""
    global _patient
    group = None if _patient is None else _patient()
    if group is None:
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        # The group ends with the world: its threads must not outlive that.
        _patient = weakref.ref(group)
    return group


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
