"""Parts of a sweep: alternatives, trials, folders, the baseline; and what is refused."""

from pathlib import Path

import pytest

from sigsoftmax.experiments.sweep.plan import SweepConfig, alternatives, axes_of, point_folder
from sigsoftmax.lm.recipes import recipe, with_overrides


def config(*names, **options):
    return SweepConfig(recipes=tuple(recipe(name) for name in names or ("tiny-softmax",)), **options)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("training.learning_rate=20", ["20"]),
        ("training.learning_rate = 20, 30", ["20", "30"]),
        ("model.hidden=64,12", ["64,12"]),
        ("model.hidden=(64,12)", ["(64,12)"]),
        ("model.hidden=(64,12),[32,12]", ["(64,12)", "[32,12]"]),
        ("model.head=gss(k=0, c=1),mixture(gss(k=0), K=4)", ["gss(k=0, c=1)", "mixture(gss(k=0), K=4)"]),
        ("training.group=none,5", ["none", "5"]),
    ],
)
def test_commas_separate_values_but_not_the_items_of_one(change, found):
    assert [one.partition("=")[2].strip() for one in alternatives(change)] == found


@pytest.mark.parametrize("change", ["training.learning_rate=20,", "training.epochs=,", "model.hidden=(1,2),,(3,4)"])
def test_nothing_between_commas_is_refused(change):
    with pytest.raises(ValueError, match="nothing between two commas"):
        alternatives(change)


def test_axes_are_the_changes_with_alternatives():
    [axis] = axes_of(["training.epochs=2", "training.learning_rate=20,30"])
    assert axis.field == "training.learning_rate"
    assert axis.changes == ("training.learning_rate=20", "training.learning_rate=30")


def test_trials_are_recipes_times_points_times_seeds():
    planned = config(
        "tiny-softmax",
        "tiny-sigsoftmax",
        seeds=(0, 1, 2),
        changes=("training.learning_rate=20,30", "model.weight_drop=0,0.5", "training.epochs=3"),
    ).trials()
    assert len(planned) == len({trial.folder for trial in planned}) == len({trial.name for trial in planned}) == 24
    first, last = planned[0], planned[-1]
    assert first.name == "tiny-softmax, training.learning_rate=20, model.weight_drop=0, seed 0"
    assert (last.recipe.training.learning_rate, last.recipe.model.weight_drop) == (30.0, 0.5)
    assert {trial.recipe.training.epochs for trial in planned} == {3}


def test_without_alternatives_folders_and_recipes_are_those_of_train():
    [trial] = config(seeds=(7,), changes=("training.epochs=3",), out=Path("x")).trials()
    assert trial.folder == Path("x/tiny-softmax/7")
    assert trial.recipe == with_overrides(recipe("tiny-softmax"), ["training.epochs=3"])


def test_seeds_are_the_published_ones_unless_given():
    assert [trial.seed for trial in config("ptb-softmax", "ptb-mos").trials()] == [141, 28]


def test_finetuning_of_a_fixed_length_follows_and_any_other_where_asked():
    assert config("language-softmax").trials()[0].phases == ("train", "finetune")
    assert config("tiny-softmax").trials()[0].phases == ("train",)
    assert config("tiny-softmax", finetune=True).trials()[0].last.phase == "finetune"


def test_names_of_folders_are_short_and_differ():
    points = [("corpus=a/b",), ("corpus=a-b",), ("corpus=a b",), ("corpus=" + "x" * 500,), ("corpus=" + "x" * 501,)]
    names = [point_folder(point) for point in points]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 120 and "/" not in name and " " not in name for name in names)
    assert point_folder(("training.learning_rate=20", "training.clip=1")) == "training.learning_rate=20-training.clip=1"


@pytest.mark.parametrize(
    ("names", "options", "choice"),
    [
        (("tiny-mos", "tiny-softmax"), {}, ("tiny-softmax", {})),
        (("tiny-mos", "tiny-moss"), {}, ("tiny-mos", {})),
        (("tiny-softmax-1.5", "tiny-softmax"), {}, ("tiny-softmax", {})),
        (
            ("tiny-softmax",),
            {"changes": ("training.clip=1,2",)},
            (None, {"training.clip": "training.clip=1"}),
        ),
        (
            ("tiny-softmax", "tiny-gss-0"),
            {"changes": ("training.clip=1,2",), "baseline": ("training.clip=2", "tiny-gss-0")},
            ("tiny-gss-0", {"training.clip": "training.clip=2"}),
        ),
    ],
)
def test_the_baseline(names, options, choice):
    assert config(*names, **options).baseline_choice() == choice


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ((), {"seeds": (1, 1)}, "seeds must differ"),
        ((), {"seeds": (-1,)}, "seeds must be between"),
        ((), {"changes": ("training.learning_rate=20,20",)}, "alternatives of training.learning_rate must differ"),
        ((), {"changes": ("training.learning_rate=20,20.0",)}, "are the same trial"),
        ((), {"changes": ("training.learning_rat=20,30",)}, "did you mean training.learning_rate"),
        ((), {"changes": ("training.epochs=1,x",)}, "training.epochs must be int"),
        ((), {"changes": ("training.epochs=1,2", "training.epochs=3")}, "changed twice"),
        ((), {"changes": ("training.clip",)}, "cannot read the change"),
        (("tiny-mos", "tiny-mos-4"), {}, "tiny-mos, seed 141 and tiny-mos-4, seed 141 are the same trial"),
        ((), {"baseline": ("tiny-mos",)}, "must be a recipe of the sweep"),
        ((), {"baseline": ("training.clip=3",), "changes": ("training.clip=1,2",)}, "there are tiny-softmax, training"),
        ((), {"precision": "float16"}, "precision must be one of"),
        ((), {"confidence": 1.0}, "confidence must be between 0 and 1"),
        ((), {"at_once": 0}, "at_once must be a positive integer"),
        ((), {"cpus_per_trial": 0}, "cpus_per_trial must be above 0"),
        ((), {"cpus_per_trial": float("nan")}, "cpus_per_trial must be above 0"),
        ((), {"gpus_per_trial": 2.0}, "a trial runs on one GPU"),
        ((), {"device": "cuda:1"}, "Ray picks the GPU"),
        ((), {"device": "cuda", "gpus_per_trial": 0.0}, "needs a share of a GPU"),
        ((), {"device": "cpu", "gpus_per_trial": 0.5}, "uses no GPU"),
    ],
)
def test_bad_settings_are_refused(names, options, message):
    with pytest.raises(ValueError, match=message):
        config(*names, **options)


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        config(out=tmp_path / "file")
