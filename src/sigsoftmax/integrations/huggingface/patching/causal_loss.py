"""The training loss of a patched causal language model, as transformers defines it: labels shifted, tokens counted.

Shapes: B sequences of L tokens, d features, V classes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigsoftmax.contract.spec import Function, Reduction, WeightGradient, check_nonnegative
from sigsoftmax.losses import functional

KeepLogits = Literal["eval", "always", "never"]
Count = Tensor | int | None


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """How a patched model computes the loss of labels."""

    logits_with_labels: KeepLogits = "eval"
    """When a call with labels also returns logits: in evaluation mode, always (they are then stored), or never."""
    z_loss: float = 0.0
    """Weight of the squared log normaliser; in training mode alone, so that evaluation stays a likelihood."""
    label_smoothing: float = 0.0
    """In training mode alone."""
    chunk_bytes: int | None = None
    """Logits held at a time; None is 32 MiB on a CPU and 576 MiB on a GPU."""
    weight_gradient: WeightGradient = "auto"
    backend: str | None = None

    def __post_init__(self) -> None:
        if self.logits_with_labels not in ("eval", "always", "never"):
            raise ValueError(f"logits_with_labels must be 'eval', 'always' or 'never', got {self.logits_with_labels!r}")
        check_nonnegative("z_loss", self.z_loss)
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must lie in [0, 1], got {self.label_smoothing}")

    def keep_logits(self, *, is_training: bool) -> bool:
        return self.logits_with_labels == "always" or (self.logits_with_labels == "eval" and not is_training)

    def regularised(self, *, is_training: bool) -> tuple[float, float]:
        """z_loss and label_smoothing as they act now."""
        return (self.z_loss, self.label_smoothing) if is_training else (0.0, 0.0)


def targets(labels_BL: Tensor | None, shifted_labels_BL: Tensor | None, ignore_index: int) -> Tensor:
    """The token that follows each position; nothing follows the last."""
    if shifted_labels_BL is not None:
        return shifted_labels_BL
    if labels_BL is None:
        raise ValueError("the loss needs labels or shift_labels, got neither")
    return F.pad(labels_BL, (0, 1), value=ignore_index)[..., 1:]


@dataclass(frozen=True, kw_only=True)
class LossRequest:
    """One call of the loss."""

    targets_BL: Tensor
    count: Count = None
    """Tokens of all batches that a step accumulates; the sum of losses is divided by it. None: the mean."""
    ignore_index: int = -100
    by_token: bool = False
    """Ask for the loss of each token, (B, L)."""
    is_training: bool = False

    @property
    def reduction(self) -> Reduction:
        return "none" if self.by_token else "mean" if self.count is None else "sum"

    def divided(self, loss: Tensor) -> Tensor:
        if self.by_token or self.count is None:
            return loss
        return loss / (self.count.to(loss.device) if isinstance(self.count, Tensor) else self.count)


def linear_operands(hidden_BLd: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden vectors, weight and bias of a product whose logits are never stored; sharded parameters are gathered."""
    weight_Vd, bias_V = _whole(layer.weight), _whole(layer.bias)
    if weight_Vd.numel() == 0:
        raise ValueError(
            "the weight of the output layer is not there when the loss needs it (DeepSpeed ZeRO-3 may do that); use "
            "ZeRO-2 or FSDP, or pass logits_with_labels='always' to apply_output_function"
        )
    return hidden_BLd, weight_Vd, bias_V


def loss_of_hidden(
    hidden_BLd: Tensor, layer: nn.Linear, scale: float, request: LossRequest, function: Function, options: LossOptions
) -> Tensor:
    """The loss by the linear path, which holds logits a slab at a time; ``function`` is that of scaled logits."""
    targets_BL = request.targets_BL
    if targets_BL.shape != hidden_BLd.shape[:-1]:
        raise ValueError(
            f"labels have the shape {tuple(targets_BL.shape)}, but the output layer got vectors for "
            f"{tuple(hidden_BLd.shape[:-1])} tokens; leave logits_to_keep out when you pass labels"
        )
    hidden_BLd, weight_Vd, bias_V = linear_operands(hidden_BLd, layer)
    if scale != 1.0:
        hidden_BLd, bias_V = hidden_BLd * scale, None if bias_V is None else bias_V * scale
    z_loss, label_smoothing = options.regularised(is_training=request.is_training)
    with float32_result(hidden_BLd):
        loss = functional.linear_cross_entropy(
            hidden_BLd,
            weight_Vd,
            targets_BL.to(hidden_BLd.device),
            function=function,
            linear_bias=bias_V,
            ignore_index=request.ignore_index,
            reduction=request.reduction,
            chunk_bytes=options.chunk_bytes,
            weight_gradient=options.weight_gradient,
            backend=options.backend,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
        )
    return request.divided(loss)


def loss_of_logits(logits_BLV: Tensor, request: LossRequest, function: Function, options: LossOptions) -> Tensor:
    """The loss of logits that are stored anyway."""
    z_loss, label_smoothing = options.regularised(is_training=request.is_training)
    with float32_result(logits_BLV):
        loss = functional.cross_entropy(
            logits_BLV,
            request.targets_BL.to(logits_BLV.device),
            function=function,
            dim=-1,
            ignore_index=request.ignore_index,
            reduction=request.reduction,
            backend=options.backend,
            z_loss=z_loss,
            label_smoothing=label_smoothing,
        )
    return request.divided(loss)


def float32_result(tensor: Tensor) -> AbstractContextManager[Any]:
    """Under autocast a loss is returned in float32; a sum over a batch in half precision would be of little use."""
    kind = tensor.device.type
    if tensor.dtype not in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, dtype=tensor.dtype)


def _whole(tensor: Any) -> Any:
    """A sharded parameter gathered; its gradient is scattered again."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()
