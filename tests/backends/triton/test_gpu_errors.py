"""Errors of gradients on a GPU, in every way to sum the weight's: bounds as docs/benchmarks.md states them.

The sums have as many chunks as the full sizes have, at sizes that take a moment; the truth and plain torch's error come
from the benchmark.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import pytest
import torch
from gpu_losses import ours_linear, ours_logits, ours_mixture, under_autocast
from gpu_machine import Machine, float32_products
from gpu_problems import (
    DEVIATIONS,
    Implementation,
    Problem,
    linear_problem,
    logits_problem,
    mixture_problem,
    relative_errors,
)

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

N, K, D, V = 2048, 4, 256, 20_011
FUNCTIONS = ("softmax", "sigsoftmax")
WAYS = {"fast": 1.6, "buffered": 1.2, "exact": 1.05}
"""the most that each may be off, relative to plain torch"""
KINDS = [*(f"deviation {deviation:g}" for deviation in DEVIATIONS), "peaked"]


def chunk_mib(chunks: int, rows: int = N, itemsize: int = 2) -> float:
    return 1.01 * rows * V * itemsize / chunks / 2**20


def assert_within(implementation: Implementation, problem: Problem, kind: str, bound: float) -> None:
    (found,) = relative_errors({"ours": implementation}, {kind: lambda: problem}).values()
    assert found.keys() == {f"{name}, {kind}" for name in problem.leaves}
    for of, error in found.items():
        assert error <= bound, f"{of}: {error:.3f} times plain torch's"


def problem_of(kind: str, dtype: torch.dtype = torch.bfloat16, product_dtype: torch.dtype = torch.bfloat16) -> Problem:
    peaked = kind == "peaked"
    deviation = 1.0 if peaked else float(kind.split()[1])
    return linear_problem(
        "cuda",
        N,
        D,
        V,
        deviation=deviation,
        peaked=peaked,
        dtype=dtype,
        product_dtype=product_dtype,
        has_bias=True,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_given_logits(function: str, kind: str) -> None:
    peaked = kind == "peaked"
    deviation = 1.0 if peaked else float(kind.split()[1])
    problem = logits_problem("cuda", N, V, deviation=deviation, peaked=peaked)
    assert_within(Implementation(function, ours_logits(function)), problem, kind, 1.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("way", "bound"), WAYS.items())
def test_products_in_four_chunks(way: str, bound: float, function: str, kind: str) -> None:
    assert_within(ours_linear(function, way, chunk_mib(4)), problem_of(kind), kind, bound)


@pytest.mark.parametrize("kind", KINDS)
def test_fast_sums_of_eight_chunks(kind: str) -> None:
    assert_within(ours_linear("sigsoftmax", "fast", chunk_mib(8)), problem_of(kind), kind, 2.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_float32_weights_under_autocast(function: str, kind: str) -> None:
    implementation = under_autocast(Machine("cuda"), ours_linear(function, "auto", chunk_mib(4)))
    # What is left of the two errors is the rounding of the same inputs; a hundredth is chance.
    assert_within(implementation, problem_of(kind, torch.float32), kind, 1.01)


@pytest.mark.parametrize("products", ["highest", "high"])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_products(kind: str, products: str) -> None:
    with float32_products(products):
        problem = problem_of(kind, torch.float32, torch.float32)
        assert_within(ours_linear("sigsoftmax", "auto", chunk_mib(4, itemsize=4)), problem, kind, 1.2)


@pytest.mark.parametrize("deviation", DEVIATIONS)
@pytest.mark.parametrize(("way", "bound"), WAYS.items())
def test_mixtures_in_four_chunks(way: str, bound: float, deviation: float) -> None:
    problem = mixture_problem("cuda", N // K, K, D, V, deviation=deviation, has_bias=True)
    implementation = ours_mixture("sigsoftmax", way, chunk_mib(4))
    assert_within(implementation, problem, f"deviation {deviation:g}", bound)


@pytest.mark.parametrize("products", ["highest", "high"])
@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_mixtures_in_float32(deviation: float, products: str) -> None:
    with float32_products(products):
        problem = mixture_problem("cuda", N // K, K, D, V, deviation=deviation, dtype=torch.float32, has_bias=True)
        implementation = ours_mixture("sigsoftmax", "auto", chunk_mib(4, itemsize=4))
        assert_within(implementation, problem, f"deviation {deviation:g}", 1.2)


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_tf32_products_of_few_features_and_ragged_chunks(deviation: float) -> None:
    """The weight is copied, and the last rows of each chunk are a product of their own."""
    with float32_products("high"):
        problem = linear_problem(
            "cuda", N - 5, 48, V, deviation=deviation, dtype=torch.float32, product_dtype=torch.float32, has_bias=True
        )
        implementation = ours_linear("sigsoftmax", "auto", chunk_mib(4, itemsize=4))
        assert_within(implementation, problem, f"deviation {deviation:g}", 1.2)
