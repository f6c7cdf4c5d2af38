"""What the records of the benchmarks say at a glance: tables beside the peers, prices of members, verdicts.

These tables stand on the front page, at the head of docs/benchmarks.md and in docs/choosing.md; every number in them is
read from the records of docs/benchmark-tables.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from measuring import RECORDS, Measurement, mib_text, milliseconds_text
from write_docs import NO_RECORDS, CaseResult, escaped, markdown_table, read_cases

from sigsoftmax.records import Environment, targets

OTHERS = {
    "torch": ("torch softmax", "torch MoS", "transformers softmax"),
    "torch.compile": ("torch.compile softmax",),
    "Liger": ("Liger softmax", "Liger softmax, in place"),
    "cut-cross-entropy": ("cut-cross-entropy softmax",),
}
"""columns of the tables beside others, and the rows of a case that they are read from"""
OURS = ("ours softmax, default", "ours softmax", "ours MoS, default", "ours MoS")
OURS_OTHERWISE = ("ours sigsoftmax, default", "ours MoSS, default")
"""read where softmax itself was not measured in the default mode; sigsoftmax is no faster than softmax"""
LEVEL = 0.03
"""times that differ by less than this fraction are called level: two runs of one program may differ as much"""


@dataclass(frozen=True)
class Suites:
    """The cases of the benchmarks by name."""

    gpu: Mapping[str, CaseResult]
    cpu: Mapping[str, CaseResult]
    huggingface: Mapping[str, CaseResult] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path = RECORDS) -> Suites:
        def of(path: Path) -> dict[str, CaseResult]:
            return {case.name: case for case in read_cases(path)} if path.is_file() else {}

        return cls(of(folder / "gpu.jsonl"), of(folder / "cpu.jsonl"), of(folder / "huggingface" / "steps.jsonl"))


def first_of(case: CaseResult, names: Iterable[str]) -> Measurement | None:
    return next((case.by_name[name] for name in names if name in case.by_name), None)


def ours_of(case: CaseResult) -> Measurement | None:
    return first_of(case, (*OURS, *OURS_OTHERWISE))


def cost_text(m: Measurement | None) -> str:
    """Time and memory of a measurement."""
    if m is None:
        return "–"
    memory = "in place" if m.peak_mib is None else f"{mib_text(m.peak_mib)} MiB"
    return f"{milliseconds_text(m.milliseconds)} ms, {memory}"


def error_text(m: Measurement | None, *, is_measure: bool = False) -> str:
    if is_measure:
        return "1"
    return "–" if m is None or m.gradient_error is None else f"{m.gradient_error:.2f}"


# --- beside others ------------------------------------------------------------------------------------------------

LOGITS = "cross-entropy of bf16 logits, N=8192 V=128256"
LINEAR = "linear cross-entropy, bf16, N=8192 d=4096 V=128256"
WIDE = "linear cross-entropy, bf16, N=8192 d=2304 V=256000"
PEAKED = {
    LINEAR: "linear cross-entropy, bf16, peaked logits, N=8192 d=4096 V=128256",
    WIDE: "linear cross-entropy, bf16, peaked logits, N=8192 d=2304 V=256000",
}


def peers(suites: Suites) -> str:
    """Time, memory and gradient errors on a GPU beside those who compute the same loss."""
    rows = []
    for title, name in (
        ("loss of given logits, 8,192 x 128,256", LOGITS),
        ("linear + loss, 8,192 x 4,096 x 128,256", LINEAR),
        ("linear + loss, 8,192 x 2,304 x 256,000", WIDE),
    ):
        if case := suites.gpu.get(name):
            rows.append([title, *(cost_text(first_of(case, names)) for names in OTHERS.values()), _ours_text(case)])
    for title, name in (
        ("gradient error, random logits, d = 4,096", LINEAR),
        ("gradient error, peaked logits, d = 4,096", PEAKED[LINEAR]),
    ):
        if case := suites.gpu.get(name):
            others = [error_text(first_of(case, of), is_measure=key == "torch") for key, of in OTHERS.items()]
            rows.append([title, *others, error_text(ours_of(case))])
    if not rows:
        return NO_RECORDS
    return markdown_table(("", *OTHERS, "sigsoftmax"), "l" + "r" * (len(OTHERS) + 1), rows) + "\n"


def _ours_text(case: CaseResult) -> str:
    shown = ours_of(case)
    text = f"**{cost_text(shown)}**"
    fast = first_of(case, ("ours softmax, fast",))
    return f"{text}; fast mode {cost_text(fast)}" if fast else text


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


def verdicts(suites: Suites) -> str:
    """Each case that others compute too: time and memory of everyone, and who is faster."""
    blocks = []
    for title, cases in (("GPU", suites.gpu), ("CPU", suites.cpu), ("Hugging Face", suites.huggingface)):
        rows = [row for case in cases.values() if (row := _verdict_row(case))]
        if not rows:
            continue
        names = [name for name in OTHERS if any(row[1][name] for row in rows)]
        cells = [[label, *(costs[name] or "–" for name in names), ours, words] for label, costs, ours, words in rows]
        table = markdown_table(("case", *names, "ours", "verdict"), "l" + "r" * (len(names) + 1) + "l", cells)
        blocks.append(f"**{title}**: {places(cases.values())}\n\n{table}\n")
    return "\n".join(blocks) or NO_RECORDS


def _verdict_row(case: CaseResult) -> tuple[str, dict[str, str], str, str] | None:
    others = {name: first_of(case, rows) for name, rows in OTHERS.items()}
    ours = ours_of(case)
    rivals = {name: m for name, m in others.items() if m is not None}
    if ours is None or not rivals or case.name.startswith(("time against memory", "sigsoftmax beside")):
        return None
    costs = {name: "" if m is None else cost_text(m) for name, m in others.items()}
    note = "" if ours.implementation in OURS else f" ({_member(ours)})"
    return escaped(case.name), costs, f"**{cost_text(ours)}**{note}", verdict(ours, rivals)


def verdict(ours: Measurement, rivals: Mapping[str, Measurement]) -> str:
    """Who is faster, and by how much; and whose memory is a fraction of whose."""
    fastest = min(rivals, key=lambda name: rivals[name].milliseconds)
    ratio = ours.milliseconds / rivals[fastest].milliseconds
    if ratio < 1.0 - LEVEL:
        words = f"faster than {fastest}: {ratio:.2f}x its time"
    elif ratio <= 1.0 + LEVEL:
        words = f"level with {fastest}: {ratio:.2f}x its time"
    else:
        words = f"**slower** than {fastest}: {ratio:.2f}x its time"
    theirs = rivals[fastest].peak_mib
    if theirs and ours.peak_mib is not None and max(theirs, ours.peak_mib) >= 1.0:
        words += f", {ours.peak_mib / theirs:.2g}x its memory"
    return words


def _member(m: Measurement) -> str:
    return m.implementation.removeprefix("ours ").split(",")[0]


# --- prices of members --------------------------------------------------------------------------------------------

MEMBER_ROWS = 5
"""a case with at least so many members of ours besides softmax says what each costs"""


def prices(suites: Suites) -> str:
    """The time of each member divided by that of our own softmax in the same case."""
    columns = {
        f"{device}: {_short(case)}": _member_ratios(case)
        for device, cases in (("GPU", suites.gpu), ("CPU", suites.cpu))
        for case in cases.values()
    }
    columns = {title: ratios for title, ratios in columns.items() if len(ratios) > MEMBER_ROWS}
    members = list(dict.fromkeys(member for ratios in columns.values() for member in ratios))
    if not members:
        return NO_RECORDS
    rows = [
        [f"`{member}`" if "learned" not in member else member]
        + [f"{ratios[member]:.2f}x" if member in ratios else "" for ratios in columns.values()]
        for member in members
    ]
    return markdown_table(("output function", *columns), "l" + "r" * len(columns), rows) + "\n"


def _member_ratios(case: CaseResult) -> dict[str, float]:
    """By member; of a case whose only options are members."""
    base = case.by_name.get("ours softmax")
    if base is None:
        return {}
    found = {}
    for m in case.rows:
        name = m.implementation.removeprefix("ours ")
        is_member = m.implementation.startswith("ours ") and not re.search(
            r" with (?!learned)| in a CUDA graph|,(?! l)", name
        )
        if is_member:
            found[name.replace(", learned", " with learned b")] = m.milliseconds / base.milliseconds
    return found


def _short(case: CaseResult) -> str:
    """The kind of a case and its sizes, without how it was measured."""
    sizes = " ".join(f"{letter}={int(size):,}" for letter, size in re.findall(r"\b([NdVK])=(\d+)", case.name))
    kind = "linear loss" if "linear" in case.name else "loss of logits"
    dtype = "bf16" if "bf16" in case.name else "float32"
    return f"{kind}, {dtype}, {sizes}"


# --- targets ------------------------------------------------------------------------------------------------------


def targets_met(suites: Suites) -> str:
    """How many targets are met, and each that is not."""
    judged: list[tuple[CaseResult, Measurement, str]] = []
    for cases in (suites.gpu, suites.cpu, suites.huggingface):
        for case in cases.values():
            for m in case.rows:
                if any(not clause.is_aim for clause in targets.clauses(m.target)):
                    judged.append((case, m, targets.verdict(m, case.by_name)))
    if not judged:
        return NO_RECORDS
    missed = [(case, m, words) for case, m, words in judged if words.startswith("no:")]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} targets are met; these are not:", ""]
    lines += [
        f"- {escaped(case.name)}: {escaped(m.implementation)} takes {cost_text(m)}, and {_missed(words)} is missed"
        for case, m, words in missed
    ]
    return "\n".join(lines if missed else [f"All {len(judged)} targets are met."]) + "\n"


def _missed(words: str) -> str:
    return escaped(words.removeprefix("no: ").split(";")[0].replace("<=", "≤"))


def only(rows: Sequence[Measurement], beginning: str) -> list[Measurement]:
    return [m for m in rows if m.implementation.startswith(beginning)]
