"""Verbs about single language models: data, recipes, train, finetune, evaluate, dynamic-eval, sample."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sigsoftmax.cli.parser import Parser, Verbs, add_out, numbers, progress, say
from sigsoftmax.lm.data.published_corpora import PUBLISHED

if TYPE_CHECKING:
    from sigsoftmax.experiments.runs.run import Resources

__all__ = ["add_changes", "add_resources", "add_verbs", "resources"]

PRECISIONS = ("float32", "tf32", "bf16")
EVALUATION_PRECISIONS = ("float32", "tf32")
SPLITS = ("valid", "test")
PARALLEL = ("ddp", "fsdp", "vocabulary")


def add_verbs(verbs: Verbs) -> None:
    _add_data(verbs)
    _add_recipes(verbs)
    _add_training(verbs)
    _add_evaluation(verbs)
    _add_sample(verbs)


# --- what several verbs take ------------------------------------------------------------------------------------------


def add_resources(parser: Parser, *, device: str = "cuda where there is one", at_once: str = "1") -> None:
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="of train.txt, valid.txt and test.txt (default: where fetch puts them)",
    )
    add_device(parser, device)
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="float32", help="of training on a GPU (default: float32)"
    )
    _add_evaluation_precision(parser, "--evaluation-precision", "of validation and test on a GPU")
    parser.add_argument(
        "--at-once",
        type=int,
        metavar="N",
        help=f"runs that share the device; on a CPU each in a process of one thread (default: {at_once})",
    )


def _add_evaluation_precision(parser: Parser, option: str, what: str) -> None:
    parser.add_argument(
        option,
        dest="evaluation_precision",
        choices=EVALUATION_PRECISIONS,
        help=f"{what}: IEEE float32, or TF32 products of float32 weights and states (default: tf32)",
    )


def add_device(parser: Parser, default: str = "cuda where there is one") -> None:
    parser.add_argument("--device", metavar="DEVICE", help=f"cpu, cuda or cuda:1 (default: {default})")


def add_changes(parser: Parser, what: str) -> None:
    parser.add_argument(
        "--set",
        dest="changes",
        action="extend",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help=f"change fields of {what}, as training.epochs=22 model.dropout_input=0.3",
    )


def resources(arguments: argparse.Namespace, *, device: str | None = None, at_once: int = 1) -> Resources:
    from sigsoftmax.experiments.runs.run import Resources, default_device

    return Resources(
        data=getattr(arguments, "data", None),
        device=arguments.device or device or default_device(),
        precision=getattr(arguments, "precision", "float32"),
        evaluation_precision=getattr(arguments, "evaluation_precision", None),
        at_once=at_once if getattr(arguments, "at_once", None) is None else arguments.at_once,
        parallel=getattr(arguments, "parallel", None),
    )


# --- data and recipes -------------------------------------------------------------------------------------------------


def _add_data(verbs: Verbs) -> None:
    data = verbs.add(
        "data",
        None,
        summary="get the published corpora",
        description="What has to do with corpora.",
        example="data fetch ptb",
    )
    fetch = Verbs(data, metavar="ACTION").add(
        "fetch",
        _fetch,
        summary="download a corpus, checked and resumable",
        description="Downloads a published corpus, checks every byte, and goes on where it was stopped.",
        example="data fetch ptb",
    )
    verbs.parsers["data fetch"] = fetch
    fetch.add_argument("corpus", metavar="CORPUS", help=" or ".join(PUBLISHED))
    fetch.add_argument("--data", type=Path, metavar="FOLDER", help="in which a folder of that name is made")


def _fetch(arguments: argparse.Namespace) -> None:
    from sigsoftmax.lm.data.fetch import fetch, terminal_progress

    with terminal_progress() as watch:
        folder = fetch(arguments.corpus, arguments.data, watch=watch)
    print(folder)


def _add_recipes(verbs: Verbs) -> None:
    recipes = verbs.add(
        "recipes",
        _recipes,
        summary="the named recipes, or one of them in full",
        description="Lists the recipes. With a name, prints all its fields as --set takes them.",
        example="recipes ptb-moss",
    )
    recipes.add_argument("name", nargs="?", metavar="RECIPE", help="a name, as ptb-sigsoftmax or wt2-gss-0.2")


def _recipes(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.recipe_text import all_recipes, one_recipe

    print(one_recipe(arguments.name) if arguments.name else all_recipes())


# --- training ---------------------------------------------------------------------------------------------------------


def _add_training(verbs: Verbs) -> None:
    train = verbs.add(
        "train",
        _train,
        summary="train recipes, with one or several seeds",
        description="Trains, goes on where it was stopped, and evaluates the best weights on validation and test.\n"
        "A run is kept in DIR/<recipe>/<seed>/train.",
        example="train ptb-sigsoftmax --seeds 141,142,143 --at-once 3 --set training.epochs=22",
    )
    train.add_argument("recipes", nargs="*", metavar="RECIPE", help="names, as ptb-sigsoftmax; see sigsoftmax recipes")
    train.add_argument("--config", type=Path, metavar="FILE", help="a recipe in TOML, in place of a name")
    seeds = train.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, metavar="N", help="of weights, masks and windows (default: the recipe's)")
    seeds.add_argument("--seeds", type=numbers, default=(), metavar="A,B,C", help="several runs of each recipe")
    add_changes(train, "the recipes")
    add_out(train, "runs", "runs")
    add_resources(train)
    _add_parallel(train)
    train.add_argument("--tensorboard", action="store_true", help="write curves for TensorBoard into each run's folder")

    finetune = verbs.add(
        "finetune",
        _finetune,
        summary="finetune trained runs, as the published recipes do",
        description="Averages from the first update on, from the best weights of training, until that stops helping.\n"
        "The result lies beside train, in the folder finetune of the run.",
        example="finetune runs/ptb-sigsoftmax/141",
    )
    finetune.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, as runs/ptb-softmax/141")
    add_resources(finetune)
    _add_parallel(finetune)
    finetune.add_argument("--tensorboard", action="store_true", help="write curves for TensorBoard")


def _add_parallel(parser: Parser) -> None:
    parser.add_argument(
        "--parallel",
        choices=PARALLEL,
        help="what the processes of torchrun divide: columns of text (ddp, the default), also the weights (fsdp), or "
        "the words of the output matrix (vocabulary)",
    )


def _train(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.runs.run import chosen_recipes
    from sigsoftmax.experiments.runs.train import TrainConfig, run

    seeds = arguments.seeds if arguments.seed is None else (arguments.seed,)
    config = TrainConfig(
        recipes=tuple(chosen_recipes(arguments.recipes, arguments.config, arguments.changes)),
        seeds=seeds,
        out=arguments.out,
        resources=resources(arguments),
        tensorboard=arguments.tensorboard,
    )
    run(config, say)


def _finetune(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.runs.train import FinetuneConfig, finetune

    config = FinetuneConfig(
        runs=tuple(arguments.runs), resources=resources(arguments), tensorboard=arguments.tensorboard
    )
    finetune(config, say)


# --- evaluation -------------------------------------------------------------------------------------------------------


def _add_evaluation(verbs: Verbs) -> None:
    evaluate = verbs.add(
        "evaluate",
        _evaluate,
        summary="perplexity of a checkpoint",
        description="Evaluates with the state carried over the whole text, and records the result beside the\n"
        "checkpoint. On text of your own (--data) nothing is recorded.",
        example="evaluate runs/ptb-sigsoftmax/141/finetune/best.safetensors --split test",
    )
    _add_checkpoint(evaluate)
    evaluate.add_argument("--split", choices=SPLITS, help="(default: both)")
    evaluate.add_argument(
        "--batch", type=int, metavar="N", help="columns of text (default: validation 10 and 1, test 1)"
    )
    evaluate.add_argument("--data", type=Path, metavar="FOLDER", help="of the corpus")
    add_device(evaluate)
    _add_evaluation_precision(evaluate, "--precision", "on a GPU")

    dynamic = verbs.add(
        "dynamic-eval",
        _dynamic,
        summary="perplexity of a model that goes on learning from the text",
        description="Searches the recipe's grid of rates on validation and runs test at the rates that won; or runs\n"
        "one pair of rates, in the RMS form. Runs that are on record beside the checkpoint are not made again.",
        example="dynamic-eval runs/ptb-sigsoftmax/141 --learning-rate 5e-5 --decay 2e-3 --split test",
    )
    _add_checkpoint(dynamic)
    dynamic.add_argument("--grid", action="store_true", help="search the recipe's grid: what is done without rates")
    dynamic.add_argument("--learning-rate", type=float, metavar="RATE", help="with --decay: one pair of rates")
    dynamic.add_argument("--decay", type=float, metavar="RATE", help="towards the weights of the checkpoint")
    dynamic.add_argument("--split", choices=SPLITS, help="without a grid (default: both)")
    dynamic.add_argument("--limit", type=int, metavar="N", help="end each run after so many windows")
    add_resources(dynamic)


def _add_checkpoint(parser: Parser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a best.safetensors, or the folder of a run"
    )


def _evaluate(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.runs.evaluate import EvaluateConfig, run

    config = EvaluateConfig(
        checkpoint=arguments.checkpoint,
        splits=SPLITS if arguments.split is None else (arguments.split,),  # type: ignore[arg-type]
        batch=arguments.batch,
        resources=resources(arguments),
    )
    run(config, print)


def _dynamic(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.runs.dynamic import DynamicConfig, run

    if arguments.grid and (arguments.learning_rate is not None or arguments.decay is not None):
        raise ValueError("give --grid, or one pair of rates, not both")
    config = DynamicConfig(
        checkpoint=arguments.checkpoint,
        learning_rate=arguments.learning_rate,
        decay=arguments.decay,
        splits=SPLITS if arguments.split is None else (arguments.split,),  # type: ignore[arg-type]
        limit=arguments.limit,
        resources=resources(arguments),
    )
    run(config, print, progress)


# --- text -------------------------------------------------------------------------------------------------------------


def _add_sample(verbs: Verbs) -> None:
    sample = verbs.add(
        "sample",
        _sample,
        summary="text from a checkpoint",
        description="Prints words that the model draws one after another.",
        example='sample runs/ptb-sigsoftmax/141 --words 200 --prompt "the company said" --temperature 0.8',
    )
    _add_checkpoint(sample)
    sample.add_argument("--words", type=int, default=100, metavar="N", help="(default: 100)")
    sample.add_argument(
        "--prompt", default="", metavar="TEXT", help="words of the vocabulary that the model reads first"
    )
    sample.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="below 1 plays safe, 0 takes the likeliest (default: 1)",
    )
    sample.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")
    add_device(sample, "cpu")


def _sample(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.runs.sample import SampleConfig, run

    config = SampleConfig(
        checkpoint=arguments.checkpoint,
        words=arguments.words,
        prompt=arguments.prompt,
        temperature=arguments.temperature,
        seed=arguments.seed,
        device=arguments.device or "cpu",
    )
    for piece in run(config):
        print(piece, end="", flush=True)
