"""A table from training to print, on a small text: the chain, going on after a stop, and runs left behind."""

import dataclasses
import io

import pytest
from tests.experiments.small_runs import SINGLE, run_times, small_resources

from sigsoftmax.experiments.display import PlainLines
from sigsoftmax.experiments.reproduce import run as reproduce
from sigsoftmax.experiments.reproduce.run import ReproduceConfig, run
from sigsoftmax.lm.training.trainer import Diverged
from sigsoftmax.records import read

TIMES = run_times()


def config_in(folder, **options):
    fields = {
        "table": "table1",
        "seeds": 2,
        "heads": ("softmax", "sigsoftmax"),
        "setting": "tiny",
        "changes": SINGLE,
        "out": folder / "runs",
        "resources": small_resources(folder),
    }
    return ReproduceConfig(**{**fields, **options})


def reproduced(config):
    said, shown = [], io.StringIO()
    run(config, said.append, display=PlainLines(shown))
    return said, shown.getvalue()


@pytest.fixture(autouse=True)
def _times_are_given(monkeypatch):
    """Measured for the first reproduction, which is made before this, and not again."""
    monkeypatch.setattr(reproduce, "measure_times", lambda *_: TIMES)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    config = config_in(tmp_path_factory.mktemp("reproduce"))
    return config, *reproduced(config)


def kinds(path):
    return [record.kind for record in read(path)]


def test_every_run_goes_through_every_stage(done):
    config, _, _ = done
    for one in config.runs():
        assert kinds(one.path / "records.jsonl") == ["epoch", "epoch"]
        assert kinds(one.path / "evaluations.jsonl") == ["evaluation"] * 3
        tuned = one.finetuning().path
        assert kinds(tuned / "records.jsonl") == ["epoch", "epoch"]
        assert kinds(tuned / "evaluations.jsonl") == ["evaluation"] * 3
        assert kinds(tuned / "dynamic.jsonl") == ["dynamic-evaluation"] * 4
        assert kinds(tuned / "spectrum.jsonl") == ["model-spectrum"]
        assert not (tuned / "spectrum.state").exists()


def test_the_plan_comes_first_and_the_table_last(done):
    _, said, _ = done
    assert said[0].startswith("Table 1, Perplexity on Penn Treebank: 2 heads x 2 seeds, each: train, finetune, dynamic")
    assert " on this machine (cpu)" in said[0]
    table = said[-1]
    assert "softmax" in table
    assert "±" in table
    # Recipes other than the paper's have other spreads than the paper's.
    assert not any("seeds of each" in text for text in said)


def test_a_second_time_nothing_is_done_but_the_table_printed(done):
    config, said, _ = done
    files = [path for path in config.out.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    again, shown = reproduced(config)
    assert not shown
    assert again[-1] == said[-1]
    assert {path: path.read_bytes() for path in config.out.rglob("*") if path.is_file()} == before
    assert "In all 0 s" in again[0]


def test_stopped_anywhere_it_goes_on_to_the_same_numbers(done, tmp_path, monkeypatch):
    straight, said, _ = done
    config = config_in(tmp_path)
    stages = ["train_and_evaluate", "search_grid", "measure_rank"]
    for stage in stages:
        with monkeypatch.context() as patched:

            def stop(*arguments, **named):
                raise KeyboardInterrupt

            patched.setattr(reproduce, stage, stop)
            with pytest.raises(KeyboardInterrupt):
                reproduced(config)
    again, _ = reproduced(config)
    assert again[-1].splitlines()[1:] == said[-1].splitlines()[1:]
    assert [one.recipe for one in straight.runs()] == [one.recipe for one in config.runs()]


def test_a_dry_run_only_plans(tmp_path):
    config = config_in(tmp_path, dry_run=True)
    said, shown = reproduced(config)
    assert len(said) == 1
    assert not shown
    assert not config.out.exists()


def test_a_run_that_diverges_is_left_behind(tmp_path, monkeypatch):
    config = config_in(tmp_path, seeds=1)
    runs = config.runs()
    training = dataclasses.replace(runs[0].recipe.training, learning_rate=1e30, clip=1e30)
    wild = dataclasses.replace(runs[1], recipe=dataclasses.replace(runs[1].recipe, training=training))
    monkeypatch.setattr(ReproduceConfig, "runs", lambda self: [runs[0], wild])
    said = []
    with pytest.raises(Diverged, match="tiny-sigsoftmax, seed 141: the loss became"):
        run(config, said.append, display=PlainLines(io.StringIO()))
    assert any(text.startswith("Left behind: tiny-sigsoftmax") for text in said)
    assert (runs[0].finetuning().path / "spectrum.jsonl").is_file()


def test_a_time_too_short_for_an_epoch_is_refused_before_anything_starts(tmp_path):
    config = config_in(tmp_path, minutes=0.01)
    with pytest.raises(ValueError, match=r"enough for one epoch: the next of tiny-softmax, seed 141 takes about 1 s"):
        run(config, lambda _: None)
    assert not config.out.exists()


def test_a_plan_for_the_time_is_said_before_it_starts(tmp_path):
    said, _ = reproduced(config_in(tmp_path, minutes=100.0, dry_run=True))
    assert said[1].startswith("In 1 h 37 min there is time for:\n  training: all 8 epochs left of all runs")
    assert "these give way, the first first: finetuning beyond" in said[1]


def test_the_end_of_the_time_stops_at_a_checkpoint_and_the_next_command_ends_the_same(done, tmp_path, monkeypatch):
    _, straight, _ = done
    config = config_in(tmp_path, minutes=1.0)
    with monkeypatch.context() as patched:
        patched.setattr(reproduce, "usable_seconds", lambda minutes: -1.0)
        patched.setattr(reproduce, "check_long_enough", lambda left, seconds: None)
        said, _ = reproduced(config)
    assert said[-1].startswith("The 1 minutes are over")
    first = config.runs()[0]
    assert (first.path / "last.safetensors").is_file()
    assert not (first.path / "evaluations.jsonl").exists()
    again, _ = reproduced(dataclasses.replace(config, minutes=None))
    assert again[-1].splitlines()[1:] == straight[-1].splitlines()[1:]


def test_finetuning_that_ends_by_its_share_of_the_time_is_evaluated_as_it_is(tmp_path, monkeypatch):
    changes = tuple(change for change in SINGLE if not change.startswith("finetuning.epochs"))
    config = config_in(tmp_path, seeds=1, heads=("softmax",), minutes=100.0, changes=(*changes, "finetuning.epochs=40"))
    planned = reproduce.TimePlan.of

    def with_no_time_for_all_epochs(left, seconds):
        plan = planned(left, seconds)
        return dataclasses.replace(plan, finetune_seconds=0.0)

    monkeypatch.setattr(reproduce.TimePlan, "of", with_no_time_for_all_epochs)
    said, _ = reproduced(config)
    [one] = config.runs()
    assert any(text.startswith("Ended by its share of the time: tiny-softmax, seed 141, finetuning") for text in said)
    tuned = one.finetuning().path
    assert kinds(tuned / "evaluations.jsonl") == ["evaluation"] * 3
    assert len(kinds(tuned / "dynamic.jsonl")) == 4
    assert any("minutes are over" in text for text in said)
    # It goes on from where it was.
    monkeypatch.undo()
    assert reproduce.Left.of(one, TIMES, reproduce.steps_of(config.published)).finetune_most > 0.0


def test_published_tables_name_all_heads_and_both_corpora():
    names = [recipe.name for recipe in ReproduceConfig(table="table3").recipes()]
    heads = ("softmax", "relu", "sigmoid", "sigsoftmax", "mos", "moss")
    assert names == [f"{setting}-{head}" for setting in ("ptb", "wt2") for head in heads]
    later = ReproduceConfig(table="table1", heads=("softmax",), seeds=2, first_seed=142).runs()
    assert [one.seed for one in later] == [142, 143]
    with pytest.raises(ValueError, match="--first-seed must be at least 0, got -1"):
        ReproduceConfig(table="table1", first_seed=-1)
    seeds = {(one.recipe.name, one.seed) for one in ReproduceConfig(table="table1", seeds=2).runs()}
    assert {("ptb-softmax", 141), ("ptb-softmax", 142), ("ptb-moss", 28), ("ptb-moss", 29)} <= seeds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table": "tabel1"}, "did you mean 'table1'"),
        ({"seeds": 0}, "seeds must be a positive integer"),
        ({"setting": "ptbb"}, "setting must be one of"),
        ({"heads": ("softmx",)}, "did you mean"),
        ({"minutes": 0.0}, "--minutes must be a positive number, got 0"),
        ({"minutes": -1.0}, "--minutes must be a positive number, got -1"),
        ({"minutes": float("nan")}, "--minutes must be a positive number, got nan"),
    ],
)
def test_bad_settings_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config_in(tmp_path, **options)
