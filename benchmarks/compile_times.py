"""The number of Triton kernels that a program compiles, and the time that takes, from an empty cache.

`python benchmarks/compile_times.py` compiles for an H100 or H200 and needs no GPU: the losses run on tensors without
data. It also tells the registers and spilled bytes of a thread. Writes benchmarks/records/compiling.jsonl. On a GPU,
benchmarks/gpu.py has the same programs run in processes of their own, and tells how much longer the first run took.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import MEMBERS, RECORDS, Measurement, measured_once, store, table

import sigsoftmax
from sigsoftmax import OutputFunction

V, D, K = 128_256, 64, 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _leaf(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)


def _targets(device: str, tokens: int) -> torch.Tensor:
    return torch.zeros(tokens, dtype=torch.int64, device=device)


def training(device: str, *, batches: tuple[int, ...] = (8192,)) -> None:
    """Steps of a language model with a linear loss, and its evaluation."""
    weight = _leaf(device, V, D)
    for tokens in batches:
        hidden, target = _leaf(device, tokens, D), _targets(device, tokens)
        options: Any = {"function": "sigsoftmax", "backend": "triton"}
        sigsoftmax.linear_cross_entropy(hidden, weight, target, **options).backward()
        with torch.no_grad():
            sigsoftmax.linear_cross_entropy(hidden, weight, target, **options)


def mixture_training(device: str) -> None:
    hidden, prior, weight = _leaf(device, 8192, K, D), _leaf(device, 8192, K), _leaf(device, V, D)
    target = _targets(device, 8192)
    options: Any = {"function": "sigsoftmax", "backend": "triton"}
    sigsoftmax.mixture_cross_entropy(hidden, prior, weight, target, **options).backward()
    with torch.no_grad():
        sigsoftmax.mixture_cross_entropy(hidden, prior, weight, target, **options)


def members(device: str, *, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,), options: bool = False) -> None:
    """Every member on logits; with all options also the rarer ones, and learned parameters."""
    target = _targets(device, 64)
    rarer: list[dict[str, Any]] = [{"label_smoothing": 0.1}, {"z_loss": 0.1}, {"extras": ("entropy",)}]
    for dtype in dtypes:
        for member in MEMBERS:
            for more in [{}, *(rarer if options else [])]:
                logits = _leaf(device, 64, V, dtype=dtype)
                result = sigsoftmax.cross_entropy(logits, target, function=member, backend="triton", **more)
                (result[0] if isinstance(result, tuple) else result).backward()
        for shape in ((), (V,)) if options else ():
            k, c = _leaf(device, dtype=torch.float32), _leaf(device, *shape, dtype=torch.float32)
            function = OutputFunction("gss", k=k, c=c)
            sigsoftmax.cross_entropy(
                _leaf(device, 64, V, dtype=dtype), target, function=function, backend="triton"
            ).backward()


PROGRAMS: dict[str, Callable[[str], None]] = {
    "ours: training, bf16": training,
    "ours: training, bf16, batches of any size": lambda device: training(device, batches=(8192, 8191, 1)),
    "ours: training a mixture, bf16": mixture_training,
    "ours: every member on logits, bf16": members,
}
ALL_PROGRAMS: dict[str, Callable[[str], None]] = {
    **PROGRAMS,
    "ours: every member on logits, each dtype and option": lambda device: members(device, dtypes=DTYPES, options=True),
}


def without_a_device(names: list[str] | None = None) -> list[Measurement]:
    import kernel_launches

    found = []
    known: dict[str, kernel_launches.Compiled] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ALL_PROGRAMS if names is None else names:
            with kernel_launches.recorded() as launches:
                ALL_PROGRAMS[name]("meta")
            kernels = []
            for key, launch in kernel_launches.variants(launches).items():
                if key not in known:
                    known[key] = kernel_launches.compiled(launch, Path(folder))
                kernels.append(known[key])
            found.append(
                measured_once(
                    "compiling",
                    "compiling Triton kernels for sm_90, without a GPU",
                    name,
                    sum(kernel.milliseconds for kernel in kernels),
                    compiled_variants=len(kernels),
                    most_registers=max(kernel.registers for kernel in kernels),
                    spilled_bytes=max(kernel.spilled_bytes for kernel in kernels),
                )
            )
    return found


def on_the_device() -> list[Measurement]:
    """Each program in a process of its own, all at once, each with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        running = {
            name: subprocess.Popen(
                [sys.executable, __file__, "--program", name],
                env={**os.environ, "TRITON_CACHE_DIR": f"{folder}/{place}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for place, name in enumerate(PROGRAMS)
        }
        # All are waited for before one that failed is told of.
        ended = {name: (*process.communicate(), process.returncode) for name, process in running.items()}
    found = []
    for name, (said, complained, code) in ended.items():
        if code:
            raise RuntimeError(f"{name}:\n{complained[-2000:]}")
        answer = json.loads(said.splitlines()[-1])
        found.append(
            measured_once(
                "gpu",
                "compiling Triton kernels from an empty cache",
                name,
                answer["milliseconds"],
                compiled_variants=answer["variants"],
            )
        )
    return found


def run_and_tell(program: str) -> None:
    """Run a program twice, and print how many kernels the first run compiled and how much longer it took.

    That is more than Triton's own count of its time: each kernel also gets a launcher, which a C compiler makes.
    """
    import triton

    compiled = []

    def listen(**told: Any) -> None:
        if not told["cache_hit"]:
            compiled.append(told["src"])

    triton.knobs.compilation.listener = listen
    # What torch sets up at its first product is not of interest.
    ones = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
    torch.mm(ones, ones)
    times = []
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        PROGRAMS[program]("cuda")
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    print(json.dumps({"variants": len(compiled), "milliseconds": times[0] - times[1]}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", choices=[*PROGRAMS], help="run one on the GPU and print what it compiled, as JSON")
    parser.add_argument(
        "--only", default="", help="compile for the programs whose name contains this; writes no records"
    )
    parser.add_argument("--out", type=Path, help="records are written here (default: records/compiling.jsonl)")
    options = parser.parse_args()
    if options.program:
        run_and_tell(options.program)
        return 0
    names = [name for name in ALL_PROGRAMS if options.only in name]
    if not names:
        parser.error(f"--only {options.only!r} is part of no name; the names are: {', '.join(ALL_PROGRAMS)}")
    measured = without_a_device(names)
    print(table(measured))
    out = options.out or (None if options.only else RECORDS / "compiling.jsonl")
    if out is not None:
        store(out, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
