"""Every verb of the command line: what it does, its help, its arguments and its options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sigsoftmax.cli import handlers
from sigsoftmax.cli.parser import Option, Verb, gibibytes, numbers, progress, say
from sigsoftmax.lm.config import EVALUATION_PRECISIONS, PRECISIONS
from sigsoftmax.lm.data.published_corpora import PUBLISHED

__all__ = ["VERBS"]

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
FITS = "heads widths starts iterations workers seed"


def _fields(names: str, **others: Option) -> dict[str, Option]:
    """Options for fields of a configuration, whose names are given, and others."""
    return {name: SPECIAL.get(name, Option()) for name in names.split()} | others


VERBS = (
    Verb(
        name="demo",
        summary="the bottleneck in three minutes: tables, pictures and a page",
        description="Fits every kind of output head to a language of known truth, at widths on both sides of its\n"
        "rank: a table, two pictures, records. Then trains small language models on text from such a language.",
        example="demo --seed 1 --out runs/demo-1",
        config=("experiments.demo", "DemoConfig"),
        act=handlers.demo,
        options=_fields("seed out quick"),
    ),
    Verb(
        name="functions",
        summary="the members of the family, their formulas and parameters",
        description="Prints every output function with its phi: f(z) = softmax(phi(z)).",
        example="functions",
        act=handlers.functions,
    ),
    Verb(
        name="compare",
        summary="train heads under equal budgets; distance to the truth, rank, time",
        description="Trains the same small language model with each head, on text from a language of known truth or\n"
        "on your own, and prints what each is worth: perplexity, KL to the truth, rank, parameters, time.",
        example="compare --heads softmax,softmax-1.5,sigsoftmax,mos --seeds 1,2,3",
        config=("experiments.compare", "CompareConfig"),
        printers=(say,),
        options=_fields(
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
        arguments=_fields("table"),
        options=_fields(f"seeds first_seed heads setting dry_run minutes changes out {RESOURCES}"),
    ),
    Verb(
        name="capacity",
        summary="the least KL of any heads at any widths",
        description="Fits heads with free hidden vectors to a language, or to distributions in a file: what each can\n"
        "express at a width, and which width of softmax that is worth.",
        example='capacity --target "of_rank(contexts=100, words=50, rank=25)" --widths 2,4,8 --starts 2',
        config=("experiments.capacity", "CapacityToolConfig"),
        printers=(say, progress),
        options=_fields(f"target softmax_widths weights tolerance floor out {FITS}"),
    ),
    Verb(
        name="audit",
        summary="what an output layer can do, and what another would buy",
        description="Audits a Hugging Face model, a checkpoint, arrays H, W and b, or a matrix of log-probabilities:\n"
        "the output function in use, bounds and spectrum of its rank and, against a target, the loss in nats.",
        example="audit gpt2 --teacher gpt2-xl --text my.txt",
        config=("experiments.audit.run", "AuditConfig"),
        printers=(say, progress),
        arguments=_fields("model"),
        options=_fields(
            f"data teacher target function bounds_only contexts window memory_gib argmax_words out {FITS}",
            text=Option(help="text whose contexts are looked at", default="generated"),
            trust_remote_code=Option(
                help="run Python code that MODEL or the teacher brings along", default="refuse such a model"
            ),
            iterations=Option(help="of each fit, at most"),
            workers=Option(help="number of processes"),
            seed=Option(help="of the starts"),
            argmax_seconds=Option(help="for the question which tokens can come first"),
            fit_contexts=Option(help="contexts of the fits"),
            fit_words=Option(help="tokens of the fits"),
            device=Option(help="cpu, cuda or cuda:1"),
        ),
    ),
    Verb(
        name="tables",
        summary="the paper's tables beside ours, from records",
        description="Prints tables 1, 2, 4 and 5 of the paper, and 3 where ranks are on record, with ours: mean and\n"
        "standard deviation over seeds.",
        example="tables runs",
        act=handlers.tables,
        arguments=_fields("paths"),
    ),
    Verb(
        name="report",
        summary="one self-contained page from records",
        description="Writes everything that is on record into one HTML page: tables, curves, spectra, audits.",
        example="report runs -o report.html",
        config=("report", "ReportConfig"),
        act=handlers.report,
        arguments=_fields("paths"),
        options={
            "out": Option(help="the page", names=("-o", "--output")),
            "title": Option(help="of the page"),
        },
    ),
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
                act=handlers.fetch,
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
        act=handlers.recipes,
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
        act=handlers.train,
        arguments=_fields("recipes"),
        options=_fields(f"config changes out {RESOURCES} parallel tensorboard"),
        exclusive=_fields("seeds", seed=Option(help="of one run", kind=int)),
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
        arguments=_fields("runs"),
        options=_fields(f"{RESOURCES} parallel tensorboard"),
    ),
    Verb(
        name="evaluate",
        summary="perplexity of a checkpoint",
        description="Evaluates with the state carried over the whole text, and records the result beside the\n"
        "checkpoint. On text of your own (--data) nothing is recorded.",
        example="evaluate runs/ptb-sigsoftmax/141/finetune/best.safetensors --split test",
        config=("experiments.runs.evaluate", "EvaluateConfig"),
        printers=(print,),
        arguments=_fields("checkpoint"),
        options=_fields(
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
        act=handlers.dynamic,
        arguments=_fields("checkpoint"),
        options=_fields(
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
        act=handlers.sample,
        arguments=_fields("checkpoint"),
        options=_fields("words prompt temperature seed", device=Option(help="cpu, cuda or cuda:1")),
    ),
    Verb(
        name="sweep",
        summary="recipes x seeds x alternatives on Ray, resumable, in one table",
        description="Trains every recipe with every seed and every alternative of --set, many at once, on this\n"
        "machine or on a Ray cluster. After a crash the same command goes on; what has ended is not made again.\n"
        "Prints means, standard deviations, and differences from a baseline by seed with confidence intervals.",
        example="sweep --heads softmax,sigsoftmax,mos --seeds 1,2,3 --set training.learning_rate=5,10",
        config=("experiments.sweep.run", "SweepConfig"),
        act=handlers.sweep,
        arguments=_fields("recipes"),
        options=_fields(
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
