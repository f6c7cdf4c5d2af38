"""The grid: its order, its winner, what is kept of it when it is interrupted, and several runs at once."""

import math
from dataclasses import replace

import pytest
import torch

from sigsoftmax.lm.config import DynamicEvaluationConfig, ModelConfig
from sigsoftmax.lm.dynamic.evaluation import DynamicEvaluator, GradientStatistics, adapt
from sigsoftmax.lm.dynamic.rates import Rates
from sigsoftmax.lm.dynamic.search import grid, search
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.training.trainer import Diverged

WORDS = 11
CONFIG = DynamicEvaluationConfig(
    learning_rates=(1e-3, 4e-3, 1e-2), decays=(0.1, 0.02), epsilon=1e-4, window=5, statistics_batch=3
)
DIVERGING = replace(CONFIG, learning_rates=(1e38, 4e-3), decays=(0.02,))


def sentence(length, seed):
    words = torch.randint(WORDS, (12,), generator=torch.Generator().manual_seed(seed))
    return words.repeat(length // 12 + 1)[:length]


TRAIN, VALID, TEST = sentence(120, 0), sentence(58, 1), sentence(71, 2)


@pytest.fixture(scope="module")
def model():
    return LanguageModel(ModelConfig(head="sigsoftmax", embedding=5, hidden=(6, 5)), WORDS, seed=2)


@pytest.fixture(scope="module")
def statistics(model):
    return GradientStatistics.of(model, TRAIN, CONFIG)


@pytest.fixture(scope="module")
def whole(model, statistics):
    """The result of an uninterrupted search, and what was kept on the way."""
    kept = []
    return search(model, statistics, CONFIG, VALID, TEST, keep=kept.append), kept


def without_time(results):
    return [replace(result, seconds=0.0) for result in results]


def test_the_published_grid():
    points = grid(DynamicEvaluationConfig())
    assert len(points) == 24
    assert [point.decay for point in points] == sorted(point.decay for point in points)
    assert {point.epsilon for point in points} == {2e-5}
    assert [point.learning_rate for point in points[:6]] == [3e-5, 4e-5, 5e-5, 6e-5, 7e-5, 1e-4]


def test_the_grid_scales_with_the_window():
    doubled = grid(replace(CONFIG, window=10))
    assert doubled[0] == Rates(learning_rate=2e-3, decay=0.04, epsilon=1e-4)


def test_the_order_and_each_point(model, statistics, whole):
    result, kept = whole
    assert [(p.rates.decay, p.rates.learning_rate) for p in result.points] == [
        (decay, rate) for decay in (0.02, 0.1) for rate in (1e-3, 4e-3, 1e-2)
    ]
    assert [each.rates for each in kept[:6]] == grid(CONFIG)
    for point in result.points:
        assert point.loss == adapt(model, statistics, VALID, point.rates).loss
        assert point.complete
        assert point.tokens == 57


def test_the_winner_goes_to_the_test_text(model, statistics, whole):
    result, kept = whole
    assert result.valid.loss == min(point.loss for point in result.points)
    assert result.test.rates == result.valid.rates
    assert result.test.loss == adapt(model, statistics, TEST, result.valid.rates).loss
    assert (result.test.split, result.test.tokens, result.test.chosen) == ("test", 70, True)
    assert [point.rates for point in result.points if point.chosen] == [result.valid.rates]
    # The grid as it ended, then the winner as chosen, and the test.
    assert [(each.split, each.chosen) for each in kept] == [("valid", False)] * 6 + [("valid", True), ("test", True)]
    assert kept[6] == result.valid
    assert kept[7] == result.test


def test_the_edges_of_the_grid(whole):
    result, _ = whole
    inner = replace(result, valid=replace(result.valid, rates=replace(result.points[1].rates, decay=0.05)))
    assert inner.edges == ()
    corner = replace(result, valid=result.points[0])
    assert corner.edges == ("learning_rate", "decay")


@pytest.mark.parametrize("at_once", [2, 4, 100])
def test_several_at_once_give_the_same_bits(model, statistics, whole, at_once):
    again = search(model, statistics, CONFIG, VALID, TEST, at_once=at_once)
    assert without_time(again.points) == without_time(whole[0].points)
    assert without_time([again.valid, again.test]) == without_time([whole[0].valid, whole[0].test])


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("after", [1, 5, 6, 7])
def test_an_interrupted_grid_goes_on(model, statistics, whole, after, at_once):
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = []

    def keep(result):
        kept.append(result)
        if len(kept) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(model, statistics, CONFIG, VALID, TEST, keep=keep, at_once=at_once)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert len(kept) == after
    later = []
    result = search(model, statistics, CONFIG, VALID, TEST, finished=kept, keep=later.append)
    assert without_time([result.valid, result.test]) == without_time([whole[0].valid, whole[0].test])
    assert without_time(result.points) == without_time(whole[0].points)
    assert len(later) == 8 - after
    assert search(model, statistics, CONFIG, VALID, TEST, finished=kept + later, keep=pytest.fail) == result


def test_what_is_finished_counts_only_for_the_same_run(model, statistics, whole):
    _, kept = whole
    again = []
    search(model, statistics, CONFIG, VALID, TEST, finished=kept, keep=again.append, limit=4)
    assert len(again) == 8
    assert {(each.tokens, each.complete) for each in again} == {(20, False)}
    again.clear()
    search(model, statistics, replace(CONFIG, epsilon=2e-4), VALID, TEST, finished=kept, keep=again.append)
    assert len(again) == 8
    again.clear()
    search(model, statistics, CONFIG, VALID[:-1], TEST, finished=kept, keep=again.append)
    assert [each.split for each in again].count("valid") == 7


def test_one_point_is_the_chosen_one(model, statistics):
    kept = []
    config = replace(CONFIG, learning_rates=(4e-3,), decays=(0.02,))
    result = search(model, statistics, config, VALID, TEST, keep=kept.append)
    assert [(each.split, each.chosen) for each in kept] == [("valid", True), ("test", True)]
    assert result.edges == ()


def test_no_test_text(model, statistics):
    kept = []
    assert search(model, statistics, CONFIG, VALID, keep=kept.append).test is None
    assert len(kept) == 7


def test_points_that_diverge_lose(model, statistics):
    kept = []
    result = search(model, statistics, DIVERGING, VALID, TEST, keep=kept.append, at_once=2)
    assert [math.isinf(point.loss) for point in result.points] == [True, False]
    assert result.valid.rates.learning_rate == 4e-3
    assert search(model, statistics, DIVERGING, VALID, TEST, finished=kept, keep=pytest.fail) == result
    with pytest.raises(Diverged, match="at any of the 1 points of the grid"):
        search(model, statistics, replace(DIVERGING, learning_rates=(1e38,)), VALID)


def test_the_defect_of_clipping_in_place_is_kept_on_request(model, statistics):
    # A grid whose best decay is not its largest one, at which D is clipped.
    config = replace(CONFIG, learning_rates=(1e-2,), decays=(0.02, 5.0))
    fixed = search(model, statistics, config, VALID, TEST)
    audited = search(model, statistics, config, VALID, TEST, clip_in_place=True, finished=[fixed.valid, fixed.test])
    assert fixed.valid.rates.decay == audited.valid.rates.decay == 0.02
    assert without_time(audited.points) == without_time(fixed.points)
    for text, run, free in ((VALID, audited.valid, fixed.valid), (TEST, audited.test, fixed.test)):
        evaluator = DynamicEvaluator(model, statistics, text)
        for _ in evaluator.launch(run.rates, clipped_for=5.0):
            pass
        assert run.loss == evaluator.results()[0].loss != free.loss
        assert (run.clip_in_place, free.clip_in_place) == (True, False)
    # A search without the defect takes none of these runs for its own.
    again = search(model, statistics, config, VALID, TEST, finished=[audited.valid, audited.test])
    assert (again.valid.loss, again.test.loss) == (fixed.valid.loss, fixed.test.loss)


def test_progress_counts_what_is_left_of_the_grid(model, statistics):
    seen = []
    search(model, statistics, CONFIG, VALID, TEST, progress=seen.append)
    assert [at.waiting for at in seen if at.split == "valid" and at.window == at.windows] == [
        left * 12 + 14 for left in (5, 4, 3, 2, 1, 0)
    ]
    assert seen[-1].waiting == 0
    assert seen[0].at_once == 1


def test_bad_input(model, statistics):
    with pytest.raises(ValueError, match="at_once must be a positive integer, got 0"):
        search(model, statistics, CONFIG, VALID, at_once=0)
    with pytest.raises(ValueError, match="the statistics are of windows of 5, and the configuration has windows of 7"):
        search(model, statistics, replace(CONFIG, window=7), VALID)
    ran = []
    with pytest.raises(ValueError, match="at least 2 tokens"):
        search(model, statistics, CONFIG, VALID, TEST[:1], keep=ran.append)
    assert not ran


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_several_at_once_on_a_gpu(model, whole):
    on_gpu = LanguageModel(model.config, WORDS).cuda()
    on_gpu.load_state_dict(model.state_dict())
    statistics = GradientStatistics.of(on_gpu, TRAIN, CONFIG)
    for at_once in (1, 3):
        result = search(on_gpu, statistics, CONFIG, VALID, TEST, at_once=at_once)
        for ours, cpu in zip(result.points, whole[0].points, strict=True):
            assert ours.loss == pytest.approx(cpu.loss, rel=1e-3)
