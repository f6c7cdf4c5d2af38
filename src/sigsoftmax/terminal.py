"""Printing for people: whatever a terminal would act on is shown as an escape, as ``\\x1b``, and does nothing.

Records, vocabularies, file names and answers of servers come from others, and may hold sequences that rewrite the
screen, change the title of the window or turn the direction of writing. The command line therefore prints everything
through :class:`EscapingStream`, which stands in for ``sys.stdout`` and ``sys.stderr`` while a command runs: whatever is
printed, by whatever function, is escaped, and no command can forget it. The control sequences that the package itself
uses go past it: :func:`clear_line`, and the bars of rich, whose console (:func:`console`) escapes each text in a bar.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

# The control characters of Unicode but line feed and tab; its format characters (marks that turn the direction of
# writing, invisible ones); line and paragraph separators; and halves of surrogate pairs, which no encoding can write.
# Not U+200C and U+200D, without which neither Persian nor Hindi nor emoji can be written and which do no more than part
# or join two letters, and not the format characters that are drawn: signs before numbers in Arabic, Syriac and Kaithi.
ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)
"""Matches each character that a terminal or a page may act on, or hide, instead of drawing it."""


def escaped(text: str) -> str:
    """The text with each active character written as Python writes it: ``\\x1b``, ``\\r``, ``\\u202e``."""
    return ACTIVE.sub(lambda found: ascii(found[0])[1:-1], text)


class EscapingStream:
    """A text stream that escapes what is written to it and passes it on to another."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._print_line: Callable[[str], None] | None = None
        """prints a whole line above progress bars; None writes to the stream"""
        self._begun = ""

    def write(self, text: str) -> int:
        if self._print_line is None:
            self._stream.write(escaped(text))
        else:
            *lines, self._begun = (self._begun + escaped(text)).split("\n")
            for line in lines:
                self._print_line(line)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """All else (``flush``, ``isatty``, ``fileno``, ``encoding``, ...) is the stream's own."""
        return getattr(self._stream, name)

    @contextmanager
    def through(self, print_line: Callable[[str], None]) -> Iterator[None]:
        """Whole lines are printed by a function meanwhile; what is left of one goes to the stream at the end."""
        self._print_line = print_line
        try:
            yield
        finally:
            self._print_line = None
            self._stream.write(self._begun)
            self._begun = ""


def _unescaped(stream: TextIO) -> TextIO:
    """The stream itself, for control sequences of ours."""
    while isinstance(stream, EscapingStream):
        stream = stream._stream
    return stream


def escape_output() -> None:
    """Escape what this process prints from here on."""
    sys.stdout, sys.stderr = (cast(TextIO, EscapingStream(stream)) for stream in (sys.stdout, sys.stderr))


@contextmanager
def escaped_output() -> Iterator[None]:
    """Escape what is printed inside."""
    before = sys.stdout, sys.stderr
    escape_output()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def clear_line(stream: TextIO) -> None:
    """Empty the line that the cursor is in, so that a shorter text can be written there."""
    _unescaped(stream).write("\r\x1b[2K")


def console(stream: TextIO | None = None) -> Console:
    """A console of rich that escapes texts and lets its own control sequences through.

    ``stream`` is the error stream by default. Without rich this raises ModuleNotFoundError.
    """
    from rich.console import Console
    from rich.segment import Segment

    class EscapingConsole(Console):
        """Every text on its way to the screen passes through ``render``; rich marks its own sequences as such."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(escaped(segment.text), segment.style)

    return EscapingConsole(file=_unescaped(stream or sys.stderr), highlight=False, markup=False, emoji=False)


@contextmanager
def above_bars(bars_console: Console) -> Iterator[None]:
    """Print lines to a terminal above the bars of that console; what goes to a file gets there.

    The bars are made with ``redirect_stdout=False, redirect_stderr=False``: rich's own way reads colours and links from
    what is printed.
    """

    def print_line(line: str) -> None:
        bars_console.print(line, soft_wrap=True)

    with escaped_output(), ExitStack() as stack:
        for stream in (sys.stdout, sys.stderr):
            if stream.isatty():
                stack.enter_context(cast(EscapingStream, stream).through(print_line))
        yield
