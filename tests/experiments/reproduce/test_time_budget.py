"""The work that fits into a given time, and the work that gives way first."""

import dataclasses

import pytest
from tests.experiments.small_runs import small_runs

from sigsoftmax.experiments.reproduce.plan import Left
from sigsoftmax.experiments.reproduce.time_budget import TimePlan, check_long_enough, narrowed
from sigsoftmax.lm.config import DynamicEvaluationConfig
from sigsoftmax.lm.dynamic.search import grid

ONE = Left(
    train_epochs=100,
    train_epoch=1.0,
    finetune_least=7.0,
    finetune_most=50.0,
    finetune_epoch=1.0,
    evaluation=3.0,
    points=24,
    dynamic_point=2.0,
    dynamic_besides=4.0,
    rank=10.0,
)
ALL = 100.0 + 50.0 + 3.0 + 24 * 2.0 + 4.0 + 10.0


def total_seconds(plan):
    dynamic = 4.0 + plan.points * 2.0 if plan.points else 0.0
    return plan.train_seconds + plan.finetune_seconds + len(plan.left) * (dynamic + plan.ranks * 10.0)


def test_with_enough_time_nothing_gives_way():
    plan = TimePlan.of([ONE, ONE], 2 * ALL)
    assert plan.dropped == ()
    assert (plan.train_epochs, plan.finetune_epochs, plan.points, plan.ranks) == (200, 50, 24, True)
    assert total_seconds(plan) == pytest.approx(2 * ALL)


@pytest.mark.parametrize(
    ("seconds", "dropped", "finetune_epochs", "points", "ranks"),
    [
        (ALL - 1.0, ("epochs of finetuning",), 49, 24, True),
        (ALL - 43.0, ("epochs of finetuning",), 7, 24, True),
        (ALL - 43.5, ("epochs of finetuning", "points of the grid"), 8, 23, True),
        (ALL - 43.0 - 46.0, ("epochs of finetuning", "points of the grid"), 7, 1, True),
        (ALL - 43.0 - 47.0, ("epochs of finetuning", "points of the grid", "ranks"), 16, 1, False),
        (ALL - 43.0 - 57.0, ("epochs of finetuning", "dynamic evaluation", "ranks"), 12, 0, False),
        (103.0 + 6.0, ("finetuning", "dynamic evaluation", "ranks"), 0, 0, False),
    ],
)
def test_what_gives_way_in_which_order(seconds, dropped, finetune_epochs, points, ranks):
    plan = TimePlan.of([ONE], seconds)
    assert plan.dropped == dropped
    assert (plan.train_epochs, plan.finetune_epochs, plan.points, plan.ranks) == (100, finetune_epochs, points, ranks)
    assert total_seconds(plan) <= seconds


def test_training_that_does_not_fit_takes_all_the_time():
    plan = TimePlan.of([ONE, ONE], 130.5)
    assert (plan.train_epochs, plan.train_epochs_left) == (130, 200)
    assert "  training: 130 of the 200 epochs left of all runs (2 min 10 s)" in plan.lines()
    assert "training" in plan.dropped
    assert not plan.finetune_seconds


def test_what_is_done_takes_no_time():
    done = dataclasses.replace(ONE, train_epochs=0, finetune_least=0.0, finetune_most=0.0, evaluation=0.0, points=0)
    plan = TimePlan.of([done], 10.0)
    assert (plan.dropped, plan.ranks, total_seconds(plan)) == ((), True, 10.0)


def test_a_time_too_short_for_an_epoch_is_refused(tmp_path):
    [run] = small_runs(tmp_path, "tiny-softmax")
    check_long_enough({run: ONE}, 1.0)
    with pytest.raises(ValueError, match=r"the next of tiny-softmax, seed 1 takes about 1 s here, and 0.9 s"):
        check_long_enough({run: ONE}, 0.9)
    # Without epochs there is nothing that it could be too short for.
    check_long_enough({run: dataclasses.replace(ONE, train_epochs=0, finetune_most=0.0)}, 0.1)


@pytest.mark.parametrize(("points", "found"), [(24, 24), (23, 20), (12, 12), (5, 4), (1, 1)])
def test_a_narrowed_grid_is_the_middle_of_the_whole(points, found):
    config = DynamicEvaluationConfig()
    part = narrowed(config, points)
    assert len(grid(part)) == found
    assert set(grid(part)) <= set(grid(config))
    assert 5e-5 in part.learning_rates
    assert 2e-3 in part.decays


def test_a_grid_of_no_points_is_refused():
    with pytest.raises(ValueError, match="at least 1 point, got 0"):
        narrowed(DynamicEvaluationConfig(), 0)
