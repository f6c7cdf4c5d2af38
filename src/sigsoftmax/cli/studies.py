"""Verbs about the worth of output functions: demo, functions, compare, reproduce, capacity, audit, tables, report."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from sigsoftmax.cli.language_models import CHANGES, RESOURCES
from sigsoftmax.cli.parser import Option, Verb, build, gibibytes, progress, say

__all__ = ["VERBS"]


def _demo(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments import compare, demo

    config = build(demo.DemoConfig, arguments)
    demo.run(config, say, progress)
    if not config.quick:
        compare.run(compare.CompareConfig(quick=True, out=config.out / "compare"), say)


def _functions(arguments: argparse.Namespace) -> None:
    from sigsoftmax.family import table

    for definition in table():
        parameters = ", ".join(f"{key}={spec.default:g}" for key, spec in definition.parameters.items())
        print(f"{definition.name}({parameters})" if parameters else definition.name)
        print(f"    phi(z) = {definition.formula}\n    {definition.summary}")


def _tables(arguments: argparse.Namespace) -> None:
    from sigsoftmax.report import paper_tables

    print(paper_tables(tuple(arguments.paths)))


def _report(arguments: argparse.Namespace) -> None:
    from sigsoftmax.report import ReportConfig, write_report

    written = write_report(build(ReportConfig, arguments))
    for warning in written.warnings:
        print(warning)
    print(f"{written.path}: {written.records:,} records of {written.files:,} files")


RECORDS = Option("files of records, or folders", "RECORDS", kind=Path, more={"nargs": "+"})
FITS: dict[str, Option | str] = {
    "heads": 'as "softmax,gss(k=0.2),mos(K=4)"',
    "widths": Option("of the fits", "D,..."),
    "starts": "of each fit, at least",
    "iterations": "of each fit, at most",
    "workers": "processes",
    "seed": "of the starts",
}

VERBS = (
    Verb(
        name="demo",
        summary="the bottleneck in three minutes: tables, pictures and a page",
        description="Fits every kind of output head to a language of known truth, at widths on both sides of its\n"
        "rank: a table, two pictures, records. Then trains small language models on text from such a language.",
        example="demo --seed 1 --out runs/demo-1",
        config=("experiments.demo", "DemoConfig"),
        act=_demo,
        options={
            "seed": "of the language and of the starts",
            "out": Option("folder for pictures and records", "DIR"),
            "quick": "a smaller language and no training, in some seconds",
        },
    ),
    Verb(
        name="functions",
        summary="the members of the family, their formulas and parameters",
        description="Prints every output function with its phi: f(z) = softmax(phi(z)).",
        example="functions",
        act=_functions,
    ),
    Verb(
        name="compare",
        summary="train heads under equal budgets; distance to the truth, rank, time",
        description="Trains the same small language model with each head, on text from a language of known truth or\n"
        "on your own, and prints what each is worth: perplexity, KL to the truth, rank, parameters, time.",
        example="compare --heads softmax,softmax-1.5,sigsoftmax,mos --seeds 1,2,3",
        config=("experiments.compare", "CompareConfig"),
        printers=(say,),
        options={
            "heads": Option("as softmax,gss-0.2,mos", default="seven"),
            "setting": Option("language, tiny, ptb or wt2", "NAME", default="language; with --data tiny"),
            "seeds": "of each head",
            "quick": "fewer heads and epochs",
            "changes": CHANGES,
            "out": Option("folder for runs, records and the page", "DIR"),
            **RESOURCES,
            "device": replace(RESOURCES["device"], default=None),
            "at_once": replace(RESOURCES["at_once"], default="as many as there are cores"),
        },
    ),
    Verb(
        name="reproduce",
        summary="a table of the paper, from training to the printed table",
        description="Says first how long it will take here and how many seeds the paper's gap needs. Then trains,\n"
        "finetunes, searches the grid of dynamic evaluation, measures ranks and prints the table. Every stage goes on\n"
        "where it was stopped.",
        example="reproduce table1 --seeds 5 --device cuda --precision tf32 --at-once 4",
        config=("experiments.reproduce.run", "ReproduceConfig"),
        printers=(say, progress),
        arguments={"table": Option("table1 to table5", "TABLE")},
        options={
            "seeds": "number of runs of each head",
            "first_seed": Option("of these runs", "S", default="the published one"),
            "heads": Option("some of the table", default="all"),
            "setting": Option("other recipes than the table's, as tiny or language", "NAME"),
            "dry_run": "print the plan alone",
            "minutes": Option(
                "of wall time: do what fits, in a plan that is printed first, and stop at a checkpoint", "M"
            ),
            "changes": CHANGES,
            "out": Option("folder for runs", "DIR"),
            **RESOURCES,
        },
    ),
    Verb(
        name="capacity",
        summary="the least KL of any heads at any widths",
        description="Fits heads with free hidden vectors to a language, or to distributions in a file: what each can\n"
        "express at a width, and which width of softmax that is worth.",
        example='capacity --target "of_rank(contexts=100, words=50, rank=25)" --widths 2,4,8 --starts 2',
        config=("experiments.capacity", "CapacityToolConfig"),
        printers=(say, progress),
        options={
            "target": Option("a language, or a file of (log-)probabilities", "TRUTH"),
            **FITS,
            "softmax_widths": Option("further widths for softmax alone", "D,..."),
            "weights": "of a language's contexts",
            "tolerance": "gain below which a fit ends",
            "floor": Option("KL below which a fit ends", "NATS"),
            "out": Option("folder for the records", "DIR"),
        },
    ),
    Verb(
        name="audit",
        summary="what an output layer can do, and what another would buy",
        description="Audits a Hugging Face model, a checkpoint, arrays H, W and b, or a matrix of log-probabilities:\n"
        "the output function in use, bounds and spectrum of its rank and, against a target, the loss in nats.",
        example="audit gpt2 --teacher gpt2-xl --text my.txt",
        config=("experiments.audit.run", "AuditConfig"),
        printers=(say, progress),
        arguments={"model": Option("a folder, a name on the hub, or a file", "MODEL")},
        options={
            "text": Option("text whose contexts are looked at", "FILE", default="generated"),
            "teacher": Option("model whose distributions count as the truth", "MODEL"),
            "target": Option("a file of (log-)probabilities, or a language", "TRUTH"),
            "function": Option("in use, where it is not recognised, as softcap(c=30)", "FUNCTION"),
            "bounds_only": "bounds of the rank alone, from the output layer alone",
            "trust_remote_code": Option(
                "run Python code that MODEL or the teacher brings along", default="refuse such a model"
            ),
            "contexts": "number of contexts",
            "window": "tokens that the model sees at once",
            "memory_gib": Option(
                "memory that may be used, in GiB or as 512MiB", "SIZE", names=("--memory",), kind=gibibytes
            ),
            "argmax_words": "words asked whether they can come first",
            "argmax_seconds": Option("for that question", "S"),
            **FITS,
            "fit_contexts": "contexts of the fits",
            "fit_words": "words of the fits",
            "device": Option("cpu, cuda or cuda:1"),
            "out": Option("folder for the records", "DIR"),
        },
    ),
    Verb(
        name="tables",
        summary="the paper's tables beside ours, from records",
        description="Prints tables 1, 2, 4 and 5 of the paper, and 3 where ranks are on record, with ours: mean and\n"
        "standard deviation over seeds.",
        example="tables runs",
        act=_tables,
        arguments={"paths": RECORDS},
    ),
    Verb(
        name="report",
        summary="one self-contained page from records",
        description="Writes everything that is on record into one HTML page: tables, curves, spectra, audits.",
        example="report runs -o report.html",
        config=("report", "ReportConfig"),
        act=_report,
        arguments={"paths": RECORDS},
        options={
            "out": Option("the page", "FILE", names=("-o", "--output")),
            "title": "of the page",
        },
    ),
)
