"""The command line: reads arguments, calls an experiment, prints. No logic lives here."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sigsoftmax._version import __version__

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
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


def _demo(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.demo import DemoConfig, run

    config = DemoConfig(seed=arguments.seed, out=arguments.out, quick=arguments.quick)
    run(config, say=lambda text: print(text + "\n", flush=True), progress=_progress)


def _functions(arguments: argparse.Namespace) -> None:
    from sigsoftmax.family import table

    for definition in table():
        parameters = ", ".join(f"{key}={spec.default:g}" for key, spec in definition.parameters.items())
        print(f"{definition.name}({parameters})" if parameters else definition.name)
        print(f"    phi(z) = {definition.formula}\n    {definition.summary}")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        # Clears the line first: the next text may be shorter.
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


def _parser(given: Sequence[str]) -> _Parser:
    parser = _Parser(
        prog="sigsoftmax",
        description="Output functions beyond softmax: what they can express, measured.",
        epilog="example: sigsoftmax demo --quick",
        allow_abbrev=False,
    )
    options = [parser.add_argument("--version", action="version", version=f"sigsoftmax {__version__}")]
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)

    demo = verbs.add_parser(
        "demo",
        help="the bottleneck in three minutes: a table and two pictures",
        description="Fits every kind of output head to a language of known truth, at widths on both sides of its "
        "rank; prints a table, draws two pictures and writes records.",
        epilog="example: sigsoftmax demo --seed 1 --out runs/demo-1",
        allow_abbrev=False,
    )
    options += [
        demo.add_argument("--seed", type=int, default=0, help="of the language and of the starts (default: 0)"),
        demo.add_argument(
            "--out",
            type=Path,
            default=Path("runs/demo"),
            metavar="DIR",
            help="folder for pictures and records (default: runs/demo)",
        ),
        demo.add_argument("--quick", action="store_true", help="a smaller language, in some seconds"),
    ]
    demo.set_defaults(act=_demo)

    functions = verbs.add_parser(
        "functions",
        help="the members of the family, their formulas and parameters",
        description="Prints every output function with its phi: f(z) = softmax(phi(z)).",
        epilog="example: sigsoftmax functions",
        allow_abbrev=False,
    )
    functions.set_defaults(act=_functions)

    known = ["--help", *verbs.choices, *(name for option in options for name in option.option_strings)]
    for one in (parser, *verbs.choices.values()):
        one.given, one.known = given, known
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (0, 2 for a bad input, 130 after Ctrl-C)."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser(given).parse_args(given)
    try:
        arguments.act(arguments)
    except ValueError as error:
        print(f"sigsoftmax {arguments.verb}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0
