"""The verb sweep."""

from __future__ import annotations

import argparse
from pathlib import Path

from sigsoftmax.cli.language_models import add_changes, add_resources
from sigsoftmax.cli.parser import Verbs, add_out, heads, numbers, progress, say

__all__ = ["add_verbs"]


def add_verbs(verbs: Verbs) -> None:
    sweep = verbs.add(
        "sweep",
        _sweep,
        summary="recipes x seeds x alternatives on Ray, resumable, in one table",
        description="Trains every recipe with every seed and every alternative of --set, many at once, on this\n"
        "machine or on a Ray cluster. Whatever dies, the same command goes on; what has ended is not made again.\n"
        "Prints means, standard deviations, and differences from a baseline by seed with confidence intervals.",
        example="sweep --heads softmax,sigsoftmax,mos --seeds 1,2,3 --set training.learning_rate=5,10",
    )
    sweep.add_argument("recipes", nargs="*", metavar="RECIPE", help="names, as tiny-softmax; see sigsoftmax recipes")
    sweep.add_argument(
        "--heads",
        type=heads,
        default=(),
        metavar="HEADS",
        help="as softmax,gss-0.2,mos, in place of recipes or besides",
    )
    sweep.add_argument("--setting", metavar="NAME", help="of --heads (default: language; with --data tiny)")
    sweep.add_argument("--config", type=Path, metavar="FILE", help="a sweep in TOML, in place of recipes and heads")
    sweep.add_argument(
        *("--seeds", "--seed"),
        type=numbers,
        action="extend",
        nargs="+",
        metavar="A,B,C",
        help="of each recipe (default: its own)",
    )
    add_changes(sweep, "all trials, or by several values of a field in turn")
    sweep.add_argument(
        "--finetune", action="store_true", help="finetune after training, where that has no fixed length"
    )
    sweep.add_argument(
        "--baseline",
        nargs="+",
        default=[],
        metavar="WORD",
        help="a recipe, or an alternative as training.learning_rate=20 (default: softmax)",
    )
    sweep.add_argument("--confidence", type=float, default=0.95, metavar="P", help="of the intervals (default: 0.95)")
    sweep.add_argument("--dry-run", action="store_true", help="list the trials, and which have ended")
    add_out(sweep, "runs/sweep", "trials, records and Ray's files")
    sweep.add_argument("--address", metavar="HOST:PORT", help="of a Ray cluster, or auto (default: a Ray of its own)")
    sweep.add_argument("--cpus-per-trial", type=float, default=1.0, metavar="N", help="threads of each (default: 1)")
    sweep.add_argument(
        "--gpus-per-trial", type=float, metavar="SHARE", help="as 0.25 for four on one GPU (default: 1 on cuda, else 0)"
    )
    add_resources(sweep, at_once="as many as CPUs and GPUs allow")


def line(text: str) -> None:
    print(text, flush=True)


def _sweep(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.sweep.file import asked_sweep
    from sigsoftmax.experiments.sweep.run import SweepConfig, run

    asked = asked_sweep(
        config=arguments.config,
        recipes=arguments.recipes,
        heads=arguments.heads,
        setting=arguments.setting,
        seeds=[seed for seeds in arguments.seeds or () for seed in seeds],
        baseline=arguments.baseline,
        changes=arguments.changes,
    )
    config = SweepConfig(
        recipes=asked.chosen_recipes(arguments.data),
        seeds=asked.seeds,
        changes=asked.changes,
        finetune=arguments.finetune,
        baseline=asked.baseline,
        confidence=arguments.confidence,
        out=arguments.out,
        data=arguments.data,
        precision=arguments.precision,
        device=arguments.device,
        address=arguments.address,
        cpus_per_trial=arguments.cpus_per_trial,
        gpus_per_trial=arguments.gpus_per_trial,
        at_once=arguments.at_once,
        dry_run=arguments.dry_run,
    )
    run(config, say, line, progress)
