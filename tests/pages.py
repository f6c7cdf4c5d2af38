"""Pages as programs: their fenced blocks, and a rule for each kind of block. Whatever has no rule is an error.

A page is run from top to bottom in a folder of its own, its Python in one namespace. A comment on the line above a
block changes what happens to it:

    <!-- parsed, not run: REASON -->   its commands are read by the program's own parser, or its Python is compiled
    <!-- output -->                    a text block: what the Python block before it prints

Between ``<!-- generated: ... -->`` and ``<!-- end -->`` commands say how records were made, and are parsed.
``WHOLE_PAGES`` names pages all of whose commands are.
"""

import argparse
import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from packaging.requirements import Requirement

from sigsoftmax import cli
from sigsoftmax.experiments.sweep import file as sweep_file
from sigsoftmax.lm import recipes

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\s`]*)(?P<options>[^`]*)$")
NOT_RUN = re.compile(r"<!-- parsed, not run: (?P<reason>.+?) -->")
GENERATED = "it made the records below"
WHOLE_PAGES = {
    "docs/sweeps.md": "a sweep starts Ray and takes minutes; tests/experiments/sweep/test_run.py runs small ones",
}
ASSIGNMENT = re.compile(r"[A-Z_]+=")
OPERATORS = {"|", "||", "&&", ";", "&", ">", ">>", "<"}


class PageError(Exception):
    """A page that cannot be run as it is written."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """line of the opening fence, from 1"""
    language: str
    text: str
    not_run: str | None = None
    """the reason why its commands are parsed only"""
    is_output: bool = False

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page in its order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    whole = WHOLE_PAGES.get(page.relative_to(ROOT).as_posix()) if page.is_relative_to(ROOT) else None
    found = []
    generated = False
    number = 0
    while number < len(lines):
        line = lines[number]
        if line.strip().startswith("<!-- generated:"):
            generated = True
        elif line.strip() == "<!-- end -->":
            generated = False
        if opening := FENCE.match(line):
            closing = f"{opening['indent']}```"
            try:
                end = lines.index(closing, number + 1)
            except ValueError:
                raise PageError(f"{page.name}:{number + 1}: a block without an end") from None
            above = next((text.strip() for text in reversed(lines[:number]) if text.strip()), "")
            marker = NOT_RUN.fullmatch(above)
            found.append(
                Block(
                    page=page,
                    line=number + 1,
                    language=opening["language"],
                    text=textwrap.dedent("\n".join(lines[number + 1 : end])) + "\n",
                    not_run=marker["reason"] if marker else GENERATED if generated else whole,
                    is_output=above == "<!-- output -->",
                )
            )
            number = end
        number += 1
    return found


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command, without comments; a backslash at the end of a line joins the next."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    commands = [words for line in lines if (words := shlex.split(line, comments=True))]
    for words in commands:
        if OPERATORS & set(words):
            raise PageError(f"{block.place}: {shlex.join(words)!r} needs a shell; write one command a line")
    return commands


@dataclass
class Run:
    """A page on its way: the folder it runs in, the names of its Python, what it printed last."""

    folder: Path
    names: dict[str, object] = field(default_factory=lambda: {"__name__": "page"})
    printed: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """variables of the environment, set before the command that runs"""

    def run_page(self, page: Path) -> None:
        for block in blocks_of(page):
            self.run(block)

    def run(self, block: Block) -> None:
        rule = RULES.get(block.language)
        if rule is None:
            known = ", ".join(RULES)
            raise PageError(
                f"{block.place}: no rule for a block in {block.language or 'no language'!r}; known: {known}"
            )
        rule(self, block)


# --- Python -----------------------------------------------------------------------------------------------------------


def run_python(run: Run, block: Block) -> None:
    # Lines of the page, so that a traceback shows where to look.
    program = compile("\n" * block.line + block.text, str(block.page), "exec")
    if block.not_run:
        return
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, run.names)
    run.printed = printed.getvalue()


def compare_output(run: Run, block: Block) -> None:
    if not block.is_output:
        raise PageError(f"{block.place}: a text block is what Python printed; write '<!-- output -->' above it")
    assert run.printed is not None, f"{block.place}: no Python block stands before this output"
    assert run.printed.strip() == block.text.strip(), f"{block.place}: the page shows what is not printed"


# --- commands ---------------------------------------------------------------------------------------------------------


def run_commands(run: Run, block: Block) -> None:
    for words in commands_of(block):
        first = next(place for place, word in enumerate(words) if not ASSIGNMENT.match(word))
        run.variables, words = dict(word.split("=", 1) for word in words[:first]), words[first:]
        program = words[0].rpartition("/")[2]
        rule = COMMANDS.get(program)
        if rule is None:
            raise PageError(f"{block.place}: no rule for the command {program!r}; known: {', '.join(COMMANDS)}")
        rule(run, block, words)


def sigsoftmax_command(run: Run, block: Block, words: list[str]) -> None:
    if run.variables and not block.not_run:
        return _subprocess(run, block, [sys.executable, "-m", *words])
    # stdout is text of the program, which a page does not repeat.
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        try:
            if block.not_run:
                cli._parser(words[1:]).parse_args(words[1:])
            status = 0 if block.not_run else cli.main(words[1:])
        except SystemExit as left:
            status = left.code
    assert status == 0, f"{block.place}: {shlex.join(words)} ended with {status}\n{printed.getvalue()}"


def python_command(run: Run, block: Block, words: list[str]) -> None:
    """``python SCRIPT ...`` of this repository."""
    script = ROOT / words[1]
    assert script.is_file(), f"{block.place}: there is no {words[1]}"
    if block.not_run:
        parse_script(script, words[2:])
    else:
        _subprocess(run, block, [sys.executable, str(script), *words[2:]])


def torchrun_command(run: Run, block: Block, words: list[str]) -> None:
    arguments = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words[1:]]
    if not block.not_run:
        _subprocess(run, block, [sys.executable, "-m", "torch.distributed.run", *arguments])


def pip_command(run: Run, block: Block, words: list[str]) -> None:
    """Not run: what the extras bring is installed already, and what the page asks for must be what pyproject offers."""
    assert words[1] == "install", f"{block.place}: {shlex.join(words)}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    offered = project["optional-dependencies"]
    known = {Requirement(line).name for lines in [project["dependencies"], *offered.values()] for line in lines}
    for word in words[2:]:
        here = re.fullmatch(rf"(?:\.|{project['name']})(?:\[(?P<extras>[\w,-]+)\])?", word)
        if here is None:
            assert word in known, f"{block.place}: {word} is a dependency of no extra"
        else:
            extras = set((here["extras"] or "").split(",")) - {""}
            assert extras <= set(offered), f"{block.place}: pyproject.toml has no extra {extras - set(offered)}"


def make_command(run: Run, block: Block, words: list[str]) -> None:
    """The recipe is printed, not run: the targets are what .ci/run runs, and tests run inside one of them."""
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{block.place}: {shlex.join(words)}\n{done.stderr}"


def script_command(run: Run, block: Block, words: list[str]) -> None:
    assert (ROOT / words[1]).is_file(), f"{block.place}: there is no {words[1]}"


def tool_command(run: Run, block: Block, words: list[str]) -> None:
    """A program of a package that the extra dev brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    brought = {Requirement(line).name for line in project["optional-dependencies"]["dev"]}
    assert words[0].rpartition("/")[2] in brought, f"{block.place}: {words[0]} is not in the extra dev"


GLOO_ABORTS = "terminate called without an active exception"
"""The message of a thread of gloo that is not waited for when a process ends; now and then, after all work is done."""


def _subprocess(run: Run, block: Block, words: list[str]) -> None:
    for _ in range(3):
        done = subprocess.run(
            words,
            cwd=run.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **run.variables},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if GLOO_ABORTS not in done.stderr:
            break
    assert done.returncode == 0, f"{block.place}: {shlex.join(words)}\n{done.stdout}\n{done.stderr}"


class _ParsedError(Exception):
    pass


def parse_script(script: Path, arguments: list[str]) -> None:
    """Let a script's own parser read the arguments, and stop it there."""
    whole = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, args: object = None, namespace: object = None) -> None:
        whole(parser, args, namespace)  # type: ignore[call-overload]
        raise _ParsedError

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        contextlib.suppress(_ParsedError),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as left:
            raise AssertionError(f"{script.name} does not take {shlex.join(arguments)}") from left
        raise PageError(f"{script.name} reads no arguments, so that it ran as a whole")


def check_formula(run: Run, block: Block) -> None:
    """The site draws it when it is built; here it must not be empty."""
    assert block.text.strip(), block.place


def read_configuration(run: Run, block: Block) -> None:
    """The file of a sweep, or of a recipe."""
    path = run.folder / "page.toml"
    path.write_text(block.text, encoding="utf-8")
    if {"recipes", "heads"} & tomllib.loads(block.text).keys():
        assert sweep_file.read_sweep_file(path).chosen_recipes(None)
    else:
        recipes.from_toml(path)


COMMANDS: dict[str, Callable[[Run, Block, list[str]], None]] = {
    "sigsoftmax": sigsoftmax_command,
    "python": python_command,
    "torchrun": torchrun_command,
    "pip": pip_command,
    "make": make_command,
    "bash": script_command,
    "pre-commit": tool_command,
}
RULES: dict[str, Callable[[Run, Block], None]] = {
    "python": run_python,
    "sh": run_commands,
    "bash": run_commands,
    "console": run_commands,
    "text": compare_output,
    "toml": read_configuration,
    "math": check_formula,
}


def unrun(pages: list[Path]) -> Iterator[tuple[str, str]]:
    """Page and reason of each block that only is parsed, but for those of generated parts."""
    for page in pages:
        for block in blocks_of(page):
            if block.not_run and block.not_run != GENERATED and block.language != "toml":
                yield page.relative_to(ROOT).as_posix(), block.not_run
