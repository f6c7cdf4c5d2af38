"""Sweeps in TOML say the same as those of a command line; what cannot be read is told with the file's name."""

import pytest

from sigsoftmax.experiments.sweep.file import AskedSweep, read_sweep_file, with_file
from sigsoftmax.experiments.sweep.plan import SweepConfig

FILE = """
recipes = ["tiny-softmax", "tiny-sigsoftmax"]
seeds = [0, 1]
baseline = "tiny-sigsoftmax"

[training]
learning_rate = [20, 30.5]
epochs = 3
stop_when_stale = false

[model]
hidden = [[64, 128], [32, 128]]
"""


def written(folder, text):
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def trials_of(asked):
    return SweepConfig(
        recipes=asked.chosen_recipes(None), seeds=asked.seeds, changes=asked.changes, baseline=asked.baseline
    ).trials()


def test_a_file_says_what_a_command_line_can_say(tmp_path):
    from_file = with_file(AskedSweep(), written(tmp_path, FILE))
    from_words = AskedSweep(
        recipes=("tiny-softmax", "tiny-sigsoftmax"),
        seeds=(0, 1),
        baseline=("tiny-sigsoftmax",),
        changes=(
            "training.learning_rate=20,30.5",
            "training.epochs=3",
            "training.stop_when_stale=false",
            "model.hidden=(64,128),(32,128)",
        ),
    )
    assert from_file == from_words
    assert len(trials_of(from_file)) == 16


def test_a_list_that_is_one_value_stays_one(tmp_path):
    asked = read_sweep_file(written(tmp_path, 'recipe = "tiny-softmax"\n[model]\nhidden = [64, 128]'))
    [trial] = trials_of(asked)
    assert trial.recipe.model.hidden == (64, 128)


def test_words_add_to_a_file(tmp_path):
    words = AskedSweep(seeds=(5,), baseline=("tiny-softmax",), changes=("training.clip=1",))
    asked = with_file(words, written(tmp_path, FILE))
    assert (asked.seeds, asked.baseline, asked.changes[-1]) == ((5,), ("tiny-softmax",), "training.clip=1")
    with pytest.raises(ValueError, match="not both"):
        with_file(AskedSweep(recipes=("tiny-softmax",)), tmp_path / "sweep.toml")


def test_heads_are_those_of_the_embedded_language_or_of_a_given_text(tmp_path):
    asked = AskedSweep(heads=("softmax", "mos"))
    assert [chosen.name for chosen in asked.chosen_recipes(None)] == ["language-softmax", "language-mos"]
    assert [chosen.name for chosen in asked.chosen_recipes(tmp_path)] == ["tiny-softmax", "tiny-mos"]
    assert AskedSweep(heads=("mos",), setting="ptb").chosen_recipes(None)[0].name == "ptb-mos"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (AskedSweep(), "name recipes, as tiny-softmax"),
        (AskedSweep(heads=("softmx",)), "did you mean"),
        (AskedSweep(heads=("softmax",), setting="ptbb"), "setting must be one of"),
        (AskedSweep(recipes=("tiny-softmax",), setting="ptb"), "the setting is that of --heads"),
        (AskedSweep(recipes=("tiny-softmax", "tiny-softmax")), "named more than once"),
    ],
)
def test_recipes_that_cannot_be_chosen_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        asked.chosen_recipes(None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipes = [", "is not TOML"),
        ("seeds = [1, 'x']", "seeds must be a list of whole numbers"),
        ("seeds = [true]", "seeds must be a list of whole numbers"),
        ("recipes = 3", "recipes must be a list of texts"),
        ("setting = 3", "setting must be a text"),
    ],
)
def test_bad_files_are_told_with_their_name(text, message, tmp_path):
    with pytest.raises(ValueError, match=rf"sweep.toml.*{message}"):
        read_sweep_file(written(tmp_path, text))


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ValueError, match="no sweep file at"):
        read_sweep_file(tmp_path / "nowhere.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_sweep_file(tmp_path / "bytes.toml")
    with pytest.raises(ValueError, match="cannot be read"):
        read_sweep_file(tmp_path)
