"""Layers on many ranks: their classes divided over a mesh, or their scalar parameters beside FSDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from sigsoftmax.contract.signature import is_dtensor
from sigsoftmax.distributed.exchange import Exchange
from sigsoftmax.family.parameters import ParameterKind
from sigsoftmax.layers.mixture import MixtureOutputLayer
from sigsoftmax.layers.output_layer import OutputLayer, buffer_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Layer = TypeVar("Layer", OutputLayer, MixtureOutputLayer)


def shard_classes(layer: Layer, mesh: DeviceMesh) -> Layer:
    """Divide a layer's classes over a mesh of one dimension, in place; rank 0's values are taken.

    The weight, the bias and parameters of the function per class become DTensors with ``Shard(0)``, all else stays
    whole on every rank. Training goes through ``layer.loss`` as before.

    A weight that is tied to an embedding would be untied, since it is replaced. Shard the embedding first, by
    ``RowwiseParallel``, and make the layer with ``weight=embedding.weight`` then: a DTensor is left as it is.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, got {mesh}; pick the tensor-parallel one, as in mesh['tp']")

    def divided(tensor: Tensor) -> Tensor:
        return tensor if is_dtensor(tensor) else distribute_tensor(tensor.detach(), mesh, [Shard(0)])

    def parameter(whole: Tensor) -> nn.Parameter:
        if isinstance(whole, nn.Parameter) and is_dtensor(whole):
            # The object stays as it is: it may be another module's weight.
            return whole
        return nn.Parameter(divided(whole), requires_grad=whole.requires_grad)

    layer.weight = parameter(layer.weight)
    if layer.bias is not None:
        layer.bias = parameter(layer.bias)
    for key, kind in layer.function.kinds.items():
        if kind is not ParameterKind.PER_CLASS:
            continue
        if key in layer.function_parameters:
            layer.function_parameters[key] = parameter(layer.function_parameters[key])
        else:
            name = buffer_name(key)
            setattr(layer, name, divided(getattr(layer, name)))
    return layer


def keep_scalars_whole(module: nn.Module, group: dist.ProcessGroup | None = None) -> set[nn.Parameter]:
    """Parameters that FSDP2 refuses because they are one number, like a learned b of shifted sigsoftmax.

    Pass them on as ``fully_shard(model, ignored_params=keep_scalars_whole(model))``; call this once for a model. Every
    rank of ``group``, those that FSDP divides the data over, holds such a parameter whole, and backward averages its
    gradient over them as FSDP does with the others.
    """
    exchange = Exchange(group)
    scalars = {parameter for parameter in module.parameters() if parameter.ndim == 0 and not is_dtensor(parameter)}

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(exchange.sum(parameter.grad) / exchange.size)

    for parameter in scalars:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
    return scalars
