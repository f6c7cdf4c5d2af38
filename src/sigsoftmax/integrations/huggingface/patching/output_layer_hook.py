"""The hook before the output layer of a patched model, which computes losses and logits in place of it.

Shapes: d width, V classes.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sigsoftmax.integrations.huggingface.examination.model_state import remove_hook
from sigsoftmax.integrations.huggingface.examination.output_layers import linear_layer, output_layer
from sigsoftmax.integrations.huggingface.patching.causal_loss import CausalLoss
from sigsoftmax.integrations.huggingface.patching.head_function import HeadFunction, whole
from sigsoftmax.integrations.huggingface.patching.product_conditions import why_not_product

_CLAIM = threading.Lock()


@dataclass(kw_only=True)
class WaitingCall:
    """One call of a patched model that waits for the input of its output layer."""

    loss: CausalLoss | None = None
    """The loss to compute; None if none is asked for."""
    head: HeadFunction | None = None
    """The output function that makes logits of that input; None if no logits are to be stored."""
    class_bias: Tensor | None = None
    """A bias that the model adds after its output layer (``Examined.class_bias``)."""
    logits: Tensor | None = None
    """The logits once they are computed."""
    rows: Tensor | None = None
    """What the layer returned, no rows, where somebody hooked its output."""
    thread: int | None = None
    """The thread that makes this call; None in a compiled call."""

    def take(self, layer: nn.Linear, hidden: Tensor) -> None:
        used = layer if self.class_bias is None else _with_bias(layer, self.class_bias)
        if self.loss is not None:
            self.loss.loss = self.loss.of_hidden(used, hidden)
        if self.head is not None:
            self.logits = self.head.linear(hidden, used).logits()

    def joined(self, result: Tensor) -> Tensor:
        """A result of this call whose gradient reaches the output of the layer, too."""
        return result if self.rows is None else result + self.rows.sum().to(result)


@dataclass(frozen=True)
class _WithBias:
    """An output layer and the bias that the model adds after it, as one linear map."""

    weight: Tensor
    bias: Tensor


def _with_bias(layer: nn.Linear, class_bias: Tensor) -> _WithBias:
    weight_Vd, own_V = whole(layer.weight), whole(layer.bias)
    bias_V = whole(class_bias).reshape(-1).to(weight_Vd)
    return _WithBias(weight_Vd, bias_V if own_V is None else own_V + bias_V)


def serve_waiting_call(layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The hook: what waits for the input of the layer is computed, and the layer gets no rows.

    It is computed here rather than after the model's forward pass because a sharded weight is whole only while its
    layer runs.
    """
    waiting = _waiting_call(layer)
    if waiting is None:
        return None
    waiting.take(layer, arguments[0])
    return (arguments[0][..., :0, :], *arguments[1:])


def give_rows(layer: Any, arguments: tuple[Any, ...], rows: Tensor) -> Tensor | None:
    """The hook after the layer, for those after it: no rows, whose gradient comes before that of the results.

    FSDP2 gathers the parameters of a group of modules again when a gradient arrives at the output of the last of them.
    These rows are a leaf, which a compiler does not allow: a gradient of the weight would be a tensor of its size.
    """
    waiting = _waiting_call(layer)
    if waiting is None or not rows.requires_grad or len(layer._forward_hooks) == 1:
        return None
    waiting.rows = rows if torch.compiler.is_compiling() else rows.detach().requires_grad_()
    return waiting.rows


def _waiting_call(layer: Any) -> WaitingCall | None:
    """The call of this thread that waits for the input of the layer."""
    waiting: WaitingCall | None = getattr(layer, "waiting_call", None)
    is_other = waiting is not None and waiting.thread is not None and waiting.thread != threading.get_ident()
    return None if is_other else waiting


def add_hook(layer: nn.Module) -> None:
    """Register the hooks: the last before the layer, which takes what it would get, and the first after it."""
    hooks = list(layer._forward_pre_hooks.values())
    if serve_waiting_call in hooks[:-1]:
        remove_hook(layer._forward_pre_hooks, serve_waiting_call)
    if hooks[-1:] != [serve_waiting_call]:
        layer.register_forward_pre_hook(serve_waiting_call)
    if give_rows not in layer._forward_hooks.values():
        layer.register_forward_hook(give_rows, prepend=True)


def remove_hooks(model: nn.Module) -> None:
    """Undo :func:`add_hook` in all layers: a model may have got another output layer since."""
    for module in model.modules():
        remove_hook(module._forward_hooks, give_rows)
        if remove_hook(module._forward_pre_hooks, serve_waiting_call):
            module.__dict__.pop("waiting_call", None)


def layer_with_hook(model: Any) -> nn.Linear | None:
    """The output layer, if it is a plain linear map; None with a warning if its logits have to be stored.

    A mixture has no use for stored logits, and raises.
    """
    layer = output_layer(model)
    reason = why_not_product(model, layer)
    if reason is not None:
        if model.output_function.takes_hidden:
            raise ValueError(
                f"{model.output_function.described()} needs an output layer that is a plain linear map and nothing "
                f"else, but {reason}; leave the output layer out of adapters and quantisation, and without hooks"
            )
        warn_of_stored_logits(model, reason)
        return None
    plain = linear_layer(layer)
    assert plain is not None
    add_hook(plain)
    return plain


@contextmanager
def waiting(model: Any, layer: Any, call: WaitingCall) -> Iterator[None]:
    """Let a call wait for the input of ``layer``, or, if that is None, its loss for logits."""
    holders = [model] if layer is None else [model, layer]
    _claim(holders, call)
    try:
        yield
    finally:
        for holder in holders:
            holder.waiting_call = None


def _claim(holders: Sequence[Any], call: WaitingCall) -> None:
    """Make a call the one that waits; one of another thread would take its vectors for ours."""
    if torch.compiler.is_compiling():
        for holder in holders:
            holder.waiting_call = call
        return
    call.thread = threading.get_ident()
    with _CLAIM:
        if any(getattr(holder, "waiting_call", None) is not None for holder in holders):
            raise RuntimeError(
                f"this {type(holders[0]).__name__} is computing a loss, or the logits of a mixture, in another thread, "
                "and computes one at a time; let the threads take turns with a lock, or give each of them a "
                "copy.deepcopy of the model"
            )
        for holder in holders:
            holder.waiting_call = call


def warn_of_stored_logits(model: Any, reason: str) -> None:
    if not getattr(model, "warned_of_stored_logits", False):
        model.warned_of_stored_logits = True
        warnings.warn(
            f"the loss of {type(model).__name__} needs its logits stored, since {reason}; the results are right, but "
            "the memory grows with tokens times vocabulary",
            stacklevel=3,
        )
