"""Words that can never come first: against convex hulls, against a full linear program, and with proofs checked."""

import sys

import numpy as np
import pytest
import torch

from sigsoftmax.analysis.audit import argmax
from sigsoftmax.analysis.audit.argmax import Cone, argmax_counts, decide_by_programs, has_rising_phi
from sigsoftmax.analysis.head_weights import HeadWeights
from sigsoftmax.family import OutputFunction, register_function
from sigsoftmax.family.heads import Head

scipy_spatial = pytest.importorskip("scipy.spatial")
scipy_optimize = pytest.importorskip("scipy.optimize")


def layer_of(words: int, width: int, *, bias: float = 0.0, seed: int = 0, dtype=torch.float32) -> HeadWeights:
    generator = torch.Generator().manual_seed(seed)
    weight_Vd = torch.randn(words, width, generator=generator).to(dtype)
    bias_V = bias * torch.randn(words, generator=generator) if bias else None
    return HeadWeights(weight_Vd=weight_Vd, bias_V=bias_V)


def can_come_first(layer: HeadWeights, word: int) -> bool:
    """One linear program over all rivals: h free, a margin of 1 without a bias, the largest margin with one."""
    weight = layer.weight_Vd.double().numpy()
    others = np.arange(layer.vocabulary) != word
    differences = weight[word] - weight[others]
    if layer.bias_V is None:
        bias = np.zeros(others.sum())
    else:
        bias = (layer.bias_V[word] - layer.bias_V).double().numpy()[others]
    # max t <= 1 with differences h + bias >= t
    limits = np.concatenate([-differences, np.ones((others.sum(), 1))], 1)
    objective = np.zeros(layer.width + 1)
    objective[-1] = -1.0
    bounds = [(None, None)] * layer.width + [(None, 1.0)]
    solved = scipy_optimize.linprog(objective, A_ub=limits, b_ub=bias, bounds=bounds, method="highs")
    return solved.x[-1] > 1e-7


@pytest.mark.parametrize("width", [2, 3, 4])
def test_without_a_bias_they_are_the_corners_of_the_convex_hull(width):
    layer = layer_of(60, width)
    counts = argmax_counts(layer, tokens_in_question=None)
    corners = scipy_spatial.ConvexHull(layer.weight_Vd.double().numpy()).vertices
    assert (counts.yes, counts.no, counts.undecided) == (len(corners), 60 - len(corners), 0)
    assert set(counts.never) == set(range(60)) - set(corners.tolist())
    assert counts.yes == counts.yes_seen + counts.yes_by_steps + counts.yes_by_program


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_with_a_bias_against_a_full_linear_program(dtype):
    layer = layer_of(50, 3, bias=1.5, dtype=dtype)
    counts = argmax_counts(layer, tokens_in_question=None)
    expected = [word for word in range(50) if not can_come_first(layer, word)]
    assert 0 < len(expected) < 50
    assert list(counts.never) == expected
    assert counts.undecided == 0


def test_a_bias_can_lift_a_word_out_of_the_hull_and_push_one_down():
    square = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])
    assert argmax_counts(HeadWeights(weight_Vd=square), tokens_in_question=None).never == (4,)
    lifted = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5])
    assert argmax_counts(HeadWeights(weight_Vd=square, bias_V=lifted), tokens_in_question=None).never == ()
    sunk = torch.tensor([0.0, 0.0, 0.0, 0.0, -0.5])
    assert argmax_counts(HeadWeights(weight_Vd=square, bias_V=sunk), tokens_in_question=None).never == (4,)


def test_words_with_the_same_row_never_come_first_alone():
    layer = layer_of(20, 3)
    layer.weight_Vd[7] = layer.weight_Vd[3]
    counts = argmax_counts(layer, tokens_in_question=None)
    assert {3, 7} <= set(counts.never)


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_proofs_hold(bias):
    """A yes comes with a hidden vector, a no with weights that bound every margin."""
    layer = layer_of(40, 3, bias=bias)
    cone = Cone(layer)
    generator = torch.Generator().manual_seed(1)
    random_x = torch.randn(2000, cone.columns, generator=generator, dtype=torch.float64)
    random_x /= random_x.abs().amax(1, keepdim=True)
    if bias:
        random_x[:, -1].abs_()
    answers = set()
    for word in range(40):
        decision = decide_by_programs(cone, word, torch.empty(0, dtype=torch.int64), seconds=20.0)
        answers.add(decision.answer)
        if decision.answer == "yes":
            x = decision.x_e
            # A weight of zero on the bias leaves room for a small one.
            weight = max(x[-1], 1e-9) if bias else 1.0
            hidden = torch.from_numpy(x[: layer.width] / weight)
            assert int(layer.logits(hidden[None])[0].argmax()) == word
        else:
            words = torch.full((2000,), word)
            assert float(cone.margins(words, random_x).amin(1).max()) <= decision.margin + 1e-12
    assert answers == {"yes", "no"}


def test_words_that_were_seen_need_no_proof():
    layer = layer_of(30, 2)
    counts = argmax_counts(layer, tokens_in_question=None, seen=torch.arange(30))
    assert (counts.yes, counts.yes_seen, counts.no) == (30, 30, 0)


def test_a_sample_is_drawn_and_the_same_for_the_same_seed():
    layer = layer_of(200, 3)
    one, same, other = (argmax_counts(layer, tokens_in_question=25, seed=seed).never for seed in (0, 0, 1))
    assert one == same != other
    assert argmax_counts(layer, tokens_in_question=25).in_question == 25


def test_time_that_is_over_leaves_words_undecided():
    counts = argmax_counts(layer_of(60, 2), tokens_in_question=None, seconds=0.0)
    assert (counts.yes, counts.no, counts.undecided) == (0, 0, 60)


def test_without_scipy_the_search_still_finds_most(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr(argmax, "find_spec", lambda name: None)
    counts = argmax_counts(layer_of(60, 8), tokens_in_question=None)
    assert not counts.has_solver
    assert counts.yes > 40
    assert counts.no == 0
    assert counts.yes + counts.undecided == 60


@pytest.mark.parametrize(
    ("text", "rising"),
    [
        ("softmax", True),
        ("sigsoftmax", True),
        ("gss(k=0)", True),
        ("softcap(c=30)", True),
        # Their slopes vanish in float64 for most logits, and are positive all the same.
        ("softcap(c=0.01)", True),
        ("gss(k=0, c=900)", True),
        ("relu", False),
        ("gss(k=-1, c=-200)", False),
    ],
)
def test_which_functions_keep_the_order(text, rising):
    layer = HeadWeights(weight_Vd=torch.randn(5, 2), head=text)
    assert has_rising_phi(layer) is rising


@pytest.mark.parametrize(("alpha", "rising"), [(0.3, True), (0.0, False), (-0.3, False)])
def test_a_learned_scale_keeps_the_order_where_it_is_positive(alpha, rising):
    function = OutputFunction("softmax", alpha=torch.tensor(alpha, requires_grad=True))
    assert has_rising_phi(HeadWeights(weight_Vd=torch.randn(5, 2), head=Head(function))) is rising


def test_the_slope_of_a_users_own_phi_is_looked_at():
    rising, waving = register_function("rising", torch.atan), register_function("waving", torch.sin)
    weight_Vd = torch.randn(5, 2)
    assert has_rising_phi(HeadWeights(weight_Vd=weight_Vd, head=Head(rising)))
    assert not has_rising_phi(HeadWeights(weight_Vd=weight_Vd, head=Head(waving)))


def test_what_is_not_covered_is_refused():
    weight_Vd = torch.randn(5, 2)
    falling = HeadWeights(weight_Vd=weight_Vd, head="gss(k=-1)")
    per_class = HeadWeights(weight_Vd=weight_Vd, head=Head(OutputFunction("shifted_sigsoftmax", b=torch.zeros(5))))
    mixture = HeadWeights(weight_Vd=weight_Vd, head="mos(K=2)")
    for layer in (falling, per_class, mixture):
        with pytest.raises(ValueError, match=r"one rising phi shared by all tokens"):
            argmax_counts(layer)
