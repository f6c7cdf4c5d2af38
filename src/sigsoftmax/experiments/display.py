"""Displays of runs while they train: bars with rich, one changing line without it, lines in a file.

All of it goes to the error stream, so that the output holds results alone.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, Self, TextIO

from sigsoftmax.experiments.runs.run import Run
from sigsoftmax.lm.training.progress import Progress
from sigsoftmax.lm.training.trainer import PART
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.statistics import perplexity
from sigsoftmax.terminal import above_bars, clear_line, console

__all__ = [
    "Display",
    "Pace",
    "RunPlan",
    "Say",
    "Watcher",
    "WholeLine",
    "make_display",
    "perplexity_text",
    "watching",
]

Say = Callable[[str], None]
"""Prints a line or a paragraph"""

REMEMBERED_EPOCHS = 5
"""number of last epochs whose mean length foretells the rest"""
UPDATE_LINE_SECONDS = 10.0
"""between two plain lines about updates: short epochs have a line of their own soon enough"""
REFRESH_SECONDS = 0.1
"""between two looks at a bar: a person sees no more"""
WHOLE_SECONDS = 10.0
"""between two lines about all runs, in a file"""
FORETELLS = 0.2
"""share of the work after which the time it took foretells the rest, and the plan no longer does"""


class Pace:
    """Tells when the next of many lines is due: so many seconds after the last."""

    def __init__(self, seconds: float = 1.0, *, last: float = -math.inf) -> None:
        self._seconds, self._last = seconds, last

    def is_due(self) -> bool:
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


class Watcher(Protocol):
    """Is told where a run stands."""

    def watch(self, run: Run, progress: Progress) -> None: ...


class Display:
    """Shows runs, and lines that are said meanwhile; this one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def watch(self, run: Run, progress: Progress) -> None:
        """Show where a run stands."""

    def note(self, text: str) -> None:
        """Show a line about what is done besides training."""

    def ended(self, run: Run) -> None:
        """Forget this run: no more will be heard of it."""


def make_display(stream: TextIO | None = None) -> Display:
    """The display that suits the stream, the error stream by default."""
    stream = stream or sys.stderr
    if not stream.isatty():
        return PlainLines(stream)
    try:
        return RichBars(stream)
    except ModuleNotFoundError:
        return ChangingLine(stream)


# --- text -------------------------------------------------------------------------------------------------------------


def perplexity_text(loss: float) -> str:
    """exp of a loss in nats, to four digits."""
    value = perplexity(loss)
    return f"{value:,.2f}" if value < 1000.0 else f"{value:,.0f}" if value < 1e6 else "over 10^6"


def update_line(progress: Progress) -> str:
    parts = [f"epoch {progress.epoch} of {progress.epochs}", f"update {progress.update}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f} (perplexity {perplexity_text(progress.loss)})")
    parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.seconds_left is not None:
        parts.append(f"the epoch ends in {duration_text(progress.seconds_left)}")
    return ", ".join(parts)


def epoch_line(progress: Progress, seconds_left: float | None) -> str:
    record = progress.record
    assert record is not None
    parts = [
        f"epoch {record.epoch} of {progress.epochs}",
        f"training loss {record.train_loss:.4f}",
        f"validation {record.valid_loss:.4f} (perplexity {perplexity_text(record.valid_loss)})"
        + (", the best so far" if record.is_best else ""),
        f"{progress.tokens_per_second:,.0f} tokens/s",
        duration_text(_epoch_seconds(progress)),
    ]
    if seconds_left:
        parts.append(f"{duration_text(seconds_left)} left")
    return ", ".join(parts)


def _epoch_seconds(progress: Progress) -> float:
    assert progress.record is not None
    return progress.record.seconds


class Forecast:
    """Foretells from its last epochs how long each run will take."""

    def __init__(self) -> None:
        self._epochs: dict[Run, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED_EPOCHS))

    def seconds_left(self, run: Run, progress: Progress) -> float | None:
        """Until the last epoch has ended; None while there is nothing to go by."""
        epochs = self._epochs[run]
        this_epoch = progress.seconds_left
        if progress.record is not None:
            epochs.append(_epoch_seconds(progress))
            this_epoch = 0.0
        if this_epoch is None:
            return None
        # In the first epoch its own length is all that is known, and validation is still to come.
        typical = (
            sum(epochs) / len(epochs) if epochs else this_epoch * progress.rows / max(progress.rows - progress.row, 1)
        )
        return this_epoch + typical * (progress.epochs - progress.epoch)


# --- displays ---------------------------------------------------------------------------------------------------------


class PlainLines(Display):
    """One line per epoch, and in long epochs one every 200 updates."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._said = stream, time.monotonic()
        self._forecast = Forecast()

    def watch(self, run: Run, progress: Progress) -> None:
        if progress.record is not None:
            line = epoch_line(progress, self._forecast.seconds_left(run, progress))
        elif progress.update % PART == 0 and time.monotonic() - self._said >= UPDATE_LINE_SECONDS:
            line = update_line(progress)
        else:
            return
        self._said = time.monotonic()
        self.note(f"{run.name}: {line}")

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class ChangingLine(PlainLines):
    """A line that changes with every update, and one that stays for every epoch: a terminal without rich."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._pace = Pace(REFRESH_SECONDS)

    def __exit__(self, *error: object) -> None:
        clear_line(self._stream)

    def watch(self, run: Run, progress: Progress) -> None:
        if progress.record is not None:
            super().watch(run, progress)
        elif self._pace.is_due():
            _redraw(self._stream, f"{run.name}: {update_line(progress)}")

    def note(self, text: str) -> None:
        clear_line(self._stream)
        super().note(text)


def _redraw(stream: TextIO, text: str) -> None:
    """Replace the line that the cursor is in. One that wraps could not be replaced."""
    clear_line(stream)
    stream.write(text[: _terminal_width() - 1])
    stream.flush()


def _terminal_width() -> int:
    return shutil.get_terminal_size().columns


class RichBars(Display):
    """A bar for each run with its epoch, speed, loss, perplexity and the time left; a line above it for each epoch."""

    def __init__(self, stream: TextIO) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        self._console = console(stream)
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("epoch {task.fields[epoch]}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("perplexity {task.fields[perplexity]}"),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._tasks: dict[Run, Any] = {}
        self._paces: dict[Run, Pace] = defaultdict(lambda: Pace(REFRESH_SECONDS))
        self._forecast = Forecast()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self._bars)
        self._open.enter_context(above_bars(self._console))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def watch(self, run: Run, progress: Progress) -> None:
        if not self._paces[run].is_due() and progress.record is None:
            return
        left = self._forecast.seconds_left(run, progress)
        fields: dict[str, Any] = {
            "completed": progress.epoch - 1 + progress.row / progress.rows,
            "epoch": f"{progress.epoch}/{progress.epochs}",
            "speed": progress.tokens_per_second,
            "left": "" if left is None else f"{duration_text(left)} left",
        }
        if progress.loss is not None:
            fields["loss"] = f"{progress.loss:.3f}"
        if progress.record is not None:
            fields["completed"] = progress.epoch
            fields["perplexity"] = perplexity_text(progress.record.valid_loss)
            self.note(f"{run.name}: {epoch_line(progress, left)}")
        if run in self._tasks:
            self._bars.update(self._tasks[run], **fields)
        else:
            fields = {"loss": "", "perplexity": "", **fields}
            self._tasks[run] = self._bars.add_task(run.name, total=progress.epochs, **fields)

    def ended(self, run: Run) -> None:
        if run in self._tasks:
            self._bars.update(self._tasks.pop(run), visible=False)

    def note(self, text: str) -> None:
        self._console.print(text)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The epochs that a run still needs, and the time that each is expected to take."""

    epoch_seconds: float
    epochs_left: int

    @property
    def seconds(self) -> float:
        return self.epochs_left * self.epoch_seconds


class WholeLine(Display):
    """One line about many runs together: the share of the work that is done, the runs that have ended, the time left.

    On a terminal the line changes in its place; in a file a new one is written now and then. ``seconds`` is what all
    runs together are expected to take, less than the sum of the plans where several run at once.
    """

    def __init__(
        self, plans: Mapping[Run, RunPlan], seconds: float, stream: TextIO, *, rest: float = WHOLE_SECONDS
    ) -> None:
        self._stream, self._changes = stream, stream.isatty()
        self._rest = REFRESH_SECONDS if self._changes else rest
        self._plans, self._planned = plans, seconds
        self._left = {run: plan.seconds for run, plan in plans.items()}
        self._open = set(plans)
        self._notes: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._pace = Pace(self._rest, last=self._began)

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        if self._changes:
            clear_line(self._stream)

    def watch(self, run: Run, progress: Progress) -> None:
        if progress.note is not None:
            # Most of it holds for every run, as which recurrence they use.
            if progress.note not in self._notes:
                self._notes.add(progress.note)
                self.note(progress.note)
            return
        done = progress.epoch if progress.record is not None else progress.epoch - 1 + progress.row / progress.rows
        self._left[run] = max(progress.epochs - done, 0.0) * self._plans[run].epoch_seconds
        self._draw()

    def ended(self, run: Run) -> None:
        self._left[run] = 0.0
        self._open.discard(run)
        self._draw()

    def left_out(self, run: Run) -> None:
        """Wait no longer for a run that will not go on, or never begin."""
        if run in self._open:
            self.ended(run)

    def note(self, text: str) -> None:
        if self._changes:
            clear_line(self._stream)
        print(text, file=self._stream, flush=True)

    @property
    def line(self) -> str:
        total = sum(plan.seconds for plan in self._plans.values())
        done = 1.0 - min(sum(self._left.values()) / total, 1.0) if total else 1.0
        weight = min(done / FORETELLS, 1.0)
        by_pace = (time.monotonic() - self._began) / done if done else 0.0
        left = (1.0 - done) * ((1.0 - weight) * self._planned + weight * by_pace)
        # The phases of a run have one folder.
        runs, going = {run.folder for run in self._plans}, {run.folder for run in self._open}
        return f"{done:.0%} done, {len(runs - going)} of {len(runs)} runs ended, about {duration_text(left)} left"

    def _draw(self) -> None:
        if self._pace.is_due():
            if self._changes:
                _redraw(self._stream, self.line)
            else:
                self.note(self.line)


def watching(display: Display, *watchers: Watcher) -> Callable[[Run, Progress], None]:
    """One function that tells all of them; the notes of a run are for the display alone."""

    def tell(run: Run, progress: Progress) -> None:
        if progress.note is not None:
            display.note(f"{run.name}: {progress.note}")
            return
        for watcher in (display, *watchers):
            watcher.watch(run, progress)

    return tell
