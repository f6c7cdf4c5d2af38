"""The command line: reads arguments, calls an experiment, prints. No logic lives here."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from sigsoftmax._version import __version__
from sigsoftmax.cli.parser import Parser, add_verbs
from sigsoftmax.cli.verbs import VERBS
from sigsoftmax.terminal import escaped_output

__all__ = ["main"]

RESUMABLE = ("train", "finetune", "compare", "reproduce", "sweep", "dynamic-eval", "data")


def _parser(given: Sequence[str]) -> Parser:
    parser = Parser(
        prog="sigsoftmax",
        description="Output functions beyond softmax: what they can express, measured.",
        epilog="example: sigsoftmax demo --quick",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sigsoftmax {__version__}")
    parsers = {"": parser, **add_verbs(parser, VERBS)}
    for one in parsers.values():
        one.given, one.all_parsers = given, parsers
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0; 1 where the machine or the run failed (a full disk, a loss that diverged); 2 for bad input; 130 after Ctrl-C.
    Everything that is printed meanwhile is escaped, tracebacks of unforeseen errors included.
    """
    with escaped_output():
        return _run(sys.argv[1:] if argv is None else argv)


def _run(given: Sequence[str]) -> int:
    arguments = _parser(given).parse_args(given)
    try:
        arguments.act(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has enough; what is left in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ValueError as error:
        return _fail(arguments.verb, error, 2)
    except (OSError, ArithmeticError) as error:
        return _fail(arguments.verb, error, 1)
    except (RuntimeError, MemoryError) as error:
        # torch has a class of its own for the memory of GPUs alone.
        if type(error).__name__ in ("OutOfMemoryError", "MemoryError") or "DefaultCPUAllocator" in str(error):
            return _fail(arguments.verb, f"the device has too little memory; try --at-once 1. {error}", 1)
        return _fail_unforeseen()
    except KeyboardInterrupt as error:
        resume = "; the same command goes on from there" if arguments.verb in RESUMABLE else ""
        print("\n".join([f"\ninterrupted{resume}", *map(str, error.args)]), file=sys.stderr)
        return 130
    except Exception:  # noqa: BLE001 - the interpreter would print it, too
        return _fail_unforeseen()
    return 0


def _fail_unforeseen() -> int:
    """The interpreter would print the traceback when the streams are no longer escaped, and it may quote anything."""
    traceback.print_exc()
    return 1


def _fail(verb: str, error: object, status: int) -> int:
    print(f"sigsoftmax {verb}: error: {error}", file=sys.stderr)
    return status
