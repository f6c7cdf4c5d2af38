"""Random calls whose numbers lie near the ends of a dtype, and what their results are in float64.

phi of extreme logits overflows in float32 and not in float64, where losses are plain torch. What is compared is what
fits the dtype of the call: it must be finite, and losses must be right.

Shapes: N tokens, K components, V classes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.tables import MEMBERS, Member, by_label, plain_reduce
from torch import Tensor
from torch.nn import functional as F

import sigsoftmax

LABELS = [m.label for m in MEMBERS if m.registers is None and not m.per_class]
PRIORS = ("softmax", "sigsoftmax", "sigmoid", "gss(k=-1)")
KINDS = ("logits", "linear", "mixture")


@dataclass(frozen=True)
class Call:
    """A loss of extreme logits, and all that it is given."""

    kind: str
    member: Member
    prior: Member
    logits_NKV: Tensor
    prior_logits_NK: Tensor
    target: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        logits, prior = self.logits_NKV.tolist(), self.prior_logits_NK.tolist()
        return (
            f"{self.kind}, {self.member}, {logits}, prior {self.prior} {prior}, {self.target.tolist()}, {self.options}"
        )

    def run(self, backend: str, device: torch.device | str = "cpu") -> tuple[Tensor, list[Tensor]]:
        """The loss, and its gradients by the logits, the prior's logits and the weights of tokens."""
        options = {key: v.to(device) if isinstance(v, Tensor) else v for key, v in self.options.items()}
        target = self.target.to(device)
        options |= {"function": self.member.make(self.logits_NKV.shape[-1]), "backend": backend}
        logits, prior = (t.to(device).requires_grad_() for t in (self.logits_NKV, self.prior_logits_NK))
        leaves = [logits, prior] if self.kind == "mixture" else [logits]
        if options.get("token_weights") is not None and backend != "reference":
            # Autograd multiplies a loss that overflows before it divides it by the number of tokens.
            leaves.append(options["token_weights"].requires_grad_())
        identity = torch.eye(logits.shape[-1], dtype=logits.dtype, device=device)
        if self.kind == "logits":
            loss = sigsoftmax.cross_entropy(logits[:, 0], target, **options)
        elif self.kind == "linear":
            loss = sigsoftmax.linear_cross_entropy(logits[:, 0], identity, target, **options)
        else:
            prior_function = self.prior.make(logits.shape[1])
            loss = sigsoftmax.mixture_cross_entropy(
                logits, prior, identity, target, prior_function=prior_function, **options
            )
        gradients = torch.autograd.grad(loss, leaves, torch.ones_like(loss))
        return loss.detach().cpu(), [gradient.cpu() for gradient in gradients]

    def truth(self) -> tuple[Tensor, list[Tensor]]:
        """The same in float64, from phi less its largest value: a normaliser near 1e38 has no digits of a logarithm."""
        logits, prior = (t.double().requires_grad_() for t in (self.logits_NKV, self.prior_logits_NK))
        options = {key: v.double() if isinstance(v, Tensor) else v for key, v in self.options.items()}
        leaves = [logits, prior] if self.kind == "mixture" else [logits]
        weights, class_weight = options.get("token_weights"), options.get("weight")
        if weights is not None:
            leaves.append(weights.requires_grad_())
        phi_NKV = self.member.phi(logits)
        joint_NKV = torch.log_softmax(phi_NKV, -1)
        prior_NK = torch.ones_like(prior)
        if self.kind == "mixture":
            log_prior_NK = torch.log_softmax(self.prior.phi(prior), -1)
            joint_NKV = joint_NKV + log_prior_NK.unsqueeze(-1)
            prior_NK = log_prior_NK.detach().exp()
        log_p_NV = torch.logsumexp(joint_NKV, 1)
        classes, smoothing = log_p_NV.shape[-1], options["label_smoothing"]
        hot_NV = self.target.double() if self.target.is_floating_point() else F.one_hot(self.target, classes).double()
        shares_NV = hot_NV * (1.0 - smoothing) + smoothing / classes
        if class_weight is not None:
            shares_NV = shares_NV * class_weight
        squares_N = (prior_NK * torch.logsumexp(phi_NKV, -1).square()).sum(-1)
        losses_N = -(shares_NV * log_p_NV).sum(-1) + options["z_loss"] * squares_N
        loss = plain_reduce(
            losses_N, self.target, reduction=options["reduction"], weight=class_weight, token_weights=weights
        )
        return loss.detach(), list(torch.autograd.grad(loss, leaves, torch.ones_like(loss)))


def random_call(seed: int, dtype: torch.dtype) -> Call:
    """Everything but the dtype is drawn."""
    draw = random.Random(seed)
    info = torch.finfo(dtype)
    tokens, classes, kind = draw.choice([1, 2, 4]), draw.choice([2, 3, 5]), draw.choice(KINDS)
    components = draw.choice([2, 3]) if kind == "mixture" else 1
    shares = (1.0, 0.9, 0.7, 0.5, 1e-8, 1e-18)
    pool = [sign * share * info.max for sign in (1.0, -1.0) for share in shares]
    pool += [0.0, 1.0, -50.0, 50.0, info.tiny, -info.tiny]
    # Few different numbers make rows that meet an end of the dtype from both sides.
    pool = draw.sample(pool, 4)

    def numbers(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.tensor([draw.choice(pool) for _ in range(count)], dtype=torch.float64).to(dtype).view(shape)

    logits, prior = numbers(tokens, components, classes), numbers(tokens, components)
    target = torch.tensor([draw.randrange(classes) for _ in range(tokens)])
    if draw.random() < 0.3:
        target = F.one_hot(target, classes).float() * 0.9 + 0.1 / classes
    options: dict[str, Any] = {
        "reduction": draw.choice(["mean", "sum", "none"]),
        "label_smoothing": draw.choice([0.0, 0.0, 0.1]),
        "z_loss": draw.choice([0.0, 0.0, 1e-4, 1e-30]),
    }
    if draw.random() < 0.5:
        options["weight"] = torch.tensor([draw.choice([1.0, 0.1, 0.01]) for _ in range(classes)])
    if draw.random() < 0.5:
        options["token_weights"] = torch.tensor([draw.choice([1.0, 0.25, 0.01, 0.0]) for _ in range(tokens)])
        options["token_weights"][0] = 0.25
    prior_member = by_label[draw.choice(PRIORS)]
    return Call(kind, by_label[draw.choice(LABELS)], prior_member, logits, prior, target, options)


def assert_sound(call: Call, backend: str, device: torch.device | str = "cpu") -> None:
    """No result is NaN, what fits its dtype is finite, and a loss that fits is right."""
    loss, gradients = call.run(backend, device)
    exact_loss, exact_gradients = call.truth()
    for found, exact in zip((loss, *gradients), (exact_loss, *exact_gradients), strict=False):
        fits = exact.abs() < 0.9 * torch.finfo(found.dtype).max
        assert not found.isnan().any(), call
        assert found[fits].isfinite().all(), call
    fits = exact_loss.abs() < 0.9 * torch.finfo(loss.dtype).max
    eps = max(torch.finfo(loss.dtype).eps, 1e-5)
    torch.testing.assert_close(loss[fits].double(), exact_loss[fits], rtol=2.0 * eps, atol=2.0 * eps, msg=str(call))


def assert_ignored_rows_reach_nothing(
    kind: str, smoothing: float, backend: str, device: torch.device | str = "cpu"
) -> None:
    """Rows that are ignored, or of weight 0, whatever they hold: their losses and gradients are exactly 0.

    Extras do not depend on the target: those of a row that is not finite are NaN, ignored or not.
    """
    generator = torch.Generator().manual_seed(3)
    logits, prior = torch.randn(6, 2, 4, generator=generator), torch.randn(6, 2, generator=generator)
    # A row of NaN, one with inf, and one whose classes are all masked; of the mixture all components or one.
    logits[0], logits[2, :, 1], logits[4, 0] = torch.nan, torch.inf, -torch.inf
    prior[2, 0] = torch.nan
    target, weights = torch.tensor([-100, 1, -100, 2, 3, 0]), torch.tensor([1.0, 1.0, 1.0, 0.5, 0.0, 2.0])
    out, kept, everything = [0, 2, 4], [1, 3, 5], list(range(6))
    identity = torch.eye(4, device=device)

    def results(rows: list[int], **options: Any) -> tuple[Tensor, Any, list[Tensor]]:
        z, p, t = (x[rows].to(device, copy=True).requires_grad_() for x in (logits, prior, weights))
        y = target[rows].to(device)
        if kind == "mixture":
            loss, extras = sigsoftmax.mixture_cross_entropy(z, p, identity, y, token_weights=t, **options)
        elif kind == "linear":
            loss, extras = sigsoftmax.linear_cross_entropy(z[:, 0], identity, y, token_weights=t, **options)
        else:
            loss, extras = sigsoftmax.cross_entropy(z[:, 0], y, token_weights=t, **options)
        leaves = [t, z, p] if kind == "mixture" else [t, z]
        return loss, extras, list(torch.autograd.grad(loss.sum(), leaves))

    for function in ("softmax", "sigsoftmax", "relu", "gss(k=0.2)", "gss(k=-1)"):
        for reduction in ("mean", "sum", "none"):
            options: dict[str, Any] = {"label_smoothing": smoothing, "z_loss": 0.01, "reduction": reduction}
            options |= {"function": function, "backend": backend, "extras": ("log_normalizer", "entropy")}
            loss, extras, (by_weights, *found) = results(everything, **options)
            expected_loss, expected_extras, (expected_by_weights, *expected) = results(kept, **options)
            if reduction == "none":
                assert (loss[out] == 0).all(), function
                loss = loss[kept]
            pairs = [(loss, expected_loss), (by_weights[kept], expected_by_weights)]
            pairs += [(a[kept], e) for a, e in zip(found, expected, strict=True)]
            names = ("log_normalizer", "entropy")
            pairs += [(getattr(extras, name)[kept], getattr(expected_extras, name)) for name in names]
            for a, e in pairs:
                torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)
            for gradient in found:
                assert (gradient[out] == 0).all(), function
            assert (by_weights[[0, 2]] == 0).all(), function
            assert extras.entropy[out].isnan().all(), function
