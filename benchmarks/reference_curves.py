"""Train a reference implementation as it is, and record its validation curve, its revision and the command.

    python benchmarks/reference_curves.py awd-lstm --checkout FOLDER --data FOLDER
    python benchmarks/reference_curves.py mos --checkout FOLDER --data FOLDER

The checkout is a clone of the reference's repository at the commit named below; --data is a folder with train.txt,
valid.txt and test.txt of Penn Treebank. The reference's own main.py is run in a copy of the checkout, in IEEE float32
(no TF32), with the changes named in CHANGES, which it needs to run with a present torch. The record takes the place of
the one for the same head in src/sigsoftmax/records/published/reference_curves.jsonl, or goes to --out. On an H200
the 22 epochs of awd-lstm take about five minutes and the 12 epochs of mos as long.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from measuring import environment

from sigsoftmax import records
from sigsoftmax.records.published.references import PATH, ReferenceCurve

CHANGES = (
    "torch.load with weights_only=False; TF32 off in products and in cuDNN; no garbage collection after each batch, "
    "which changes no number"
)
PROLOGUE = """\
import gc, runpy, sys, torch
load = torch.load
torch.load = lambda *args, **options: load(*args, **{"weights_only": False, **options})
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
gc.collect = lambda *_: 0
sys.argv = ["main.py", *sys.argv[1:]]
sys.path.insert(0, ".")
runpy.run_path("main.py", run_name="__main__")
"""
EPOCH = re.compile(r"\| end of epoch +(\d+) .* valid ppl +([\d.]+)")
BATCHES = re.compile(r"\| epoch +1 \| +\d+/ *\d+ batches .* loss +([\d.]+) ")
LOG_INTERVAL = 200


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An implementation, and the options of its README for Penn Treebank."""

    repository: str
    revision: str
    head: str
    seed: int
    epochs: int
    options: str


REFERENCES = {
    "awd-lstm": Reference(
        repository="salesforce/awd-lstm-lm",
        revision="1d466ec",
        head="softmax",
        seed=141,
        epochs=22,
        options="--batch_size 20 --dropouti 0.4 --dropouth 0.25 --seed 141",
    ),
    "mos": Reference(
        repository="zihangdai/mos",
        revision="9c0c608",
        head="mos(K=15)",
        seed=28,
        epochs=12,
        options="--dropouti 0.4 --dropoutl 0.29 --dropouth 0.225 --seed 28 --batch_size 12 --lr 20.0 --nhid 960 "
        "--nhidlast 620 --emsize 280 --n_experts 15 --single_gpu",
    ),
}


def revision_of(checkout: Path, reference: Reference) -> str:
    """The commit of a clean checkout of the reference; ValueError if it is another one, or was changed."""
    git = ["git", "-C", str(checkout)]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True, stderr=subprocess.PIPE).strip()
        changed = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], text=True)
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{checkout} is no checkout of a repository: {error.stderr.strip()}") from None
    if not commit.startswith(reference.revision) or changed:
        raise ValueError(
            f"{checkout} must be a checkout of {reference.repository} at {reference.revision} without changes, got "
            f"{commit[:7]}{' with changes' if changed else ''}"
        )
    return commit


def curve(lines: Iterable[str]) -> tuple[dict[int, float], list[float]]:
    """Validation perplexity by epoch, and the training losses of the first epoch, from what main.py prints."""
    perplexities: dict[int, float] = {}
    losses: list[float] = []
    for line in lines:
        if found := EPOCH.search(line):
            perplexities[int(found[1])] = float(found[2])
        elif found := BATCHES.search(line):
            losses.append(float(found[1]))
    return perplexities, losses


def measured(reference: Reference, checkout: Path, data: Path, more: Sequence[str], epochs: int) -> ReferenceCurve:
    """Run main.py in a copy of the checkout; RuntimeError if it prints fewer epochs than it should."""
    revision = revision_of(checkout, reference)
    options = [*shlex.split(reference.options), *more, "--epochs", str(epochs), "--log-interval", str(LOG_INTERVAL)]
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "reference"
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
        command = [sys.executable, "-u", "-c", PROLOGUE, "--data", f"{data.resolve()}/", "--save", "model", *options]
        with subprocess.Popen(
            command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
    perplexities, losses = curve(lines)
    if len(perplexities) < epochs:
        raise RuntimeError(f"expected {epochs} epochs from {reference.repository}, got {len(perplexities)}")
    return ReferenceCurve(
        corpus="ptb",
        head=reference.head,
        seed=reference.seed,
        precision="float32",
        epochs=tuple(perplexities),
        valid_perplexities=tuple(perplexities.values()),
        first_train_losses=tuple(losses),
        repository=reference.repository,
        revision=revision,
        command=f"python main.py --data data/penn --save model {shlex.join(options)}",
        changes=CHANGES,
    )


def write(out: Path, found: ReferenceCurve, where: records.Environment) -> None:
    """Put the record in the place of the one for the same corpus, head and seed."""
    key = (found.corpus, found.head, found.seed)
    kept = []
    for record in records.read(out) if out.exists() else ():
        old = record.payload_as(ReferenceCurve)
        if (old.corpus, old.head, old.seed) != key:
            kept.append(record)
    new = out.with_suffix(".new")
    new.unlink(missing_ok=True)
    records.append(new, [*kept, records.Record.of(found, where)])
    new.replace(out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", choices=REFERENCES, help="which implementation")
    parser.add_argument("--checkout", type=Path, required=True, help="folder of its repository")
    parser.add_argument("--data", type=Path, required=True, help="folder of Penn Treebank")
    parser.add_argument("--epochs", type=int, help="fewer or more than the curve on record")
    parser.add_argument("--out", type=Path, default=PATH, help="file of the records")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu is for a first look")
    options = parser.parse_args(arguments)
    reference = REFERENCES[options.reference]
    more = ["--cuda"] if options.device == "cpu" else []  # the references' --cuda switches it off
    try:
        found = measured(reference, options.checkout, options.data, more, options.epochs or reference.epochs)
    except (ValueError, RuntimeError) as error:
        print(f"reference_curves.py: {error}", file=sys.stderr)
        return 1
    write(options.out, found, environment(options.device))
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
