"""The queue of the paper's tables: every line is a command that the package takes, and keeps its records."""

import dataclasses
import shlex
from pathlib import Path

import paper_queue
import pytest
from paper_queue import QUEUE, RUNS, Line, gather
from tests.benchmarks.test_whole_runs import run_of, spectrum_of
from tests.report.synthetic_runs import environment

from sigsoftmax.cli import _parser
from sigsoftmax.cli.parser import build
from sigsoftmax.experiments.reproduce.run import ReproduceConfig
from sigsoftmax.records import Record, append
from sigsoftmax.records.schemas.training import EpochRecord


def config_of(line: Line) -> ReproduceConfig:
    command = line.command(Path("corpora"), minutes=27.0)
    arguments = _parser(command).parse_args(command)
    # Of no consequence for the runs, and not every machine has the GPU that the queue asks for.
    arguments.device = "cpu"
    return build(ReproduceConfig, arguments)


@pytest.mark.parametrize("line", QUEUE, ids=lambda line: line.name)
def test_a_line_is_a_command_whose_runs_are_those_that_it_names(line: Line) -> None:
    runs = config_of(line).runs()
    assert [(run.recipe.name, run.seed) for run in runs] == [
        (f"{line.setting}-{head}", line.seed) for head in line.heads
    ]
    assert all(run.recipe.training.epochs == line.epochs for run in runs)
    assert all(run.recipe.finetuning.epochs == line.finetuning_epochs for run in runs)


def test_the_lines_of_one_comparison_have_one_schedule() -> None:
    assert len({(line.epochs, line.finetuning_epochs) for line in QUEUE[:5]}) == 1


def test_every_line_has_a_folder_of_its_own() -> None:
    assert [line.number for line in QUEUE] == list(range(1, len(QUEUE) + 1))
    assert len({line.name for line in QUEUE}) == len(QUEUE)


def test_records_of_all_runs_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = QUEUE[0]
    for place in ("ptb-softmax/141", "ptb-softmax/141/finetune", "ptb-sigsoftmax/141"):
        folder = RUNS / line.name / place
        folder.mkdir(parents=True)
        (folder / "records.jsonl").write_text(f'{{"place": "{place}"}}\n')
    assert gather(line, Path("results")) == 3
    assert len((Path("results") / f"{line.name}.jsonl").read_text().splitlines()) == 3


def test_the_table_says_which_lines_are_done(tmp_path: Path) -> None:
    line = QUEUE[0]
    records = []
    for recipe in paper_queue.recipes(line):
        head = recipe.removeprefix("ptb-")
        payloads = [*run_of(head, line.seed, (60.0, 59.0, 51.0)), spectrum_of(head, line.seed, 402)]
        for payload in payloads:
            last = isinstance(payload, EpochRecord) and payload.epoch == 30
            kept = dataclasses.replace(payload, epoch=line.epochs) if last else payload
            records.append(Record.of(kept, environment("python -m sigsoftmax reproduce table4")))
    states = {kept: paper_queue.state(line, records[:kept]) for kept in (0, 3, len(records) - 1, len(records))}
    assert states[0] == "not run yet"
    assert states[3].startswith("stopped without all of: training, finetuning, dynamic evaluation, ranks (")
    assert states[len(records) - 1].startswith("stopped without all of: ranks (")
    assert states[len(records)].startswith("done (2026-01-01, Test CPU, commit ")
    append(tmp_path / f"{line.name}.jsonl", records)
    rows = paper_queue.table(tmp_path).splitlines()[2:]
    assert ["| done (" in row for row in rows] == [True] + [False] * (len(QUEUE) - 1)
    assert paper_queue.commands(tmp_path).splitlines() == ["# line 1", "sigsoftmax reproduce table4"]


def test_without_a_line_the_queue_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["paper_queue.py"])
    assert paper_queue.main() == 0
    assert capsys.readouterr().out == paper_queue.table()


def test_a_line_is_run_as_it_is_printed_and_its_records_are_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = []

    class Done:
        returncode = 3

    def run(command: list[str], check: bool) -> Done:
        ran.append(command)
        return Done()

    monkeypatch.setattr(paper_queue.subprocess, "run", run)
    monkeypatch.setattr("sys.argv", ["paper_queue.py", "4", "--data", "corpora"])
    assert paper_queue.main() == 3
    printed = capsys.readouterr().out.splitlines()
    assert shlex.split(printed[0])[1:] == ran[0][3:]
    assert printed[1].startswith("0 records of line 4")
