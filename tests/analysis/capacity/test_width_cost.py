"""Nats against a target: the restriction to some words is a lower bound, and widths are chosen so that they bind."""

import math

import pytest
import torch

from sigsoftmax.analysis.capacity.curves import CapacityConfig
from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.capacity.fits import fit
from sigsoftmax.analysis.capacity.lbfgs import Budget
from sigsoftmax.analysis.capacity.width_cost import heads_at_width, least_kl, mean_kl, restricted, widths_that_bind
from sigsoftmax.family.heads import Head
from sigsoftmax.synthetic import Language

LANGUAGE = Language.of_rank(contexts=30, words=24, rank=16, seed=0)
LOG_P = LANGUAGE.log_p_NV
EFFORT = CapacityConfig(random_starts=0, least_starts=2, budget=Budget(iterations=60))


def likeliest(count):
    return LOG_P.exp().mean(0).topk(count).indices.sort().values


def test_all_words_and_contexts_are_the_target_itself():
    found = restricted(LOG_P, contexts=100, vocabulary=100)
    assert found.weights_N.sum() == pytest.approx(1.0)
    rows = {tuple(row) for row in found.log_p_NV.tolist()}
    assert rows == {tuple(row) for row in LOG_P.tolist()}


def test_the_likeliest_words_are_kept_and_the_rest_conditioned_away():
    found = restricted(LOG_P, contexts=100, vocabulary=8)
    p_V = LOG_P.exp().mean(0)
    assert float(found.weights_N.sum()) == pytest.approx(float(p_V.topk(8).values.sum()))
    expected = torch.log_softmax(LOG_P[:, likeliest(8)], 1)
    found_rows, expected_rows = (rows[rows[:, 0].argsort()] for rows in (found.log_p_NV, expected))
    torch.testing.assert_close(found_rows, expected_rows)


@pytest.mark.parametrize("text", ["softmax", "gss(k=0)", "mos(K=2)"])
def test_the_restricted_least_kl_is_a_lower_bound(text):
    """The same output, restricted, is a solution of the restricted problem: its weighted KL is no larger."""
    head, width = Head.parse(text), 3
    whole, fitted = fit(Distributions.of_language(LANGUAGE), head, width, budget=Budget(iterations=40))
    log_q = fitted.own.problem.log_output(fitted.own.x)
    words = likeliest(8)
    log_mass, log_mass_q = LOG_P[:, words].logsumexp(1), log_q[:, words].logsumexp(1)
    given_p, given_q = LOG_P[:, words] - log_mass[:, None], log_q[:, words] - log_mass_q[:, None]
    conditional = (log_mass.exp() * (given_p.exp() * (given_p - given_q)).sum(1)).mean()
    assert float(conditional) <= whole.fitted_kl
    chosen = restricted(LOG_P, contexts=100, vocabulary=8)
    refitted, _ = fit(chosen, head, width, budget=Budget(iterations=80))
    assert refitted.kl < whole.kl


def test_contexts_that_are_alike_are_fitted_once():
    twice = torch.cat([LOG_P[:3], LOG_P[:1], LOG_P[:1]])
    found = restricted(twice, contexts=100, vocabulary=100)
    assert found.log_p_NV.shape[0] == 3
    assert sorted(found.weights_N.tolist()) == pytest.approx([0.2, 0.2, 0.6])


def test_contexts_are_sampled_by_the_seed():
    one, same, other = (restricted(LOG_P, contexts=5, vocabulary=24, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.log_p_NV, same.log_p_NV)
    assert not torch.equal(one.log_p_NV, other.log_p_NV)


def test_contexts_in_which_none_of_the_words_can_follow():
    certain = torch.full((3, 4), -math.inf)
    certain[0, 0] = certain[1, 1] = certain[2, 2] = 0.0
    found = restricted(certain, contexts=10, vocabulary=2)
    assert found.log_p_NV.shape == (2, 2)
    assert float(found.weights_N.sum()) == pytest.approx(2 / 3)


def test_widths_that_bind():
    assert widths_that_bind(16, 500, 500) == (16,)
    assert widths_that_bind(2048, 500, 500) == (15, 31, 62, 124)
    assert widths_that_bind(300, 500, 500) == (15, 31, 62, 124, 300)
    assert widths_that_bind(None, 65, 1000) == (2, 4, 8, 16)
    assert widths_that_bind(5, 3, 1000) == (1,)


def test_heads_are_compared_with_softmax():
    target = restricted(LOG_P, contexts=100, vocabulary=100)
    results = least_kl(target, ("sigsoftmax", "mos(K=2)"), (4,), EFFORT)
    found = {(head.head, head.width): head for head in heads_at_width(results)}
    assert {width for name, width in found if name == "softmax"} == {2, 4, 6, 8, 12, 16}
    assert found["softmax", 4].softmax_width == pytest.approx(4.0)
    assert found["mos(K=2)", 4].softmax_width > 4.5
    assert found["mos(K=2)", 4].kl < found["softmax", 4].kl
    with pytest.raises(
        ValueError, match=r"at width 23 a softmax makes any distributions over 24 tokens in 30|width 24"
    ):
        least_kl(target, ("softmax",), (24,), EFFORT)


def test_mean_kl():
    log_q = Language.of_rank(contexts=30, words=24, rank=5, seed=1).log_p_NV
    assert mean_kl(LOG_P, log_q) == pytest.approx(LANGUAGE.kl(log_q, weights="uniform"))
    assert mean_kl(LOG_P, LOG_P) == 0.0
    impossible = torch.tensor([[0.0, -math.inf]])
    assert mean_kl(impossible, impossible) == 0.0
    with pytest.raises(ValueError, match=r"the same contexts and vocabulary, got \(30, 24\) and \(29, 24\)"):
        mean_kl(LOG_P, log_q[:29])


def test_too_little_to_fit():
    with pytest.raises(ValueError, match=r"at least 1 context and 2 tokens, got 0 and 5"):
        restricted(LOG_P, contexts=0, vocabulary=5)
