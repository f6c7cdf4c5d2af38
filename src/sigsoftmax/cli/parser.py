"""Everything that verbs share: their declaration, printing, and the answer to a misspelt word.

An option stands for a field of a verb's configuration. The type of the field says how the option is read, and the
string below it is the help, which also shows the default; "...; None: TEXT" says what the lack of a value means.
Configurations are imported when a verb is used: most verbs would import what they do not need.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import importlib
import inspect
import itertools
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from sigsoftmax.family.notation import split_items
from sigsoftmax.terminal import clear_line

__all__ = ["Option", "Parser", "Verb", "add_verbs", "build", "gibibytes", "heads", "numbers", "progress", "say"]

C = TypeVar("C")


class Parser(argparse.ArgumentParser):
    """One line for an error, with the nearest verb or option when something is misspelt."""

    given: Sequence[str] = ()
    """the words of the command line"""
    all_parsers: Mapping[str, Parser] = {}
    """the parser of the program and those of all verbs, by name"""
    declare: Callable[[Parser], None] | None = None
    """adds arguments and options as soon as they are asked for"""

    def complete(self) -> Parser:
        declare, self.declare = self.declare, None
        if declare is not None:
            declare(self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super(Parser, self.complete()).parse_known_args(args, namespace)

    def format_help(self) -> str:
        return super(Parser, self.complete()).format_help()

    def error(self, message: str) -> NoReturn:
        known = [word for verb in self.all_parsers for word in verb.split()]
        known += [name for one in self.all_parsers.values() for name in one.complete()._option_string_actions]
        for word in (word.partition("=")[0] for word in self.given):
            near = difflib.get_close_matches(word, known, n=1)
            if near and word not in known:
                message += f"; did you mean {near[0]!r}?"
                break
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


# --- declarations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option or argument of a verb. What is not said follows from the field of its name in the configuration."""

    help: str = ""
    metavar: str = ""
    names: tuple[str, ...] = ()
    """as ``--set``; none: the name of the field"""
    default: str = ""
    """text for the help in place of the field's default"""
    kind: Any = None
    """type, or function that reads a word, in place of the field's type"""
    more: Mapping[str, Any] = field(default_factory=dict)
    """further arguments of argparse"""


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A verb with its help. Without ``act``, ``entry`` is called with the configuration and ``printers``."""

    name: str
    summary: str
    description: str
    example: str
    config: tuple[str, ...] = ()
    """module below ``sigsoftmax`` and class of the configuration"""
    entry: str = "run"
    """function of the same module"""
    printers: tuple[Callable[[str], None], ...] = ()
    act: Callable[[argparse.Namespace], None] | None = None
    arguments: Mapping[str, Option] = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)
    exclusive: Mapping[str, Option] = field(default_factory=dict)
    """options of which one may be given"""
    actions: Sequence[Verb] = ()
    """verbs below this one"""

    def _module(self) -> types.ModuleType:
        return importlib.import_module(f"sigsoftmax.{self.config[0]}")

    def run(self, arguments: argparse.Namespace) -> None:
        module = self._module()
        getattr(module, self.entry)(build(getattr(module, self.config[1]), arguments), *self.printers)

    def declare(self, parser: Parser) -> None:
        """Add arguments and options."""
        fields = _fields(getattr(self._module(), self.config[1])) if self.config else {}
        group = parser.add_mutually_exclusive_group() if self.exclusive else parser
        for name, option in self.arguments.items():
            parser.add_argument(name, **_declared(name, option, fields))
        for owner, options in ((group, self.exclusive), (parser, self.options)):
            for name, option in options.items():
                names = option.names or (f"--{name.replace('_', '-')}",)
                owner.add_argument(*names, dest=name, default=None, **_declared(name, option, fields))


def add_verbs(parser: Parser, verbs: Sequence[Verb], metavar: str = "VERB") -> dict[str, Parser]:
    """Add verbs to a parser; returns the parsers of all of them, by name."""
    added = parser.add_subparsers(dest=metavar.lower(), metavar=metavar, required=True, parser_class=Parser)
    parsers: dict[str, Parser] = {}
    for verb in verbs:
        one = parsers[verb.name] = added.add_parser(
            verb.name,
            help=verb.summary,
            description=verb.description,
            epilog=f"example: sigsoftmax {verb.example}",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if verb.actions:
            parsers |= {f"{verb.name} {name}": p for name, p in add_verbs(one, verb.actions, "ACTION").items()}
            continue
        one.declare = verb.declare
        one.set_defaults(act=verb.act or verb.run)
    return parsers


def build(config: type[C], arguments: argparse.Namespace, **more: Any) -> C:
    """A configuration of what was given; it has the defaults of all else."""
    given = _given(config, arguments)
    for own in dataclasses.fields(config):  # type: ignore[arg-type]
        if own.name == "resources":
            from sigsoftmax.experiments.runs.run import Resources, default_device

            # A configuration that chooses its resources by itself keeps that choice.
            make: Any = own.default_factory
            base = Resources(device=default_device()) if make is Resources else make()
            given["resources"] = dataclasses.replace(base, **_given(Resources, arguments))
    return config(**given | more)


def _given(config: type, arguments: argparse.Namespace) -> dict[str, Any]:
    found = {one.name: getattr(arguments, one.name, None) for one in dataclasses.fields(config)}
    given = {name: value for name, value in found.items() if value is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


# --- options of fields ------------------------------------------------------------------------------------------------


class _Field(NamedTuple):
    kind: Any
    default: Any
    """MISSING where there is none"""
    doc: str


def _fields(config: type) -> dict[str, _Field]:
    """The fields of a configuration and of its resources."""
    hints = typing.get_type_hints(config)
    try:
        body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(config)).body[0]).body
    except OSError:
        # Installed without its source: options have no help.
        body = []
    docs = {
        ast.unparse(one.target): " ".join(ast.literal_eval(doc.value).replace("``", "").split())
        for one, doc in itertools.pairwise(body)
        if isinstance(one, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
    fields = {
        one.name: _Field(hints[one.name], one.default, docs.get(one.name, "")) for one in dataclasses.fields(config)
    }
    return fields | _fields(hints["resources"]) if "resources" in hints else fields


def _declared(name: str, option: Option, fields: Mapping[str, _Field]) -> dict[str, Any]:
    """The arguments of argparse for an option."""
    own = fields.get(name, _Field(str, None, ""))
    text, _, missing = re.sub("(^|; )(None|none|empty): ", "\0", own.doc).partition("\0")
    default = option.default or missing or _default_text(own.default)
    text = " ".join(part for part in (option.help or text, f"(default: {default})" if default else "") if part)
    declared: dict[str, Any] = {"help": text.replace("%", "%%")}
    kind = option.kind or _without_none(own.kind)
    if kind is bool:
        return {**declared, "action": "store_true"}
    if typing.get_origin(kind) is Literal:
        return {**declared, "choices": typing.get_args(kind)}
    read, metavar = READERS.get(kind, (kind, name.upper()))
    declared |= {"type": read, "metavar": option.metavar or metavar, **option.more}
    if "choices" in option.more:
        del declared["metavar"]
    return declared


def _without_none(kind: Any) -> Any:
    """The type of a field that may also be None."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    [only] = [one for one in typing.get_args(kind) if one is not type(None)]
    return only


def _default_text(default: Any) -> str:
    if default is MISSING or default is None or isinstance(default, bool):
        return ""
    if isinstance(default, tuple):
        return ",".join(map(_default_text, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


# --- values -----------------------------------------------------------------------------------------------------------


def numbers(text: str) -> tuple[int, ...]:
    """``1,2,3``"""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers, as 1,2,3, got {text!r}") from None


def heads(text: str) -> tuple[str, ...]:
    """``softmax,gss-0,mixture(gss(k=0), K=4)``: commas inside brackets belong to a head."""
    parts = split_items(text)
    if not all(parts):
        raise argparse.ArgumentTypeError(f"expected heads, as softmax,sigsoftmax,mos, got {text!r}")
    return tuple(parts)


def gibibytes(text: str) -> float:
    """``8``, ``8GiB`` or ``512MiB``"""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([MG])(?:i?B)?)?\s*", text, re.IGNORECASE)
    if match is None or not (size := float(match[1])):
        raise argparse.ArgumentTypeError(f"expected an amount of memory, as 8 (GiB), 8GiB or 512MiB, got {text!r}")
    return size / 1024 if (match[2] or "G").upper() == "M" else size


READERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "N"),
    float: (float, "X"),
    Path: (Path, "PATH"),
    tuple[int, ...]: (numbers, "A,B,C"),
    tuple[str, ...]: (heads, "HEADS"),
}
"""for each type of a field, how a word is read and what stands for it in the help"""


# --- printing ---------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print a paragraph."""
    print(text + "\n", flush=True)


def progress(text: str) -> None:
    """Print a line that the next one replaces, where someone is watching."""
    if sys.stderr.isatty():
        # The next text may be shorter.
        clear_line(sys.stderr)
        print(text, end="", file=sys.stderr, flush=True)
