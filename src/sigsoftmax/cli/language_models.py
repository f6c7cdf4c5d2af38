"""Verbs about language models: data, recipes, train, finetune, evaluate, dynamic-eval, sample, sweep."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from sigsoftmax.cli.parser import Option, Verb, build, numbers, progress, say
from sigsoftmax.lm.config import EVALUATION_PRECISIONS, PRECISIONS

__all__ = ["CHANGES", "RESOURCES", "VERBS"]

# --- what several verbs take ------------------------------------------------------------------------------------------

CHANGES = Option(
    "change fields of every recipe, as training.epochs=22 model.dropout_input=0.3",
    "FIELD=VALUE",
    names=("--set",),
    kind=str,
    more={"action": "extend", "nargs": "+"},
)
EVALUATION_PRECISION = Option(
    "of validation and test on a GPU: IEEE float32, or TF32 products of float32 weights and states",
    default="tf32",
    more={"choices": EVALUATION_PRECISIONS},
)
RESOURCES: dict[str, Option] = {
    "data": Option("of train.txt, valid.txt and test.txt", default="where fetch puts them"),
    "device": Option("cpu, cuda or cuda:1", default="cuda where there is one"),
    "precision": Option("of training on a GPU", more={"choices": PRECISIONS}),
    "evaluation_precision": EVALUATION_PRECISION,
    "at_once": Option("runs that share the device; on a CPU each in a process of one thread"),
}
PARALLEL = Option(
    "what the processes of torchrun divide: columns of text (ddp), also the weights (fsdp), or the rows of the output "
    "matrix (vocabulary)",
    default="ddp",
)
CHECKPOINT = Option("a best.safetensors, or the folder of a run", "CHECKPOINT")
RECIPES = Option("names, as ptb-sigsoftmax; see sigsoftmax recipes", "RECIPE", kind=str, more={"nargs": "*"})
SPLIT = Option(
    "the text that is evaluated",
    names=("--split",),
    default="both",
    kind=str,
    more={"choices": ("valid", "test"), "nargs": 1},
)


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

FETCH = Verb(
    name="fetch",
    summary="download a corpus, checked and resumable",
    description="Downloads Penn Treebank or WikiText-2, checks every byte, and goes on where it was stopped.",
    example="data fetch ptb",
    act=_fetch,
    arguments={"corpus": Option("ptb or wikitext-2", "CORPUS")},
    options={"data": Option("folder in which one of that name is made", "FOLDER", kind=Path)},
)

VERBS = (
    Verb(
        name="data",
        summary="get the published corpora",
        description="Gets corpora.",
        example="data fetch ptb",
        actions=(FETCH,),
    ),
    Verb(
        name="recipes",
        summary="the named recipes, or one of them in full",
        description="Lists the recipes. With a name, prints all its fields as --set takes them.",
        example="recipes ptb-moss",
        act=_recipes,
        arguments={"name": Option("a name, as ptb-sigsoftmax or wt2-gss-0.2", "RECIPE", more={"nargs": "?"})},
    ),
    Verb(
        name="train",
        summary="train recipes, with one or several seeds",
        description="Trains, goes on where it was stopped, and evaluates the best weights on validation and test.\n"
        "A run is kept in DIR/<recipe>/<seed>/train.",
        example="train ptb-sigsoftmax --seeds 141,142,143 --at-once 3 --set training.epochs=22",
        config=("experiments.runs.train", "TrainConfig"),
        act=_train,
        arguments={"recipes": RECIPES},
        options={
            "config": Option("a recipe in TOML, in place of a name", "FILE", kind=Path),
            "changes": CHANGES,
            "out": Option("folder for runs", "DIR"),
            **RESOURCES,
            "parallel": PARALLEL,
            "tensorboard": "write curves for TensorBoard into each run's folder",
        },
        exclusive={
            "seed": Option("of weights, masks and windows", "N", default="the recipe's", kind=int),
            "seeds": "several runs of each recipe",
        },
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
        arguments={"runs": Option("folder of a run, as runs/ptb-softmax/141", "RUN", kind=Path, more={"nargs": "+"})},
        options={**RESOURCES, "parallel": PARALLEL, "tensorboard": "write curves for TensorBoard"},
    ),
    Verb(
        name="evaluate",
        summary="perplexity of a checkpoint",
        description="Evaluates with the state carried over the whole text, and records the result beside the\n"
        "checkpoint. On text of your own (--data) nothing is recorded.",
        example="evaluate runs/ptb-sigsoftmax/141/finetune/best.safetensors --split test",
        config=("experiments.runs.evaluate", "EvaluateConfig"),
        printers=(print,),
        arguments={"checkpoint": CHECKPOINT},
        options={
            "splits": SPLIT,
            "batch": Option("columns of text", default="validation in the recipe's and in 1, test in 1"),
            "data": RESOURCES["data"],
            "device": RESOURCES["device"],
            "evaluation_precision": replace(EVALUATION_PRECISION, names=("--precision",)),
        },
    ),
    Verb(
        name="dynamic-eval",
        summary="perplexity of a model that goes on learning from the text",
        description="Searches the recipe's grid of rates on validation and runs test at the rates that won; or runs\n"
        "one pair of rates, in the RMS form. Runs that are on record beside the checkpoint are not made again.",
        example="dynamic-eval runs/ptb-sigsoftmax/141 --learning-rate 5e-5 --decay 2e-3 --split test",
        config=("experiments.runs.dynamic", "DynamicConfig"),
        act=_dynamic,
        arguments={"checkpoint": CHECKPOINT},
        options={
            "grid": Option("search the recipe's grid: what is done without rates", kind=bool),
            "learning_rate": Option("with --decay: one pair of rates", "RATE"),
            "decay": Option("towards the weights of the checkpoint", "RATE"),
            "splits": replace(SPLIT, help="the text that is evaluated without a grid"),
            "limit": "end each run after so many windows",
            **RESOURCES,
        },
    ),
    Verb(
        name="sample",
        summary="text from a checkpoint",
        description="Prints words that the model draws one after another.",
        example='sample runs/ptb-sigsoftmax/141 --words 200 --prompt "the company said" --temperature 0.8',
        config=("experiments.runs.sample", "SampleConfig"),
        act=_sample,
        arguments={"checkpoint": CHECKPOINT},
        options={
            "words": "number of words",
            "prompt": Option("words of the vocabulary that the model reads first", "TEXT"),
            "temperature": Option("below 1 plays safe, 0 takes the likeliest", "T"),
            "seed": "of the draws",
            "device": Option("cpu, cuda or cuda:1"),
        },
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
        arguments={"recipes": RECIPES},
        options={
            "heads": Option("as softmax,gss-0.2,mos, in place of recipes or besides", kind=tuple[str, ...]),
            "setting": Option("of --heads", "NAME", default="language; with --data tiny"),
            "config": Option("a sweep in TOML, in place of recipes and heads", "FILE", kind=Path),
            "seeds": Option(
                "of each recipe",
                names=("--seeds", "--seed"),
                default="its own",
                more={"type": numbers, "action": "extend", "nargs": "+"},
            ),
            "changes": replace(CHANGES, help=f"{CHANGES.help}; several values of a field are taken in turn"),
            "finetune": "finetune after training, where that has no fixed length",
            "baseline": Option(
                "a recipe, or an alternative as training.learning_rate=20",
                "WORD",
                default="softmax",
                kind=str,
                more={"nargs": "+"},
            ),
            "confidence": Option("of the intervals", "P"),
            "dry_run": "list the trials, and which have ended",
            "out": Option("folder for trials, records and Ray's files", "DIR"),
            "address": Option("of a Ray cluster, or auto", "HOST:PORT", default="a Ray of its own"),
            "cpus_per_trial": Option("threads of each", "N"),
            "gpus_per_trial": Option("as 0.25 for four on one GPU", "SHARE", default="1 on cuda, else 0"),
            **RESOURCES,
            "at_once": replace(RESOURCES["at_once"], default="as many as CPUs and GPUs allow"),
        },
    ),
)
