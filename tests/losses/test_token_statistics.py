"""Statistics of tokens: values and gradients against plain torch in float64, memory, and what is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from tests.allocations import allocations_of
from torch import Tensor

import sigsoftmax
from sigsoftmax.contract.statistics import TokenStatistics

TOKENS, COMPONENTS, CLASSES, WIDTH = 13, 3, 17, 5
BACKENDS = ["reference", "blocked"]
MEMBERS = ["softmax", "sigsoftmax", "gss", "per-class shift", "relu"]
SMALL = 8 * CLASSES * COMPONENTS * 4
"""bytes of a chunk of a few tokens"""


class Case(NamedTuple):
    function: sigsoftmax.OutputFunction
    leaves: dict[str, Tensor]
    """tensors that a gradient is wanted of, by name"""
    target: Tensor

    def statistics(self, **options: Any) -> TokenStatistics:
        leaves, options = self.leaves, {"entropy": True, "argmax": True, "topk": 4, "chunk_bytes": SMALL} | options
        options |= {"function": self.function, "linear_bias": leaves["bias"]}
        target = options.pop("target", self.target)
        if "prior" in leaves:
            options.setdefault("prior_function", "sigsoftmax")
            return sigsoftmax.mixture_token_statistics(
                leaves["hidden"], leaves["prior"], leaves["weight"], target, **options
            )
        return sigsoftmax.linear_token_statistics(leaves["hidden"], leaves["weight"], target, **options)


def make_case(member: str, is_mixture: bool, dtype: torch.dtype = torch.float64) -> Case:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    components = (COMPONENTS,) if is_mixture else ()
    leaves = {"hidden": leaf(TOKENS, *components, WIDTH), "weight": leaf(CLASSES, WIDTH), "bias": leaf(CLASSES)}
    if is_mixture:
        leaves["prior"] = leaf(TOKENS, COMPONENTS)
    if member == "gss":
        leaves["k"] = torch.tensor(0.4, dtype=dtype).requires_grad_()
        function = sigsoftmax.OutputFunction("gss", k=leaves["k"])
    elif member == "per-class shift":
        leaves["b"] = leaf(CLASSES)
        function = sigsoftmax.OutputFunction("shifted_sigsoftmax", b=leaves["b"])
    else:
        function = sigsoftmax.OutputFunction(member)
    target = torch.randint(CLASSES, (TOKENS,))
    target[3] = -100
    return Case(function, leaves, target)


def plain(case: Case, *, temperature: float = 1.0, floor: float = 0.0, topk: int = 4) -> TokenStatistics:
    """The same by nothing but torch."""
    leaves = case.leaves
    z = leaves["hidden"] @ leaves["weight"].t() + leaves["bias"]
    masked = z == -torch.inf
    phi = torch.where(masked, z, case.function.phi(z.masked_fill(masked, 0.0)))
    log_p = torch.log_softmax(phi, -1)
    if "prior" in leaves:
        prior = leaves["prior"] + torch.nn.functional.logsigmoid(leaves["prior"])
        p = (torch.softmax(prior, -1).unsqueeze(-1) * log_p.exp()).sum(1) + floor
        # Not log of 0, whose gradient is no number.
        log_p = torch.where(p == 0, -torch.inf, torch.where(p == 0, 1.0, p).log())
    if temperature != 1.0:
        log_p = torch.log_softmax(log_p / temperature, -1)
    kept = case.target != -100
    at_target = log_p.gather(-1, case.target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    largest, argmax = log_p.topk(topk), log_p.argmax(-1)
    return TokenStatistics(torch.where(kept, at_target, 0.0), entropy, torch.logsumexp(phi, -1), *largest, argmax)


def weighted_sum(statistics: TokenStatistics, names: tuple[str, ...] = TokenStatistics._fields[:4]) -> Tensor:
    """A number that depends on every statistic in its own way; -inf is left out."""
    total = torch.zeros((), dtype=torch.float64)
    for name in names:
        values = getattr(statistics, name)
        weights = torch.linspace(-1.0, 2.0, values.numel(), dtype=torch.float64).view(values.shape)
        total = total + (weights * values.masked_fill(values == -torch.inf, 0.0)).sum()
    return total


def gradients_of(case: Case, total: Tensor) -> dict[str, Tensor]:
    """Zeros of what the number does not depend on: the prior, of normalisers."""
    gradients = torch.autograd.grad(total, list(case.leaves.values()), materialize_grads=True)
    return dict(zip(case.leaves, gradients, strict=True))


def assert_same(case: Case, got: TokenStatistics, expected: TokenStatistics) -> None:
    torch.testing.assert_close(tuple(got), tuple(expected), rtol=1e-10, atol=1e-10)
    wanted = gradients_of(case, weighted_sum(expected))
    torch.testing.assert_close(gradients_of(case, weighted_sum(got)), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.grid
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_mixture", [False, True])
@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_plain_torch(
    backend: str, is_mixture: bool, member: str, temperature: float
) -> None:
    case = make_case(member, is_mixture)
    expected = plain(case, temperature=temperature)
    assert_same(case, case.statistics(backend=backend, temperature=temperature), expected)


@pytest.mark.grid
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_mixture", [False, True])
@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("names", [("log_probs",), ("log_probs", "entropy"), TokenStatistics._fields[:3]])
def test_statistics_that_a_loss_computes_too(
    backend: str, is_mixture: bool, member: str, names: tuple[str, ...]
) -> None:
    case = make_case(member, is_mixture)
    got, expected = case.statistics(backend=backend, topk=0), plain(case)
    assert got.topk_log_probs is got.topk_indices is None
    torch.testing.assert_close(got[:3], expected[:3], rtol=1e-10, atol=1e-10)
    assert torch.equal(got.argmax, expected.argmax)
    wanted = gradients_of(case, weighted_sum(expected, names))
    torch.testing.assert_close(gradients_of(case, weighted_sum(got, names)), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_floor_of_a_mixture(backend: str, temperature: float) -> None:
    case = make_case("sigsoftmax", is_mixture=True)
    expected = plain(case, temperature=temperature, floor=1e-2)
    assert_same(case, case.statistics(backend=backend, temperature=temperature, floor=1e-2), expected)


@pytest.mark.parametrize("name", TokenStatistics._fields[:4])
@pytest.mark.parametrize("is_mixture", [False, True])
def test_the_gradient_of_each_statistic_by_itself(is_mixture: bool, name: str) -> None:
    case = make_case("gss", is_mixture)
    expected = gradients_of(case, weighted_sum(plain(case), (name,)))
    got = gradients_of(case, weighted_sum(case.statistics(), (name,)))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_mixture", [False, True])
def test_masked_classes_have_no_part(is_mixture: bool, backend: str) -> None:
    case = make_case("sigsoftmax", is_mixture)
    case.leaves["bias"].data[[2, 5]] = -torch.inf
    case.target[case.target == 2] = 1
    case.target[case.target == 5] = 1
    got, expected = case.statistics(backend=backend), plain(case)
    torch.testing.assert_close(tuple(got), tuple(expected), rtol=1e-10, atol=1e-10)
    gradients, wanted = (gradients_of(case, weighted_sum(s)) for s in (got, expected))
    torch.testing.assert_close(gradients["hidden"], wanted["hidden"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients["bias"], wanted["bias"], rtol=1e-9, atol=1e-9)
    assert gradients["bias"][2] == 0


def test_more_likeliest_classes_than_are_not_masked() -> None:
    case = make_case("softmax", is_mixture=False)
    case.leaves["bias"].data[3:] = -torch.inf
    got = case.statistics(topk=5, target=None)
    assert got.log_probs is None
    assert (got.topk_log_probs[:, 3:] == -torch.inf).all()
    assert got.topk_log_probs[:, :3].isfinite().all()


def test_what_is_not_asked_for_is_none_and_shapes_are_the_leading_ones() -> None:
    hidden, weight = torch.randn(2, 3, WIDTH), torch.randn(CLASSES, WIDTH)
    got = sigsoftmax.linear_token_statistics(hidden, weight, function="sigsoftmax")
    assert got.log_probs is got.entropy is got.topk_log_probs is got.topk_indices is got.argmax is None
    assert got.log_normalizer.shape == (2, 3)
    got = sigsoftmax.linear_token_statistics(hidden, weight, function="sigsoftmax", topk=2, entropy=True)
    assert got.entropy is not None
    assert got.entropy.shape == (2, 3)
    assert got.topk_indices is not None
    assert got.topk_indices.shape == (2, 3, 2)
    prior = torch.randn(2, 3)
    got = sigsoftmax.mixture_token_statistics(hidden, prior, weight, torch.ones(2).long(), function="softmax")
    assert got.log_probs is not None
    assert got.log_probs.shape == (2,)
    assert got.log_normalizer.shape == (2, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: str) -> None:
    hidden, weight = torch.randn(0, WIDTH, requires_grad=True), torch.randn(CLASSES, WIDTH, requires_grad=True)
    got = sigsoftmax.linear_token_statistics(
        hidden, weight, torch.empty(0).long(), function="softmax", entropy=True, topk=2, backend=backend
    )
    assert got.log_probs is not None
    assert got.entropy is not None
    assert got.log_probs.shape == (0,)
    (got.log_probs.sum() + got.entropy.sum()).backward()
    assert weight.grad is not None
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("is_mixture", [False, True])
def test_backward_twice_gives_the_same_bits(is_mixture: bool) -> None:
    case = make_case("gss", is_mixture)
    total = weighted_sum(case.statistics())
    leaves = list(case.leaves.values())
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    second = torch.autograd.grad(total, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_second_derivative_raises_or_comes_from_the_reference() -> None:
    case = make_case("sigsoftmax", is_mixture=False)
    hidden = case.leaves["hidden"]

    def second(backend: str) -> Tensor:
        (by_hidden,) = torch.autograd.grad(case.statistics(backend=backend).entropy.sum(), hidden, create_graph=True)
        return torch.autograd.grad(by_hidden.square().sum(), hidden)[0]

    assert second("reference").norm() > 0
    with pytest.raises(RuntimeError, match="backend='reference'"):
        second("blocked")


@pytest.mark.parametrize("is_mixture", [False, True])
def test_a_token_that_the_loss_does_not_use_may_be_nan(is_mixture: bool) -> None:
    case = make_case("gss", is_mixture)
    case.leaves["hidden"].data[3] = torch.nan
    kept = case.target != -100
    got = case.statistics()
    total = got.log_probs.sum() + got.entropy[kept].sum() + got.topk_log_probs[kept].sum()
    gradients = gradients_of(case, total)
    # That of the weight is a product with the hidden vectors.
    del gradients["weight"]
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert (gradients["hidden"][3] == 0).all()


def test_results_may_be_changed_in_place() -> None:
    case = make_case("sigsoftmax", is_mixture=False)
    got, expected = case.statistics(), plain(case)
    assert got.log_probs is not None
    assert expected.log_probs is not None
    wanted = gradients_of(case, (expected.log_probs * 2.0).sum())
    torch.testing.assert_close(gradients_of(case, got.log_probs.mul_(2.0).sum()), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("topk", [0, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_has_results_in_float32(dtype: torch.dtype, topk: int) -> None:
    case = make_case("sigsoftmax", is_mixture=False, dtype=dtype)
    got, names = case.statistics(topk=topk), TokenStatistics._fields[: 4 if topk else 1]
    assert {values.dtype for values in got[:4] if values is not None} == {torch.float32}
    exact = Case(case.function, {k: t.detach().double().requires_grad_() for k, t in case.leaves.items()}, case.target)
    assert got.entropy is not None
    assert got.log_probs is not None
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.entropy.double(), plain(exact).entropy, rtol=tolerance, atol=tolerance)
    gradients = gradients_of(case, weighted_sum(got, names))
    assert {name: g.dtype for name, g in gradients.items()} == dict.fromkeys(gradients, dtype)
    expected = gradients_of(exact, weighted_sum(plain(exact), names))
    for name, gradient in gradients.items():
        assert (gradient.double() - expected[name]).norm() < tolerance * expected[name].norm(), name


@pytest.mark.parametrize("names", [("log_probs",), ("log_probs", "entropy")])
def test_the_gradient_of_a_weight_of_low_precision_is_summed_as_asked_for(names: tuple[str, ...]) -> None:
    classes, tokens = 40, 96
    hidden, weight = torch.randn(tokens, WIDTH).bfloat16(), torch.randn(classes, WIDTH).bfloat16()
    target = torch.randint(classes, (tokens,))

    def gradient(dtype: torch.dtype, weight_gradient: Any) -> Tensor:
        leaf = weight.to(dtype).requires_grad_()
        got = sigsoftmax.linear_token_statistics(
            *(hidden.to(dtype), leaf, target),
            function="softmax",
            entropy=True,
            chunk_bytes=2 * classes,
            weight_gradient=weight_gradient,
        )
        way = "in place" if dtype == torch.float64 else "fast" if weight_gradient == "fast" else "buffered"
        assert f"token statistics, 96 chunks of 1 tokens (0.0 MiB), weight gradient {way}" in str(sigsoftmax.explain())
        total = torch.stack([getattr(got, name).double().sum() for name in names]).sum()
        return torch.autograd.grad(total, leaf)[0].double()

    exact = gradient(torch.float64, "fast")
    fast, *others = ((gradient(torch.bfloat16, way) - exact).norm() for way in ("fast", "buffered", "exact", "auto"))
    assert all(error < 0.7 * fast for error in others)


def test_a_peaked_distribution_has_a_small_entropy_with_the_right_gradient() -> None:
    # Near an entropy of 0 terms of size 1 would cancel.
    hidden = torch.tensor([[18.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    got = sigsoftmax.linear_token_statistics(hidden, weight, function="softmax", entropy=True).entropy
    assert got is not None
    (gradient,) = torch.autograd.grad(got.sum(), hidden)
    exact = hidden.detach().double().requires_grad_()
    log_p = torch.log_softmax(exact @ weight.double().t(), -1)
    (expected,) = torch.autograd.grad(-(log_p.exp() * log_p).sum(), exact)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("is_mixture", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_memory_does_not_grow_with_the_number_of_tokens_times_classes(is_mixture: bool) -> None:
    classes, width, components = 4000, 4, 2

    def peak(tokens: int) -> int:
        hidden = torch.randn(tokens, *((components,) if is_mixture else ()), width, requires_grad=True)
        weight = torch.randn(classes, width, requires_grad=True)
        prior, target = torch.randn(tokens, components, requires_grad=True), torch.randint(classes, (tokens,))
        options: dict[str, Any] = {"function": "sigsoftmax", "entropy": True, "topk": 3, "chunk_bytes": 2**18}

        def step() -> None:
            if is_mixture:
                got = sigsoftmax.mixture_token_statistics(hidden, prior, weight, target, **options)
            else:
                got = sigsoftmax.linear_token_statistics(hidden, weight, target, **options)
            sum(values.sum() for values in got[:4] if values is not None).backward()

        return allocations_of(step).peak

    # Chunks of the same size; 320 tokens more would have 5.1 MB of logits, 10.2 MB for the mixture.
    assert peak(480) - peak(160) < 100_000


@pytest.mark.parametrize("is_mixture", [False, True])
def test_torch_compile_keeps_it_whole(is_mixture: bool) -> None:
    case = make_case("gss", is_mixture)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(leaves: dict[str, Tensor]) -> TokenStatistics:
        function = sigsoftmax.OutputFunction("gss", k=leaves["k"])
        return Case(function, leaves, case.target).statistics()

    assert_same(case, compiled(case.leaves), plain(case))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"topk": CLASSES + 1}, "topk must be at most the number of classes, 17, got 18"),
    ({"topk": -1}, "topk must be a number of classes, or 0 for none, got -1"),
    ({"topk": 1.5}, "topk must be a whole number, got 1.5"),
    ({"topk": True}, "topk must be a whole number, got True"),
    ({"entropy": 1}, "entropy must be True or False, got 1"),
    ({"argmax": None}, "argmax must be True or False, got None"),
    ({"weight_gradient": "slow"}, "weight_gradient must be one of 'auto', 'fast', 'buffered', 'exact', got 'slow'"),
    ({"temperature": 0.0}, "temperature must be a finite number greater than 0, got 0.0"),
    ({"temperature": "hot"}, "temperature must be a number"),
    ({"target": torch.zeros(TOKENS, 1).long()}, r"one class index per token, shape \(13,\), got \(13, 1\)"),
    ({"target": torch.zeros(TOKENS)}, r"target must hold class indices \(int64\), got torch.float32"),
    ({"target": torch.full((TOKENS,), CLASSES)}, "target 17 at row 0 is out of range"),
    ({"backend": "fast"}, "unknown backend 'fast'"),
    ({"chunk_bytes": 0}, "chunk_bytes must be a positive number of bytes"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("options", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_bad_arguments_are_named(options: dict[str, Any], message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_case("softmax", is_mixture=False).statistics(**{"backend": backend} | options)


def test_explain_tells_of_the_statistics() -> None:
    make_case("softmax", is_mixture=True).statistics()
    assert "mixture (3 components) token statistics" in str(sigsoftmax.explain())
