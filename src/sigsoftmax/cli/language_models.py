"""Verbs about language models: data, recipes, train, finetune, evaluate, dynamic-eval, sample, sweep."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from sigsoftmax.cli.parser import Option, Verb, build, gibibytes, numbers, progress, say
from sigsoftmax.lm.config import EVALUATION_PRECISIONS, PRECISIONS
from sigsoftmax.lm.data.published_corpora import PUBLISHED

__all__ = ["VERBS", "fields"]

SPECIAL = {
    "changes": Option(
        help="change fields of every recipe, as training.epochs=22 model.dropout_input=0.3",
        metavar="FIELD=VALUE",
        names=("--set",),
        kind=str,
        more={"action": "extend", "nargs": "+"},
    ),
    "device": Option(default="cuda where there is one"),
    "precision": Option(more={"choices": PRECISIONS}),
    "evaluation_precision": Option(more={"choices": EVALUATION_PRECISIONS}),
    "recipes": Option(
        help="names, as ptb-sigsoftmax; see sigsoftmax recipes", metavar="RECIPE", kind=str, more={"nargs": "*"}
    ),
    "checkpoint": Option(metavar="CHECKPOINT"),
    "runs": Option(metavar="RUN", kind=Path, more={"nargs": "+"}),
    "paths": Option(help="files of records, or folders", metavar="RECORDS", kind=Path, more={"nargs": "+"}),
    "config": Option(help="a file in TOML, in place of names", metavar="FILE", kind=Path),
    "splits": Option(names=("--split",), default="both", kind=str, more={"choices": ("valid", "test"), "nargs": 1}),
    "memory_gib": Option(metavar="SIZE", names=("--memory",), kind=gibibytes),
}
"""options that are written otherwise than their fields"""
RESOURCES = "data device precision evaluation_precision at_once"


def fields(names: str, **others: Option) -> dict[str, Option]:
    """Options for fields of a configuration, whose names are given, and others."""
    return {name: SPECIAL.get(name, Option()) for name in names.split()} | others


# --- acts -------------------------------------------------------------------------------------------------------------


def _fetch(arguments: argparse.Namespace) -> None:
    from sigsoftmax.lm.data.fetch import fetch, terminal_progress

    with terminal_progress() as watch:
        folder = fetch(arguments.corpus, arguments.data, watch=watch)
    print(folder)


def _recipes(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.recipe_text import all_recipes, one_recipe

    print(one_recipe(arguments.name) if arguments.name else all_recipes())


def _train(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.runs import train
    from sigsoftmax.experiments.runs.run import chosen_recipes

    recipes = tuple(chosen_recipes(arguments.recipes, arguments.config, arguments.changes or ()))
    seeds = arguments.seeds or () if arguments.seed is None else (arguments.seed,)
    train.run(build(train.TrainConfig, arguments, recipes=recipes, seeds=seeds), say)


def _dynamic(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.runs import dynamic

    if arguments.grid and (arguments.learning_rate is not None or arguments.decay is not None):
        raise ValueError("give --grid, or one pair of rates, not both")
    dynamic.run(build(dynamic.DynamicConfig, arguments), print, progress)


def _sample(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.runs import sample

    for piece in sample.run(build(sample.SampleConfig, arguments)):
        print(piece, end="", flush=True)


def _sweep(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.sweep import run as sweep
    from sigsoftmax.experiments.sweep.file import AskedSweep, with_file

    seeds = tuple(seed for seeds in arguments.seeds or () for seed in seeds)
    asked = with_file(build(AskedSweep, arguments, seeds=seeds), arguments.config)
    config = build(
        sweep.SweepConfig,
        arguments,
        recipes=asked.chosen_recipes(arguments.data),
        seeds=asked.seeds,
        changes=asked.changes,
        baseline=asked.baseline,
    )
    sweep.run(config, say, lambda line: print(line, flush=True), progress)


# --- verbs ------------------------------------------------------------------------------------------------------------

VERBS = (
    Verb(
        name="data",
        summary="get the published corpora",
        description="Gets corpora.",
        example="data fetch ptb",
        actions=(
            Verb(
                name="fetch",
                summary="download a corpus, checked and resumable",
                description="Downloads a published corpus, checks every byte, and goes on where it was stopped.",
                example="data fetch ptb",
                act=_fetch,
                arguments={"corpus": Option(help=" or ".join(PUBLISHED))},
                options={"data": Option(help="folder in which one of that name is made", kind=Path)},
            ),
        ),
    ),
    Verb(
        name="recipes",
        summary="the named recipes, or one of them in full",
        description="Lists the recipes. With a name, prints all its fields as --set takes them.",
        example="recipes ptb-moss",
        act=_recipes,
        arguments={
            "name": Option(help="a name, as ptb-sigsoftmax or wt2-gss-0.2", metavar="RECIPE", more={"nargs": "?"})
        },
    ),
    Verb(
        name="train",
        summary="train recipes, with one or several seeds",
        description="Trains, goes on where it was stopped, and evaluates the best weights on validation and test.\n"
        "A run is kept in OUT/<recipe>/<seed>/train.",
        example="train ptb-sigsoftmax --seeds 141,142,143 --at-once 3 --set training.epochs=22",
        config=("experiments.runs.train", "TrainConfig"),
        act=_train,
        arguments=fields("recipes"),
        options=fields(f"config changes out {RESOURCES} parallel tensorboard"),
        exclusive=fields("seeds", seed=Option(help="of one run", kind=int)),
    ),
    Verb(
        name="finetune",
        summary="finetune trained runs, as the published recipes do",
        description="Averages from the first update on, from the best weights of training, until that stops helping.\n"
        "The result lies beside train, in the folder finetune of the run.",
        example="finetune runs/ptb-sigsoftmax/141",
        config=("experiments.runs.train", "FinetuneConfig"),
        entry="finetune",
        printers=(say,),
        arguments=fields("runs"),
        options=fields(f"{RESOURCES} parallel tensorboard"),
    ),
    Verb(
        name="evaluate",
        summary="perplexity of a checkpoint",
        description="Evaluates with the state carried over the whole text, and records the result beside the\n"
        "checkpoint. On text of your own (--data) nothing is recorded.",
        example="evaluate runs/ptb-sigsoftmax/141/finetune/best.safetensors --split test",
        config=("experiments.runs.evaluate", "EvaluateConfig"),
        printers=(print,),
        arguments=fields("checkpoint"),
        options=fields(
            "splits batch data device",
            evaluation_precision=replace(SPECIAL["evaluation_precision"], names=("--precision",)),
        ),
    ),
    Verb(
        name="dynamic-eval",
        summary="perplexity of a model that goes on learning from the text",
        description="Searches the recipe's grid of rates on validation and runs test at the rates that won; or runs\n"
        "one pair of rates, in the RMS form. Runs that are on record beside the checkpoint are not made again.",
        example="dynamic-eval runs/ptb-sigsoftmax/141 --learning-rate 5e-5 --decay 2e-3 --split test",
        config=("experiments.runs.dynamic", "DynamicConfig"),
        act=_dynamic,
        arguments=fields("checkpoint"),
        options=fields(
            f"learning_rate decay splits limit {RESOURCES}",
            grid=Option(help="search the recipe's grid: what is done without rates", kind=bool),
        ),
    ),
    Verb(
        name="sample",
        summary="text from a checkpoint",
        description="Prints words that the model draws one after another.",
        example='sample runs/ptb-sigsoftmax/141 --words 200 --prompt "the company said" --temperature 0.8',
        config=("experiments.runs.sample", "SampleConfig"),
        act=_sample,
        arguments=fields("checkpoint"),
        options=fields("words prompt temperature seed", device=Option(help="cpu, cuda or cuda:1")),
    ),
    Verb(
        name="sweep",
        summary="recipes x seeds x alternatives on Ray, resumable, in one table",
        description="Trains every recipe with every seed and every alternative of --set, many at once, on this\n"
        "machine or on a Ray cluster. After a crash the same command goes on; what has ended is not made again.\n"
        "Prints means, standard deviations, and differences from a baseline by seed with confidence intervals.",
        example="sweep --heads softmax,sigsoftmax,mos --seeds 1,2,3 --set training.learning_rate=5,10",
        config=("experiments.sweep.run", "SweepConfig"),
        act=_sweep,
        arguments=fields("recipes"),
        options=fields(
            "config finetune confidence dry_run out address cpus_per_trial gpus_per_trial data precision "
            "evaluation_precision at_once",
            heads=Option(help="as softmax,gss-0.2,mos, in place of recipes or besides", kind=tuple[str, ...]),
            setting=Option(help="of --heads", default="language; with --data tiny"),
            seeds=Option(names=("--seeds", "--seed"), more={"type": numbers, "action": "extend", "nargs": "+"}),
            changes=replace(SPECIAL["changes"], help="change fields; several values of one are taken in turn"),
            baseline=Option(metavar="WORD", kind=str, more={"nargs": "+"}),
            device=Option(),
        ),
    ),
)
