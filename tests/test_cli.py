"""The command line: what it prints, what it refuses and how."""

import subprocess
import sys

import pytest

from sigsoftmax import cli, family
from sigsoftmax._version import __version__
from sigsoftmax.experiments import demo


def test_version_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "sigsoftmax", "--version"], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == f"sigsoftmax {__version__}"


def test_functions_lists_the_family(capsys):
    assert cli.main(["functions"]) == 0
    printed = capsys.readouterr().out
    for definition in family.table():
        assert definition.name in printed
        assert f"phi(z) = {definition.formula}" in printed


def test_demo_passes_its_arguments_on(monkeypatch, capsys, tmp_path):
    seen = []
    monkeypatch.setattr(demo, "run", lambda config, say, progress: seen.append(config) or say("table"))
    assert cli.main(["demo", "--seed", "3", "--out", str(tmp_path), "--quick"]) == 0
    assert seen == [demo.DemoConfig(seed=3, out=tmp_path, quick=True)]
    assert capsys.readouterr().out == "table\n\n"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["functions", "--help"]])
def test_help_shows_an_example(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    assert "example: sigsoftmax " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "did you mean 'demo'?"),
        (["function"], "did you mean 'functions'?"),
        (["demo", "--sede", "1"], "did you mean '--seed'?"),
        (["demo", "--quik"], "did you mean '--quick'?"),
        (["demo", "--seed", "x"], "invalid int value: 'x'"),
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


def test_bad_values_are_one_line_without_traceback(capsys, tmp_path):
    assert cli.main(["demo", "--seed", "-1"]) == 2
    assert capsys.readouterr().err == "sigsoftmax demo: error: seed must not be negative, got -1\n"


def test_interrupt_ends_cleanly(monkeypatch, capsys):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"
