"""A mixture of output functions on the output layer of a patched model.

The K components share the model's output matrix. Their latent vectors and the prior are made of the vector h that
enters the output layer, so a mixture is a function of hidden vectors and not of logits: the hook before the output
layer hands them over (``output_layer_hook``), and the layer's own product is not computed.

The logits of a patched model are log P + sum_k pi_k n_k, with P the mixture's probability, pi the prior and n_k the log
normalisers of the components. Their softmax is P, and they lie where the logits of a single component would: components
that are equal give exactly phi of the model's logits.

Shapes: (..., d) hidden vectors, (..., K, d) latent vectors, V classes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sigsoftmax.contract.rows import compute_dtype
from sigsoftmax.contract.spec import prior_of
from sigsoftmax.contract.statistics import TokenStatistics
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.heads import Head
from sigsoftmax.integrations.huggingface.examination.output_layers import Examined
from sigsoftmax.integrations.huggingface.patching.head_function import (
    HeadFunction,
    LinearLogits,
    LinearMap,
    examined_in,
    float32_result,
    whole,
)
from sigsoftmax.layers.mixture import latent_vectors, with_plain_numbers
from sigsoftmax.losses import functional
from sigsoftmax.losses.token_statistics import mixture_token_statistics

DEFAULT_LATENT = "residual"
"""The latent vectors with which a trained model begins as the model that it is."""


class MixtureHead(HeadFunction):
    """A mixture that a patched model holds as ``model.output_function``, beside the parameters of its member.

    ``prior_weight`` (K, d) begins at random. With residual latent vectors, h + A_k h, ``latent_weight`` (K d, d) begins
    as zero: all components are equal, and the model gives the probabilities that its member would give alone. They part
    in training, since the gradient of component k is pi_k(h) times the one that all have in common.
    """

    takes_hidden = True

    def __init__(self, head: Head, examined: Examined, features: int, *, frozen: tuple[str, ...] = ()) -> None:
        if examined.why_stored is not None:
            raise ValueError(
                f"{head} is computed from the vectors that enter the output layer, which this model does not allow: "
                f"{examined.why_stored}. Use a single output function, such as {head.function}, or a model "
                "whose output layer is a plain linear map"
            )
        super().__init__(head.function, examined, frozen=frozen)
        head = completed(head)
        self.components, self.features = head.components, features
        self.latent, self.prior_function = str(head.latent), str(head.prior)
        is_residual = self.latent == "residual"
        rows = self.components * features
        self.prior_weight = nn.Parameter(_random(self.components, features))
        self.latent_weight = nn.Parameter(torch.zeros(rows, features) if is_residual else _random(rows, features))
        self.latent_bias = None if is_residual else nn.Parameter(torch.zeros(rows))

    @property
    def is_plain_softmax(self) -> bool:
        return False

    def head(self, member: str) -> Head:
        """The mixture of a member, with all options."""
        return Head(
            OutputFunction.parse(member), self.components, self.latent, OutputFunction.parse(self.prior_function)
        )

    def forward(self, logits: Tensor) -> Tensor:
        return self.transformed(logits)

    def transformed(self, logits: Tensor) -> Tensor:
        raise ValueError(
            f"{self.described()} is a function of hidden vectors, not of logits: the logits that the model returns are "
            "those of the mixture already"
        )

    def cross_entropy(self, logits: Tensor, targets: Tensor, *, are_transformed: bool = False, **options: Any) -> Any:
        if not are_transformed:
            self.transformed(logits)
        if options.get("z_loss"):
            raise ValueError(
                "z_loss of a mixture needs the log normalisers of its components, which logits do not hold; call the "
                "model with labels, or leave z_loss out"
            )
        return super().cross_entropy(logits, targets, are_transformed=True, **options)

    def linear(self, hidden: Tensor, layer: LinearMap) -> MixtureLogits:
        """The mixture of hidden vectors."""
        self.check_values(on_meta=hidden.is_meta)
        weight, bias = whole(self.latent_weight).to(hidden.dtype), whole(self.latent_bias)
        bias = None if bias is None else bias.to(hidden.dtype)
        latent = latent_vectors(hidden, weight, bias, components=self.components, latent=self.latent)
        wide = compute_dtype(hidden.dtype)
        # K numbers per token: half precision would save nothing.
        with torch.autocast(hidden.device.type, enabled=False):
            prior_logits = F.linear(hidden.to(wide), whole(self.prior_weight).to(wide))
        one = super().linear(latent, layer)
        fields = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
        return MixtureLogits(**fields, prior_logits=prior_logits, prior_function=self.prior_function)

    def stored(self) -> dict[str, Any]:
        member = super().stored()
        return {**member, "function": str(self.head(member["function"])), "features": self.features}

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> MixtureHead:
        head = Head.parse(stored["function"], allow_options=True)
        return cls(head, examined_in(stored), stored["features"], frozen=tuple(stored["frozen"]))

    def described(self) -> str:
        return str(self.head(super().described()))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, components={self.components}, latent={self.latent!r}"


@dataclass(frozen=True, kw_only=True)
class MixtureLogits(LinearLogits):
    """The mixture of latent vectors, which take the place of ``hidden`` as (..., K, d)."""

    prior_logits: Tensor
    prior_function: str

    @property
    def _keywords(self) -> dict[str, Any]:
        return {"function": self.function, "prior_function": self.prior_function, "linear_bias": self.bias_V}

    def cross_entropy(self, targets: Tensor, **options: Any) -> Any:
        """:func:`sigsoftmax.mixture_cross_entropy`; a pair with extras if ``options`` ask for these."""
        with float32_result(self.hidden):
            return functional.mixture_cross_entropy(
                self.hidden, self.prior_logits, self.weight_Vd, targets, **self._keywords, **options
            )

    def token_statistics(self, targets: Tensor, **options: Any) -> TokenStatistics:
        """:func:`sigsoftmax.mixture_token_statistics`, whose results are in float32 or better."""
        return mixture_token_statistics(
            self.hidden, self.prior_logits, self.weight_Vd, targets, **self._keywords, **options
        )

    def tempered(self, temperature: float) -> tuple[Self, float]:
        # A temperature divides log P, which is no mixture of tempered components.
        return self, temperature

    def rows(self, span: slice) -> Self:
        return dataclasses.replace(self, hidden=self.hidden[span], prior_logits=self.prior_logits[span])

    def logits(self) -> Tensor:
        """log P + sum_k pi_k n_k; what is added to a row is a constant to the gradient."""
        # With many classes log P lies far below 0, where half precision has few digits; logits do not.
        with float32_result(self.hidden):
            log_p, extras = functional.mixture_log_probs(
                self.hidden, self.prior_logits, self.weight_Vd, **self._keywords, extras=["log_normalizer"]
            )
        assert extras.log_normalizer is not None
        prior = functional.probs(self.prior_logits.detach(), function=self.prior_function)
        return log_p + (prior * extras.log_normalizer).sum(-1, keepdim=True)


def completed(head: Head) -> Head:
    """A mixture with the options that it has on a model where it does not name others; any other head as it is."""
    if head.components == 1:
        return head
    # By the member itself: the model's scale and cap make another function of it.
    prior = with_plain_numbers(prior_of(head.function, head.prior))
    return dataclasses.replace(head, latent=head.latent or DEFAULT_LATENT, prior=OutputFunction.parse(prior))


def made_head(head: Head, examined: Examined, features: int, *, frozen: tuple[str, ...] = ()) -> HeadFunction:
    """The output function of a patched model whose output layer takes vectors of so many features."""
    if head.components == 1:
        return HeadFunction(head.function, examined, frozen=frozen)
    return MixtureHead(head, examined, features, frozen=frozen)


def restored_head(stored: Mapping[str, Any]) -> HeadFunction:
    """The counterpart of ``stored()``."""
    kind = HeadFunction if Head.parse(stored["function"], allow_options=True).components == 1 else MixtureHead
    return kind.restored(stored)


def _random(rows: int, features: int) -> Tensor:
    """A matrix as nn.Linear begins with it."""
    bound = 1.0 / math.sqrt(features)
    return torch.empty(rows, features).uniform_(-bound, bound)
