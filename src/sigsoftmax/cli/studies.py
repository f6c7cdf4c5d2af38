"""Verbs about the worth of output functions: demo, functions, compare, reproduce, capacity, audit, tables, report."""

from __future__ import annotations

import argparse

from sigsoftmax.cli.language_models import RESOURCES, fields
from sigsoftmax.cli.parser import Option, Verb, build, progress, say

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


FITS = "heads widths starts iterations workers seed"

VERBS = (
    Verb(
        name="demo",
        summary="the bottleneck in three minutes: tables, pictures and a page",
        description="Fits every kind of output head to a language of known truth, at widths on both sides of its\n"
        "rank: a table, two pictures, records. Then trains small language models on text from such a language.",
        example="demo --seed 1 --out runs/demo-1",
        config=("experiments.demo", "DemoConfig"),
        act=_demo,
        options=fields("seed out quick"),
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
        options=fields(
            f"heads setting seeds quick changes out {RESOURCES}",
            device=Option(),
            at_once=Option(default="as many as there are cores"),
        ),
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
        arguments=fields("table"),
        options=fields(f"seeds first_seed heads setting dry_run minutes changes out {RESOURCES}"),
    ),
    Verb(
        name="capacity",
        summary="the least KL of any heads at any widths",
        description="Fits heads with free hidden vectors to a language, or to distributions in a file: what each can\n"
        "express at a width, and which width of softmax that is worth.",
        example='capacity --target "of_rank(contexts=100, words=50, rank=25)" --widths 2,4,8 --starts 2',
        config=("experiments.capacity", "CapacityToolConfig"),
        printers=(say, progress),
        options=fields(f"target softmax_widths weights tolerance floor out {FITS}"),
    ),
    Verb(
        name="audit",
        summary="what an output layer can do, and what another would buy",
        description="Audits a Hugging Face model, a checkpoint, arrays H, W and b, or a matrix of log-probabilities:\n"
        "the output function in use, bounds and spectrum of its rank and, against a target, the loss in nats.",
        example="audit gpt2 --teacher gpt2-xl --text my.txt",
        config=("experiments.audit.run", "AuditConfig"),
        printers=(say, progress),
        arguments=fields("model"),
        options=fields(
            f"teacher target function bounds_only contexts window memory_gib argmax_words out {FITS}",
            text=Option(help="text whose contexts are looked at", default="generated"),
            trust_remote_code=Option(
                help="run Python code that MODEL or the teacher brings along", default="refuse such a model"
            ),
            iterations=Option(help="of each fit, at most"),
            workers=Option(help="number of processes"),
            seed=Option(help="of the starts"),
            argmax_seconds=Option(help="for the question which words can come first"),
            fit_contexts=Option(help="contexts of the fits"),
            fit_words=Option(help="words of the fits"),
            device=Option(help="cpu, cuda or cuda:1"),
        ),
    ),
    Verb(
        name="tables",
        summary="the paper's tables beside ours, from records",
        description="Prints tables 1, 2, 4 and 5 of the paper, and 3 where ranks are on record, with ours: mean and\n"
        "standard deviation over seeds.",
        example="tables runs",
        act=_tables,
        arguments=fields("paths"),
    ),
    Verb(
        name="report",
        summary="one self-contained page from records",
        description="Writes everything that is on record into one HTML page: tables, curves, spectra, audits.",
        example="report runs -o report.html",
        config=("report", "ReportConfig"),
        act=_report,
        arguments=fields("paths"),
        options={
            "out": Option(help="the page", names=("-o", "--output")),
            "title": Option(help="of the page"),
        },
    ),
)
