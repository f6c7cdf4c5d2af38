"""Compiles the kernels of a plan with NVRTC, which comes with torch's CUDA builds. It needs neither toolkit nor GPU.

A program is one source file, the headers beside it, and the plan's constants as one more header.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from sigsoftmax.lm.recurrence.plans import KernelPlan

__all__ = ["ARCHITECTURE", "CompilationError", "KernelFile", "checked", "compile_together", "compiled"]

KernelFile = Literal["forward", "backward", "layout"]
ARCHITECTURE = "sm_90a"
FOLDER = Path(__file__).with_name("kernels")
HEADERS = ("numerics.cuh", "exchange.cuh", "products.cuh")


class CompilationError(RuntimeError):
    """NVRTC refused a program; the text is its log."""


def compile_together(programs: Sequence[tuple[KernelFile, KernelPlan]]) -> None:
    """Compile programs side by side, for :func:`compiled` to find."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda program: compiled(*program), programs))


@functools.cache
def compiled(source: KernelFile, plan: KernelPlan) -> bytes:
    """The binary of a source file with the constants of a plan."""
    from cuda.bindings import nvrtc

    text = (FOLDER / f"{source}.cu").read_text(encoding="utf-8")
    headers = {name: (FOLDER / name).read_text(encoding="utf-8") for name in HEADERS} | {"plan.cuh": plan.header()}
    program = checked(
        nvrtc.nvrtcCreateProgram(
            text.encode(),
            f"{source}.cu".encode(),
            len(headers),
            [header.encode() for header in headers.values()],
            [name.encode() for name in headers],
        )
    )
    try:
        options = [f"--gpu-architecture={ARCHITECTURE}".encode(), b"--std=c++17"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompilationError(f"{source}.cu does not compile for {plan}: {log.decode(errors='replace')}")
        binary = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
        checked(nvrtc.nvrtcGetCUBIN(program, binary))
        return binary
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def checked(results: tuple[Any, ...], error: type[RuntimeError] = CompilationError, library: str = "NVRTC") -> Any:
    """The value that a call of a CUDA library returned beside its status, or an error."""
    status, *values = results
    if int(status) != 0:
        raise error(f"{library} answered {status.name}")
    return values[0] if values else None
