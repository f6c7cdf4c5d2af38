"""log P cut down to a rank: against an SVD, as an upper bound, and zero where a softmax made it."""

import pytest
import torch

from sigsoftmax.analysis.audit.truncation import truncation, truncation_widths
from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.capacity.fits import fit
from sigsoftmax.analysis.capacity.lbfgs import Budget
from sigsoftmax.family.heads import Head
from sigsoftmax.synthetic import Language

LOG_P = Language.of_rank(contexts=30, words=20, rank=12, seed=0).log_p_NV


def kl_by_svd(log_p, width):
    centred = log_p - log_p.mean(1, keepdim=True)
    bias = centred.mean(0)
    u, s, v = torch.linalg.svd(centred - bias, full_matrices=False)
    log_q = torch.log_softmax(bias + (u[:, :width] * s[:width]) @ v[:width], -1)
    return float((log_p.exp() * (log_p - log_q)).sum(1).mean())


@pytest.mark.parametrize("memory", [1, 1 << 20])
@pytest.mark.parametrize("log_p", [LOG_P, LOG_P.T.log_softmax(-1)], ids=["tall", "wide"])
def test_against_an_svd(log_p, memory):
    found = truncation(log_p, (0, 3, 7, 20), memory=memory)
    for point in found.points:
        assert point.kl == pytest.approx(kl_by_svd(log_p, point.width), abs=1e-9)
    assert (found.contexts, found.words) == tuple(log_p.shape)


def test_it_bounds_the_least_kl_of_a_softmax_from_above():
    found = truncation(LOG_P, (2, 5))
    for point in found.points:
        least, _ = fit(Distributions.given(LOG_P), Head.parse("softmax"), point.width, budget=Budget(iterations=60))
        assert least.kl < point.bound


def test_the_bound_never_rises():
    peaked = Language.peaked(contexts=40, words=25, seed=0).log_p_NV * 3.0
    found = truncation(peaked.log_softmax(-1), range(21))
    bounds = [point.bound for point in found.points]
    assert bounds == sorted(bounds, reverse=True)
    assert all(point.bound <= point.kl for point in found.points)


def test_the_output_of_a_softmax_needs_its_width_and_no_more():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, dtype=torch.float64, generator=generator) for n in (30, 25))
    log_p = torch.log_softmax(hidden @ weight.T + torch.randn(25, dtype=torch.float64, generator=generator), -1)
    kl = {point.width: point.kl for point in truncation(log_p, (3, 4, 5)).points}
    assert kl[3] > 0.01
    assert kl[4] == pytest.approx(0.0, abs=1e-12)
    assert kl[5] == pytest.approx(0.0, abs=1e-12)


def test_log_p_is_left_as_it_was():
    before = LOG_P.clone()
    truncation(LOG_P, (2,))
    assert torch.equal(LOG_P, before)


def test_widths():
    assert truncation_widths(10, 30) == (0, 1, 2, 4, 8, 10)
    assert truncation_widths(10, 30, 5) == (0, 1, 2, 4, 5, 8, 10)
    assert truncation_widths(10, 30, 11) == (0, 1, 2, 4, 8, 10)
    with pytest.raises(ValueError, match=r"widths must lie between 0 and min\(contexts, tokens\) = 20, got \(21,\)"):
        truncation(LOG_P, (21,))


def test_words_of_probability_zero():
    with pytest.raises(ValueError, match=r"entries of -inf, and cannot be truncated"):
        truncation(torch.tensor([[0.0, -torch.inf]]), (1,))
