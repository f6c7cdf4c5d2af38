"""Handlers of those verbs that need more than their configuration: each takes the parsed command line.

Everything is imported when a verb is used: most verbs would import what they do not need.
"""

from __future__ import annotations

import argparse

from sigsoftmax.cli.parser import build, progress, say


def demo(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments import compare, demo

    config = build(demo.DemoConfig, arguments)
    demo.run(config, say, progress)
    if not config.quick:
        compare.run(compare.CompareConfig(quick=True, out=config.out / "compare"), say)


def functions(arguments: argparse.Namespace) -> None:
    from sigsoftmax.family import table

    for definition in table():
        parameters = ", ".join(f"{key}={spec.default:g}" for key, spec in definition.parameters.items())
        print(f"{definition.name}({parameters})" if parameters else definition.name)
        print(f"    phi(z) = {definition.formula}\n    {definition.summary}")


def tables(arguments: argparse.Namespace) -> None:
    from sigsoftmax.report import paper_tables

    print(paper_tables(tuple(arguments.paths)))


def report(arguments: argparse.Namespace) -> None:
    from sigsoftmax.report import ReportConfig, write_report

    written = write_report(build(ReportConfig, arguments))
    for warning in written.warnings:
        print(warning)
    print(f"{written.path}: {written.records:,} records of {written.files:,} files")


def fetch(arguments: argparse.Namespace) -> None:
    from sigsoftmax.lm.data.fetch import fetch, terminal_progress

    with terminal_progress() as watch:
        folder = fetch(arguments.corpus, arguments.data, watch=watch)
    print(folder)


def recipes(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.recipe_text import all_recipes, one_recipe

    print(one_recipe(arguments.name) if arguments.name else all_recipes())


def train(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.runs import train
    from sigsoftmax.experiments.runs.run import chosen_recipes

    recipes = tuple(chosen_recipes(arguments.recipes, arguments.config, arguments.changes or ()))
    seeds = arguments.seeds or () if arguments.seed is None else (arguments.seed,)
    train.run(build(train.TrainConfig, arguments, recipes=recipes, seeds=seeds), say)


def dynamic(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.runs import dynamic

    if arguments.grid and (arguments.learning_rate is not None or arguments.decay is not None):
        raise ValueError("give --grid, or one pair of rates, not both")
    dynamic.run(build(dynamic.DynamicConfig, arguments), print, progress)


def sample(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.runs import sample

    for piece in sample.run(build(sample.SampleConfig, arguments)):
        print(piece, end="", flush=True)


def sweep(arguments: argparse.Namespace) -> None:
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
