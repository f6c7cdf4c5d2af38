"""What a person sees of runs: lines in a file, a changing line or bars in a terminal."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sigsoftmax.experiments import display
from sigsoftmax.experiments.display import ChangingLine, Forecast, PlainLines, RichBars, duration_text, make_display
from sigsoftmax.experiments.runs import Run
from sigsoftmax.lm.recipes import recipe
from sigsoftmax.lm.training import PART, Progress
from sigsoftmax.records.training import EpochRecord, RunIdentity

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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.5, "9.5 s"),
        (42.4, "42 s"),
        (125, "2 min 5 s"),
        (7500, "2 h 5 min"),
        (200000, "2 d 7 h"),
        (59.7, "1 min 0 s"),
    ],
)
def test_durations_in_words(seconds, text):
    assert duration_text(seconds) == text


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
