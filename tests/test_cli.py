"""The command line: what it prints, what it refuses and how."""

import dataclasses
import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tests.experiments.small_runs import SINGLE, write_text

from sigsoftmax import cli, family
from sigsoftmax._version import __version__
from sigsoftmax.cli import verbs
from sigsoftmax.cli.parser import heads, numbers
from sigsoftmax.experiments import capacity, compare, demo
from sigsoftmax.experiments.audit import run as audit
from sigsoftmax.experiments.reproduce import run as reproduce
from sigsoftmax.experiments.runs import dynamic, evaluate, train
from sigsoftmax.experiments.sweep import run as sweep
from sigsoftmax.lm.training.trainer import Diverged

VERBS = (
    *("demo", "functions", "compare", "reproduce", "capacity", "audit", "tables", "report", "data", "recipes"),
    *("train", "finetune", "evaluate", "dynamic-eval", "sample", "sweep"),
)


def test_version_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "sigsoftmax", "--version"], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == f"sigsoftmax {__version__}"


def test_it_runs_from_source_with_torch_numpy_and_safetensors_alone(tmp_path):
    """As on a machine where nothing can be installed."""
    absent = ("rich", "typer", "plotly", "matplotlib", "tensorboard", "pooch", "scipy", "transformers", "requests")
    text = write_text(tmp_path / "text")
    words = ["train", "tiny-softmax", "--data", str(text), "--out", str(tmp_path / "runs"), "--set", *SINGLE]
    script = (
        "import sys\n"
        f"for name in {absent!r}: sys.modules[name] = None\n"
        "from sigsoftmax.cli import main\n"
        f"assert main({words!r}) == 0\n"
        f"assert main(['tables', {str(tmp_path / 'runs')!r}]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_functions_lists_the_family(capsys):
    assert cli.main(["functions"]) == 0
    printed = capsys.readouterr().out
    for definition in family.table():
        assert definition.name in printed
        assert f"phi(z) = {definition.formula}" in printed


@pytest.mark.parametrize("verb", [(), *((verb,) for verb in VERBS), ("data", "fetch")], ids=" ".join)
def test_help_shows_an_example_that_can_be_read(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*verb, "--help"])
    assert ended.value.code == 0
    [example] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("example: sigsoftmax ")]
    words = shlex.split(example.removeprefix("example: sigsoftmax "))
    assert not verb or tuple(words[: len(verb)]) == verb
    assert callable(cli._parser(words).parse_args(words).act)


def test_all_verbs_are_known(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"\n    {verb}" in printed for verb in VERBS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "did you mean 'demo'?"),
        (["function"], "did you mean 'functions'?"),
        (["tain", "ptb-softmax"], "did you mean 'train'?"),
        (["data", "fech", "ptb"], "did you mean 'fetch'?"),
        (["demo", "--sede", "1"], "did you mean '--seed'?"),
        (["demo", "--quik"], "did you mean '--quick'?"),
        (["--versoin"], "did you mean '--version'?"),
        (["train", "ptb-softmax", "--devise", "cpu"], "did you mean '--device'?"),
        (["demo", "--seed", "x"], "invalid int value: 'x'"),
        (["train", "ptb-softmax", "--seeds", "1,b"], "expected whole numbers, as 1,2,3"),
        (["train", "ptb-softmax", "--seed", "1", "--seeds", "1,2"], "not allowed with"),
        (["compare", "--heads", "softmax,,mos"], "expected heads"),
        ([], "required: VERB"),
    ],
)
def test_typing_errors_are_one_line_and_suggest(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--seed", "-1"], "demo: error: seed must not be negative, got -1\n"),
        (["train", "ptb-sofmax"], "did you mean ptb-softmax"),
        (["train"], "train: error: name a recipe"),
        (["train", "ptb-softmax", "--set", "training.epoch=1"], "did you mean training.epochs"),
        (["recipes", "ptb-sofmax"], "did you mean ptb-softmax"),
        (["reproduce", "table9"], "the tables are table1"),
        (["evaluate", "nowhere"], "no trained model at nowhere"),
        (["finetune", "nowhere"], "no trained run in nowhere"),
        (["tables", "nowhere"], "no records at nowhere"),
        (["report", "nowhere"], "no records at nowhere"),
        (["data", "fetch", "ptbb"], "did you mean 'ptb'"),
        (["dynamic-eval", "x", "--grid", "--learning-rate", "1"], "give --grid, or one pair of rates"),
        (["sample", "nowhere"], "no trained model at nowhere"),
    ],
)
def test_bad_values_are_told_without_traceback(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("bad"), 2, "sigsoftmax train: error: bad"),
        (OSError(28, "could not write the checkpoint"), 1, "could not write the checkpoint"),
        (Diverged("the loss became nan"), 1, "sigsoftmax train: error: the loss became nan"),
        (KeyboardInterrupt(), 130, "interrupted; the same command goes on from there"),
    ],
)
def test_what_went_wrong_shows_in_the_status(error, status, message, monkeypatch, capsys):
    def fail(*arguments, **named):
        raise error

    monkeypatch.setattr(train, "run", fail)
    assert cli.main(["train", "ptb-softmax", "--device", "cpu"]) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["much", "8 TiB", "0", "-1", "8GiBs"])
def test_an_amount_of_memory_that_is_none(text, capsys):
    with pytest.raises(SystemExit):
        cli.main(["audit", "gpt2", f"--memory={text}"])
    assert f"expected an amount of memory, as 8 (GiB), 8GiB or 512MiB, got {text!r}" in capsys.readouterr().err


class OutOfMemoryError(RuntimeError):
    pass


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("CUDA out of memory"),
        MemoryError("Unable to allocate"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_too_little_memory_is_told(monkeypatch, capsys, error):
    def fail(*arguments, **named):
        raise error

    monkeypatch.setattr(train, "run", fail)
    assert cli.main(["train", "ptb-softmax", "--device", "cpu"]) == 1
    assert "too little memory; try --at-once 1" in capsys.readouterr().err


def test_interrupt_ends_cleanly(monkeypatch, capsys):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_what_an_interrupt_has_to_tell_is_told(monkeypatch, capsys):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt("one of the runs had diverged")

    monkeypatch.setattr(train, "run", interrupted)
    assert cli.main(["train", "tiny-softmax", "--device", "cpu"]) == 130
    told = capsys.readouterr().err.strip()
    assert told == "interrupted; the same command goes on from there\none of the runs had diverged"


# --- what reaches the experiments -------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """The configurations that experiments were called with."""
    found = []
    for module in (audit, capacity, compare, demo, dynamic, evaluate, reproduce, sweep, train):
        monkeypatch.setattr(module, "run", lambda config, *_, **__: found.append(config))
    monkeypatch.setattr(train, "finetune", lambda config, *_: found.append(config))
    return found


def test_demo_runs_the_bottleneck_and_a_small_comparison(seen, tmp_path):
    assert cli.main(["demo", "--seed", "3", "--out", str(tmp_path)]) == 0
    assert seen[0] == demo.DemoConfig(seed=3, out=tmp_path)
    assert (seen[1].quick, seen[1].out) == (True, tmp_path / "compare")


def test_a_quick_demo_trains_nothing(seen, tmp_path):
    assert cli.main(["demo", "--quick", "--out", str(tmp_path)]) == 0
    assert seen == [demo.DemoConfig(quick=True, out=tmp_path)]


def test_train_passes_recipes_seeds_and_changes_on(seen, tmp_path):
    words = ["train", "ptb-softmax", "ptb-mos", "--seeds", "1,2", "--at-once", "3", "--device", "cpu"]
    assert cli.main([*words, "--out", str(tmp_path), "--set", "training.epochs=2", "training.clip=0.5"]) == 0
    [config] = seen
    assert [recipe.name for recipe in config.recipes] == ["ptb-softmax", "ptb-mos"]
    assert all((r.training.epochs, r.training.clip) == (2, 0.5) for r in config.recipes)
    assert (config.seeds, config.out, config.resources.at_once) == ((1, 2), tmp_path, 3)


def test_train_reads_a_recipe_file(seen, tmp_path):
    (tmp_path / "mine.toml").write_text('recipe = "ptb-softmax"\n[training]\nepochs = 3\n')
    assert cli.main(["train", "--config", str(tmp_path / "mine.toml"), "--seed", "9", "--device", "cpu"]) == 0
    assert seen[0].recipes[0].training.epochs == 3
    assert seen[0].seeds == (9,)


def test_other_verbs_pass_their_arguments_on(seen, tmp_path):
    cpu = ["--device", "cpu"]
    assert cli.main(["finetune", "a", "b", *cpu]) == 0
    assert [str(path) for path in seen[-1].runs] == ["a", "b"]
    assert cli.main(["evaluate", "a", "--split", "test", "--batch", "3", *cpu]) == 0
    assert (seen[-1].splits, seen[-1].batch) == (("test",), 3)
    assert cli.main(["dynamic-eval", "a", "--learning-rate", "5e-5", "--decay", "1e-3", "--limit", "7", *cpu]) == 0
    assert (seen[-1].learning_rate, seen[-1].decay, seen[-1].limit) == (5e-5, 1e-3, 7)
    assert cli.main(["compare", "--heads", "softmax,mos", "--seeds", "1,2", "--quick", "--at-once", "1"]) == 0
    assert (seen[-1].heads, seen[-1].seeds, seen[-1].quick) == (("softmax", "mos"), (1, 2), True)
    assert cli.main(["reproduce", "table2", "--seeds", "4", "--dry-run", *cpu]) == 0
    assert (seen[-1].table, seen[-1].seeds, seen[-1].dry_run) == ("table2", 4, True)
    assert cli.main(["capacity", "--heads", "softmax,gss(k=0)", "--widths", "2,4", "--starts", "1"]) == 0
    assert (seen[-1].heads, seen[-1].widths, seen[-1].starts) == (("softmax", "gss(k=0)"), (2, 4), 1)
    assert cli.main(["audit", "gpt2", "--bounds-only", "--memory", "2"]) == 0
    assert (seen[-1].model, seen[-1].bounds_only, seen[-1].memory_gib) == ("gpt2", True, 2.0)
    for text, gib in (("8GiB", 8.0), ("512MiB", 0.5), ("1.5g", 1.5)):
        assert cli.main(["audit", "gpt2", "--memory", text]) == 0
        assert seen[-1].memory_gib == gib


def test_a_sweep_gets_its_seeds_and_precisions(seen, tmp_path):
    words = ["sweep", "tiny-softmax", "--seeds", "1,2", "3", "--seed", "4", "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--evaluation-precision", "float32", "--cpus-per-trial", "0.5"]) == 0
    assert (seen[-1].seeds, seen[-1].evaluation_precision, seen[-1].cpus_per_trial) == ((1, 2, 3, 4), "float32", 0.5)
    assert (seen[-1].confidence, seen[-1].at_once) == (0.95, None)


@pytest.mark.parametrize("verb", verbs.VERBS, ids=lambda verb: verb.name)
def test_the_help_shows_the_defaults_of_the_configuration(verb, capsys):
    if not verb.config:
        return
    module, name = verb.config
    fields = {one.name: one for one in dataclasses.fields(getattr(import_module(f"sigsoftmax.{module}"), name))}
    with pytest.raises(SystemExit):
        cli.main([verb.name, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for option, declared in verb.options.items():
        default = fields[option].default if option in fields else None
        if not declared.default and isinstance(default, int | float | Path) and not isinstance(default, bool):
            assert f"(default: {default if isinstance(default, Path) else format(default, 'g')})" in printed


def test_the_string_below_a_field_is_the_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "--first-seed N the first of these seeds (default: the published one)" in printed
    assert (
        "--data PATH folder of train.txt, valid.txt and test.txt (default: where sigsoftmax data fetch puts" in printed
    )


def test_the_resources_of_a_comparison_are_its_own_choice_and_others_take_a_gpu(seen, monkeypatch):
    assert cli.main(["compare", "--precision", "tf32"]) == 0
    assert (seen[-1].resources.device, seen[-1].resources.at_once) == ("cpu", os.cpu_count())
    assert seen[-1].resources.precision == "tf32"
    monkeypatch.setattr("sigsoftmax.experiments.runs.run.default_device", lambda: "meta")
    assert cli.main(["train", "ptb-softmax"]) == 0
    assert (seen[-1].resources.device, seen[-1].resources.at_once) == ("meta", 1)


def test_defaults_of_a_configuration_are_its_own(seen):
    assert cli.main(["capacity"]) == 0
    assert seen[-1] == capacity.CapacityToolConfig()
    assert cli.main(["audit", "gpt2"]) == 0
    assert seen[-1] == audit.AuditConfig(model="gpt2")


def test_lists_are_read():
    assert numbers("3,1,2") == (3, 1, 2)
    assert heads("softmax, gss(k=0, c=1),mixture(gss(k=0), K=4)") == (
        "softmax",
        "gss(k=0, c=1)",
        "mixture(gss(k=0), K=4)",
    )


def test_recipes_are_printed(capsys):
    assert cli.main(["recipes", "ptb-moss"]) == 0
    printed = capsys.readouterr().out
    assert "model.head" in printed
    assert "moss(K=15)" in printed
    assert cli.main(["recipes"]) == 0
    assert "wt2" in capsys.readouterr().out


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    script = f"{sys.executable} -m sigsoftmax functions | true"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {script}"], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
