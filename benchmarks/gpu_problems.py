"""Inputs of the GPU benchmark, and the gradients that its losses should have.

The truth is computed in float64 for all tokens and classes, a chunk of tokens at a time. Beside it stands plain torch
with logits of the same dtype as the loss under test: rounded logits, float32 arithmetic on them, a rounded gradient of
all logits, and one product over all tokens for the gradient of the weight. It is computed chunk by chunk too, which
changes nothing but the memory it takes.

Shapes: N tokens, K components, V classes, d features; n tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

DEVIATIONS = (1.0, 3.0)
"""standard deviations of the logits at which gradients are judged"""
PEAKS = (18.0, 15.0, 13.0, 12.0)
"""the height of some classes of each token where logits are peaked; the first one gets about 0.9 of the mass"""
CHUNK_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Inputs of a loss, those that want a gradient being leaves. Logits are given if there is no ``weight``."""

    hidden: Tensor
    """(N, d), or (N, K, d) with a prior; (N, V) logits without a weight"""
    target: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    prior: Tensor | None = None
    product_dtype: torch.dtype
    """dtype of the logits; where the weight has another, products run under autocast"""

    @property
    def leaves(self) -> dict[str, Tensor]:
        """By name, as gradients are reported."""
        if self.weight is None:
            return {"logits": self.hidden}
        named = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias, "prior": self.prior}
        return {name: leaf for name, leaf in named.items() if leaf is not None}

    @property
    def is_cast(self) -> bool:
        return self.weight is not None and self.weight.dtype != self.product_dtype

    def gradients(self, loss: Callable[[Problem], Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.leaves, torch.autograd.grad(loss(self), list(self.leaves.values())), strict=True))


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).requires_grad_()


def _peaked_classes(tokens: int, classes: int, device: str) -> tuple[Tensor, Tensor]:
    """(N, 4) classes that stand out, and targets: the first of them for about two tokens in three, else another."""
    standing_out = torch.randint(classes, (tokens, len(PEAKS)), device=device)
    place = torch.randint(3 * len(PEAKS), (tokens, 1), device=device)
    place = torch.where(place < len(PEAKS), place, torch.zeros_like(place))
    return standing_out, standing_out.gather(1, place).squeeze(1)


def logits_problem(device: str, tokens: int, classes: int, *, deviation: float = 1.0, peaked: bool = False) -> Problem:
    logits = torch.randn(tokens, classes, device=device, dtype=torch.bfloat16)
    if deviation != 1.0:
        logits *= deviation
    target = torch.randint(classes, (tokens,), device=device)
    if peaked:
        standing_out, target = _peaked_classes(tokens, classes, device)
        peaks = torch.tensor(PEAKS, device=device, dtype=logits.dtype)
        logits.scatter_add_(1, standing_out, peaks.expand(tokens, -1).contiguous())
    return Problem(hidden=logits.requires_grad_(), target=target, product_dtype=logits.dtype)


def linear_problem(
    device: str,
    tokens: int,
    features: int,
    classes: int,
    *,
    deviation: float = 1.0,
    peaked: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    product_dtype: torch.dtype = torch.bfloat16,
    has_bias: bool = False,
) -> Problem:
    """Hidden vectors and a weight whose logits have the given standard deviation."""
    hidden = torch.randn(tokens, features, device=device)
    weight = torch.randn(classes, features, device=device) * (deviation / features**0.5)
    target = torch.randint(classes, (tokens,), device=device)
    if peaked:
        standing_out, target = _peaked_classes(tokens, classes, device)
        # The squared length of a row of the weight is about deviation^2.
        for place, peak in enumerate(PEAKS):
            hidden += (peak / deviation**2) * weight[standing_out[:, place]]
    return Problem(
        hidden=_leaf(hidden, dtype),
        weight=_leaf(weight, dtype),
        bias=_leaf(0.1 * torch.randn(classes, device=device), dtype) if has_bias else None,
        target=target,
        product_dtype=product_dtype,
    )


def mixture_problem(
    device: str,
    tokens: int,
    components: int,
    features: int,
    classes: int,
    *,
    deviation: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
    has_bias: bool = False,
) -> Problem:
    hidden = torch.tanh(torch.randn(tokens, components, features, device=device))
    plain = linear_problem(device, 0, features, classes, deviation=deviation / 0.628, dtype=dtype, has_bias=has_bias)
    return replace(
        plain,
        hidden=_leaf(hidden, dtype),
        prior=torch.randn(tokens, components, device=device, requires_grad=True),
        target=torch.randint(classes, (tokens,), device=device),
        product_dtype=dtype,
    )


# --- gradients by chunks -------------------------------------------------------------------------------------------


def log_g(function: str, logits: Tensor) -> Tensor:
    return logits + F.logsigmoid(logits) if function == "sigsoftmax" else logits


def token_losses(function: str, logits: Tensor, prior: Tensor | None, target: Tensor) -> Tensor:
    """From the definitions, in the dtype of the logits."""
    log_f = torch.log_softmax(log_g(function, logits), -1)
    if prior is None:
        return -log_f.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    index = target.view(-1, 1, 1).expand(-1, log_f.shape[1], 1)
    log_prior = torch.log_softmax(log_g(function, prior.to(log_f.dtype)), -1)
    return -torch.logsumexp(log_prior + log_f.gather(-1, index).squeeze(-1), -1)


def _chunks(problem: Problem, element_size: int) -> Iterator[slice]:
    rows = problem.hidden[0].numel() // problem.hidden.shape[-1]
    classes = problem.hidden.shape[-1] if problem.weight is None else problem.weight.shape[0]
    tokens = problem.hidden.shape[0]
    step = max(1, CHUNK_BYTES // (rows * classes * element_size))
    for first in range(0, tokens, step):
        yield slice(first, min(first + step, tokens))


def _by_logits(
    problem: Problem, function: str, logits: Tensor, span: slice, arithmetic: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the mean loss by the logits of a chunk and by their prior."""
    logits = logits.detach().requires_grad_()
    prior = None if problem.prior is None else problem.prior[span].detach()
    if prior is not None:
        # A gradient has the dtype of its leaf, and the truth must not be rounded.
        prior = prior.to(torch.promote_types(prior.dtype, logits.dtype)).requires_grad_()
    losses = token_losses(function, logits.to(arithmetic), prior, problem.target[span])
    inputs = [logits] if prior is None else [logits, prior]
    by_logits, *by_prior = torch.autograd.grad(losses.sum() / problem.hidden.shape[0], inputs)
    return by_logits, by_prior[0] if by_prior else None


def exact_gradients(problem: Problem, function: str) -> dict[str, Tensor]:
    """In float64."""
    found = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in problem.leaves.items()}
    if problem.weight is None:
        for span in _chunks(problem, 8):
            found["logits"][span], _ = _by_logits(problem, function, problem.hidden[span].double(), span, torch.float64)
        return found
    weight = problem.weight.detach().double()
    bias = None if problem.bias is None else problem.bias.detach().double()
    for span in _chunks(problem, 8):
        rows = problem.hidden[span].detach().double()
        by_logits, by_prior = _by_logits(problem, function, F.linear(rows, weight, bias), span, torch.float64)
        found["hidden"][span] = by_logits @ weight
        flat = by_logits.flatten(0, -2)
        found["weight"].addmm_(flat.t(), rows.flatten(0, -2))
        if bias is not None:
            found["bias"] += flat.sum(0)
        if by_prior is not None:
            found["prior"][span] = by_prior
    return found


def torch_gradients(problem: Problem, function: str) -> dict[str, Tensor]:
    """Plain torch with logits of the dtype of the products, in that of the leaves."""
    arithmetic = torch.promote_types(problem.product_dtype, torch.float32)
    if problem.weight is None:
        by_logits = torch.empty_like(problem.hidden)
        for span in _chunks(problem, 8):
            by_logits[span], _ = _by_logits(problem, function, problem.hidden[span], span, arithmetic)
        return {"logits": by_logits}
    dtype = problem.product_dtype
    hidden, weight = problem.hidden.detach().to(dtype), problem.weight.detach().to(dtype)
    bias = None if problem.bias is None else problem.bias.detach().to(dtype)
    by_logits = torch.empty((*hidden.shape[:-1], weight.shape[0]), dtype=dtype, device=hidden.device)
    priors = []
    for span in _chunks(problem, 8):
        by_logits[span], by_prior = _by_logits(
            problem, function, F.linear(hidden[span], weight, bias), span, arithmetic
        )
        priors.append(by_prior)
    flat = by_logits.flatten(0, -2)
    found = {"hidden": by_logits @ weight, "weight": flat.t() @ hidden.flatten(0, -2)}
    if bias is not None:
        found["bias"] = flat.sum(0)
    if problem.prior is not None:
        found["prior"] = torch.cat([by_prior for by_prior in priors if by_prior is not None])
    return {name: found[name].to(leaf.dtype) for name, leaf in problem.leaves.items()}


# --- errors -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Implementation:
    """A loss under test, and the output function whose gradients it should have."""

    function: str
    loss: Callable[[Problem], Tensor]


def error(gradient: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference relative to that of the truth."""
    return float((gradient.double() - truth).norm() / truth.norm())


def relative_errors(
    implementations: Mapping[str, Implementation], problems: Mapping[str, Callable[[], Problem]]
) -> dict[str, dict[str, float]]:
    """For each implementation, by gradient and kind of logits: its error divided by plain torch's."""
    found: dict[str, dict[str, float]] = {name: {} for name in implementations}
    for kind, make in problems.items():
        problem = make()
        for function in dict.fromkeys(i.function for i in implementations.values()):
            truth = exact_gradients(problem, function)
            plain = {
                name: error(gradient, truth[name]) for name, gradient in torch_gradients(problem, function).items()
            }
            for name, implementation in implementations.items():
                if implementation.function != function:
                    continue
                for of, gradient in problem.gradients(implementation.loss).items():
                    found[name][f"{of}, {kind}"] = error(gradient, truth[of]) / plain[of]
    return found
