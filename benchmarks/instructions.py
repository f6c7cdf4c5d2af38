"""The instructions of the row kernel for an element of a long row, counted in the code that the assembler writes.

`python benchmarks/instructions.py` compiles the kernel of softmax and sigsoftmax for an H100 or H200, with no GPU
present, and prints for the two loops that a row of a trained model runs through how many instructions an element takes,
and how many special-function operations (exponentials and reciprocals) four elements take.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from kernel_launches import TARGET, recorded, signature
from triton.compiler import ASTSource

import sigsoftmax

CLASSES = 128_256


@dataclass(frozen=True)
class Loop:
    """One loop; every element it reads has one exponential."""

    operations: Counter[str]

    @property
    def elements(self) -> int:
        return self.operations["MUFU.EX2"]

    @property
    def instructions_an_element(self) -> float:
        return sum(self.operations.values()) / self.elements

    @property
    def special_for_four(self) -> float:
        special = sum(count for name, count in self.operations.items() if name.startswith("MUFU"))
        return 4.0 * special / self.elements

    @property
    def writes(self) -> bool:
        return self.operations["STG"] > 0


def machine_code(function: str, classes: int = CLASSES) -> str:
    """The machine code of the kernel of a loss of bf16 logits."""
    with recorded() as launches:
        logits = torch.empty(8192, classes, dtype=torch.bfloat16, device="meta", requires_grad=True)
        target = torch.empty(8192, dtype=torch.int64, device="meta")
        sigsoftmax.cross_entropy(logits, target, function=function, backend="triton")
    launch, _ = launches  # the other finishes the rows
    kernel = triton.compile(ASTSource(launch.kernel, *signature(launch)), target=TARGET, options=launch.options)
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        return subprocess.run([disassembler, "-c", binary], capture_output=True, text=True, check=True).stdout


def loops(code: str) -> Iterator[Loop]:
    """Innermost loops: what lies between a label and a branch back to it, with no other such branch between."""
    labels: dict[str, int] = {}
    operations: list[str] = []
    last_back = -1
    for line in code.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(operations)
        instruction = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)", line)
        if instruction is None:
            continue
        name = instruction[1]
        operations.append(name if name.startswith("MUFU") else name.split(".")[0])
        back = re.search(r"BRA.*`\((\.L_\w+)\)", line)
        if back and back[1] in labels:
            first = labels[back[1]]
            if first > last_back:
                yield Loop(Counter(operations[first:]))
            last_back = len(operations) - 1


def loops_of_a_row(function: str) -> tuple[Loop, Loop]:
    """The loop that sums a row, and the one that writes its gradient.

    Each has a formula for the safe path beside it, which takes fewer elements at a time, or more instructions for each.
    """
    found = [loop for loop in loops(machine_code(function)) if loop.elements]
    if not any(loop.writes for loop in found) or all(loop.writes for loop in found):
        raise ValueError(f"found no loops with exponentials that sum and that write in the kernel of {function!r}")
    sums, gradient = (
        min(
            (loop for loop in found if loop.writes == writes),
            key=lambda loop: (-loop.elements, loop.instructions_an_element),
        )
        for writes in (False, True)
    )
    return sums, gradient


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| function | loop | instructions an element | special functions for four elements |")
    print("|---|---|---:|---:|")
    for function in ("softmax", "sigsoftmax"):
        for name, loop in zip(("sum", "gradient"), loops_of_a_row(function), strict=True):
            print(f"| {function} | {name} | {loop.instructions_an_element:.1f} | {loop.special_for_four:.1f} |")


if __name__ == "__main__":
    main()
