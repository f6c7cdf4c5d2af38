"""Time and memory of spectra and of bounds on ranks at the sizes of the paper and of today's models.

    python benchmarks/spectrum.py                  two CPU cores: PTB size, bounds for 128k words
    python benchmarks/spectrum.py --device cuda    also WikiText-2 size
    python benchmarks/spectrum.py --noise          how good the estimates of rounding are, against an SVD
    python benchmarks/spectrum.py --docs           nothing is run: the table of docs/analysis.md, from the records

Every case is a random model whose rank theory knows. It runs in a process of its own, so that its peak memory is its
own, and nothing is warmed up. Records are appended to benchmarks/records/spectra/cpu.jsonl or cuda.jsonl: the spectrum
or the bounds, and a measurement for each part of the time.

Shapes: M words, T contexts, B contexts of a block, d features.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from measuring import MIB, RECORDS, Measurement, environment, measured_once
from torch import Tensor

from sigsoftmax import records
from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.analysis.spectrum.bounds import rank_bounds
from sigsoftmax.analysis.spectrum.matrix_readers import from_head
from sigsoftmax.analysis.spectrum.singular_values import describe
from sigsoftmax.analysis.spectrum.streaming import Method, SpectrumOptions, SpectrumStream, streamed_spectrum
from sigsoftmax.records import Payload
from sigsoftmax.records.schemas.spectra import RankBounds, Spectrum


@dataclass(frozen=True, kw_only=True)
class Case:
    """A random head, and what is computed of it."""

    name: str
    words: int
    contexts: int
    width: int
    functions: tuple[str, ...] = ("softmax",)
    method: Method = "gram"
    dtype: torch.dtype = torch.float32
    bounds: bool = False
    """bounds on the rank instead of the spectrum"""
    targets: tuple[tuple[str, str], ...] = ()
    """device -> what is aimed for"""

    def title(self, function: str) -> str:
        what = "bounds on the rank" if self.bounds else f"spectrum ({self.method}, {self.dtype})"
        return f"{what} of a random {function} model, M={self.words} T={self.contexts} d={self.width}"


CASES = (
    Case(
        name="ptb",
        words=10_000,
        contexts=82_430,
        width=400,
        targets=(("cpu", "rank 402, < 12 min, < 6 GiB on two cores"), ("cuda", "rank 402, < 10 s on an H200")),
    ),
    Case(
        name="wikitext2",
        words=33_278,
        contexts=245_569,
        width=400,
        targets=(("cuda", "rank 402, < 90 s on an H200"),),
    ),
    Case(
        name="bounds",
        words=128_000,
        contexts=4096,
        width=2048,
        functions=("softmax", "sigsoftmax"),
        bounds=True,
        targets=(("cpu", "< 60 s, < 8 GiB on two cores"),),
    ),
    Case(name="ptb-exact", words=10_000, contexts=82_430, width=400, method="exact", dtype=torch.float64),
    Case(name="smoke", words=300, contexts=900, width=20),
    Case(name="smoke-bounds", words=300, contexts=400, width=20, bounds=True),
)
DEFAULT = {"cpu": ("ptb", "bounds"), "cuda": ("ptb", "wikitext2", "bounds")}


class Clock:
    """Adds up the time of named parts; on a GPU each part ends when its work does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.began = self.last = time.perf_counter()
        self._processor_began = time.process_time()

    def lap(self, part: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now

    @property
    def total(self) -> float:
        return self.last - self.began

    @property
    def processor_seconds(self) -> float:
        return time.process_time() - self._processor_began


def random_head(case: Case, function: str, device: torch.device) -> tuple[HeadWeights, Contexts]:
    """Zipf's law in the bias; hidden vectors whose spectrum falls by a factor of 100, as those of trained models do."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=case.dtype)

    scale_d = torch.logspace(0, -2, case.width, device=device, dtype=case.dtype)
    hidden_Nd = normal(case.contexts, case.width) * scale_d
    layer = HeadWeights(
        weight_Vd=normal(case.words, case.width) * 0.3,
        bias_V=-torch.arange(1, case.words + 1, device=device, dtype=case.dtype).log(),
        head=function,
    )
    return layer, Contexts.of_rows(hidden_Nd)


def measured_spectrum(case: Case, layer: HeadWeights, contexts: Contexts, clock: Clock) -> Spectrum:
    options = SpectrumOptions(method=case.method, device=clock.device)
    # The blocks of the reader are those of the sum, so that each part can be timed.
    rows = options.block_contexts_for(case.words)
    stream = SpectrumStream(
        vocabulary=case.words,
        dtype=case.dtype,
        contexts=case.contexts,
        options=options,
        description=case.title(str(layer.head)),
    )
    clock.lap("set up")
    for first in range(0, case.contexts, rows):
        block_BV = layer.log_probs(contexts[first : first + rows], case.dtype)
        clock.lap("log-probabilities")
        stream.add(block_BV)
        clock.lap("checks and sums")
    found = stream.spectrum()
    clock.lap("singular values")
    return found


def run(name: str, device_name: str, threads: int) -> list[tuple[Payload, str]]:
    """The records of a case, each with what to print."""
    torch.set_num_threads(threads)
    case = next(case for case in CASES if case.name == name)
    device = torch.device(device_name)
    found: list[tuple[Payload, str]] = []
    for function in case.functions:
        clock = Clock(device)
        layer, contexts = random_head(case, function, device)
        clock.lap("random model")
        if case.bounds:
            bounds = rank_bounds(layer, contexts, source=case.title(function))
            clock.lap("bounds")
            found.append((bounds, bounds_text(bounds)))
        else:
            spectrum = measured_spectrum(case, layer, contexts, clock)
            found.append((spectrum, describe(spectrum)))
        del layer, contexts
        target = dict(case.targets).get(device.type, "")
        parts = {**clock.seconds, "total": clock.total}
        for part, seconds in parts.items():
            share = seconds / clock.total
            measurement = measured_once(
                "spectrum",
                case.title(function),
                part,
                1e3 * seconds,
                baseline="total",
                ratio=share,
                ratio_quartiles=(share, share),
                peak_mib=peak_mib(device) if part == "total" else None,
            )
            memory = "" if measurement.peak_mib is None else f", peak {measurement.peak_mib / 1024:.2f} GiB"
            if part == "total" and device.type == "cpu":
                # Far less than threads times the total means that the machine was busy with other things.
                memory += f", {clock.processor_seconds:.0f} s of processor time"
            aim = f"   (aimed for: {target})" if part == "total" and target else ""
            found.append((measurement, f"  {part}: {seconds:.2f} s{memory}{aim}"))
    return found


def bounds_text(bounds: RankBounds) -> str:
    return (
        f"{bounds.source}: rank at least {bounds.lower}, at most {bounds.upper} ({bounds.upper_reason})\n"
        f"  above {bounds.threshold_bound:.3g} ({bounds.rule}), from a block of {bounds.block_contexts} contexts x "
        f"{bounds.block_words} words; norm from {bounds.norm_contexts} of {bounds.contexts} contexts"
    )


def peak_mib(device: torch.device) -> float:
    """The peak memory of the process on a CPU, torch and the model included; of torch's allocator on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- how good the noise floors are ----------------------------------------------------------------------------------

NOISE_SIZES = ((30, 20), (1000, 100), (4000, 1000), (80_000, 300), (8000, 2000))


def noise_table() -> Iterator[str]:
    """True errors of small singular values in units of the estimates that the noise floors rest on."""
    yield "errors in units of their estimates: below 1 the estimate holds, at 2 the noise floor is reached"
    yield f"{'T x M':>14}  {'spectrum':12}  {'gram':>6}  {'qr':>6}"
    for contexts, words in NOISE_SIZES:
        for kind, matrix_TM, expected_R in noise_matrices(contexts, words):
            small = expected_R < 1e-3 * expected_R[0]
            gram, exact = (
                streamed_spectrum(matrix_TM, SpectrumOptions(method=method, log_probs=False))
                for method in ("gram", "exact")
            )
            values = torch.tensor(gram.singular_values, dtype=torch.float64)
            of_gram = (values.square() - expected_R.square())[small].abs().max().item() / gram.squared_error
            values = torch.tensor(exact.singular_values, dtype=torch.float64)
            of_exact = (values - expected_R)[small].abs().max().item() / exact.value_error
            yield f"{f'{contexts} x {words}':>14}  {kind:12}  {of_gram**0.5:6.3f}  {of_exact:6.3f}"


def noise_matrices(contexts: int, words: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Matrices of whole numbers, which are exact, of a known rank; and log-probabilities of rank d + 2."""
    generator = torch.Generator().manual_seed(0)
    rank = max(1, words // 8)
    for kind, offset in (("flat", 0.0), ("one large", 500.0)):
        left, right = (torch.randint(-9, 10, (n, rank), generator=generator).double() for n in (contexts, words))
        matrix_TM = left @ right.T - offset
        yield kind, matrix_TM, with_zeros(matrix_TM, rank + (offset != 0.0))
    layer, of_layer = random_head(
        Case(name="noise", words=words, contexts=contexts, width=rank, dtype=torch.float64),
        "softmax",
        torch.device("cpu"),
    )
    matrix_TM = torch.cat([torch.as_tensor(block) for block in from_head(layer, of_layer).blocks(0)])
    yield "log softmax", matrix_TM, with_zeros(matrix_TM, rank + 2)


def with_zeros(matrix_TM: Tensor, rank: int) -> Tensor:
    values_R = torch.linalg.svdvals(matrix_TM)
    values_R[rank:] = 0.0
    return values_R


# --- the page -------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs" / "analysis.md"
BEGIN, END = "<!-- generated: spectra -->\n", "<!-- end -->\n"


def figures_table(folder: Path) -> str:
    """The last run of each case on each device."""
    runs: dict[tuple[str, str], dict[str, Measurement]] = {}
    answers: dict[tuple[str, str], str] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for record in records.read(path):
            device = f"{record.environment.device}, {record.environment.threads} threads" * (path.stem == "cpu")
            device = device or record.environment.device
            if record.kind == Measurement.KIND:
                part = record.payload_as(Measurement)
                runs.setdefault((part.case, device), {})[part.implementation] = part
            elif record.kind == RankBounds.KIND:
                bounds = record.payload_as(RankBounds)
                answers[bounds.source, device] = f"press32 {bounds.lower} to {bounds.upper}"
            else:
                spectrum = record.payload_as(Spectrum)
                counts = (f"{rule} {spectrum.count(rule).text}" for rule in ("press32", "numpy32", "noise"))
                floor = f"noise floor {spectrum.noise_floor / spectrum.largest:.0e} of the largest"
                answers[spectrum.source, device] = f"{', '.join(counts)}; {floor}"
    rows = ["| what | where | rank, by threshold | total | of it | peak memory |", "|---|---|---|---|---|---|"]
    for (case, device), parts in runs.items():
        total = parts["total"]
        shares = ", ".join(
            f"{name} {part.milliseconds / 1e3:.1f} s"
            for name, part in parts.items()
            if name != "total" and part.ratio > 0.02
        )
        rows.append(
            f"| {case} | {device} | {answers[case, device]} | {total.milliseconds / 1e3:.1f} s | {shares} | "
            f"{(total.peak_mib or 0.0) / 1024:.2f} GiB |"
        )
    return "\n".join(rows) + "\n"


def page_with(table: str, text: str) -> str:
    before, found, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"{PAGE.name} has no lines {BEGIN.strip()!r} and {END.strip()!r} to put the table between")
    return before + BEGIN + table + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DEFAULT), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument(
        "--only", nargs="+", choices=[case.name for case in CASES], help="cases to run (default: by device)"
    )
    parser.add_argument(
        "--out", type=Path, help="records are appended here (default: benchmarks/records/spectra/DEVICE.jsonl)"
    )
    parser.add_argument("--noise", action="store_true", help="compare estimates of rounding with true errors")
    parser.add_argument("--docs", action="store_true", help="write the table of docs/analysis.md from the records")
    options = parser.parse_args()
    if options.docs:
        PAGE.write_text(
            page_with(figures_table(RECORDS / "spectra"), PAGE.read_text(encoding="utf-8")), encoding="utf-8"
        )
        return
    if options.noise:
        torch.set_num_threads(options.threads)
        for line in noise_table():
            print(line, flush=True)
        return
    out = options.out or RECORDS / "spectra" / f"{options.device}.jsonl"

    for name in options.only or DEFAULT[options.device]:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            found = process.submit(run, name, options.device, options.threads).result()
        print("\n".join(text for _, text in found), flush=True)
        where = environment(options.device)
        records.append(out, [records.Record.of(payload, where) for payload, _ in found])
    print(f"records in {out}")


if __name__ == "__main__":
    main()
