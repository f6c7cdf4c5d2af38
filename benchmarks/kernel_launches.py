"""The kernels that a piece of code launches, compiled for an H100 or H200 with no GPU present.

The code runs on tensors without data (``device="meta"``); launches are recorded, and each becomes a signature as Triton
itself would derive it. Launches that Triton would serve by the same compiled kernel are one variant.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sigsoftmax.backends import triton as kernels
from sigsoftmax.backends.triton import lowering as triton_lowering
from sigsoftmax.contract import signature as signatures
from sigsoftmax.losses import lowering

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
    torch.float64: "*fp64",
}


class Launch(NamedTuple):
    kernel: Any
    values: dict[str, Any]
    """Arguments by name."""
    options: dict[str, Any]


class Recorder:
    """Stands in for a kernel, and keeps what it is launched with."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*positional: Any, **named: Any) -> None:
            values = dict(zip(self.kernel.arg_names, positional, strict=False))
            values |= {key: value for key, value in named.items() if key in self.kernel.arg_names}
            options = {key: value for key, value in named.items() if key not in self.kernel.arg_names}
            self.launches.append(Launch(self.kernel, values, options))

        return launch


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within it no kernel runs, and the public losses take tensors without data."""
    launches: list[Launch] = []
    names = [module.name for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, value in vars(module).copy().items():
                if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                    stack.enter_context(mock.patch.object(module, name, Recorder(value, launches)))
        # Paths that were lowered before hold kernels that are not recorded here.
        stack.enter_context(mock.patch.dict(lowering._lowered, clear=True))
        stack.enter_context(mock.patch.object(triton_lowering, "_refusal", return_value=None))
        stack.enter_context(mock.patch.object(signatures, "checks_values", return_value=False))
        yield launches


class Signature(NamedTuple):
    types: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]


def signature(launch: Launch) -> Signature:
    """The specialisation of a launch. Constants and attributes are found by the place of the argument."""
    found = Signature({}, {}, {})
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.values[parameter.name]
        if parameter.is_constexpr:
            found.types[parameter.name], found.constants[place,] = "constexpr", value
        else:
            found.types[parameter.name] = _type_of(value, (place,), found)
    return found


def _type_of(value: Any, place: tuple[int, ...], found: Signature) -> Any:
    """The type of an argument, whose constants and attributes are added to what was found."""
    if isinstance(value, tuple):
        return tuple(_type_of(item, (*place, index), found) for index, item in enumerate(value))
    if value is None or (isinstance(value, int) and value == 1):
        found.constants[place] = value
        return "constexpr"
    if isinstance(value, Tensor):
        # As if all memory began at an aligned address, which that of torch does.
        if value.storage_offset() * value.element_size() % 16 == 0:
            found.attributes[place] = [["tt.divisibility", 16]]
        return POINTERS[value.dtype]
    if isinstance(value, int):
        if value % 16 == 0:
            found.attributes[place] = [["tt.divisibility", 16]]
        return "i32" if abs(value) < 2**31 else "i64"
    return "fp32"


def variants(launches: list[Launch]) -> dict[str, Launch]:
    """One launch for each kernel that has to be compiled, by a text that tells them apart."""
    found: dict[str, Launch] = {}
    for launch in launches:
        kernel = f"{launch.kernel.__module__}.{launch.kernel.__name__}"
        found.setdefault(f"{kernel} {signature(launch)} {sorted(launch.options.items())}", launch)
    return found


@dataclass(frozen=True)
class Compiled:
    name: str
    milliseconds: float
    """processor time, so that others who use the processor do not count"""
    registers: int
    spilled_bytes: int


def _processor_seconds() -> float:
    """Processor time of this process and of the assembler, which is a process of its own."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def compiled(launch: Launch, folder: Path) -> Compiled:
    """Compile anew, whatever the cache holds, and ask the assembler what the kernel uses."""
    source = ASTSource(launch.kernel, *signature(launch))
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        start = _processor_seconds()
        kernel = triton.compile(source, target=TARGET, options=launch.options)
        milliseconds = 1e3 * (_processor_seconds() - start)
    report = assembler_report(kernel.asm["ptx"], folder)
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", report)]
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)]
    if not registers or not spills:
        raise ValueError(f"the assembler says nothing of registers or spills:\n{report}")
    return Compiled(launch.kernel.__name__, milliseconds, max(registers), sum(spills))


def assembler_report(ptx: str, folder: Path) -> str:
    source = folder / "kernel.ptx"
    source.write_text(ptx, encoding="utf-8")
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    architecture = re.search(r"^\.target (\w+)", ptx, re.M)
    assert architecture
    command = [str(assembler), "-v", f"--gpu-name={architecture[1]}", str(source), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr
