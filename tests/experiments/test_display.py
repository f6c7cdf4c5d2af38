"""The display of runs: lines in a file, a changing line or bars in a terminal."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sigsoftmax.experiments import display
from sigsoftmax.experiments.display import (
    ChangingLine,
    Forecast,
    PlainLines,
    RichBars,
    RunPlan,
    WholeLine,
    make_display,
)
from sigsoftmax.experiments.runs.run import Run
from sigsoftmax.lm.recipes import recipe
from sigsoftmax.lm.training.trainer import PART, Progress
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.schemas.training import EpochRecord, RunIdentity

RUN = Run(recipe=recipe("ptb-softmax"), seed=1, folder=Path("runs/ptb-softmax/1"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def identity():
    fields = dict.fromkeys(("recipe", "phase", "head", "corpus", "corpus_checksum", "precision"), "x")
    return RunIdentity(**fields, seed=1, parameters=3)


def at(update, *, epoch=2, record=None, loss=None):
    return Progress(
        epoch=epoch,
        epochs=10,
        update=update,
        row=update,
        rows=1000,
        tokens_per_second=31234.0,
        seconds_left=125.0,
        loss=loss,
        record=record,
    )


def epoch(number, seconds=20.0):
    record = EpochRecord(
        run=identity(),
        epoch=number,
        optimizer="sgd",
        updates=1000,
        train_loss=5.0,
        train_loss_parts=(),
        valid_loss=4.605,
        valid_loss_over_rows=4.6,
        is_best=True,
        seconds_training=seconds - 5.0,
        seconds_validation=5.0,
    )
    return at(1000, epoch=number, record=record, loss=5.0)


def test_plain_lines_are_an_epoch_each_and_updates_only_in_long_epochs(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    with PlainLines(stream) as lines:
        for update in range(1, 3 * PART + 1):
            clock[0] += 0.04
            lines.watch(RUN, at(update, loss=5.1))
        lines.watch(RUN, epoch(2))
    printed = stream.getvalue().splitlines()
    # 200 updates take 8 seconds: a line about updates needs 10 since the last.
    assert [line.split(":")[1].split(",")[1].strip() for line in printed] == ["update 400", "training loss 5.0000"]
    assert printed[0].startswith("ptb-softmax, seed 1: epoch 2 of 10")
    assert "31,234 tokens/s" in printed[0]
    assert "perplexity 99.98), the best so far" in printed[1]
    assert printed[1].endswith("20 s, 2 min 40 s left")


def test_the_forecast_is_of_the_last_epochs():
    forecast = Forecast()
    assert forecast.seconds_left(RUN, epoch(1, 20.0)) == 9 * 20.0
    assert forecast.seconds_left(RUN, epoch(2, 40.0)) == 8 * 30.0
    assert forecast.seconds_left(RUN, at(10, epoch=3)) == 125.0 + 7 * 30.0


def test_a_file_gets_plain_lines_and_a_terminal_bars():
    assert type(make_display(io.StringIO())) is PlainLines
    pytest.importorskip("rich")
    assert type(make_display(Terminal())) is RichBars


def test_a_terminal_without_rich_gets_a_changing_line(monkeypatch):
    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    stream = Terminal()
    shown = make_display(stream)
    assert type(shown) is ChangingLine
    with shown:
        shown.watch(RUN, at(1))
        shown.watch(RUN, epoch(2))
    assert "update 1" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_bars_show_epoch_speed_and_perplexity(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with RichBars(stream) as bars:
        bars.watch(RUN, at(1))
        bars.watch(RUN, epoch(2))
        bars.note("a word in between")
        bars.ended(RUN)
    printed = stream.getvalue()
    for part in ("ptb-softmax, seed 1", "epoch 2/10", "31,234 tokens/s", "99.98", "a word in between"):
        assert part in printed


def test_the_note_of_a_run_goes_to_the_display_alone():
    stream, told = io.StringIO(), []

    class Other:
        def watch(self, run, progress):
            told.append(progress)

    with PlainLines(stream) as lines:
        tell = display.watching(lines, Other())
        tell(RUN, replace(at(0), note="LSTM recurrence: torch's own LSTM"))
        tell(RUN, epoch(1))
    assert stream.getvalue().startswith("ptb-softmax, seed 1: LSTM recurrence: torch's own LSTM\n")
    assert [progress.note for progress in told] == [None]


# --- all runs together ------------------------------------------------------------------------------------------------

OTHER = Run(recipe=recipe("ptb-sigsoftmax"), seed=1, folder=Path("runs/ptb-sigsoftmax/1"))


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on when it is told to."""
    now = [1000.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    return now


def whole(stream, *, rest=0.0):
    """Two runs of ten epochs of 10 s, two at once, one of them finetuned for ten further epochs."""
    ten = RunPlan(epoch_seconds=10.0, epochs_left=10)
    return WholeLine({RUN: ten, OTHER: ten, OTHER.finetuning(): ten}, 200.0, stream, rest=rest)


def test_the_whole_is_foretold_by_the_plan_and_then_by_the_pace(clock):
    line = whole(io.StringIO())
    assert line.line == "0% done, 0 of 2 runs ended, about 3 min 20 s left"
    # Twice as slow as planned: 60 of 300 s of work took 80 s.
    clock[0] += 80.0
    line.watch(RUN, epoch(6))
    assert line.line == "20% done, 0 of 2 runs ended, about 5 min 20 s left"
    # Below a fifth, both count.
    line = whole(io.StringIO())
    clock[0] += 40.0
    line.watch(RUN, epoch(3))
    assert line.line == f"10% done, 0 of 2 runs ended, about {duration_text(0.9 * (0.5 * 200 + 0.5 * 400))} left"


def test_a_run_has_ended_with_its_last_phase(clock):
    line = whole(io.StringIO())
    line.ended(OTHER)
    assert line.line.startswith("33% done, 0 of 2 runs ended")
    line.ended(OTHER.finetuning())
    line.ended(RUN)
    assert line.line == "100% done, 2 of 2 runs ended, about 0 s left"


def test_runs_that_are_left_out_are_no_longer_waited_for(clock):
    line = whole(io.StringIO())
    for run in (OTHER, OTHER.finetuning(), RUN.finetuning()):
        line.left_out(run)
    line.watch(RUN, epoch(5))
    assert line.line.startswith("83% done, 1 of 2 runs ended")


def test_in_a_file_there_is_a_line_now_and_then_and_a_note_once(clock):
    stream = io.StringIO()
    with whole(stream, rest=10.0) as line:
        for run in (RUN, OTHER):
            line.watch(run, replace(at(0, epoch=1), note="LSTM recurrence: torch's own"))
        for second in range(1, 26):
            clock[0] += 1.0
            line.watch(RUN, at(40 * second, epoch=1))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "LSTM recurrence: torch's own"
    assert [text.split(",")[0] for text in lines[1:]] == ["1% done", "3% done"]


def test_on_a_terminal_one_line_changes_in_its_place(clock, monkeypatch):
    monkeypatch.setattr(display, "_terminal_width", lambda: 40)
    stream = Terminal()
    with whole(stream) as line:
        for second in range(1, 4):
            clock[0] += 1.0
            line.watch(RUN, at(100 * second, epoch=1))
    assert "\n" not in stream.getvalue()
    drawn = [part for part in stream.getvalue().split("\r\x1b[2K") if part]
    assert len(drawn) == 3
    assert all(part.endswith("2 runs ended, about") or len(part) == 39 for part in drawn)
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_where_nothing_is_left_all_is_done(clock):
    done = RunPlan(epoch_seconds=0.0, epochs_left=0)
    assert WholeLine({RUN: done}, 0.0, io.StringIO()).line.startswith("100% done")
