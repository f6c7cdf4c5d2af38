"""The training loss of a patched language model, as transformers defines it: labels placed, tokens counted.

Shapes: B sequences of L tokens, d width, V classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from sigsoftmax.contract.spec import (
    WeightGradient,
    check_chunk_bytes,
    check_label_smoothing,
    check_nonnegative,
)
from sigsoftmax.family.notation import check_choice
from sigsoftmax.integrations.huggingface.examination.label_convention import IGNORED
from sigsoftmax.integrations.huggingface.patching.head_function import HeadFunction, LinearMap
from sigsoftmax.losses.lowering import chosen_backend

KeepLogits = Literal["eval", "always", "never"]
Count = Tensor | int | None


@dataclass(frozen=True, kw_only=True)
class CausalLossOptions:
    """The options with which a patched model computes the loss of labels."""

    logits_with_labels: KeepLogits = "eval"
    """Calls with labels that return logits, too: in evaluation mode, always (they are then stored), or never."""
    z_loss: float = 0.0
    """Weight of the squared log normaliser; in training mode alone, so that evaluation stays a likelihood."""
    label_smoothing: float = 0.0
    """Label smoothing, in training mode alone."""
    chunk_bytes: int | None = None
    """Logits held at a time; None is 32 MiB on a CPU and 576 MiB on a GPU."""
    weight_gradient: WeightGradient = "auto"
    backend: str | None = None

    def __post_init__(self) -> None:
        check_choice("logits_with_labels", self.logits_with_labels, ("eval", "always", "never"))
        check_nonnegative("z_loss", self.z_loss)
        check_label_smoothing(self.label_smoothing)
        check_chunk_bytes(self.chunk_bytes)
        check_choice("weight_gradient", self.weight_gradient, get_args(WeightGradient))
        chosen_backend(self.backend, None)

    def keep_logits(self, *, is_training: bool) -> bool:
        return self.logits_with_labels == "always" or (self.logits_with_labels == "eval" and not is_training)

    @property
    def is_regularised(self) -> bool:
        return self.z_loss > 0.0 or self.label_smoothing > 0.0

    @property
    def of_linear_loss(self) -> dict[str, Any]:
        """Keywords of the loss that stores no logits."""
        return {"chunk_bytes": self.chunk_bytes, "weight_gradient": self.weight_gradient, "backend": self.backend}


@dataclass(kw_only=True)
class CausalLoss:
    """The loss of one call, computed from the input of the output layer or from logits that are stored anyway."""

    head: HeadFunction
    options: CausalLossOptions
    targets_BL: Tensor
    """The label that counts at each position (``label_convention``)."""
    count: Count = None
    """Tokens of all batches that a step accumulates; the sum of losses is divided by it. None: the mean."""
    ignore_index: int = IGNORED
    by_token: bool = False
    """Ask for the loss of each token, (B, L)."""
    is_training: bool = False
    loss: Tensor | None = None
    """The loss once it is computed."""

    def of_hidden(self, layer: LinearMap, hidden_BLd: Tensor) -> Tensor:
        """The loss without storing logits."""
        self.check_shape(hidden_BLd)
        linear = self.head.linear(hidden_BLd, layer)
        targets_BL = self.targets_BL.to(hidden_BLd.device)
        if self.by_token:
            options = self.options.of_linear_loss
            log_probs_BL = linear.token_statistics(targets_BL, ignore_index=self.ignore_index, **options).log_probs
            assert log_probs_BL is not None
            return -log_probs_BL
        return self._divided(linear.cross_entropy(targets_BL, **self._keywords, **self.options.of_linear_loss))

    def of_logits(self, logits_BLV: Tensor, *, are_returned: bool = False) -> Tensor:
        """The loss of the model's logits, before its output function or, if it has returned them, after it."""
        targets_BL = self.targets_BL.to(logits_BLV.device)
        keywords = self._keywords | {"backend": self.options.backend, "are_transformed": are_returned}
        return self._divided(self.head.cross_entropy(logits_BLV, targets_BL, **keywords))

    def check_shape(self, hidden_BLd: Tensor) -> None:
        """Refuse hidden vectors that do not belong to the labels."""
        if self.targets_BL.shape != hidden_BLd.shape[:-1]:
            raise ValueError(
                f"labels have the shape {tuple(self.targets_BL.shape)}, but the output layer got vectors for "
                f"{tuple(hidden_BLd.shape[:-1])} tokens; leave logits_to_keep out when you pass labels"
            )

    @property
    def _keywords(self) -> dict[str, Any]:
        reduction = "none" if self.by_token else "mean" if self.count is None else "sum"
        keywords: dict[str, Any] = {"ignore_index": self.ignore_index, "reduction": reduction}
        if self.is_training:
            keywords |= {"z_loss": self.options.z_loss, "label_smoothing": self.options.label_smoothing}
        return keywords

    def _divided(self, loss: Tensor) -> Tensor:
        return loss if self.by_token or self.count is None else divided(loss, self.count)


def divided(total: Tensor, count: Tensor | int) -> Tensor:
    """A sum of losses over the number of tokens, which a trainer may hold on another device."""
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)
