"""What all verbs share: how they are declared, what they print, and how a misspelt word is answered."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from sigsoftmax.terminal import clear_line

__all__ = ["Act", "Parser", "Verbs", "heads", "numbers", "progress", "say"]

Act = Callable[[argparse.Namespace], None]


class Parser(argparse.ArgumentParser):
    """One line for an error, with the nearest verb or option when something is misspelt."""

    given: Sequence[str] = ()
    """the words of the command line"""
    known: Sequence[str] = ()
    """all verbs and options"""

    def error(self, message: str) -> NoReturn:
        for word in (word.partition("=")[0] for word in self.given):
            near = difflib.get_close_matches(word, self.known, n=1)
            if near and word not in self.known:
                message += f"; did you mean {near[0]!r}?"
                break
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Subparsers(Protocol):
    def add_parser(self, name: str, **options: Any) -> Any: ...


class Verbs:
    """The verbs of a parser."""

    def __init__(self, parser: Parser, *, metavar: str = "VERB") -> None:
        self._subparsers: _Subparsers = parser.add_subparsers(
            dest=metavar.lower(), metavar=metavar, required=True, parser_class=Parser
        )
        self.parsers: dict[str, Parser] = {}

    def add(self, name: str, act: Act | None, *, summary: str, description: str, example: str) -> Parser:
        """A verb with its help; ``act`` is called with what was given."""
        parser: Parser = self._subparsers.add_parser(
            name,
            help=summary,
            description=description,
            epilog=f"example: sigsoftmax {example}",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if act is not None:
            parser.set_defaults(act=act)
        self.parsers[name] = parser
        return parser


# --- values -----------------------------------------------------------------------------------------------------------


def numbers(text: str) -> tuple[int, ...]:
    """``1,2,3``"""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers, as 1,2,3, got {text!r}") from None


def heads(text: str) -> tuple[str, ...]:
    """``softmax,gss-0,mixture(gss(k=0), K=4)``: commas inside brackets belong to a head."""
    parts = [part.strip() for part in re.split(r",(?![^()]*(?:\([^()]*\)[^()]*)*\))", text)]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"expected heads, as softmax,sigsoftmax,mos, got {text!r}")
    return tuple(parts)


def gibibytes(text: str) -> float:
    """``8``, ``8GiB`` or ``512MiB``"""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([MG])(?:i?B)?)?\s*", text, re.IGNORECASE)
    if match is None or not (size := float(match[1])):
        raise argparse.ArgumentTypeError(f"expected an amount of memory, as 8 (GiB), 8GiB or 512MiB, got {text!r}")
    return size / 1024 if (match[2] or "G").upper() == "M" else size


def add_out(parser: Parser, default: str, what: str) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path(default), metavar="DIR", help=f"folder for {what} (default: {default})"
    )


# --- printing ---------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """A paragraph."""
    print(text + "\n", flush=True)


def progress(text: str) -> None:
    """A line that the next one replaces, where someone is watching."""
    if sys.stderr.isatty():
        # The next text may be shorter.
        clear_line(sys.stderr)
        print(text, end="", file=sys.stderr, flush=True)
