"""Spectra of small matrices against numpy, and the rank of log-softmax against theory."""

import math

import numpy as np
import pytest
import torch

from sigsoftmax.analysis.spectrum import spectrum
from sigsoftmax.family import OutputFunction


def logits(rank: int, *, bias: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, rank, dtype=torch.float64, generator=generator) for n in (70, 40))
    return h @ w.T + (torch.randn(40, dtype=torch.float64, generator=generator) if bias else 0.0)


def test_values_and_thresholds_against_numpy():
    matrix = torch.log_softmax(logits(5, bias=False), -1)
    found = spectrum(matrix)
    assert (found.words, found.contexts) == (40, 70)
    expected = np.linalg.svd(matrix.numpy(), compute_uv=False)
    np.testing.assert_allclose(found.singular_values, expected, atol=1e-12)
    assert found.float64_rank == np.linalg.matrix_rank(matrix.numpy())
    assert found.press32_threshold == pytest.approx(0.5 * math.sqrt(111) * expected[0] * 2.0**-23)
    assert found.float64_threshold == pytest.approx(70 * expected[0] * 2.0**-52)


@pytest.mark.parametrize("width", [1, 4, 9])
def test_log_softmax_has_rank_width_plus_one_and_one_more_with_a_bias(width):
    assert spectrum(torch.log_softmax(logits(width, bias=False), -1)).press32_rank == width + 1
    assert spectrum(torch.log_softmax(logits(width, bias=True), -1)).press32_rank == width + 2


def test_log_sigsoftmax_exceeds_the_bound():
    phi = OutputFunction("sigsoftmax").phi(logits(4, bias=True))
    assert spectrum(torch.log_softmax(phi, -1)).press32_rank > 6


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.zeros(3), r"expected a floating-point matrix .* shape \(3,\)"),
        (torch.zeros(3, 0), r"at least one row and one column"),
        (torch.zeros(3, 3, dtype=torch.int64), r"got torch.int64"),
        (torch.tensor([[0.0, 0.0], [0.0, -math.inf]]), r"the first is -inf at row 1, column 1. Leave masked words out"),
    ],
)
def test_bad_input(matrix, message):
    with pytest.raises(ValueError, match=message):
        spectrum(matrix)
