"""What TRL's trainers ask of a model that they gave a fused output layer, by the model's own output function.

TRL calls ``model(..., labels=labels, fused_lm_head=True)`` and wants log-probabilities of the labels, entropies and a
few statistics of each token. Log-probabilities, entropies and the likeliest token come from the linear loss, a chunk of
logits at a time. The gradient of an entropy, the mean of the logits and sum p^2 take products of their own, in chunks,
and only where they are asked for. A temperature divides phi, as it does when the model generates.

Shapes: B sequences of L tokens, N tokens that have a label, d features, V classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigsoftmax.contract.problem import default_chunk_bytes
from sigsoftmax.contract.rows import compute_dtype
from sigsoftmax.family import OutputFunction
from sigsoftmax.integrations.huggingface.patching.causal_loss import (
    Count,
    LossOptions,
    float32_result,
    linear_operands,
    targets,
)
from sigsoftmax.integrations.huggingface.patching.head_function import LogitAdjustment, tempered
from sigsoftmax.integrations.huggingface.trainers.known_libraries import FusedHead
from sigsoftmax.losses import functional

IGNORED = -100


@dataclass(kw_only=True)
class TokenStatistics:
    """One number for each token that has a label; None where it was not asked for. The names are TRL's."""

    log_probs: Tensor
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None


@dataclass(kw_only=True)
class FusedRequest:
    """One call of a fused output layer; it is answered before the output layer runs, or by the logits of that layer."""

    head: FusedHead
    function: OutputFunction
    """Of raw logits times ``scale``."""
    scale: float
    options: LossOptions
    labels_BL: Tensor
    """The label of the token that follows each position."""
    count: Count = None
    statistics: TokenStatistics | None = None

    def of_hidden(self, layer: nn.Linear, hidden_BLd: Tensor) -> Tensor:
        """The loss, from the input of the output layer; no logits are stored."""
        kept_BL = self.kept.to(hidden_BLd.device)
        if kept_BL.shape != hidden_BLd.shape[:-1]:
            raise ValueError(
                f"labels have the shape {tuple(kept_BL.shape)}, but the output layer got vectors for "
                f"{tuple(hidden_BLd.shape[:-1])} tokens; leave logits_to_keep out when you pass labels"
            )
        with self._precision(hidden_BLd):
            hidden_Nd = hidden_BLd[kept_BL]
            operands = linear_operands(hidden_Nd.float() if self.head.cast_lm_head_to_fp32 else hidden_Nd, layer)
            self.statistics = self._statistics_of_hidden(*operands)
        return self._loss(self.statistics.log_probs)

    def of_logits(self, phi_BLV: Tensor) -> Tensor:
        """The loss, from phi of logits that are stored anyway."""
        kept_BL = self.kept.to(phi_BLV.device)
        phi_NV = phi_BLV[kept_BL].to(compute_dtype(phi_BLV.dtype)) / self.head.temperature
        self.statistics = _statistics_of_phi(phi_NV, self.targets_N(phi_BLV.device), self.head.outputs)
        return self._loss(self.statistics.log_probs)

    @property
    def kept(self) -> Tensor:
        return self.labels_BL != IGNORED

    def targets_N(self, device: torch.device) -> Tensor:
        return self.labels_BL[self.kept].to(device)

    def _loss(self, log_probs_N: Tensor) -> Tensor:
        count = max(1, log_probs_N.numel()) if self.count is None else self.count
        return -log_probs_N.sum() / (count.to(log_probs_N.device) if isinstance(count, Tensor) else count)

    def _precision(self, hidden: Tensor) -> AbstractContextManager[Any]:
        cast = self.head.cast_lm_head_to_fp32
        return torch.autocast(hidden.device.type, enabled=False) if cast else nullcontext()

    def _statistics_of_hidden(self, hidden_Nd: Tensor, weight_Vd: Tensor, bias_V: Tensor | None) -> TokenStatistics:
        if self.scale != 1.0:
            hidden_Nd, bias_V = hidden_Nd * self.scale, None if bias_V is None else bias_V * self.scale
        asked, targets_N = self.head.outputs, self.targets_N(hidden_Nd.device)
        with float32_result(hidden_Nd):
            losses_N, extras = functional.linear_cross_entropy(
                hidden_Nd,
                weight_Vd,
                targets_N,
                function=self.function,
                linear_bias=bias_V,
                reduction="none",
                chunk_bytes=self.options.chunk_bytes,
                weight_gradient=self.options.weight_gradient,
                backend=self.options.backend,
                extras=[*(["entropy"] if "entropy" in asked else []), *(["argmax"] if "is_top1" in asked else [])],
            )
        chunks = PhiChunks.of(hidden_Nd, self.function, weight_Vd.shape[0], self.options.chunk_bytes)
        found = TokenStatistics(log_probs=-losses_N)
        if "entropy" in asked:
            values = {key: x for key, x in self.function.parameters.items() if isinstance(x, Tensor)}
            found.entropy = _Entropy.apply(
                extras.entropy, chunks, tuple(values), hidden_Nd, weight_Vd, bias_V, *values.values()
            )
        if "is_top1" in asked:
            assert extras.argmax is not None
            found.is_top1 = extras.argmax == targets_N
        others = tuple(name for name in asked if name in ("mean_logits", "log_sum_sq_probs"))
        if others:
            with torch.no_grad():
                parts = [
                    _statistics_of_phi(phi_nV, targets_N[span], others)
                    for span, phi_nV in chunks.phi(hidden_Nd, weight_Vd, bias_V)
                ]
            for name in others:
                empty = [losses_N.detach()[:0]]
                setattr(found, name, torch.cat([getattr(part, name) for part in parts] or empty))
        return found


def request(
    model: Any, adjustment: LogitAdjustment, labels: Tensor | None, shift_labels: Tensor | None, count: Count
) -> FusedRequest:
    """What a call with ``fused_lm_head=True`` asks of a patched model."""
    if model.fused_head is None:
        raise ValueError(
            "fused_lm_head=True is for a model that TRL gave a fused output layer; call "
            "trl.trainer.utils.add_fused_lm_head(model) first, or leave the argument out"
        )
    if model.training and any(model.loss_options.regularised(is_training=True)):
        raise ValueError(
            "z_loss and label_smoothing of apply_output_function have no effect on TRL's losses, which are made of "
            f"log-probabilities; got z_loss={model.loss_options.z_loss} and "
            f"label_smoothing={model.loss_options.label_smoothing}: leave them out, as in apply_output_function(model)"
        )
    return FusedRequest(
        head=model.fused_head,
        function=tempered(model.output_function.of_raw_logits(adjustment), model.fused_head.temperature),
        scale=adjustment.scale,
        options=model.loss_options,
        labels_BL=targets(labels, shift_labels, IGNORED),
        count=count,
    )


def answer(asked: FusedRequest, output: Any, *, is_shifted: bool) -> Any:
    """TRL's output, of what the forward pass of the model's own class returned."""
    from trl.trainer.utils import FusedCausalLMOutput

    assert asked.statistics is not None
    kept_BL = asked.kept.to(asked.statistics.log_probs.device)
    # Nothing follows the last token, so TRL has no place for it, unless the labels came shifted.
    placed_BL = kept_BL if is_shifted else kept_BL[:, :-1]

    def at_place(values_N: Tensor | None) -> Tensor | None:
        return None if values_N is None else values_N.new_zeros(placed_BL.shape).masked_scatter(placed_BL, values_N)

    fields = {field.name: getattr(asked.statistics, field.name) for field in dataclasses.fields(asked.statistics)}
    return FusedCausalLMOutput(
        loss=output.loss,
        label_mask=placed_BL,
        aux_loss=output.get("aux_loss"),
        **{name: at_place(values_N) for name, values_N in fields.items()},
    )


def _statistics_of_phi(phi_NV: Tensor, targets_N: Tensor, asked: tuple[str, ...]) -> TokenStatistics:
    log_p_NV = torch.log_softmax(phi_NV, -1)
    squares_NV = 2.0 * log_p_NV.detach()
    return TokenStatistics(
        log_probs=log_p_NV.gather(-1, targets_N[:, None])[:, 0],
        entropy=_entropy(log_p_NV) if "entropy" in asked else None,
        log_sum_sq_probs=torch.logsumexp(squares_NV, -1) if "log_sum_sq_probs" in asked else None,
        mean_logits=phi_NV.detach().mean(-1) if "mean_logits" in asked else None,
        is_top1=phi_NV.argmax(-1) == targets_N if "is_top1" in asked else None,
    )


def _entropy(log_p_NV: Tensor) -> Tensor:
    # A class of probability 0 adds nothing, and 0 times -inf is no number.
    return -(log_p_NV.exp() * log_p_NV.masked_fill(log_p_NV == -torch.inf, 0.0)).sum(-1)


@dataclass(frozen=True, kw_only=True)
class PhiChunks:
    """phi of the logits of hidden vectors, some rows at a time."""

    function: OutputFunction
    product_dtype: torch.dtype
    rows: int

    @classmethod
    def of(cls, hidden_Nd: Tensor, function: OutputFunction, num_classes: int, chunk_bytes: int | None) -> PhiChunks:
        kind = hidden_Nd.device.type
        is_cast = torch.is_autocast_enabled(kind) and hidden_Nd.dtype != torch.float64
        dtype = torch.get_autocast_dtype(kind) if is_cast else hidden_Nd.dtype
        row_bytes = num_classes * compute_dtype(dtype).itemsize
        rows = max(1, default_chunk_bytes(chunk_bytes, hidden_Nd.device) // row_bytes)
        return cls(function=function, product_dtype=dtype, rows=rows)

    def phi(
        self, hidden_Nd: Tensor, weight_Vd: Tensor, bias_V: Tensor | None, **parameters: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        function, dtype = self.function.with_parameters(**parameters), self.product_dtype
        weight_Vd, bias_V = weight_Vd.to(dtype), None if bias_V is None else bias_V.to(dtype)
        for start in range(0, hidden_Nd.shape[0], self.rows):
            span = slice(start, start + self.rows)
            logits_nV = F.linear(hidden_Nd[span].to(dtype), weight_Vd, bias_V)
            yield span, function.phi(logits_nV.to(compute_dtype(dtype)))


class _Entropy(torch.autograd.Function):
    """Entropies that are known, with a gradient that computes logits again, and only if somebody wants it."""

    @staticmethod
    def forward(
        ctx: Any,
        entropy_N: Tensor,
        chunks: PhiChunks,
        names: tuple[str, ...],
        hidden_Nd: Tensor,
        weight_Vd: Tensor,
        bias_V: Tensor | None,
        *values: Tensor,
    ) -> Tensor:
        ctx.chunks, ctx.names = chunks, names
        ctx.save_for_backward(hidden_Nd, weight_Vd, bias_V, *values)
        return entropy_N.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_N,) = gradients
        wanted = ctx.needs_input_grad[3:]
        with torch.enable_grad(), torch.autocast(gradient_N.device.type, enabled=False):
            leaves = [
                None if x is None else x.detach().requires_grad_(needed)
                for x, needed in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            hidden_Nd, weight_Vd, bias_V, *values = leaves
            parameters = dict(zip(ctx.names, values, strict=True))
            # backward, not grad: the gradients of all chunks are summed where they arrive.
            for span, phi_nV in ctx.chunks.phi(hidden_Nd, weight_Vd, bias_V, **parameters):
                entropy_n = _entropy(torch.log_softmax(phi_nV, -1))
                entropy_n.backward(gradient_N[span].to(entropy_n.dtype), retain_graph=False)
        return (None, None, None, *(x.grad if x is not None and x.requires_grad else None for x in leaves))
