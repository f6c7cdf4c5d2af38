"""One call of a loss: what its options mean, decided once for every backend.

Which tokens count, how weights and reductions go together, which dtype comes back.

Shapes: N tokens, K components, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sigsoftmax import validation
from sigsoftmax.backends import dispatch, reference, token_loss
from sigsoftmax.backends.chunks import token_scales
from sigsoftmax.backends.reference import scaled
from sigsoftmax.backends.shards import Shard
from sigsoftmax.border import (
    Function,
    check_floating,
    check_index,
    check_nonnegative,
    check_tensor,
    linear,
    needs_gradient,
    number,
)
from sigsoftmax.family import OutputFunction

if TYPE_CHECKING:
    from sigsoftmax.backends.triton.plans import Plan

Reduction = Literal["none", "mean", "sum"]
WeightGradient = Literal["auto", "fast", "buffered", "exact"]
EXTRAS = ("log_normalizer", "argmax", "entropy")


class Extras(NamedTuple):
    """What a loss can tell besides, detached, in the shape of the targets; None where it was not asked for."""

    log_normalizer: Tensor | None = None
    """log sum_j g(z_j); for a mixture one per component, (..., K)"""
    argmax: Tensor | None = None
    entropy: Tensor | None = None


class Loss:
    """One call of a loss: its options checked, then computed by a backend and reduced.

    With a ``shard``, ``num_classes`` counts those of this process, to which all that has a place for every class
    belongs, except the class weights: they are whole.
    """

    def __init__(
        self,
        *,
        leading: torch.Size,
        num_classes: int,
        dtype: torch.dtype,
        product_dtype: torch.dtype,
        function: Function,
        target: Tensor,
        class_weight: Tensor | None,
        token_weights: Tensor | None,
        ignore_index: int,
        reduction: Reduction,
        label_smoothing: float,
        z_loss: float,
        extras: Sequence[str] | None,
        backend: str | None,
        chunk_bytes: int,
        device: torch.device,
        floor: float = 0.0,
        weight_gradient: WeightGradient = "auto",
        shard: Shard | None = None,
    ) -> None:
        self.leading, self.num_classes = leading, num_classes
        self.dtype, self.product_dtype = dtype, product_dtype
        self.member = OutputFunction.parse(function)
        self.arguments = self.member.arguments(num_classes)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.z_loss = number("label_smoothing", label_smoothing), number("z_loss", z_loss)
        self.floor = number("floor", floor)
        self.extras, self.backend, self.chunk_bytes = extras or (), backend, chunk_bytes
        self.class_weight, self.token_weights = class_weight, token_weights
        self.wants_extras = extras is not None
        self.decision: dispatch.Decision | None = None
        self.shard = shard
        if weight_gradient not in get_args(WeightGradient):
            choices = ", ".join(map(repr, get_args(WeightGradient)))
            raise ValueError(f"weight_gradient must be one of {choices}, got {weight_gradient!r}")
        self.weight_gradient = weight_gradient
        if reduction not in ("none", "mean", "sum"):
            raise ValueError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
        check_index("ignore_index", ignore_index)
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing}")
        check_nonnegative("z_loss", z_loss)
        if isinstance(extras, str) or not isinstance(self.extras, Sequence):
            raise ValueError(f"extras must be a sequence of names, like ('argmax',), got {extras!r}")
        for name in self.extras:
            if name not in EXTRAS:
                raise ValueError(f"unknown extra {name!r}; known: {', '.join(EXTRAS)}")
        self.target = self._flat_target(target, device)
        if class_weight is not None:
            check_floating("weight", class_weight)
            all_classes = num_classes if shard is None else shard.num_classes
            if class_weight.shape != (all_classes,):
                raise ValueError(
                    f"weight must hold one number per class, shape ({all_classes},), got {tuple(class_weight.shape)}"
                )
        if token_weights is not None:
            check_floating("token_weights", token_weights)
            if token_weights.shape != leading:
                raise ValueError(
                    f"token_weights must have the shape {tuple(leading)}, one number per token, "
                    f"got {tuple(token_weights.shape)}"
                )
        for name, tensor in (("target", target), ("weight", class_weight), ("token_weights", token_weights)):
            if tensor is not None and tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, but the input is on {device}; move it there")

    def _flat_target(self, target: Tensor, device: torch.device) -> Tensor:
        check_tensor("target", target)
        dense_shape = (*self.leading, self.num_classes)
        if target.is_floating_point():
            if target.shape != dense_shape:
                raise ValueError(
                    f"probability targets must have a number per token and class, shape {dense_shape} (classes last), "
                    f"got {tuple(target.shape)}; class indices must be integers, got {target.dtype}"
                )
            if self.ignore_index >= 0:
                raise ValueError("ignore_index goes with class indices, not with probability targets")
            return target.reshape(-1, self.num_classes)
        if target.dtype == torch.bool or target.is_complex():
            raise ValueError(f"target must hold class indices (int64) or probabilities (floating), got {target.dtype}")
        if target.shape != self.leading:
            raise ValueError(
                f"target must hold one class index per token, shape {tuple(self.leading)}, got {tuple(target.shape)}"
            )
        return target.reshape(-1).long().contiguous()

    def plan(
        self, input: Tensor, linear_weight: Tensor | None, linear_bias: Tensor | None, target: Tensor
    ) -> Plan | None:
        """How this loss and those like it are computed by one kernel, where that is the way."""
        if not self._may_be_planned(input, linear_weight, linear_bias, target):
            return None
        from sigsoftmax.backends.triton import plans

        return plans.plan_of(
            self.member.form,
            self.arguments,
            input,
            linear_weight,
            linear_bias,
            target,
            label_smoothing=self.label_smoothing,
            **self._plan_options(),
        )

    def mixture_plan(
        self,
        input: Tensor,
        prior_logits: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        prior: OutputFunction,
    ) -> Plan | None:
        if not (prior.is_fixed and self._may_be_planned(input, prior_logits, linear_weight, linear_bias, target)):
            return None
        from sigsoftmax.backends.triton import mixture_plans

        return mixture_plans.plan_of(
            self.member.form,
            self.arguments,
            prior.form,
            prior.arguments(prior_logits.shape[-1]),
            input,
            prior_logits,
            linear_weight,
            linear_bias,
            target,
            floor=self.floor,
            weight_gradient=self.weight_gradient,
            **self._plan_options(),
        )

    def _plan_options(self) -> dict[str, Any]:
        """Those that every plan depends on."""
        return {
            "is_mean": self.reduction == "mean",
            "ignore_index": self.ignore_index,
            "z_loss": self.z_loss,
            "dtype": self.dtype,
            "product_dtype": self.product_dtype,
            "chunk_bytes": self.chunk_bytes,
        }

    def _may_be_planned(self, *tensors: Tensor | None) -> bool:
        everything = (*tensors, *self.arguments)
        self.decision = dispatch.decision(self.backend, self.member.form, self.product_dtype, everything)
        return self.decision.backend == "triton" and self.reduction != "none" and self.member.is_fixed

    def compute(
        self,
        hidden_NKd: Tensor,
        linear_weight: Tensor | None,
        linear_bias: Tensor | None,
        log_prior_NK: Tensor | None,
    ) -> Tensor | tuple[Tensor, Extras]:
        tensors = (hidden_NKd, linear_weight, linear_bias, log_prior_NK, *self.arguments)
        probabilities = self.target if self.target.is_floating_point() else None
        rare = next((t for t in (probabilities, self.class_weight) if needs_gradient(t)), None)
        everything = (*tensors, self.target, self.class_weight, self.token_weights)
        backend = dispatch.choose(
            self.backend, self.member.form, self.product_dtype, everything, needs_autograd_of=rare
        )
        if backend == "reference" and self.shard is not None:
            raise ValueError(
                "backend 'reference' cannot be used: it needs all classes in one process, and those of a "
                f"vocabulary-parallel loss are spread over {len(self.shard.sizes)} ({dispatch.explain()}); gather the "
                "weight and use the functions of sigsoftmax itself"
            )
        is_none, is_mean = self.reduction == "none", self.reduction == "mean"
        scale_N = is_empty = None
        if self.token_weights is not None or backend == "reference":
            scale_N, is_empty = token_scales(
                self.target,
                None if self.token_weights is None else self.token_weights.reshape(-1),
                self.class_weight,
                self.ignore_index,
                reference.compute_dtype(self.product_dtype),
                is_mean=is_mean,
            )
        if backend == "reference":
            results = self._reference(hidden_NKd, linear_weight, linear_bias, log_prior_NK)
            losses_N, log_normalizer_NK, argmax_N, entropy_N = results
            total = None
        else:
            needs = [needs_gradient(t) for t in tensors[:4]] + [any(map(needs_gradient, self.arguments))]
            has_gradients = any(needs) and not is_none
            total, losses_N, log_normalizer_NK, argmax_N, entropy_N = token_loss.token_loss(
                hidden_NKd,
                linear_weight,
                linear_bias,
                log_prior_NK,
                self.arguments,
                self.target,
                self.class_weight,
                scale_N if scale_N is None or has_gradients else scale_N.detach(),
                is_mean,
                self.member.form.name,
                backend,
                self.label_smoothing,
                self.z_loss,
                self.floor,
                self.ignore_index,
                self.chunk_bytes,
                self.weight_gradient,
                self.product_dtype,
                "argmax" in self.extras,
                "entropy" in self.extras,
                has_gradients,
                needs,
                shard=self.shard,
            )
            if not has_gradients and needs_gradient(scale_N):
                total = None
        if is_none:
            loss = losses_N if scale_N is None else scaled(losses_N, scale_N)
            loss = loss.view(self.leading)
        else:
            if total is None:
                assert scale_N is not None
                total = scaled(losses_N, scale_N).sum()
            loss = total if is_empty is None else torch.where(is_empty, torch.full_like(total, torch.nan), total)
        loss = loss.to(self.dtype)
        if not self.wants_extras:
            return loss
        return loss, self._extras(log_normalizer_NK, argmax_N, entropy_N, is_mixture=log_prior_NK is not None)

    def _reference(
        self,
        hidden_NKd: Tensor,
        linear_weight: Tensor | None,
        linear_bias: Tensor | None,
        log_prior_NK: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if not torch.compiler.is_compiling() and not torch._C._functorch.is_functorch_wrapped_tensor(self.target):
            validation.check_target(self.target, self.num_classes, self.ignore_index)
            if self.class_weight is not None:
                validation.check_class_weight(self.class_weight)
        if linear_weight is None:
            logits_NKV = hidden_NKd
        else:
            gradient_dtype = reference.gradient_dtype(self.member.form, self.arguments, self.product_dtype)
            logits_NKV = linear(hidden_NKd, linear_weight, linear_bias, self.product_dtype, gradient_dtype)
        results = reference.token_losses(
            logits_NKV,
            log_prior_NK,
            self.member.form,
            self.arguments,
            self.target,
            class_weight_V=self.class_weight,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            floor=self.floor,
            ignore_index=self.ignore_index,
        )
        log_p = results.log_probs_NV
        return results.losses_N, results.log_normalizer_NK, log_p.argmax(-1), reference.entropy(log_p)

    def _extras(self, log_normalizer_NK: Tensor, argmax_N: Tensor, entropy_N: Tensor, *, is_mixture: bool) -> Extras:
        normalizer_shape = (*self.leading, log_normalizer_NK.shape[1]) if is_mixture else self.leading
        return Extras(
            log_normalizer_NK.detach().view(normalizer_shape) if "log_normalizer" in self.extras else None,
            argmax_N.detach().view(self.leading) if "argmax" in self.extras else None,
            entropy_N.detach().view(self.leading) if "entropy" in self.extras else None,
        )
