"""The plan of a reproduction: hours of what is left, and the seeds that the paper's gaps take."""

import math
from pathlib import Path

import pytest
from tests.experiments.small_runs import run_times, small_resources, small_runs

from sigsoftmax.experiments.reproduce import run_times as measuring
from sigsoftmax.experiments.reproduce.plan import Left, describe_plan, power_lines, steps_of
from sigsoftmax.experiments.reproduce.run_times import measure_times
from sigsoftmax.experiments.runs.run import chosen_recipes, planned_runs
from sigsoftmax.lm.dynamic.evaluation import DynamicEvaluator
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.published import paper

TIMES = run_times(
    train_epoch=10.0, finetune_epoch=11.0, dynamic_statistics=30.0, dynamic_point=50.0, dynamic_test=60.0, rank=9.0
)
TABLES = {table.number: table for table in paper.TABLES}


def runs_of(*names, seeds=(1, 2)):
    return planned_runs(chosen_recipes(names, None, []), seeds, Path("no/such/folder"))


def test_times_are_those_of_all_stages():
    runs = runs_of("ptb-softmax")
    left = Left.of(runs[0], TIMES, steps_of(TABLES[1]))
    assert left.train == 1000 * 10.0
    # The trigger cannot fire before epoch 7.
    assert (left.finetune_least, left.finetune_most) == (7 * 11.0, 500 * 11.0)
    assert left.dynamic == 30.0 + 24 * 50.0 + 60.0
    assert left.rank == 9.0
    text = describe_plan("Table 1", runs, {"ptb-softmax": TIMES}, steps_of(TABLES[1]), Path("no/such"), "cuda")
    assert left.evaluation == 2 * 1.0
    least, most = (2 * (left.fixed + finetuning) for finetuning in (left.finetune_least, left.finetune_most))
    assert f"In all {duration_text(least)} to {duration_text(most)} on this machine (cuda)" in text
    assert "1 heads x 2 seeds" in text


def test_the_table_of_ranks_needs_no_dynamic_evaluation():
    assert steps_of(TABLES[3]) == ("train", "finetune", "ranks")
    left = Left.of(runs_of("ptb-softmax")[0], TIMES, steps_of(TABLES[3]))
    assert left.dynamic == 0.0


def test_checkpoints_that_do_not_fit_are_foretold():
    runs = runs_of("ptb-softmax")
    huge = {"ptb-softmax": run_times(parameters=10**15)}
    assert "that may not be enough" in describe_plan("T", runs, huge, steps_of(TABLES[1]), Path(), "cpu")


def test_seeds_for_the_papers_gaps():
    lines = power_lines(TABLES[4], "ptb", ["softmax", "sigsoftmax"], seeds=5)
    assert len(lines) == 1 + 3
    # (t + t)^2 (0.5^2 + 0.4^2) <= n 1.3^2 with Student's t for 2 n - 2 degrees of freedom: n = 4.
    assert (
        "dynamic evaluation: softmax minus sigsoftmax is +1.30 in the paper, spreads 0.5 and 0.4: 4 seeds" in lines[3]
    )
    # (1.96 + 0.84)^2 (0.6^2 + 0.4^2) / 0.4^2 = 25.5, and a little more by Student's t.
    assert "finetuned: softmax minus sigsoftmax is +0.40" in lines[2]
    assert "27 seeds of each; with 5 a gap of this size will be missed" in lines[2]


def test_gaps_of_heads_that_are_not_run_are_not_mentioned():
    assert power_lines(TABLES[1], "ptb", ["softmax", "relu"], seeds=1) == []
    assert len(power_lines(TABLES[1], "ptb", list(paper.HEADS), seeds=1)) == 1 + 2


@pytest.mark.parametrize("at_once", [1, 2])
def test_times_are_measured(at_once, tmp_path):
    resources = small_resources(tmp_path, at_once=at_once)
    recipe = small_runs(tmp_path, "tiny-softmax")[0].recipe
    times = measure_times(recipe, resources.corpus("ptb"), resources)
    assert all(math.isfinite(value) and value > 0.0 for value in vars(times).values())
    assert times.dynamic_points == 2
    words = 16
    assert times.parameters == words * 6 + words + 4 * 8 * (6 + 8 + 2) + 4 * 6 * (8 + 6 + 2)


def test_points_of_the_grid_are_timed_as_many_at_once_as_the_search_evaluates(tmp_path, monkeypatch):
    made = []

    class Evaluator(DynamicEvaluator):
        def __init__(self, *args, **options):
            made.append(options["at_once"])
            super().__init__(*args, **options)

    monkeypatch.setattr(measuring, "DynamicEvaluator", Evaluator)
    monkeypatch.setattr(measuring, "points_at_once", lambda resources, device: resources.at_once)
    resources = small_resources(tmp_path, at_once=2)
    recipe = small_runs(tmp_path, "tiny-softmax")[0].recipe
    times = measure_times(recipe, resources.corpus("ptb"), resources)
    assert made == [1, 2]
    assert times.dynamic_point > 0.0
