"""What the records of the benchmarks say at a glance: tables beside the peers, prices of members, verdicts.

These tables stand on the front page, at the head of docs/benchmarks.md and in docs/choosing.md; every number in them is
read from the records of docs/benchmark-tables.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from measuring import RECORDS, Measurement, mib_text, milliseconds_text
from write_docs import NO_RECORDS, CaseResult, is_ours, judged, markdown_table, read_cases

from sigsoftmax.records import Environment

OTHERS = {
    "torch": ("torch softmax", "torch MoS", "transformers softmax"),
    "torch.compile": ("torch.compile softmax",),
    "Liger": ("Liger softmax", "Liger softmax, in place"),
    "cut-cross-entropy": ("cut-cross-entropy softmax",),
}
"""columns of the tables beside others, and the rows of a case that they are read from"""
OURS = ("ours softmax, default", "ours softmax", "ours MoS, default", "ours MoS")
OURS_FAST = ("ours softmax, fast",)
OURS_OTHERWISE = ("ours sigsoftmax, default", "ours MoSS, default")
"""read where softmax itself was not measured in the default mode; sigsoftmax is no faster than softmax"""
NONE = "\N{EN DASH}"
"""a cell that nothing was measured for"""
LEVEL = 0.03
"""times that differ by less than this fraction are called level: two runs of one program may differ as much"""


@dataclass(frozen=True)
class Suites:
    """The cases of the benchmarks by name."""

    gpu: Mapping[str, CaseResult]
    cpu: Mapping[str, CaseResult]
    huggingface: Mapping[str, CaseResult] = field(default_factory=dict)
    distributed: Mapping[str, CaseResult] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path = RECORDS) -> Suites:
        def of(path: Path) -> dict[str, CaseResult]:
            return {case.name: case for case in read_cases(path)} if path.is_file() else {}

        return cls(
            gpu=of(folder / "gpu.jsonl"),
            cpu=of(folder / "cpu.jsonl"),
            huggingface=of(folder / "huggingface" / "steps.jsonl"),
            distributed=of(folder / "distributed" / "cpu.jsonl"),
        )


def first_of(case: CaseResult, names: Iterable[str]) -> Measurement | None:
    return next((case.by_name[name] for name in names if name in case.by_name), None)


def ours_of(case: CaseResult) -> Measurement | None:
    return first_of(case, (*OURS, *OURS_OTHERWISE))


def cost_text(m: Measurement | None) -> str:
    """Time and memory of a measurement."""
    if m is None:
        return NONE
    in_place = ", in place" if m.implementation.endswith(", in place") else ""
    memory = in_place if m.peak_mib is None else f", {mib_text(m.peak_mib)} MiB"
    return f"{milliseconds_text(m.milliseconds)} ms{memory}"


def error_text(m: Measurement | None, *, is_measure: bool = False) -> str:
    if is_measure:
        return "1"
    return NONE if m is None or m.gradient_error is None else f"{m.gradient_error:.2f}"


# --- beside others ------------------------------------------------------------------------------------------------

LOGITS = "cross-entropy of bf16 logits, N=8192 V=128256"
LINEAR = "linear cross-entropy, bf16, N=8192 d=4096 V=128256"
WIDE = "linear cross-entropy, bf16, N=8192 d=2304 V=256000"
CPU_LOGITS = "cross-entropy of logits, N=2048 V=32000"
CPU_LINEAR = "linear cross-entropy, N=2048 d=512 V=32000"
PEAKED = {
    LINEAR: "linear cross-entropy, bf16, peaked logits, N=8192 d=4096 V=128256",
    WIDE: "linear cross-entropy, bf16, peaked logits, N=8192 d=2304 V=256000",
}


FEATURES = (
    ("other output functions", "write them", "write them", "softcap, sparsemax", "softcap", "six, and your own"),
    ("mixtures of them", "write them", "write them", "no", "no", "yes, in chunks"),
    ("Hugging Face models", "their own loss", "their own loss", "patch", "patch", "patch"),
    (
        "vocabulary over processes",
        "of logits",
        "of logits",
        "of logits, linear loss",
        "linear loss",
        "linear loss, mixtures",
    ),
)
"""what is not a number, in the order of the columns"""


def peers(suites: Suites) -> str:
    """Time, memory and gradient errors, and what else is offered, beside those who compute the same loss."""
    rows = []
    for cases, title, name in (
        (suites.gpu, "loss of given logits, 8,192 x 128,256", LOGITS),
        (suites.gpu, "linear layer and loss, 8,192 x 4,096 x 128,256", LINEAR),
        (suites.gpu, "linear layer and loss, 8,192 x 2,304 x 256,000", WIDE),
        (suites.cpu, "CPU: loss of given logits, 2,048 x 32,000", CPU_LOGITS),
        (suites.cpu, "CPU: linear layer and loss, 2,048 x 512 x 32,000", CPU_LINEAR),
    ):
        if case := cases.get(name):
            rows.append([title, *_costs(case)])
    for title, name in (
        ("gradient error at d = 4,096, random logits", LINEAR),
        ("gradient error at d = 4,096, peaked logits", PEAKED[LINEAR]),
    ):
        if case := suites.gpu.get(name):
            errors = [error_text(m, is_measure=column == "torch") for column, m in _compared(case).items()]
            rows.append([title, *errors])
    if not rows:
        return NO_RECORDS
    rows += [[*row, ""] for row in FEATURES]
    return markdown_table(("", *OTHERS, *OUR_COLUMNS), "l" * (len(OTHERS) + 3), rows) + "\n"


OUR_COLUMNS = ("this package", "its `fast` mode")


def _compared(case: CaseResult) -> dict[str, Measurement | None]:
    """By column; None where the case has no such row."""
    others = {name: first_of(case, rows) for name, rows in OTHERS.items()}
    return others | dict(zip(OUR_COLUMNS, (ours_of(case), first_of(case, OURS_FAST)), strict=True))


def _costs(case: CaseResult) -> list[str]:
    """The least time is bold, whosever it is."""
    found = _compared(case).values()
    least = min((m.milliseconds for m in found if m is not None), default=0.0)
    texts = []
    for m in found:
        text = cost_text(m)
        if m is not None and m.milliseconds == least:
            text = f"**{text}**"
        if m is not None and is_ours(m) and not _is_softmax(m):
            text += f" ({_member(m)})"
        texts.append(text)
    return texts


def place_text(where: Environment) -> str:
    """Machine, versions and revision of a run, in a sentence."""
    libraries = "".join(f", {library}" for library in where.libraries)
    return (
        f"{where.device}, torch {where.torch_version}{libraries}, sigsoftmax {where.package_version} "
        f"({where.revision_text}), {where.time_utc[:10]}"
    )


def places(cases: Iterable[CaseResult]) -> str:
    return "; ".join(dict.fromkeys(place_text(case.environment) for case in cases))


# --- verdicts -----------------------------------------------------------------------------------------------------


SHOWN: dict[str, dict[str, str]] = {
    "GPU": {
        LOGITS: "given logits, 8,192 x 128,256",
        "a classifier's bf16 logits, N=1024 V=1000": "given logits, 1,024 x 1,000",
        LINEAR: "linear, 8,192 x 4,096 x 128,256",
        PEAKED[LINEAR]: "the same, peaked logits",
        WIDE: "linear, 8,192 x 2,304 x 256,000",
        PEAKED[WIDE]: "the same, peaked logits",
        "linear cross-entropy, bf16, N=8192 d=768 V=50304": "linear, 8,192 x 768 x 50,304",
        "linear cross-entropy, float32 weights under bf16 autocast, N=8192 d=4096 V=128256": (
            "linear, 8,192 x 4,096 x 128,256, float32 weights under autocast"
        ),
        "linear cross-entropy, bf16, N=1400 d=400 V=10000": "linear, 1,400 x 400 x 10,000",
        "mixture cross-entropy, bf16 products, N=840 K=15 d=280 V=10000": "mixture of 15, 840 x 280 x 10,000",
        "mixture cross-entropy, bf16 products, N=8192 K=4 d=2048 V=32000": "mixture of 4, 8,192 x 2,048 x 32,000",
    },
    "CPU": {
        CPU_LOGITS: "given logits, 2,048 x 32,000",
        CPU_LINEAR: "linear, 2,048 x 512 x 32,000",
        "mixture cross-entropy, N=840 K=15 d=280 V=10000": "mixture of 15, 840 x 280 x 10,000",
    },
}
"""the cases of the overview; the page of tables has all"""


def verdicts(suites: Suites) -> str:
    """Time and memory of everyone in the main cases, and who is faster."""
    blocks = []
    for title, cases in (("GPU", suites.gpu), ("CPU", suites.cpu)):
        shown = [(cases[name], label) for name, label in SHOWN[title].items() if name in cases]
        rows = [row for case, label in shown if (row := _verdict_row(case, label))]
        if not rows:
            continue
        names = [name for name in OTHERS if any(costs[name] for _, costs, _, _ in rows)]
        cells = [[label, ours, *(costs[name] or NONE for name in names), words] for label, costs, ours, words in rows]
        table = markdown_table(("case", "ours", *names, "verdict"), "l" * (len(names) + 3), cells)
        blocks.append(f"**On a {title}.** {places(case for case, _ in shown)}.\n\n{table}\n")
    return "\n".join(blocks) or NO_RECORDS


def _verdict_row(case: CaseResult, label: str) -> tuple[str, dict[str, str], str, str] | None:
    others = {name: first_of(case, rows) for name, rows in OTHERS.items()}
    ours = ours_of(case)
    rivals = {name: m for name, m in others.items() if m is not None}
    if ours is None or not rivals:
        return None
    costs = {name: "" if m is None else _two_lines(m) for name, m in others.items()}
    note = "" if _is_softmax(ours) else f"<br>({_member(ours)})"
    return label, costs, f"**{_two_lines(ours)}**{note}", verdict(ours, rivals)


def _two_lines(m: Measurement) -> str:
    """Time above memory, neither of them broken."""
    return cost_text(m).replace(", ", "<br>").replace(" ms", "&nbsp;ms").replace(" MiB", "&nbsp;MiB")


def verdict(ours: Measurement, rivals: Mapping[str, Measurement]) -> str:
    """Whether ours is faster than the fastest of the others, and the ratio of their times."""
    fastest = min(rivals, key=lambda name: rivals[name].milliseconds)
    ratio = ours.milliseconds / rivals[fastest].milliseconds
    words = "faster" if ratio < 1.0 - LEVEL else "level" if ratio <= 1.0 + LEVEL else "**slower**"
    return f"{words}: {ratio:.2f}x of {fastest}"


def _is_softmax(m: Measurement) -> bool:
    return m.implementation in (*OURS, *OURS_FAST)


def _member(m: Measurement) -> str:
    return m.implementation.removeprefix("ours ").split(",")[0]


# --- prices of members --------------------------------------------------------------------------------------------

OPTION = re.compile(r" with (?!learned)| in a CUDA graph|,(?! learned)")
"""marks rows of ours that differ from others by more than the member"""
MEMBER_ROWS = 5
"""a case with at least so many members of ours besides softmax says what each costs"""


OLDER_CPU = (
    "The figures of the CPU were measured before its losses of relu, sigmoid, softcap and gss were made faster. "
    "They are to be measured again."
)
"""under prices of an older version"""


def is_older(cases: Mapping[str, CaseResult]) -> bool:
    """Tells whether a record names no commit: such records are older than the present passes and kernels of members."""
    return any(not case.environment.commit for case in cases.values())


def price_columns(suites: Suites) -> dict[str, dict[str, float]]:
    """The time of each member divided by that of our own softmax, for every case that has enough members."""
    return {
        f"{device}: {_short(case)}": ratios
        for device, cases in (("GPU", suites.gpu), ("CPU", suites.cpu))
        for case in cases.values()
        if len(ratios := _member_ratios(case)) > MEMBER_ROWS
    }


def prices(suites: Suites) -> str:
    """The price of each member relative to our own softmax, a column for each case."""
    columns = price_columns(suites)
    members = list(dict.fromkeys(member for ratios in columns.values() for member in ratios))
    if not members:
        return NO_RECORDS
    rows = [
        [f"`{member}`" if "learned" not in member else member]
        + [f"{ratios[member]:.2f}x" if member in ratios else "" for ratios in columns.values()]
        for member in members
    ]
    note = f"\n{OLDER_CPU}\n" if is_older(suites.cpu) else ""
    return markdown_table(("output function", *columns), "l" + "r" * len(columns), rows) + f"\n{note}"


def _member_ratios(case: CaseResult) -> dict[str, float]:
    """By member; of a case whose only options are members."""
    base = case.by_name.get("ours softmax")
    if base is None:
        return {}
    found = {}
    for m in case.rows:
        name = m.implementation.removeprefix("ours ")
        if is_ours(m) and not OPTION.search(name):
            found[name.replace(", learned", " with learned b")] = m.milliseconds / base.milliseconds
    return found


def _short(case: CaseResult) -> str:
    """The kind of a case and its sizes, without how it was measured."""
    sizes = " ".join(f"{letter}={int(size):,}" for letter, size in re.findall(r"\b([NdVK])=(\d+)", case.name))
    kind = "linear loss" if "linear" in case.name else "loss of logits"
    dtype = "bf16" if "bf16" in case.name else "float32"
    return f"{kind}, {dtype}, {sizes}"


def cpu_members(suites: Suites) -> str:
    """Which members take less time on a CPU than torch.compile's softmax, which more than plain torch's."""
    cases = [case for case in suites.cpu.values() if len(_member_ratios(case)) > MEMBER_ROWS]
    if not cases:
        return NO_RECORDS
    case = cases[-1]
    softmax = {name: first_of(case, OTHERS[name]) for name in ("torch.compile", "torch")}
    limits = {name: m.milliseconds for name, m in softmax.items() if m is not None}
    own = case.by_name["ours softmax"].milliseconds
    names = (
        "less time than torch.compile's softmax",
        "more time than that, but less than plain torch's softmax",
        "more time than either",
    )
    groups: dict[str, list[str]] = {name: [] for name in names}
    for member, ratio in _member_ratios(case).items():
        if "learned" in member:
            continue
        place = sum(ratio * own > limit for limit in limits.values())
        groups[names[place]].append(f"`{member}`")
    filled = {name: found for name, found in groups.items() if found}
    if len(filled) == 1:
        words = f"Every member with fixed parameters takes {next(iter(filled))}"
    else:
        words = "Of ours " + "; ".join(
            f"{', '.join(found)} {'takes' if len(found) == 1 else 'take'} {name}" for name, found in filled.items()
        )
    note = f" {OLDER_CPU}" if is_older(suites.cpu) else ""
    return f"- **A CPU with {case.environment.threads} threads**, {_short(case)}. {words}.{note}\n"


# --- several processes --------------------------------------------------------------------------------------------


def exchange(suites: Suites) -> str:
    """Bytes and time of vocabulary-parallel losses beside one process and beside gathered logits."""
    rows = [
        [
            case.name.replace(" over gloo", ""),
            m.implementation,
            f"{m.exchanged_bytes:,}" if m.exchanged_bytes else NONE,
            NONE if m.peak_mib is None else f"{mib_text(m.peak_mib)} MiB",
            f"{milliseconds_text(m.milliseconds)} ms",
            "{:.2f} ({:.2f} to {:.2f})".format(m.ratio, *m.ratio_quartiles),
        ]
        for case in suites.distributed.values()
        for m in case.rows
    ]
    if not rows:
        return NO_RECORDS
    heads = ("case", "implementation", "bytes exchanged", "memory", "time", "ratio (quartiles)")
    place = f"{places(suites.distributed.values())}. The command: `python benchmarks/exchange.py`.\n\n"
    return place + markdown_table(heads, "llrrrr", rows) + "\n"


# --- targets ------------------------------------------------------------------------------------------------------


def targets_met(suites: Suites) -> str:
    """How many targets are met, and, folded away, each that is not."""
    rows = [
        row for cases in (suites.gpu, suites.cpu, suites.huggingface) for case in cases.values() for row in judged(case)
    ]
    if not rows:
        return NO_RECORDS
    missed = [row for row in rows if row[-1].startswith("no:")]
    if not missed:
        return f"All {len(rows)} targets are met.\n"
    cells = [[name, implementation, f"{ms} ms", ratio, met] for name, implementation, ms, ratio, *_, met in missed]
    table = markdown_table(("case", "implementation", "time", "ratio", "target missed"), "lllll", cells)
    return (
        f"{len(rows) - len(missed)} of {len(rows)} targets are met.\n\n"
        f"<details markdown>\n<summary>The {len(missed)} that are not</summary>\n\n{table}\n\n</details>\n"
    )
