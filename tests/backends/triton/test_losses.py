"""The public losses by the kernels, against the reference in float64.

An error is bounded by that of the reference in plain torch, in the same dtype on the same device, times ``SLACK``.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.backends.triton.device import DEVICE, IS_INTERPRETED
from tests.tables import LEAST, by_label, frobenius_error, gradients
from torch import Tensor

import sigsoftmax
from sigsoftmax import OutputFunction
from sigsoftmax.backends.chunked import chunk_plan
from sigsoftmax.backends.triton import fused_loss, priors
from sigsoftmax.contract import normalizing, signature
from sigsoftmax.contract.spec import member_of
from sigsoftmax.losses import lowering

pytestmark = pytest.mark.usefixtures("_fresh_memory_is_nan")

N, K, V, D = 7, 2, 37, 5
SLACK = 2.0
"""The most that an error may be relative to plain torch's, besides a few roundings of the result."""
DTYPES = [torch.float32, torch.float16, *([] if IS_INTERPRETED else [torch.bfloat16])]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

Loss = Callable[..., Any]
"""(inputs, learned parameters, **moved options) -> a loss, and extras if asked for"""


def check(
    loss: Loss, inputs: Sequence[Tensor], dtype: torch.dtype, label: str = "sigsoftmax", **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """Loss, gradients and extras of one call, within bounds; returns those of the kernels."""
    member = by_label[label]
    names = list(member.learnable)

    def results(backend: str, precision: torch.dtype, device: torch.device) -> tuple[list[Tensor], Tensor | None]:
        # All see the numbers that the dtype can hold.
        leaves = [t.to(dtype).to(device, precision).requires_grad_() for t in inputs]
        wide = torch.promote_types(precision, torch.float32)
        values = [v.detach().to(device, wide).requires_grad_() for v in member.learned(V, torch.float32).values()]
        function = member.make(V, **dict(zip(names, values, strict=True)))
        moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()}
        result = loss(*leaves, function=function, backend=backend, **moved)
        value, extras = result if isinstance(result, tuple) else (result, None)
        found = [value, *gradients(value, [*leaves, *values])]
        best = None
        if extras is not None:
            found += [extras.log_normalizer, extras.entropy]
            best = extras.argmax
        return [t.detach().cpu() for t in found], None if best is None else best.cpu()

    truth, best = results("reference", torch.float64, torch.device("cpu"))
    plain, _ = results("reference", dtype, DEVICE)
    found, found_best = results("triton", dtype, DEVICE)
    decision = sigsoftmax.explain()
    assert decision is not None
    assert decision.backend == "triton"
    for i, (actual, plainly, exact) in enumerate(zip(found, plain, truth, strict=True)):
        assert actual.dtype == plainly.dtype
        assert actual.shape == exact.shape
        # Gradients of parameters are sums of terms as large as logits, and may cancel to nothing. For logits of 16 bits
        # the hardware's logarithm, off by 2^-22, is in each term.
        is_parameter = 0 <= i - 1 - len(inputs) < len(names)
        size = float(exact.norm()) + (2.0 if is_parameter and dtype != torch.float32 else 0.3)
        bound = SLACK * frobenius_error(plainly, exact) + 2.0 * torch.finfo(actual.dtype).eps * size
        assert frobenius_error(actual, exact) <= bound, f"result {i} of {member}"
    if best is not None and dtype == torch.float32:
        # Rounded products may tie, or swap.
        assert torch.equal(found_best, best)
    return found[0], found[1:]


@pytest.fixture(params=["messages", "fused tokens", "fused"])
def _every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The common losses are computed in fused tokens, unless bad targets are to be reported by a message.

    Those of few tokens have fused paths besides.
    """
    monkeypatch.setattr(signature, "checks_values", lambda device: request.param == "messages")
    monkeypatch.setattr(lowering, "_lowered", {})
    if request.param == "fused tokens":
        monkeypatch.setattr(fused_loss, "MOST_TOKENS", 0)
        monkeypatch.setattr(fused_loss, "MANY_TOKENS", 0)


@pytest.fixture(params=[1, 16], ids=["", "aligned"])
def _alignments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any length, as on a CPU, and rows with room to the next multiple, as on a GPU."""
    monkeypatch.setattr(chunk_plan, "row_alignment", lambda device: request.param)


def target_with_ignored(count: int = N) -> Tensor:
    target = torch.randint(V, (count,))
    target[::4] = -100
    return target


CLASS_WEIGHT = torch.linspace(0.0, 1.5, V)
TOKEN_WEIGHTS = torch.linspace(2.0, 0.0, N)
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "z_loss": 0.02},
    "none": {"reduction": "none", "weight": CLASS_WEIGHT},
    "weights": {"weight": CLASS_WEIGHT, "token_weights": TOKEN_WEIGHTS, "z_loss": 0.02},
    "smoothing": {"label_smoothing": 0.1, "weight": CLASS_WEIGHT},
    "extras": {"extras": ("log_normalizer", "argmax", "entropy")},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


# Logits that the caller holds


def cross_entropy(logits: Tensor, **options: Any) -> Any:
    return sigsoftmax.cross_entropy(logits, **options)


@pytest.mark.usefixtures("_every_way")
@every_option
@pytest.mark.parametrize("label", ["sigsoftmax", "gss(k=0.5, c per class)"])
def test_cross_entropy(label: str, options: dict[str, Any]) -> None:
    check(cross_entropy, [2.0 * torch.randn(N, V)], torch.float32, label, target=target_with_ignored(), **options)


@pytest.mark.parametrize("label", ["softmax(alpha=1.5)", "shifted(b=1.3)", "sigmoid", "relu", "softcap(c=5)"])
@every_dtype
def test_cross_entropy_of_other_members(label: str, dtype: torch.dtype) -> None:
    check(cross_entropy, [2.0 * torch.randn(N, V)], dtype, label, target=target_with_ignored(), z_loss=0.01)


@pytest.mark.usefixtures("_every_way")
@pytest.mark.parametrize("label", ["softmax(alpha=-0.8)", "gss(k=-1)", "gss(k=-1.5, c per class)"])
@pytest.mark.parametrize("is_learned", [False, True], ids=["fixed", "learned"])
@every_dtype
def test_members_that_are_largest_at_the_lowest_logit(label: str, is_learned: bool, dtype: torch.dtype) -> None:
    logits, target = 2.0 * torch.randn(N, V), target_with_ignored()
    logits[1, 4] = LEAST
    target[:3] = 7
    extras = ("log_normalizer", "argmax", "entropy")
    if is_learned:
        check(cross_entropy, [logits], dtype, label, target=target, extras=extras)
        return
    logits[0, 3] = -300.0
    logits[2] -= 1e3
    function = by_label[label].make(V)
    exact, exact_extras = cross_entropy(
        logits.to(dtype).double(), function=function, target=target, backend="reference", extras=extras
    )
    moved = {key: v.to(DEVICE) if isinstance(v, Tensor) and v.ndim else v for key, v in function.given.items()}
    found, found_extras = cross_entropy(
        logits.to(DEVICE, dtype),
        function=function.with_parameters(**moved),
        target=target.to(DEVICE),
        backend="triton",
        extras=extras,
    )
    torch.testing.assert_close(found.cpu().double(), exact, rtol=4.0 * torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(found_extras.argmax.cpu(), exact_extras.argmax)


@pytest.mark.usefixtures("_every_way")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("mixture", [False, True], ids=["plain", "mixture"])
def test_a_token_weight_of_0_has_a_gradient(mixture: bool, reduction: str) -> None:
    hidden, weight, prior = torch.randn(N, K, D), torch.randn(V, D), torch.randn(N, K)
    target, t = target_with_ignored(), torch.linspace(0.0, 2.0, N)
    target[0] = 3
    found = []
    for backend, device, dtype in (("triton", DEVICE, torch.float32), ("reference", "cpu", torch.float64)):
        leaf = t.to(device, dtype).requires_grad_()
        h, w, p = (x.to(device, dtype).requires_grad_() for x in (hidden, weight, prior))
        options: dict[str, Any] = {"function": "sigsoftmax", "token_weights": leaf, "reduction": reduction}
        options |= {"z_loss": 0.01, "backend": backend}
        if mixture:
            loss = sigsoftmax.mixture_cross_entropy(h, p, w, target.to(device), **options)
        else:
            loss = sigsoftmax.linear_cross_entropy(h[:, 0], w, target.to(device), **options)
        found.append(gradients(loss, [leaf])[0].cpu().double())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert found[0][0] != 0


LARGEST = {torch.float32: 3.4e38, torch.float16: 6.5e4, torch.bfloat16: 3.3e38}


@pytest.mark.usefixtures("_every_way")
@every_dtype
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
@pytest.mark.parametrize("label", ["softmax", "sigsoftmax", "gss(k=-1)", "gss(k=-1.5, c per class)", "relu"])
def test_logits_near_the_largest_float(label: str, z_loss: float, smoothing: float, dtype: torch.dtype) -> None:
    ramp = torch.linspace(-1.0, 1.0, V, dtype=torch.float64)
    rows = [ramp, ramp.sign(), -ramp.abs(), 0.5 * ramp, torch.ones(V), -torch.ones(V), ramp.clamp(max=0.0)]
    logits = (torch.stack([row.double() for row in rows]) * LARGEST[dtype]).to(dtype)
    target = torch.randint(V, (len(rows),))
    member = by_label[label].make(V)
    moved = {key: v.to(DEVICE) if isinstance(v, Tensor) else v for key, v in member.given.items()}

    def losses(z: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        leaf = z.requires_grad_()
        loss = cross_entropy(
            leaf,
            target=target.to(leaf.device),
            label_smoothing=smoothing,
            z_loss=z_loss,
            reduction="sum",
            **options,
        )
        return loss.detach().cpu(), gradients(loss, [leaf])[0].cpu()

    for row in range(len(rows)):
        kept, target = target, target[row : row + 1]
        exact, _ = losses(logits[row : row + 1].double(), function=member, backend="reference")
        found, by_logits = losses(
            logits[row : row + 1].to(DEVICE), function=member.with_parameters(**moved), backend="triton"
        )
        target = kept
        assert not found.isnan()
        assert not by_logits.isnan().any()
        # A gap between two logits may itself be more than a float32.
        if float(exact) < 0.4 * LARGEST[dtype]:
            torch.testing.assert_close(found.double(), exact, rtol=8 * torch.finfo(dtype).eps, atol=1e-3)


def test_steep_slopes_in_float16() -> None:
    """Gradients of relu's logits near 0 exceed float16, and those of what they are made of do not."""
    hidden, weight = (1e-3 * torch.randn(N, D)).half(), (1e-3 * torch.randn(V, D)).half()
    target = torch.randint(V, (N,))
    found = []
    for backend, device in (("triton", DEVICE), ("reference", torch.device("cpu"))):
        leaves = [t.to(device).requires_grad_() for t in (hidden, weight)]
        loss = sigsoftmax.linear_cross_entropy(
            *leaves, target.to(device), function="relu", backend=backend, reduction="sum"
        )
        found.append([g.cpu() for g in gradients(loss, leaves)])
    for a, e in zip(*found, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, e, rtol=4e-3, atol=4e-3)


def test_a_prior_that_falls() -> None:
    z = torch.tensor([[-300.0, -1.0, 2.0], [5.0, -2e3, LEAST], [-1e30, -1e30, 1.0]], device=DEVICE)
    gss = OutputFunction("gss", k=-1.0)
    spec, _ = member_of(gss)
    found = priors.KernelPrior(spec, z).log_prior.values.cpu().double()
    exact = normalizing.log_probs(z.cpu().double(), gss.form, gss.arguments())
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


@every_dtype
@pytest.mark.parametrize("label", ["softmax(alpha=1.5)", "sigsoftmax"])
def test_negative_weights(label: str, dtype: torch.dtype) -> None:
    """The formulas of the fast path take the root of the weight."""
    weights = torch.linspace(1.0, -1.0, N)
    options: dict[str, Any] = {"target": target_with_ignored(), "token_weights": weights, "reduction": "sum"}
    check(cross_entropy, [2.0 * torch.randn(N, V)], dtype, label, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_probabilities(smoothing: float) -> None:
    target = torch.softmax(torch.randn(N, V), -1)
    check(cross_entropy, [torch.randn(N, V)], torch.float32, target=target, label_smoothing=smoothing)


@pytest.mark.usefixtures("_every_way")
def test_masks_and_rows_that_do_not_count() -> None:
    logits = torch.randn(N, V)
    logits[:, 5:9] = LEAST
    logits[4] = torch.nan
    target = torch.tensor([0, 1, 2, 3, -100, 4, 36])
    _, (by_logits,) = check(cross_entropy, [logits], torch.float32, target=target)
    assert (by_logits[4] == 0).all()
    assert (by_logits[:, 5:9] == 0).all()


@pytest.mark.usefixtures("_every_way")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_tokens_and_none_that_count(reduction: str) -> None:
    for target in (torch.empty(0, dtype=torch.int64), torch.full((3,), -100)):
        logits = torch.randn(len(target), V, device=DEVICE, requires_grad=True)
        hidden = torch.randn(len(target), D, device=DEVICE, requires_grad=True)
        weight = torch.randn(V, D, device=DEVICE, requires_grad=True)
        options: dict[str, Any] = {"function": "sigsoftmax", "backend": "triton", "reduction": reduction}
        on_logits = sigsoftmax.cross_entropy(logits, target.to(DEVICE), **options)
        linear = sigsoftmax.linear_cross_entropy(hidden, weight, target.to(DEVICE), **options)
        for loss in (on_logits, linear):
            assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
        if reduction != "mean":
            for gradient in (*gradients(on_logits, [logits]), *gradients(linear, [hidden, weight])):
                assert (gradient == 0).all()


def strided(tensor: Tensor) -> Tensor:
    """The same numbers with others between them."""
    return torch.stack([tensor, tensor.flip(-1)], -1)[..., 0]


@pytest.mark.usefixtures("_every_way")
@pytest.mark.parametrize("what", ["logits", "transposed logits", "target", "probabilities", "weight", "shifts"])
def test_memory_that_is_not_contiguous(what: str) -> None:
    logits, target, shifts = torch.randn(N, V, device=DEVICE), target_with_ignored().to(DEVICE), torch.randn(V)
    options: dict[str, Any] = {"label_smoothing": 0.1, "weight": torch.linspace(0.1, 1.5, V).to(DEVICE)}
    if what in ("target", "probabilities"):
        options = {}
    if what == "probabilities":
        target = torch.softmax(torch.randn(N, V), -1).to(DEVICE)
    function = OutputFunction("gss", k=0.5, c=shifts.to(DEVICE)) if what == "shifts" else OutputFunction("sigsoftmax")

    def loss(backend: str) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        given = {"logits": strided(leaf), "transposed logits": leaf.t().contiguous().t()}.get(what, leaf)
        y = strided(target) if what in ("target", "probabilities") else target
        value = sigsoftmax.cross_entropy(given, y, function=function, backend=backend, **options)
        return value.detach(), gradients(value, [leaf])[0]

    expected = loss("reference")
    if what == "weight":
        options["weight"] = strided(options["weight"])
    if what == "shifts":
        function = OutputFunction("gss", k=0.5, c=strided(shifts).to(DEVICE))
    torch.testing.assert_close(loss("triton"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_every_way", "_alignments")
@pytest.mark.parametrize("how", ["fast", "buffered", "exact"])
@pytest.mark.parametrize("function", ["sigsoftmax", "gss(k=0.5)"])
def test_a_row_that_overflows_and_does_not_count(function: str, how: str) -> None:
    hidden = torch.randn(N, D).half()
    hidden[2] = 6e4
    leaves = [t.to(DEVICE).requires_grad_() for t in (hidden, torch.randn(V, D).half())]
    target = torch.randint(V, (N,))
    target[2] = -100
    loss = sigsoftmax.linear_cross_entropy(
        *leaves,
        target.to(DEVICE),
        function=function,
        z_loss=0.01,
        weight_gradient=how,
        chunk_bytes=three_chunks(torch.float16),
        backend="triton",
    )
    for found in (loss, *gradients(loss, leaves)):
        assert found.isfinite().all()


def test_gradients_of_a_large_normaliser() -> None:
    """gss with k < 0 is largest at a logit far to the left, and all of the mass is there."""
    logits = torch.tensor([[-1.0, -30_000.0]], dtype=torch.float16, device=DEVICE, requires_grad=True)
    k = torch.tensor(-0.24, device=DEVICE, requires_grad=True)
    target = torch.tensor([1], device=DEVICE)
    loss = sigsoftmax.cross_entropy(logits, target, function=OutputFunction("gss", k=k), backend="triton")
    by_logits, by_k = gradients(loss, [logits, k])
    assert float(by_logits.abs().max()) < 1e-3
    assert abs(float(by_k)) < 1.0


@pytest.mark.parametrize("k", [0.0, 2.0**-10])
def test_slopes_that_cancel_left_of_the_bend(k: float) -> None:
    """gss has the slope k there, the small difference of two terms as large as the logits."""
    logits = (-5e4 + 64.0 * torch.randint(-90, 90, (N, V))).half()
    logits[:, 3] = 5.0
    target = torch.randint(V, (N,))

    def log_normalizer(logits: Tensor, backend: str) -> Tensor:
        _, extras = sigsoftmax.cross_entropy(
            logits,
            target.to(logits.device),
            function=OutputFunction("gss", k=k),
            extras=("log_normalizer",),
            backend=backend,
        )
        assert extras.log_normalizer is not None
        return extras.log_normalizer.double().cpu()

    found, truth = log_normalizer(logits.to(DEVICE), "triton"), log_normalizer(logits.double(), "reference")
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)


# Logits that are a product


def linear(hidden: Tensor, matrix: Tensor, bias: Tensor, **options: Any) -> Any:
    return sigsoftmax.linear_cross_entropy(hidden, matrix, linear_bias=bias, **options)


def linear_inputs() -> list[Tensor]:
    return [torch.randn(N, D), torch.randn(V, D), torch.randn(V)]


def three_chunks(dtype: torch.dtype, components: int = 1) -> int:
    return 3 * components * V * dtype.itemsize


@pytest.mark.usefixtures("_every_way", "_alignments")
@pytest.mark.parametrize("how", ["fast", "buffered", "exact"])
@pytest.mark.parametrize("label", ["sigsoftmax", "gss(k=0.5, c per class)"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.02}], ids=["plain", "options"])
def test_sums_of_the_weights_gradient(label: str, how: str, options: dict[str, Any]) -> None:
    dtype = torch.float16 if IS_INTERPRETED else torch.bfloat16
    options = {"chunk_bytes": three_chunks(dtype), "weight_gradient": how, **options}
    check(linear, linear_inputs(), dtype, label, target=target_with_ignored(), **options)


@pytest.mark.usefixtures("_every_way")
@every_option
@every_dtype
def test_linear_cross_entropy(dtype: torch.dtype, options: dict[str, Any]) -> None:
    options = {"chunk_bytes": three_chunks(dtype), **options}
    check(linear, linear_inputs(), dtype, target=target_with_ignored(), **options)


@pytest.mark.grid
@pytest.mark.parametrize("label", ["softmax(alpha=1.5)", "gss(k=2, c=1)", "sigmoid", "relu", "softcap(c=5)"])
@pytest.mark.parametrize("tokens", [N, 3 * N])
def test_exact_sums_of_other_members(label: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are measured in ranges of classes, of which all that fit into the gradient's memory are kept."""
    monkeypatch.setattr(signature, "checks_values", lambda device: False)
    dtype = torch.float16
    inputs = [2.0 * torch.randn(tokens, D), torch.randn(V, D), 3.0 * torch.randn(V)]
    options = {"chunk_bytes": three_chunks(dtype), "weight_gradient": "exact", "z_loss": 0.01}
    check(linear, inputs, dtype, label, target=target_with_ignored(tokens), **options)


@pytest.mark.parametrize("height", [-6e4, 6e4])
def test_ranges_of_classes_that_are_masked_or_far_apart(height: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "checks_values", lambda device: False)
    bias = torch.randn(V)
    bias[:9] = LEAST
    bias[30:] = height
    target = torch.tensor([10, 31, -100, 36, 20, 12, 35])
    options = {"chunk_bytes": three_chunks(torch.float16), "weight_gradient": "exact"}
    check(linear, [torch.randn(N, D), torch.randn(V, D), bias], torch.float16, target=target, **options)


# Mixtures


def mixture(hidden: Tensor, prior: Tensor, matrix: Tensor, bias: Tensor, **options: Any) -> Any:
    return sigsoftmax.mixture_cross_entropy(hidden, prior, matrix, linear_bias=bias, **options)


@pytest.mark.usefixtures("_every_way", "_alignments")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "options",
    [*OPTIONS.values(), {"floor": 1e-8}, {"weight_gradient": "exact"}, {"weight_gradient": "exact", "z_loss": 0.1}],
    ids=[*OPTIONS, "floor", "exact", "exact z-loss"],
)
def test_mixture_cross_entropy(dtype: torch.dtype, options: dict[str, Any]) -> None:
    inputs = [torch.randn(N, K, D), torch.randn(N, K), torch.randn(V, D), torch.randn(V)]
    options = {"chunk_bytes": three_chunks(dtype, K), **options}
    check(mixture, inputs, dtype, target=target_with_ignored(), prior_function="sigsoftmax", **options)


@pytest.mark.usefixtures("_every_way")
@pytest.mark.parametrize("components", [1, 3])
def test_a_mixture_of_a_learned_member(components: int) -> None:
    inputs = [torch.randn(N, components, D), torch.randn(N, components), torch.randn(V, D), torch.randn(V)]
    check(mixture, inputs, torch.float32, "gss(k=0.2)", target=target_with_ignored(), chunk_bytes=1000)


@pytest.mark.usefixtures("_every_way")
@pytest.mark.parametrize("options", [{}, {"floor": 1e-8, "z_loss": 0.1, "reduction": "sum"}], ids=["plain", "options"])
def test_a_mixture_with_masked_classes_and_components(options: dict[str, Any]) -> None:
    bias = torch.randn(V)
    bias[3] = LEAST
    prior = torch.randn(N, 3)
    prior[:, 1] = LEAST
    hidden = torch.randn(N, 3, D)
    target = torch.tensor([0, 1, 2, 5, -100, 4, 36])
    _, (by_hidden, by_prior, *_) = check(
        mixture, [hidden, prior, torch.randn(V, D), bias], torch.float32, target=target, **options
    )
    assert (by_hidden[4] == 0).all()
    assert (by_prior[4] == 0).all()


@pytest.mark.usefixtures("_every_way")
@pytest.mark.parametrize("floor", [0.0, 1e-8])
def test_the_loss_of_a_target_that_no_component_allows(floor: float) -> None:
    bias = torch.zeros(V, device=DEVICE)
    bias[3] = LEAST
    loss = sigsoftmax.mixture_cross_entropy(
        torch.randn(2, K, D, device=DEVICE),
        torch.randn(2, K, device=DEVICE),
        torch.randn(V, D, device=DEVICE),
        torch.tensor([3, 4], device=DEVICE),
        function="sigsoftmax",
        linear_bias=bias,
        reduction="none",
        floor=floor,
        backend="triton",
    )
    assert float(loss[0]) == (torch.inf if not floor else pytest.approx(-math.log(floor), rel=1e-5))
    assert loss[1].isfinite()


# The prior of a mixture


@pytest.mark.parametrize("label", ["softmax", "sigsoftmax", "gss(k=0)", "relu", "softcap(c=5)"])
@pytest.mark.parametrize("shape", [(5, 15), (6, 1), (0, 4), (700, 2)], ids=str)
def test_log_priors(label: str, shape: tuple[int, int]) -> None:
    function = by_label[label].make(shape[-1])
    spec, _ = member_of(function)
    assert priors.has_kernel(spec, shape[-1], torch.float32)
    logits = 3.0 * torch.randn(shape)
    logits[:1, 0] = 40.0
    if shape[-1] > 2:
        logits[:, -1] = LEAST
    by_log_prior = torch.randn(shape)

    def plainly(dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
        leaf = logits.to(device, dtype).requires_grad_()
        found = normalizing.log_probs(leaf, function.form, function.arguments())
        (gradient,) = torch.autograd.grad(found, leaf, by_log_prior.to(device, found.dtype))
        return found.detach().cpu(), gradient.cpu()

    prior = priors.KernelPrior(spec, logits.to(DEVICE))
    log_prior, by_logits = prior.log_prior.values, prior.gradient(by_log_prior.to(DEVICE))
    truth, plain = plainly(torch.float64, "cpu"), plainly(torch.float32, DEVICE)
    for actual, other, exact in zip((log_prior.cpu(), by_logits.cpu()), plain, truth, strict=True):
        masked = exact.isinf()
        assert torch.equal(actual.isinf(), masked)
        actual, other, exact = (t.masked_fill(masked, 0.0) for t in (actual, other, exact))
        bound = SLACK * frobenius_error(other, exact) + 1e-6 * (float(exact.norm()) + 0.1)
        assert frobenius_error(actual, exact) <= bound


@pytest.mark.usefixtures("_every_way")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_of_the_prior_is_refused(reduction: str) -> None:
    logits = torch.randn(3, K, device=DEVICE, requires_grad=True)
    loss = sigsoftmax.mixture_cross_entropy(
        torch.randn(3, K, D, device=DEVICE),
        logits,
        torch.randn(V, D, device=DEVICE),
        torch.randint(V, (3,), device=DEVICE),
        function="sigsoftmax",
        reduction=reduction,
        backend="triton",
    )
    (gradient,) = torch.autograd.grad(loss.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


# What kernels refuse


def test_what_has_no_kernel_is_refused_with_a_reason() -> None:
    target = torch.randint(V, (N,), device=DEVICE)
    with pytest.raises(ValueError, match=r"'triton' cannot be used: logits of torch\.float64"):
        sigsoftmax.cross_entropy(
            torch.randn(N, V, device=DEVICE, dtype=torch.float64), target, function="softmax", backend="triton"
        )
    own = sigsoftmax.register_function("own", lambda z: z + torch.atan(z))
    with pytest.raises(ValueError, match="'own' is registered by the user and has no kernel"):
        sigsoftmax.cross_entropy(torch.randn(N, V, device=DEVICE), target, function=own, backend="triton")


def test_gradients_are_scaled_by_what_comes_in() -> None:
    logits = torch.randn(N, V, device=DEVICE, requires_grad=True)
    target = target_with_ignored().to(DEVICE)
    loss = sigsoftmax.cross_entropy(logits, target, function=OutputFunction("sigsoftmax"), backend="triton")
    (once,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (half,) = torch.autograd.grad(0.5 * loss, logits)
    assert torch.equal(0.5 * once, half)
