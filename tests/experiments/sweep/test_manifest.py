"""The plan on disk: a sweep may grow and shrink, and says so; its trials stay what they are."""

import pytest

from sigsoftmax.experiments.sweep.manifest import PLAN_FILE, PlanChange, keep_plan, plan_change
from sigsoftmax.experiments.sweep.plan import SweepConfig
from sigsoftmax.lm.recipes import recipe


def config(out, *names, **options):
    return SweepConfig(recipes=tuple(recipe(name) for name in names or ("tiny-softmax",)), out=out, **options)


def kept(chosen):
    keep_plan(chosen, chosen.trials())


def changed(chosen):
    return plan_change(chosen, chosen.trials())


def test_a_new_folder_and_the_same_plan_are_no_change(tmp_path):
    chosen = config(tmp_path, seeds=(1, 2), changes=("training.clip=1,2",))
    assert changed(chosen) == PlanChange()
    kept(chosen)
    assert changed(chosen) == PlanChange()
    assert str(changed(chosen)) == ""
    # Neither the order of the words nor what is not trained makes another plan.
    assert changed(config(tmp_path, seeds=(2, 1), changes=("training.clip=2,1",), confidence=0.9)) == PlanChange()
    assert not list(tmp_path.glob(".*"))


def test_trials_that_come_and_go_are_told(tmp_path):
    kept(config(tmp_path, "tiny-softmax", "tiny-mos", seeds=(1, 2)))
    change = changed(config(tmp_path, "tiny-softmax", seeds=(1, 2, 3)))
    assert change == PlanChange(("tiny-softmax/3",), ("tiny-mos/1", "tiny-mos/2"))
    assert str(change) == "1 trial added, 2 trials of it left out and kept on disk (tiny-mos/1, tiny-mos/2)"


def test_trials_that_were_left_out_are_still_remembered(tmp_path):
    kept(config(tmp_path, "tiny-softmax"))
    kept(config(tmp_path, "tiny-mos"))
    with pytest.raises(ValueError, match=r"tiny-softmax/141 has training\.epochs 6 there and 7 here"):
        changed(config(tmp_path, "tiny-softmax", changes=("training.epochs=7",)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"changes": ("training.batch=10",)}, "training.batch 20 there and 10 here"),
        ({"precision": "bf16"}, "precision 'float32' there and 'bf16' here"),
        ({"finetune": True}, "phases"),
    ],
)
def test_a_trial_that_would_become_another_is_refused(options, message, tmp_path):
    kept(config(tmp_path))
    with pytest.raises(ValueError, match=f"holds another sweep: tiny-softmax/141 has {message}.*--out"):
        changed(config(tmp_path, **options))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 1}',
        '{"version": 99, "trials": {}}',
        '{"version": 1, "trials": [[1, 2]]}',
        '{"version": 1, "trials": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
)
def test_a_damaged_plan_is_told(text, tmp_path):
    (tmp_path / PLAN_FILE).write_text(text)
    with pytest.raises(ValueError, match="is no plan of a sweep"):
        changed(config(tmp_path))
