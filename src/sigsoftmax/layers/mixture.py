"""Mixtures of output functions as a layer: MoS (softmax) and MoSS (sigsoftmax).

Shapes: (..., h) input of the layer, K components, d latent features, V classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigsoftmax._old_calls import function_was_positional
from sigsoftmax.contract.rows import compute_dtype
from sigsoftmax.contract.spec import Function, check_nonnegative, check_positive, prior_of
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.heads import Latent, check_latent
from sigsoftmax.layers.output_layer import (
    Device,
    OutputModule,
    check_bias,
    log_probs_to_draw,
    sample_from,
)
from sigsoftmax.losses import functional


def latent_vectors(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, components: int, latent: str) -> Tensor:
    """The latent vectors (..., K, d) of hidden vectors (..., h), given a weight (K d, h) and a bias (K d)."""
    product = F.linear(hidden, weight, bias).unflatten(-1, (components, -1))
    if latent == "residual":
        return hidden.unsqueeze(-2) + product
    return torch.tanh(product) if latent == "tanh" else product


class MixtureOutputLayer(OutputModule):
    """K output functions over one output matrix, mixed by a prior that depends on the input.

    prior logits = input W_pi (no bias); latent_k = tanh(input W_k + b_k) with ``latent="tanh"``, input W_k + b_k with
    ``"linear"``, and input + input A_k with ``"residual"``, where A_k begins as zero and the widths must be equal. They
    are dropped out by ``latent_dropout`` (a module on (..., K d)); logits_k = latent_k W^T + bias. ``floor`` adds a
    constant to every probability in :meth:`loss` and :meth:`log_probs`; 1e-8 is the published code's. ``weight`` (V, d)
    ties the output matrix to another one. ``device`` and ``dtype`` are those of the parameters that the layer makes.
    """

    latent_kind: str = "tanh"
    """The kind of latent vectors; a layer that was pickled without this attribute has the default."""

    @function_was_positional(
        *("in_features", "latent_features", "num_classes", "components", "function", "prior_function"),
        *("bias", "weight", "latent_dropout", "floor", "latent"),
    )
    def __init__(
        self,
        in_features: int,
        latent_features: int,
        num_classes: int,
        components: int,
        bias: bool = True,
        *,
        function: Function = "sigsoftmax",
        prior_function: Function | None = None,
        weight: Tensor | None = None,
        latent: Latent = "tanh",
        latent_dropout: nn.Module | None = None,
        floor: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(
            in_features=in_features, latent_features=latent_features, num_classes=num_classes, components=components
        )
        check_bias(bias)
        check_latent(latent)
        is_residual = latent == "residual"
        if is_residual and in_features != latent_features:
            raise ValueError(
                f"latent='residual' adds to the input, so latent_features must be in_features, {in_features}; got "
                f"{latent_features}: make them equal, or use latent='linear'"
            )
        super().__init__(function, num_classes, device=device, dtype=dtype)
        self.latent_features = latent_features
        self.components = components
        self.prior_function = None if prior_function is None else with_plain_numbers(prior_function)
        self.prior = nn.Linear(in_features, components, bias=False, device=device, dtype=dtype)
        self.latent_kind = latent
        self.latent = nn.Linear(
            in_features, components * latent_features, bias=not is_residual, device=device, dtype=dtype
        )
        if is_residual:
            nn.init.zeros_(self.latent.weight)
        self.latent_dropout = nn.Identity() if latent_dropout is None else latent_dropout
        self._add_output_matrix(weight, num_classes, latent_features, bias, device, dtype)
        check_nonnegative("floor", floor)
        self.floor = floor

    def latent_vectors(self, hidden: Tensor) -> Tensor:
        """(..., K, d)"""
        weight, bias, count = self.latent.weight, self.latent.bias, self.components
        latent = latent_vectors(hidden, weight, bias, components=count, latent=self.latent_kind)
        return self.latent_dropout(latent.flatten(-2)).unflatten(-1, (count, self.latent_features))

    def log_probs(self, hidden: Tensor) -> Tensor:
        """(..., V), without the (..., K, V) of its components."""
        return functional.mixture_log_probs(
            self.latent_vectors(hidden),
            self.prior(hidden),
            self.weight,
            function=self.function,
            prior_function=self.prior_function,
            linear_bias=self.bias,
            floor=self.floor,
        )

    def _loss(self, losses: Any, hidden: Tensor, target: Tensor, **options: Any) -> Any:
        return losses.mixture_cross_entropy(
            self.latent_vectors(hidden),
            self.prior(hidden),
            self.weight,
            target,
            function=self.function,
            prior_function=self.prior_function,
            **{"floor": self.floor, **options},
        )

    @torch.no_grad()
    def sample(
        self, hidden: Tensor, num_samples: int | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Classes drawn from the mixture: (...), or (..., num_samples). The component is drawn first.

        One (..., V) at a time is computed, as often as there are samples or, if these are fewer, components.
        """
        count = 1 if num_samples is None else num_samples
        check_positive(num_samples=count)
        prior_logits = self.prior(hidden)
        prior_function = prior_of(self.function, self.prior_function)
        log_priors = functional.log_probs(prior_logits.to(compute_dtype(prior_logits.dtype)), function=prior_function)
        component = sample_from(log_priors, count, 1.0, generator)
        latent = self.latent_vectors(hidden)
        drawn = torch.empty_like(component)
        if count < self.components:
            index = component.unsqueeze(-1).expand(*component.shape, self.latent_features)
            chosen = latent.gather(-2, index)
            for sample in range(count):
                drawn[..., sample] = self._drawn_from(chosen[..., sample, :], None, generator)
        else:
            for k in range(self.components):
                of_component = self._drawn_from(latent[..., k, :], count, generator)
                drawn = torch.where(component == k, of_component, drawn)
        return drawn.squeeze(-1) if num_samples is None else drawn

    def _drawn_from(self, latent: Tensor, num_samples: int | None, generator: torch.Generator | None) -> Tensor:
        logits = nn.functional.linear(latent, self.weight, self.bias)
        return sample_from(log_probs_to_draw(logits, self.function), num_samples, 1.0, generator)

    def extra_repr(self) -> str:
        sizes = f"components={self.components}, num_classes={self.num_classes}"
        return f"{sizes}, latent={self.latent_kind!r}, {super().extra_repr()}"


def with_plain_numbers(prior_function: Function) -> str:
    """The text of the prior's member: the layer has no place for tensors of the prior's own."""
    prior = OutputFunction.parse(prior_function)
    for key, value in prior.given.items():
        if not isinstance(value, float):
            raise ValueError(
                f"parameter {key!r} of the prior's {prior.name!r} must be a plain number, got {type(value).__name__}; "
                "the layer learns parameters of its function, not of prior_function"
            )
    return str(prior)
