"""Verbs about the worth of output functions: demo, functions, compare, reproduce, capacity, audit, tables, report."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from sigsoftmax.cli.language_models import add_changes, add_resources, resources
from sigsoftmax.cli.parser import Parser, Verbs, add_out, gibibytes, heads, numbers, progress, say

__all__ = ["add_verbs"]


def add_verbs(verbs: Verbs) -> None:
    _add_demo(verbs)
    _add_functions(verbs)
    _add_compare(verbs)
    _add_reproduce(verbs)
    _add_capacity(verbs)
    _add_audit(verbs)
    _add_records(verbs)


# --- first looks ------------------------------------------------------------------------------------------------------


def _add_demo(verbs: Verbs) -> None:
    demo = verbs.add(
        "demo",
        _demo,
        summary="the bottleneck in three minutes: tables, pictures and a page",
        description="Fits every kind of output head to a language of known truth, at widths on both sides of its\n"
        "rank: a table, two pictures, records. Then trains small language models on text from such a language.",
        example="demo --seed 1 --out runs/demo-1",
    )
    demo.add_argument("--seed", type=int, default=0, help="of the language and of the starts (default: 0)")
    add_out(demo, "runs/demo", "pictures and records")
    demo.add_argument("--quick", action="store_true", help="a smaller language and no training, in some seconds")


def _demo(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments import demo

    demo.run(demo.DemoConfig(seed=arguments.seed, out=arguments.out, quick=arguments.quick), say, progress)
    if not arguments.quick:
        from sigsoftmax.experiments import compare

        compare.run(compare.CompareConfig(quick=True, out=arguments.out / "compare"), say)


def _add_functions(verbs: Verbs) -> None:
    verbs.add(
        "functions",
        _functions,
        summary="the members of the family, their formulas and parameters",
        description="Prints every output function with its phi: f(z) = softmax(phi(z)).",
        example="functions",
    )


def _functions(arguments: argparse.Namespace) -> None:
    from sigsoftmax.family import table

    for definition in table():
        parameters = ", ".join(f"{key}={spec.default:g}" for key, spec in definition.parameters.items())
        print(f"{definition.name}({parameters})" if parameters else definition.name)
        print(f"    phi(z) = {definition.formula}\n    {definition.summary}")


# --- studies ----------------------------------------------------------------------------------------------------------


def _add_compare(verbs: Verbs) -> None:
    compare = verbs.add(
        "compare",
        _compare,
        summary="train heads under equal budgets; distance to the truth, rank, time",
        description="Trains the same small language model with each head, on text from a language of known truth or\n"
        "on your own, and prints what each is worth: perplexity, KL to the truth, rank, parameters, time.",
        example="compare --heads softmax,softmax-1.5,sigsoftmax,mos --seeds 1,2,3",
    )
    compare.add_argument(
        "--heads", type=heads, default=(), metavar="HEADS", help="as softmax,gss-0.2,mos (default: seven)"
    )
    compare.add_argument(
        "--setting", metavar="NAME", help="language, tiny, ptb or wt2 (default: language; with --data tiny)"
    )
    compare.add_argument("--seeds", type=numbers, default=(1,), metavar="A,B,C", help="(default: 1)")
    compare.add_argument("--quick", action="store_true", help="fewer heads and epochs")
    add_changes(compare, "every recipe alike")
    add_out(compare, "runs/compare", "runs, records and the page")
    add_resources(compare, device="cpu", at_once="as many as there are cores")


def _compare(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.compare import CompareConfig, run

    config = CompareConfig(
        heads=arguments.heads,
        setting=arguments.setting,
        changes=tuple(arguments.changes),
        seeds=arguments.seeds,
        out=arguments.out,
        quick=arguments.quick,
        resources=resources(arguments, device="cpu", at_once=os.cpu_count() or 1),
    )
    run(config, say)


def _add_reproduce(verbs: Verbs) -> None:
    reproduce = verbs.add(
        "reproduce",
        _reproduce,
        summary="a table of the paper, from training to the printed table",
        description="Says first how long it will take here and how many seeds the paper's gap needs. Then trains,\n"
        "finetunes, searches the grid of dynamic evaluation, measures ranks and prints the table. Every stage goes on\n"
        "where it was stopped.",
        example="reproduce table1 --seeds 5 --device cuda --precision tf32 --at-once 4",
    )
    reproduce.add_argument("table", metavar="TABLE", help="table1 to table5")
    reproduce.add_argument("--seeds", type=int, default=1, metavar="N", help="how many runs of each head (default: 1)")
    reproduce.add_argument("--first-seed", type=int, metavar="S", help="of these runs (default: the published one)")
    reproduce.add_argument("--heads", type=heads, default=(), metavar="HEADS", help="some of the table (default: all)")
    reproduce.add_argument("--setting", metavar="NAME", help="other recipes than the table's, as tiny or language")
    reproduce.add_argument("--dry-run", action="store_true", help="print the plan alone")
    reproduce.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="of wall time: do what fits, in a plan that is printed first, and stop at a checkpoint",
    )
    add_changes(reproduce, "every recipe alike")
    add_out(reproduce, "runs", "runs")
    add_resources(reproduce)


def _reproduce(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.reproduce.run import ReproduceConfig, run

    config = ReproduceConfig(
        table=arguments.table,
        seeds=arguments.seeds,
        first_seed=arguments.first_seed,
        heads=arguments.heads,
        setting=arguments.setting,
        changes=tuple(arguments.changes),
        out=arguments.out,
        resources=resources(arguments),
        dry_run=arguments.dry_run,
        minutes=arguments.minutes,
    )
    run(config, say, progress)


# --- output layers ----------------------------------------------------------------------------------------------------


def _add_fits(parser: Parser, *, starts: int, iterations: int) -> None:
    parser.add_argument("--heads", type=heads, metavar="HEADS", help='as "softmax,gss(k=0.2),mos(K=4)"')
    parser.add_argument("--widths", type=numbers, metavar="D,...", help="of the fits")
    parser.add_argument("--starts", type=int, metavar="N", help=f"of each fit, at least (default: {starts})")
    parser.add_argument("--iterations", type=int, metavar="N", help=f"of each fit, at most (default: {iterations})")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: 2)")
    parser.add_argument("--seed", type=int, metavar="N", help="(default: 0)")


def _add_capacity(verbs: Verbs) -> None:
    capacity = verbs.add(
        "capacity",
        _capacity,
        summary="the least KL of any heads at any widths",
        description="Fits heads with free hidden vectors to a language, or to distributions in a file: what each can\n"
        "express at a width, and which width of softmax that is worth.",
        example='capacity --target "of_rank(contexts=100, words=50, rank=25)" --widths 2,4,8 --starts 2',
    )
    capacity.add_argument("--target", metavar="TRUTH", help="a language, or a file of (log-)probabilities")
    _add_fits(capacity, starts=3, iterations=500)
    capacity.add_argument("--softmax-widths", type=numbers, metavar="D,...", help="further widths for softmax alone")
    capacity.add_argument("--weights", choices=("uniform", "stationary"), help="of a language's contexts")
    capacity.add_argument("--tolerance", type=float, metavar="X", help="gain below which a fit ends")
    capacity.add_argument("--floor", type=float, metavar="NATS", help="KL below which a fit ends")
    add_out(capacity, "runs/capacity", "the records")


def _capacity(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.capacity import CapacityToolConfig, run

    run(CapacityToolConfig(**_given(CapacityToolConfig, arguments)), say, progress)


def _add_audit(verbs: Verbs) -> None:
    audit = verbs.add(
        "audit",
        _audit,
        summary="what an output layer can do, and what another would buy",
        description="Audits a Hugging Face model, a checkpoint, arrays H, W and b, or a matrix of log-probabilities:\n"
        "the output function in use, bounds and spectrum of its rank and, against a target, the loss in nats.",
        example="audit gpt2 --teacher gpt2-xl --text my.txt",
    )
    audit.add_argument("model", metavar="MODEL", help="a folder, a name on the hub, or a file")
    audit.add_argument("--text", type=Path, metavar="FILE", help="whose contexts are looked at (default: generated)")
    audit.add_argument("--teacher", metavar="MODEL", help="whose distributions count as the truth")
    audit.add_argument("--target", metavar="TRUTH", help="a file of (log-)probabilities, or a language")
    audit.add_argument("--function", metavar="FUNCTION", help="in use, where it is not recognised, as softcap(c=30)")
    audit.add_argument(
        "--bounds-only", action="store_true", help="bounds of the rank alone, from the output layer alone"
    )
    audit.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that MODEL or the teacher brings along (default: refuse such a model)",
    )
    audit.add_argument("--contexts", type=int, metavar="N")
    audit.add_argument("--window", type=int, metavar="N", help="tokens that the model sees at once (default: 128)")
    audit.add_argument(
        "--memory", dest="memory_gib", type=gibibytes, metavar="SIZE", help="that may be used, as 8GiB (the default)"
    )
    audit.add_argument("--argmax-words", type=int, metavar="N", help="words asked whether they can come first")
    audit.add_argument("--argmax-seconds", type=float, metavar="S", help="for that question (default: 60)")
    _add_fits(audit, starts=3, iterations=300)
    audit.add_argument("--fit-contexts", type=int, metavar="N", help="(default: 500)")
    audit.add_argument("--fit-words", type=int, metavar="N", help="(default: 500)")
    audit.add_argument("--device", metavar="DEVICE", help="(default: cpu)")
    add_out(audit, "runs/audit", "the records")


def _audit(arguments: argparse.Namespace) -> None:
    from sigsoftmax.experiments.audit.run import AuditConfig, run

    run(AuditConfig(**_given(AuditConfig, arguments)), say, progress)


def _given(config: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of a configuration that were given; it has the defaults of the others."""
    names = [field.name for field in dataclasses.fields(config)]
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


# --- records ----------------------------------------------------------------------------------------------------------


def _add_records(verbs: Verbs) -> None:
    tables = verbs.add(
        "tables",
        _tables,
        summary="the paper's tables beside ours, from records",
        description="Prints tables 1, 2, 4 and 5 of the paper, and 3 where ranks are on record, with ours: mean and\n"
        "standard deviation over seeds.",
        example="tables runs",
    )
    tables.add_argument("records", nargs="+", type=Path, metavar="RECORDS", help="files of records, or folders")

    report = verbs.add(
        "report",
        _report,
        summary="one self-contained page from records",
        description="Writes everything that is on record into one HTML page: tables, curves, spectra, audits.",
        example="report runs -o report.html",
    )
    report.add_argument("records", nargs="+", type=Path, metavar="RUNS", help="files of records, or folders")
    report.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="FILE")
    report.add_argument("--title", metavar="TEXT")


def _tables(arguments: argparse.Namespace) -> None:
    from sigsoftmax.report import paper_tables

    print(paper_tables(tuple(arguments.records)))


def _report(arguments: argparse.Namespace) -> None:
    from sigsoftmax.report import ReportConfig, write_report

    title = {} if arguments.title is None else {"title": arguments.title}
    written = write_report(ReportConfig(paths=tuple(arguments.records), out=arguments.output, **title))
    for warning in written.warnings:
        print(warning)
    print(f"{written.path}: {written.records:,} records of {written.files:,} files")
