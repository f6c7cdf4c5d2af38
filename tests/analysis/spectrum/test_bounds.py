"""Bounds on a rank against the rank itself, and against theory."""

import math

import pytest
import torch

from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.analysis.spectrum import bounds
from sigsoftmax.analysis.spectrum.bounds import matrix_rank_bounds, rank_bounds, upper_bound
from sigsoftmax.analysis.spectrum.matrix_readers import from_array, from_blocks, from_head
from sigsoftmax.analysis.spectrum.streaming import SpectrumOptions, streamed_spectrum
from sigsoftmax.family import OutputFunction, register_function
from sigsoftmax.family.heads import Head


def made(contexts=400, words=300, width=10, *, bias=True, head="softmax", components=1, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    hidden_NKd = normal(contexts, components, width)
    layer = HeadWeights(weight_Vd=normal(words, width), bias_V=normal(words) if bias else None, head=head)
    prior_logits_NK = None if components == 1 else normal(contexts, components)
    return layer, Contexts(hidden_NKd=hidden_NKd, prior_logits_NK=prior_logits_NK)


def matrix_of(model, **arguments):
    return torch.cat(list(from_head(*model, **arguments).blocks(0)))


def rank_of(model, rule="press32"):
    count = streamed_spectrum(from_head(*model), SpectrumOptions(method="exact")).count(rule)
    assert count.at_least == count.at_most
    return count.rank


HEADS = ["softmax", "softmax(alpha=2)", "sigsoftmax", "gss(k=0.2)", "sigmoid", "relu", "softcap(c=3)"]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_contexts", [None, 50])
def test_the_rank_lies_between_the_bounds(head, bias, norm_contexts):
    model = made(head=head, bias=bias)
    found = rank_bounds(*model, block_contexts=40, block_tokens=50, norm_contexts=norm_contexts)
    assert found.norm_contexts == (norm_contexts or 400)
    assert found.lower <= rank_of(model) <= found.upper
    spectrum = streamed_spectrum(from_head(*model))
    assert spectrum.largest <= found.norm_bound
    assert spectrum.press32_threshold <= found.threshold_bound < found.counting_threshold
    # One by one, the block's singular values are no larger than those of the whole.
    values = zip(found.block_singular_values, spectrum.singular_values, strict=False)
    assert all(block <= whole + 1e-3 for block, whole in values)


@pytest.mark.parametrize(("bias", "rank"), [(True, 12), (False, 11)])
def test_for_softmax_the_bounds_meet(bias, rank):
    found = rank_bounds(*made(bias=bias))
    assert (found.lower, found.upper) == (rank, rank) == (rank_of(made(bias=bias)),) * 2
    assert "phi is linear" in found.upper_reason
    assert (found.head, found.width, found.block_contexts, found.block_words) == ("softmax", 10, 256, 256)


def test_a_block_shows_that_sigsoftmax_exceeds_the_bound_of_softmax():
    found = rank_bounds(*made(head="sigsoftmax"), block_contexts=100, block_tokens=100)
    assert 12 < found.lower <= 100
    assert found.upper == 300


def test_a_constant_bias_adds_nothing():
    layer, contexts = made()
    constant = HeadWeights(weight_Vd=layer.weight_Vd, bias_V=torch.full((300,), 2.0))
    assert rank_bounds(constant, contexts).upper == 11


def test_words_and_contexts_that_are_the_same_count_once():
    layer, contexts = made(head="sigsoftmax")
    repeated_Vd = layer.weight_Vd[:20].repeat(15, 1)
    words = HeadWeights(weight_Vd=repeated_Vd, bias_V=layer.bias_V[:20].repeat(15), head="sigsoftmax")
    found = rank_bounds(words, contexts)
    assert found.upper == 20 >= rank_of((words, contexts))
    assert found.upper_reason == "20 of 300 tokens differ in W or bias"
    unbiased = HeadWeights(weight_Vd=layer.weight_Vd, head="sigsoftmax")
    few = Contexts(hidden_NKd=contexts.hidden_NKd[:7].repeat(50, 1, 1))
    assert rank_bounds(unbiased, few).upper == 7 >= rank_of((unbiased, few))
    # A bias or a shift for each word tells words apart.
    apart = HeadWeights(weight_Vd=repeated_Vd, bias_V=layer.bias_V, head="sigsoftmax")
    assert rank_bounds(apart, contexts).upper == 300
    shifted = Head(OutputFunction("shifted_sigsoftmax", b=torch.arange(300.0)))
    assert rank_bounds(HeadWeights(weight_Vd=repeated_Vd, head=shifted), contexts).upper == 300


@pytest.mark.parametrize("norm_contexts", [None, 60])
def test_mixtures(norm_contexts):
    model = made(head="mos(K=3)", components=3)
    found = rank_bounds(*model, block_contexts=50, block_tokens=50, norm_contexts=norm_contexts)
    assert found.lower <= rank_of(model) <= found.upper == 300
    assert streamed_spectrum(from_head(*model)).largest <= found.norm_bound
    assert found.lower > 12


def test_few_words_or_contexts_leave_no_bottleneck():
    found = rank_bounds(*made(contexts=8, words=30))
    assert found.upper == 8
    assert found.upper_reason == "the smaller side of the matrix"


def test_thresholds_of_float64():
    found = rank_bounds(*made(), rule="numpy64")
    assert (found.lower, found.upper) == (12, 12)
    assert found.counting_threshold < 1e-6
    with pytest.raises(ValueError, match="unknown rule 'press'"):
        rank_bounds(*made(), rule="press")


@pytest.mark.parametrize("head", ["softmax", "sigsoftmax"])
def test_the_rounding_of_large_logits_is_not_counted(head):
    """Logits around 30,000 are rounded to 0.002 in float32, far above the threshold; both heads are softmax there."""
    layer, contexts = made(bias=False, head=head)
    weight_Vd, hidden_Nd = layer.weight_Vd, contexts.hidden_NKd[:, 0]
    offset = HeadWeights(weight_Vd=torch.cat([weight_Vd, torch.full((300, 1), 3e4)], 1).float(), head=head)
    assert rank_bounds(offset, Contexts.of_rows(torch.cat([hidden_Nd, torch.ones(400, 1)], 1).float())).lower == 11
    with pytest.raises(ValueError, match="overflow float32"):
        rank_bounds(HeadWeights(weight_Vd=weight_Vd * 1e30, head=head), Contexts.of_rows(hidden_Nd * 1e30))


def test_what_rounding_does_is_bounded_in_both_arithmetics(monkeypatch):
    model = made(head="sigsoftmax", width=40)
    exact = matrix_of(model, dtype=torch.float64)
    for share, dtype, least in ((math.inf, torch.float32, 1e-7), (0.0, torch.float64, 1e-16)):
        monkeypatch.setattr(bounds, "ROUNDING_SHARE", share)
        found = rank_bounds(*model, block_contexts=300, block_tokens=300)
        rounding = found.counting_threshold - found.threshold_bound
        rounded = matrix_of(model, dtype=torch.float32, quick=True)
        error = float(torch.linalg.matrix_norm(exact - rounded, 2))
        scale = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
        assert error * scale < rounding
        assert rounding > least
        assert found.lower <= rank_of(model)
        assert found.norm_bound >= float(exact.norm())


def test_the_same_seed_draws_the_same_block():
    first, second, other = (rank_bounds(*made(), block_contexts=30, seed=seed) for seed in (1, 1, 2))
    assert first.block_singular_values == second.block_singular_values != other.block_singular_values


def test_what_cannot_be_bounded_must_be_computed():
    register_function("square", lambda z: z * z)
    per_class = Head(OutputFunction("shifted_sigsoftmax", b=torch.zeros(300)))
    for head in ("square", "gss(k=-1)", per_class):
        with pytest.raises(ValueError, match="ask for norm_contexts=400, or give fewer contexts"):
            rank_bounds(*made(head=head), block_contexts=30, norm_contexts=30)
        assert rank_bounds(*made(head=head), block_contexts=30).norm_contexts == 400


def test_work_is_limited_by_default(monkeypatch):
    monkeypatch.setattr(bounds, "NORM_FLOPS", 2.0 * 300 * 10 * 350)
    assert rank_bounds(*made()).norm_contexts == 350
    seen = []
    rank_bounds(*made(), progress=seen.append)
    assert seen[-1].contexts == seen[-1].total_contexts == 350


# --- stored matrices ------------------------------------------------------------------------------------------------


def test_a_stored_matrix():
    matrix = matrix_of(made())
    found = matrix_rank_bounds(from_array(matrix), head="softmax", width=10, block_contexts=60, block_tokens=60)
    assert (found.lower, found.upper) == (12, 12)
    assert found.norm_bound == pytest.approx(float(matrix.norm()), rel=1e-6)
    unknown = matrix_rank_bounds(from_blocks(matrix.split(33), contexts=400, vocabulary=300))
    assert (unknown.lower, unknown.upper, unknown.width, unknown.head) == (12, 300, None, "")


def test_a_matrix_that_is_not_what_it_was_said_to_be():
    matrix = matrix_of(made(head="sigsoftmax"))
    with pytest.raises(ValueError, match=r"more than the 12 that theory allows .* check head, width and bias"):
        matrix_rank_bounds(from_array(matrix), head="softmax", width=10)
    with pytest.raises(ValueError, match="knows its contexts and its vocabulary"):
        matrix_rank_bounds(from_blocks([matrix]))
    with pytest.raises(ValueError, match="ended after 400 contexts, expected 500"):
        matrix_rank_bounds(from_blocks([matrix], contexts=500, vocabulary=300))
    with pytest.raises(ValueError, match="block_tokens must be at least 1"):
        matrix_rank_bounds(from_array(matrix), block_tokens=0)
    matrix[3, 4] = math.nan
    with pytest.raises(ValueError, match="nan at row 3, column 4"):
        matrix_rank_bounds(from_array(matrix))


# --- theory ---------------------------------------------------------------------------------------------------------

GENERATOR = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT, BIAS = (torch.randn(*shape, generator=GENERATOR) for shape in ((40, 5), (30, 5), (30,)))
CONTEXTS = Contexts.of_rows(HIDDEN)


@pytest.mark.parametrize("head", ["softmax", "softmax(alpha=2)"])
@pytest.mark.parametrize(("bias", "bound"), [(BIAS, 7), (None, 6), (torch.full((30,), 3.0), 6)])
def test_a_linear_phi(head, bias, bound):
    found, reason = upper_bound(HeadWeights(weight_Vd=WEIGHT, bias_V=bias, head=head), CONTEXTS)
    assert found == bound
    assert "phi is linear" in reason


def test_any_other_phi_is_bounded_by_what_differs():
    assert upper_bound(HeadWeights(weight_Vd=WEIGHT, head="sigsoftmax"), CONTEXTS)[0] == 30
    words = HeadWeights(weight_Vd=WEIGHT[:4].repeat(8, 1), head="sigsoftmax")
    assert upper_bound(words, CONTEXTS) == (4, "4 of 32 tokens differ in W or bias")
    told_apart = HeadWeights(weight_Vd=WEIGHT[:1].repeat(30, 1), bias_V=BIAS, head="sigsoftmax")
    assert upper_bound(told_apart, CONTEXTS)[0] == 30
    contexts = Contexts.of_rows(HIDDEN[:3].repeat(9, 1))
    assert upper_bound(HeadWeights(weight_Vd=WEIGHT, head="sigsoftmax"), contexts) == (3, "3 of 27 contexts differ")


def test_priors_tell_contexts_of_a_mixture_apart():
    same = HIDDEN[:1, None].repeat(20, 2, 1)
    for prior, bound in ((torch.randn(20, 2, generator=GENERATOR), 20), (torch.zeros(20, 2), 1)):
        mixture = Contexts(hidden_NKd=same, prior_logits_NK=prior)
        assert upper_bound(HeadWeights(weight_Vd=WEIGHT, head="mos(K=2)"), mixture)[0] == bound
