"""TRL's fused output layer, computed by the output function of a patched model.

TRL calls ``model(..., labels=labels, fused_lm_head=True)`` and wants log-probabilities of the labels, entropies and a
few statistics of each token. Log-probabilities, entropies and the likeliest token are token statistics, for which a
chunk of logits exists at a time. The mean of the logits and sum p^2 take a product of their own, in chunks, and only
where they are asked for. A temperature divides phi, and log P of a mixture, as it does when the model generates.

Shapes: B sequences of L tokens, N tokens that have a label, n of a chunk, d width, V classes.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sigsoftmax.contract.rows import compute_dtype
from sigsoftmax.contract.tokens import entropy
from sigsoftmax.integrations.huggingface.examination.label_convention import IGNORED, LabelConvention
from sigsoftmax.integrations.huggingface.patching.causal_loss import CausalLoss, Count, divided
from sigsoftmax.integrations.huggingface.patching.head_function import LinearLogits, LinearMap

FORWARD_OF_TRL = "add_fused_lm_head.<locals>._fused_forward"
OUTPUTS_OF_TRL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@dataclass(frozen=True, kw_only=True)
class FusedHead:
    """The arguments that ``trl.trainer.utils.add_fused_lm_head`` was called with, under its names."""

    temperature: float = 1.0
    cast_lm_head_to_fp32: bool = False
    outputs: tuple[str, ...] = ("log_probs",)

    def __post_init__(self) -> None:
        unknown = [name for name in self.outputs if name not in OUTPUTS_OF_TRL]
        if unknown:
            raise ValueError(
                f"TRL asks its fused output layer for {', '.join(unknown)}, but sigsoftmax knows "
                f"{', '.join(OUTPUTS_OF_TRL)}; install TRL 1.16, or a newer version of sigsoftmax"
            )

    @classmethod
    def of(cls, forward: Any) -> FusedHead | None:
        """The arguments of TRL's fused output layer, if ``forward`` is one; seen to work with TRL 1.16.

        TRL offers no other way in than the assignment to ``forward``. The function is known by the name in its code,
        and the variables that it closes over have the names of the public arguments of ``add_fused_lm_head``.
        """
        function = getattr(forward, "__func__", forward)
        if getattr(getattr(function, "__code__", None), "co_qualname", None) != FORWARD_OF_TRL:
            return None
        values = inspect.getclosurevars(function).nonlocals
        missing = [field.name for field in dataclasses.fields(cls) if field.name not in values]
        if missing:
            raise ValueError(
                f"the fused output layer of this version of TRL has no {', '.join(missing)}, so sigsoftmax cannot take "
                "its place; install TRL 1.16, or call remove_output_function(model) to train a softmax model"
            )
        return cls(
            temperature=float(values["temperature"]),
            cast_lm_head_to_fp32=bool(values["cast_lm_head_to_fp32"]),
            outputs=tuple(values["outputs"]),
        )


@dataclass(kw_only=True)
class FusedLoss(CausalLoss):
    """One call of a fused output layer, with the statistics of tokens that TRL asks for beside the loss."""

    fused_head: FusedHead
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """One number for each token that has a label, under TRL's names."""

    @classmethod
    def of_call(cls, model: Any, labels: Tensor | None, shift_labels: Tensor | None, count: Count) -> FusedLoss:
        """The loss that a call with ``fused_lm_head=True`` asks of a patched model."""
        if model.fused_head is None:
            raise ValueError(
                "fused_lm_head=True is for a model that TRL gave a fused output layer; call "
                "trl.trainer.utils.add_fused_lm_head(model) first, or leave the argument out"
            )
        options = model.loss_options
        if model.training and options.is_regularised:
            raise ValueError(
                "z_loss and label_smoothing of apply_output_function have no effect on TRL's losses, which are made of "
                f"log-probabilities; got z_loss={options.z_loss} and label_smoothing={options.label_smoothing}: leave "
                "them out, as in apply_output_function(model)"
            )
        return cls(
            head=model.output_function,
            options=options,
            targets_BL=LabelConvention().targets(labels, shift_labels, IGNORED),
            count=count,
            fused_head=model.fused_head,
        )

    def of_hidden(self, layer: LinearMap, hidden_BLd: Tensor) -> Tensor:
        self.check_shape(hidden_BLd)
        is_cast, device = self.fused_head.cast_lm_head_to_fp32, hidden_BLd.device
        with torch.autocast(device.type, enabled=False) if is_cast else nullcontext():
            hidden_Nd = hidden_BLd[self.kept_BL.to(device)]
            linear = self.head.linear(hidden_Nd.float() if is_cast else hidden_Nd, layer)
            self.statistics = self._statistics_of_hidden(*linear.tempered(self.fused_head.temperature))
        return self._mean()

    def of_logits(self, logits_BLV: Tensor, *, are_returned: bool = False) -> Tensor:
        phi_BLV = logits_BLV if are_returned else self.head.transformed(logits_BLV)
        phi_NV = phi_BLV[self.kept_BL.to(phi_BLV.device)]
        phi_NV = phi_NV.to(compute_dtype(phi_NV.dtype)) / self.fused_head.temperature
        asked = ("log_probs", *self.fused_head.outputs)
        self.statistics = _statistics_of_phi(phi_NV, self._targets_N(phi_NV.device), asked)
        return self._mean()

    @property
    def kept_BL(self) -> Tensor:
        return self.targets_BL != IGNORED

    def _targets_N(self, device: torch.device) -> Tensor:
        return self.targets_BL[self.kept_BL].to(device)

    def _mean(self) -> Tensor:
        log_probs_N = self.statistics["log_probs"]
        return divided(-log_probs_N.sum(), max(1, log_probs_N.numel()) if self.count is None else self.count)

    def _statistics_of_hidden(self, linear: LinearLogits, temperature: float) -> dict[str, Tensor]:
        asked, targets_N = self.fused_head.outputs, self._targets_N(linear.hidden.device)
        statistics = linear.token_statistics(
            targets_N,
            temperature=temperature,
            entropy="entropy" in asked,
            argmax="is_top1" in asked,
            **self.options.of_linear_loss,
        )
        assert statistics.log_probs is not None
        found = {"log_probs": statistics.log_probs}
        if statistics.entropy is not None:
            found["entropy"] = statistics.entropy
        if statistics.argmax is not None:
            found["is_top1"] = statistics.argmax == targets_N
        others = [name for name in ("mean_logits", "log_sum_sq_probs") if name in asked]
        if others:
            with torch.no_grad():
                parts = [
                    _statistics_of_phi(phi_nV / temperature, targets_N[span], others)
                    for span, phi_nV in linear.logits_chunks(self.options.chunk_bytes)
                ]
            none_N = statistics.log_probs.detach()[:0]
            found |= {name: torch.cat([none_N, *(part[name] for part in parts)]) for name in others}
        return found

    def answer(self, output: Any, *, is_shifted: bool) -> Any:
        """TRL's output, made of what the forward pass of the model's own class returned."""
        from trl.trainer.utils import FusedCausalLMOutput

        kept_BL = self.kept_BL.to(self.statistics["log_probs"].device)
        # Nothing follows the last token, so TRL has no place for it, unless the labels came shifted.
        placed_BL = kept_BL if is_shifted else kept_BL[:, :-1]
        return FusedCausalLMOutput(
            loss=output.loss,
            label_mask=placed_BL,
            aux_loss=output.get("aux_loss"),
            **{
                name: values_N.new_zeros(placed_BL.shape).masked_scatter(placed_BL, values_N)
                for name, values_N in self.statistics.items()
            },
        )


def _statistics_of_phi(phi_NV: Tensor, targets_N: Tensor, asked: Iterable[str]) -> dict[str, Tensor]:
    log_p_NV = torch.log_softmax(phi_NV, -1)
    compute = {
        "log_probs": lambda: log_p_NV.gather(-1, targets_N[:, None])[:, 0],
        "entropy": lambda: entropy(log_p_NV),
        "log_sum_sq_probs": lambda: torch.logsumexp(2.0 * log_p_NV.detach(), -1),
        "mean_logits": lambda: phi_NV.detach().mean(-1),
        "is_top1": lambda: phi_NV.argmax(-1) == targets_N,
    }
    return {name: compute[name]() for name in asked}
