"""Validation of given distributions: what is accepted, put right and refused."""

import math

import pytest
import torch

from sigsoftmax.analysis.capacity.distributions import Distributions, checked_log_probs
from sigsoftmax.synthetic import Language

LANGUAGE = Language.of_rank(contexts=6, words=5, rank=3, seed=0)
LOG_P = LANGUAGE.log_p_NV


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probabilities_and_probabilities_mean_the_same(dtype):
    of_logs, of_probabilities = (checked_log_probs(x.to(dtype), "x") for x in (LOG_P, LOG_P.exp()))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    for found in (of_logs, of_probabilities):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, LOG_P, rtol=0, atol=tolerance)
        torch.testing.assert_close(found.logsumexp(1), torch.zeros(6, dtype=torch.float64))


def test_a_floor_under_probabilities_is_put_right():
    floored = (LOG_P.exp() + 1e-4).log()
    torch.testing.assert_close(checked_log_probs(floored, "x").logsumexp(1), torch.zeros(6, dtype=torch.float64))


def test_zeros_are_probabilities_too():
    found = checked_log_probs(torch.tensor([[0.0, 1.0], [0.5, 0.5]]), "x")
    assert found[0].tolist() == [-math.inf, 0.0]


def changed(row: int, column: int, value: float) -> torch.Tensor:
    matrix = LOG_P.clone()
    matrix[row, column] = value
    return matrix


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.zeros(3), r"x: expected a floating-point matrix .* shape \(3,\)"),
        (torch.zeros(0, 3), r"at least one of each"),
        (torch.zeros(2, 3, dtype=torch.int64), r"got torch.int64"),
        (changed(4, 2, math.nan), r"x: NaN at row 4, column 2 \(1 such entries\)"),
        (changed(4, 2, 0.25), r"x: 0.25 at row 4, column 2 .* never positive; if these are logits, take log_softmax"),
        (LOG_P - 0.5 * (torch.arange(6) == 3)[:, None], r"those of row 3 sum to 0.606531, off by -0.393, and 1 of 6"),
        (2.0 * LOG_P.exp() / LOG_P.exp().sum(1, keepdim=True), r"must lie between 0 and 1|sum to 2, off by \+1"),
        (torch.tensor([[0.5, 0.4]]), r"sum to 0.9, off by -0.1"),
    ],
)
def test_what_is_refused_and_how_far_it_is_off(matrix, message):
    with pytest.raises(ValueError, match=message):
        checked_log_probs(matrix, "x")


def test_rows_have_the_numbers_of_the_whole():
    with pytest.raises(ValueError, match=r"NaN at row 104, column 2"):
        checked_log_probs(changed(4, 2, math.nan), "x", rows_N=torch.arange(100, 106))


def test_weights():
    assert torch.equal(Distributions.of_language(LANGUAGE, "stationary").weights_N, LANGUAGE.stationary_N)
    given = Distributions.given(LOG_P)
    assert given.weights_N.tolist() == pytest.approx([1 / 6] * 6)
    with pytest.raises(ValueError, match=r"weights of contexts must be 6 numbers"):
        Distributions(log_p_NV=LOG_P, weights_N=torch.ones(5), description="")
    with pytest.raises(ValueError, match=r"not all zero"):
        Distributions(log_p_NV=LOG_P, weights_N=torch.zeros(6), description="")
    with pytest.raises(ValueError, match=r"two tokens, got 1 and 1"):
        Distributions(log_p_NV=torch.zeros(1, 1), weights_N=torch.ones(1), description="")
