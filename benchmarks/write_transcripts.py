"""Run the commands that pages show, and put what they print into the pages: `make transcripts`.

A transcript stands between `<!-- generated: NAME -->` and `<!-- end -->`, as a console block: the commands after a
dollar sign, and what they printed. Times in it belong to the machine that ran it. `--only NAME` runs some of them, and
`--check` only compares the commands with those that the pages show.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from write_docs import PART

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """Commands that run in a folder of their own; one that begins with ``#`` is run and not shown."""

    name: str
    page: str
    commands: tuple[str, ...]

    @property
    def shown(self) -> list[str]:
        return [command for command in self.commands if not command.startswith("#")]


TRANSCRIPTS = (
    Transcript(
        name="audit-report",
        page="docs/audit.md",
        commands=(
            "#sigsoftmax train language-softmax",
            "sigsoftmax audit runs/language-softmax/141 --heads 'softmax,sigsoftmax,gss(k=0),mos(K=4)' --workers 1",
        ),
    ),
    Transcript(
        name="sweep-output",
        page="docs/sweeps.md",
        commands=("sigsoftmax sweep --heads softmax,softmax-1.5,sigsoftmax,mos --seeds 1,2,3 --set training.epochs=4",),
    ),
    Transcript(
        name="parallel-output",
        page="docs/distributed.md",
        commands=("torchrun --standalone --nproc-per-node 2 examples/vocabulary_parallel.py",),
    ),
)


def run(transcript: Transcript) -> str:
    """The console block of a transcript; RuntimeError with what was printed if a command fails."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for command in transcript.commands:
            printed = run_command(command.removeprefix("#"), Path(folder))
            if not command.startswith("#"):
                lines += [f"$ {command}", *printed.splitlines(), ""]
    return "```console\n" + "\n".join(lines).rstrip() + "\n```\n"


def run_command(command: str, folder: Path) -> str:
    """The text that a command prints, without progress that was written over."""
    words = shlex.split(command)
    program = {"sigsoftmax": ["-m", "sigsoftmax"], "torchrun": ["-m", "torch.distributed.run"]}[words[0]]
    arguments = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "110"}
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    text = "\n".join(line.rpartition("\r")[2].rstrip() for line in done.stdout.splitlines())
    return text.replace(f"{folder}/", "").strip()


def commands_on(page: str, name: str) -> list[str]:
    """The commands that a page shows in a transcript."""
    text = (ROOT / page).read_text(encoding="utf-8")
    part = next((found[0] for found in PART.finditer(text) if found["suite"] == name), "")
    return [line.removeprefix("$ ") for line in part.splitlines() if line.startswith("$ ")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", action="append", choices=[t.name for t in TRANSCRIPTS], help="run this one; repeatable"
    )
    parser.add_argument("--check", action="store_true", help="run nothing; exit with 1 if a page shows other commands")
    given = parser.parse_args(arguments)
    chosen = [t for t in TRANSCRIPTS if not given.only or t.name in given.only]
    if given.check:
        stale = [t.name for t in chosen if commands_on(t.page, t.name) != t.shown]
        if stale:
            print(f"out of date: {', '.join(stale)}; run make transcripts")
        return int(bool(stale))
    for transcript in chosen:
        print(f"== {transcript.name}", flush=True)
        block = run(transcript)
        page = ROOT / transcript.page
        text = page.read_text(encoding="utf-8")
        pattern = re.compile(rf"(<!-- generated: {transcript.name} -->\n).*?(<!-- end -->)", re.S)
        if not pattern.search(text):
            print(f"write_transcripts.py: {transcript.page} has no part {transcript.name}", file=sys.stderr)
            return 2
        page.write_text(pattern.sub(lambda part, block=block: part[1] + block + part[2], text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
