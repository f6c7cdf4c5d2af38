"""The one table of members, dtypes and backends that drives the tests, and plain computations to hold them against.

The plain computations are written a second time, from the definitions, in float64 and without a thought for memory:
phi of the logits, a log-sum-exp, a weighted sum. Nothing here calls the code under test, except to make its members.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mpmath
import pytest
import torch
from tests.covering import chosen_cases
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax import OutputFunction, register_function

BACKENDS = ("reference", "blocked")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LEAST = float("-inf")
"""The logit that masks a class."""

every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def plain_log_sigmoid(x: Tensor) -> Tensor:
    return -torch.logaddexp(torch.zeros_like(x), -x)


def plain_softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(torch.zeros_like(x), x)


@dataclass(frozen=True)
class Member:
    """A row of the table: how the package makes the member, and what its phi is."""

    label: str
    name: str
    plain_phi: Callable[..., Tensor]
    """phi(z, **parameters) in torch, from its definition."""
    exact_phi: Callable[..., mpmath.mpf]
    """The same with mpmath's numbers, for logits whose phi float64 cannot tell apart."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    per_class: tuple[str, ...] = ()
    """Parameters that get one value per class: the given one plus numbers from -1 to 1."""
    learnable: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    """Parameters that are given as tensors: a plain number of this value is refused, and a tensor moves as it likes."""
    registers: Mapping[str, Any] | None = None
    """Arguments of register_function, for a member of the user's own."""

    def __str__(self) -> str:
        return self.label

    def values(self, num_classes: int, dtype: torch.dtype = torch.float64) -> dict[str, float | Tensor]:
        spread = torch.linspace(-1.0, 1.0, num_classes, dtype=torch.float64)
        found: dict[str, float | Tensor] = dict(self.parameters)
        found |= {key: (self.parameters[key] + spread).to(dtype) for key in self.per_class}
        return found | {key: torch.tensor(self.parameters[key], dtype=dtype) for key in self.tensors}

    def make(self, num_classes: int, **values: Any) -> OutputFunction:
        """The member under test; ``values`` replace parameters, say by tensors that want a gradient."""
        if self.registers is not None:
            register_function(self.name, **self.registers)
        return OutputFunction(self.name, **{**self.values(num_classes), **values})

    def learned(self, num_classes: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """Every learnable parameter as a leaf that wants a gradient."""
        values = self.values(num_classes, dtype)
        return {
            key: torch.as_tensor(values[key], dtype=dtype).detach().clone().requires_grad_() for key in self.learnable
        }

    def phi(self, z: Tensor, **values: Any) -> Tensor:
        """-inf stays -inf, and passes its gradient on with the slope 1 that torch's softmax gives it."""
        masked = z == LEAST
        parameters = {**self.values(z.shape[-1]), **values}
        parameters = {key: torch.as_tensor(value, dtype=z.dtype) for key, value in parameters.items()}
        return torch.where(masked, z, self.plain_phi(torch.where(masked, torch.zeros_like(z), z), **parameters))

    def exact_log_probs(self, row: Sequence[float]) -> list[mpmath.mpf]:
        """log f of one row of scalar-parameter logits with more digits than any logit needs."""
        with mpmath.workdps(120):
            numbers = {key: mpmath.mpf(value) for key, value in self.parameters.items()}
            values = [self.exact_phi(mpmath.mpf(z), **numbers) for z in row]
            largest = max(values)
            normalizer = largest + mpmath.log(mpmath.fsum(mpmath.exp(value - largest) for value in values))
            return [value - normalizer for value in values]


def _atan(z: Tensor, s: Tensor) -> Tensor:
    return s * torch.atan(z)


def _falling(z: Tensor) -> Tensor:
    return -0.7 * z


def _falling_slope(z: Tensor) -> Tensor:
    return torch.full_like(z, -0.7)


def _exact_log_sigmoid(x: mpmath.mpf) -> mpmath.mpf:
    return -mpmath.log1p(mpmath.exp(-x)) if x > 0 else x - mpmath.log1p(mpmath.exp(x))


def _gss(z: Tensor, k: Tensor, c: Tensor) -> Tensor:
    return k * (z - c) + c - (k - 1.0) * plain_softplus(z - c)


def _exact_gss(z: mpmath.mpf, k: mpmath.mpf, c: mpmath.mpf) -> mpmath.mpf:
    return k * (z - c) + c - (k - 1) * ((z - c) - _exact_log_sigmoid(z - c))


def _softcap(z: Tensor, c: Tensor) -> Tensor:
    # c tanh(z / c) by sigmoids of what is negative, because autograd's 1 - tanh^2 is 0 from z / c = 19 on.
    x = 2.0 * z / c
    return c * torch.where(x < 0, 2.0 * torch.sigmoid(x) - 1.0, 1.0 - 2.0 * torch.sigmoid(-x))


def _shifted(z: Tensor, b: Tensor) -> Tensor:
    return z + plain_log_sigmoid(z + b)


def _exact_shifted(z: mpmath.mpf, b: mpmath.mpf) -> mpmath.mpf:
    return z + _exact_log_sigmoid(z + b)


MEMBERS: tuple[Member, ...] = (
    Member(
        "softmax",
        "softmax",
        lambda z, alpha: alpha * z,
        lambda z, alpha: alpha * z,
        {"alpha": 1.0},
        learnable=("alpha",),
    ),
    Member(
        "softmax(alpha=1.5)",
        "softmax",
        lambda z, alpha: alpha * z,
        lambda z, alpha: alpha * z,
        {"alpha": 1.5},
        learnable=("alpha",),
    ),
    Member(
        "softmax(alpha=-0.8)",
        "softmax",
        lambda z, alpha: alpha * z,
        lambda z, alpha: alpha * z,
        {"alpha": -0.8},
        learnable=("alpha",),
        tensors=("alpha",),
    ),
    Member("sigsoftmax", "sigsoftmax", lambda z: z + plain_log_sigmoid(z), lambda z: z + _exact_log_sigmoid(z)),
    Member("shifted(b=1.3)", "shifted_sigsoftmax", _shifted, _exact_shifted, {"b": 1.3}, learnable=("b",)),
    Member(
        "shifted(b per class)",
        "shifted_sigsoftmax",
        _shifted,
        _exact_shifted,
        {"b": 0.4},
        per_class=("b",),
        learnable=("b",),
    ),
    Member("sigmoid", "sigmoid", plain_log_sigmoid, _exact_log_sigmoid),
    Member(
        "relu",
        "relu",
        lambda z, eps: torch.log(z.clamp(min=0.0) + eps),
        lambda z, eps: mpmath.log(max(z, 0) + eps),
        {"eps": 1e-8},
    ),
    Member("gss(k=0)", "gss", _gss, _exact_gss, {"k": 0.0, "c": 0.0}, learnable=("k", "c")),
    Member("gss(k=0.2)", "gss", _gss, _exact_gss, {"k": 0.2, "c": 0.0}, learnable=("k", "c")),
    Member("gss(k=2, c=1)", "gss", _gss, _exact_gss, {"k": 2.0, "c": 1.0}, learnable=("k", "c")),
    Member(
        "gss(k=0.5, c per class)",
        "gss",
        _gss,
        _exact_gss,
        {"k": 0.5, "c": 0.3},
        per_class=("c",),
        learnable=("k", "c"),
    ),
    Member("gss(k=-1)", "gss", _gss, _exact_gss, {"k": -1.0, "c": 0.0}, learnable=("k", "c")),
    Member(
        "gss(k=-1.5, c per class)",
        "gss",
        _gss,
        _exact_gss,
        {"k": -1.5, "c": 0.3},
        per_class=("c",),
        learnable=("k", "c"),
    ),
    Member(
        "softcap(c=5)",
        "softcap",
        _softcap,
        lambda z, c: c * mpmath.tanh(z / c),
        {"c": 5.0},
    ),
    Member(
        "user, phi alone",
        "user_atan",
        _atan,
        lambda z, s: s * mpmath.atan(z),
        {"s": 3.0},
        learnable=("s",),
        registers={"phi": _atan, "parameters": {"s": 3.0}},
    ),
    Member(
        "user, with slope",
        "user_falling",
        _falling,
        lambda z: -mpmath.mpf(0.7) * z,
        registers={"phi": _falling, "slope": _falling_slope},
    ),
)
by_label = {member.label: member for member in MEMBERS}
every_member = pytest.mark.parametrize("member", MEMBERS, ids=str)
learned_members = pytest.mark.parametrize("member", [m for m in MEMBERS if m.learnable], ids=str)


class Plain(NamedTuple):
    """The results of a plain computation for each token."""

    losses_N: Tensor
    log_normalizer_NK: Tensor
    log_probs_NV: Tensor
    entropy_N: Tensor


def plain_log_prior(prior_logits_NK: Tensor, prior: Member) -> Tensor:
    phi_NK = prior.phi(prior_logits_NK)
    return phi_NK - phi_NK.logsumexp(-1, keepdim=True)


def plain_token_losses(
    phi_NKV: Tensor,
    target: Tensor,
    *,
    log_prior_NK: Tensor | None = None,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    floor: float = 0.0,
    ignore_index: int = -100,
) -> Plain:
    """The loss of every token: minus the weighted sum of log-probabilities, the weights spelled out for every class."""
    tokens, _, classes = phi_NKV.shape
    n_NK = phi_NKV.logsumexp(-1)
    log_f_NKV = phi_NKV - n_NK.unsqueeze(-1)
    if log_prior_NK is None:
        log_p_NV = log_f_NKV[:, 0]
        prior_NK = torch.ones_like(n_NK)
    else:
        p_NV = (log_prior_NK.unsqueeze(-1) + log_f_NKV).exp().sum(1)
        log_p_NV = torch.log(p_NV + floor)
        prior_NK = log_prior_NK.detach().exp()
    class_weight_V = phi_NKV.new_ones(classes) if weight is None else weight.to(phi_NKV)
    if target.is_floating_point():
        kept_N = torch.ones(tokens, dtype=torch.bool)
        share_NV = class_weight_V * (target.to(phi_NKV) * (1.0 - label_smoothing) + label_smoothing / classes)
    else:
        kept_N = target != ignore_index
        hot_NV = F.one_hot(torch.where(kept_N, target, 0), classes).to(phi_NKV)
        share_NV = class_weight_V * (hot_NV * (1.0 - label_smoothing) + label_smoothing / classes)
    losses_N = -(share_NV * log_p_NV.masked_fill(share_NV == 0, 0.0)).sum(-1)
    losses_N = losses_N + z_loss * (prior_NK * n_NK.square()).sum(-1)
    losses_N = torch.where(kept_N, losses_N, torch.zeros_like(losses_N))
    p_NV = log_p_NV.exp()
    entropy_N = -(p_NV * log_p_NV.masked_fill(p_NV == 0, 0.0)).sum(-1)
    return Plain(losses_N, n_NK, log_p_NV, entropy_N)


def plain_reduce(
    losses_N: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    weight: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """none: t loss; sum: their sum; mean: the sum over sum t weight[y] (sum t for probabilities) of kept tokens."""
    kept_N = torch.ones_like(losses_N, dtype=torch.bool) if target.is_floating_point() else target != ignore_index
    t_N = torch.ones_like(losses_N) if token_weights is None else token_weights.to(losses_N)
    t_N = torch.where(kept_N, t_N, torch.zeros_like(t_N))
    if reduction == "none":
        return t_N * losses_N
    total = (t_N * losses_N).sum()
    if reduction == "sum":
        return total
    if weight is not None and not target.is_floating_point():
        t_N = t_N * weight.to(losses_N)[torch.where(kept_N, target, 0)]
    return total / t_N.sum()


def plain_loss(phi_NKV: Tensor, target: Tensor, **options: Any) -> Tensor:
    """A whole loss, from phi of the logits to the reduced number."""
    reducing = {key: options[key] for key in ("reduction", "token_weights") if key in options}
    shared = {key: options[key] for key in ("weight", "ignore_index") if key in options}
    each = {key: value for key, value in options.items() if key not in reducing}
    return plain_reduce(plain_token_losses(phi_NKV, target, **each).losses_N, target, **shared, **reducing)


def option_grid(num_tokens: int, num_classes: int) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Combinations of the options that all losses share: a label, a target, and the options as keywords."""
    generator = torch.Generator().manual_seed(7)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    index = torch.randint(num_classes, (num_tokens,), generator=generator)
    some_ignored = index.clone()
    some_ignored[::3] = -100
    targets = {
        "indices": (index, -100),
        "some ignored": (some_ignored, -100),
        "a class ignored": (index, int(index[1])),
        "probabilities": (torch.softmax(3.0 * uniform(num_tokens, num_classes), -1), -100),
    }
    class_weight = uniform(num_classes) + 0.2
    class_weight[0] = 0.0
    token_weights = uniform(num_tokens) * 2.0
    token_weights[-1] = 0.0
    grid = itertools.product(targets, (0.0, 0.15), (False, True), (False, True), (0.0, 0.02), ("mean", "sum", "none"))
    for kind, smoothing, weighted, tokens, z_loss, reduction in chosen_cases(list(grid)):
        target, ignore_index = targets[kind]
        options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": smoothing,
            "weight": class_weight if weighted else None,
            "token_weights": token_weights if tokens else None,
            "z_loss": z_loss,
            "reduction": reduction,
        }
        label = f"{kind}, smoothing {smoothing}, weight {weighted}, tokens {tokens}, z-loss {z_loss}, {reduction}"
        yield label, target, options


def gradients(output: Tensor, inputs: Sequence[Tensor], by: Tensor | None = None, **options: Any) -> list[Tensor]:
    """d(output * by)/d(input) for each input; by is 1 for a number, else something uneven."""
    if by is None:
        by = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64).view(output.shape)
        by = torch.ones_like(output) if output.ndim == 0 else by.to(output)
    results = list(torch.autograd.grad(output, list(inputs), by, **options))
    assert not any(result.requires_grad for result in results), "a gradient without create_graph is a plain tensor"
    return results


def assert_same(actual: Tensor, expected: Tensor, what: str = "", *, tolerance: float = 1e-10) -> None:
    """Equal shapes, and values within an absolute and a relative tolerance; NaN and infinities must agree."""
    torch.testing.assert_close(
        actual.to(torch.float64),
        expected.to(torch.float64),
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}" if what else text,
    )


def frobenius_error(actual: Tensor, truth: Tensor) -> float:
    return float((actual.to(torch.float64) - truth).norm())
