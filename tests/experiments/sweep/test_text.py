"""Means, paired differences and their intervals against scipy; the table shows them and what failed."""

import numpy as np
import pytest
from tests.records import samples

from sigsoftmax.experiments.sweep.plan import SweepConfig
from sigsoftmax.experiments.sweep.text import differences, groups_of, results_table, trial_line
from sigsoftmax.lm.recipes import recipe
from sigsoftmax.records import Record
from sigsoftmax.records.schemas.sweeps import PairedDifferenceRecord


def config(*names, **options):
    return SweepConfig(recipes=tuple(recipe(name) for name in names), **options)


def record(trial, test_loss, *, kl=None, checksum="x"):
    recipe = trial.recipe
    run = samples.identity(
        recipe.model.head,
        trial.seed,
        phase=trial.last.phase,
        corpus=recipe.corpus,
        recipe=recipe.name,
        overrides=recipe.overrides,
        corpus_checksum=checksum,
    )
    return samples.trial(
        run=run,
        point=trial.point,
        epochs=2,
        valid_loss=test_loss + 0.1,
        test_loss=test_loss,
        kl=kl,
        entropy_rate=None if kl is None else 3.0,
        seconds=75.0,
    )


def test_differences_are_taken_at_the_same_point_from_the_baseline():
    chosen = config("tiny-softmax", "tiny-gss-0", seeds=(1, 2), changes=("training.clip=1,2",))
    levels = {
        ("tiny-softmax", "1"): 4.0,
        ("tiny-softmax", "2"): 5.0,
        ("tiny-gss-0", "1"): 3.9,
        ("tiny-gss-0", "2"): 5.3,
    }
    trials = chosen.trials()
    ended = {
        trial: record(trial, levels[trial.recipe.name, trial.point[0].partition("=")[2]] + 0.01 * trial.seed)
        for trial in trials
    }
    found = differences(groups_of(trials, ended), chosen)
    assert [(one.recipe, one.point, one.baseline_recipe, one.baseline_point) for one in found] == [
        ("tiny-gss-0", (clip,), "tiny-softmax", (clip,)) for clip in ("training.clip=1", "training.clip=2")
    ]
    assert [one.mean for one in found] == pytest.approx([-0.1, 0.3])
    assert found[0].seeds == (1, 2)
    assert found[0].quantity == "test_loss"
    assert Record.from_json(Record.of(found[0]).to_json()).payload_as(PairedDifferenceRecord) == found[0]


def test_one_recipe_is_compared_with_its_first_alternative():
    chosen = config("tiny-softmax", seeds=(1, 2), changes=("training.clip=1,2,3",))
    trials = chosen.trials()
    ended = {trial: record(trial, float(trial.point[0][-1])) for trial in trials}
    assert [one.mean for one in differences(groups_of(trials, ended), chosen)] == [1.0, 2.0]


def test_the_table_has_means_deviations_differences_and_failures():
    chosen = config("tiny-softmax", "tiny-gss-0", "tiny-mos", seeds=(1, 2, 3))
    trials = chosen.trials()
    losses = {"tiny-softmax": (4.0, 4.2, 4.4), "tiny-gss-0": (3.0, 3.2, 3.41), "tiny-mos": (4.0, 4.3, 4.35)}
    ended = {trial: record(trial, losses[trial.recipe.name][trial.seed - 1]) for trial in trials}
    lost = trials[-1]
    del ended[lost]
    text = results_table(groups_of(trials, ended), {lost: "the loss became nan"}, chosen)
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("tiny-")}
    perplexities = np.exp([4.0, 4.2, 4.4])
    assert f"{perplexities.mean():.2f} ± {perplexities.std(ddof=1):.2f}" in lines["tiny-softmax"]
    assert lines["tiny-softmax"].endswith("baseline")
    assert lines["tiny-gss-0"].endswith("*")
    assert "2 of 3" in lines["tiny-mos"]
    assert not lines["tiny-mos"].endswith("*")
    assert "from tiny-softmax, seed by seed." in text
    assert text.splitlines()[-1] == "failed: tiny-mos, seed 3: the loss became nan"


def test_where_the_truth_is_known_it_is_the_measure():
    chosen = config("language-softmax", "language-mos", seeds=(1, 2))
    trials = chosen.trials()
    ended = {
        trial: record(trial, 5.0, kl=0.5 - 0.1 * ("mos" in trial.recipe.name) + 0.01 * trial.seed) for trial in trials
    }
    groups = groups_of(trials, ended)
    [found] = differences(groups, chosen)
    assert found.quantity == "kl"
    assert found.mean == pytest.approx(-0.1)
    text = results_table(groups, {}, chosen)
    assert "KL minus baseline's" in text
    assert "KL to the truth" in text
    assert "KL to the truth 0.5100 (2 epochs, 1 min 15 s; 1 of 4)" in trial_line(trials[0], ended[trials[0]], "1 of 4")


def test_two_seeds_have_no_interval_however_near_they_fall():
    chosen = config("tiny-softmax", "tiny-mos", seeds=(1, 2))
    trials = chosen.trials()
    ended = {trial: record(trial, 4.0 - ("mos" in trial.recipe.name)) for trial in trials}
    [found] = differences(groups_of(trials, ended), chosen)
    assert (found.mean, found.low, found.high) == (-1.0, None, None)
    text = results_table(groups_of(trials, ended), {}, chosen)
    assert "-1.0000" in text
    assert "*" not in text
    assert "With fewer than 3 seeds nothing can be resolved" in text


def test_a_single_seed_and_a_single_trial_are_shown_without_intervals():
    chosen = config("tiny-softmax", "tiny-mos", seeds=(1,))
    trials = chosen.trials()
    text = results_table(groups_of(trials, {trial: record(trial, 4.0) for trial in trials}), {}, chosen)
    assert "With fewer than 3 seeds nothing can be resolved, and no interval is given." in text
    alone = config("tiny-softmax", seeds=(1,))
    text = results_table(groups_of(alone.trials(), {alone.trials()[0]: record(alone.trials()[0], 4.0)}), {}, alone)
    assert "baseline" not in text


def test_groups_of_which_nothing_came_have_dashes():
    chosen = config("tiny-softmax", "tiny-mos", seeds=(1, 2))
    trials = chosen.trials()
    text = results_table(groups_of(trials, {}), dict.fromkeys(trials, "no corpus"), chosen)
    assert "0 of 2" in text
    assert text.splitlines()[-1].startswith("failed: tiny-softmax, seed 1; tiny-softmax, seed 2; tiny-mos, seed 1;")
    assert text.endswith("tiny-mos, seed 2: no corpus")


def test_trials_on_different_texts_are_not_compared():
    chosen = config("tiny-softmax", "tiny-mos", seeds=(1,))
    one, other = chosen.trials()
    with pytest.raises(ValueError, match="'ptb' changed during the sweep: tiny-softmax, seed 1 and tiny-mos, seed 1"):
        groups_of([one, other], {one: record(one, 4.0), other: record(other, 4.0, checksum="y")})


def test_recipes_on_different_texts_have_no_difference():
    chosen = config("tiny-softmax", "wt2-mos", "tiny-mos", seeds=(1, 2))
    trials = chosen.trials()
    ended = {trial: record(trial, 4.0, checksum=trial.recipe.corpus) for trial in trials}
    groups = groups_of(trials, ended)
    assert [found.recipe for found in differences(groups, chosen)] == ["tiny-mos"]
    [line] = [line for line in results_table(groups, {}, chosen).splitlines() if line.startswith("wt2-mos")]
    assert line.endswith("–")
