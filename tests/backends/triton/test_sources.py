"""The sources of the kernels: formulas that stand once are called elsewhere, and not repeated."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "src/sigsoftmax/backends/triton"
OPTIONS = {"z_loss", "label_smoothing", "floor"}
"""arguments of a loss that kernels hand to ``tokens``"""


def device_functions(source: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            yield node


def computed_options(source: str) -> list[str]:
    """The expressions of device functions that compute with an option of a loss."""
    found = []
    for function in device_functions(source):
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp):
                operands = [node.left, node.right]
            elif isinstance(node, ast.UnaryOp):
                operands = [node.operand]
            elif isinstance(node, ast.AugAssign):
                operands = [node.target, node.value]
            else:
                continue
            if any(isinstance(operand, ast.Name) and operand.id in OPTIONS for operand in operands):
                found.append(f"{function.name}: {ast.unparse(node)}")
    return found


def test_computing_with_an_option_is_found() -> None:
    device = "@triton.jit\ndef f(n, z_loss):\n    n += {}\n"
    assert computed_options(device.format("2.0 * z_loss * n")) == ["f: 2.0 * z_loss"]
    assert computed_options(device.format("z_loss")) == ["f: n += z_loss"]
    assert computed_options(device.format("tokens.z_slopes(n, z_loss)")) == []
    assert computed_options("def host(z_loss):\n    return 2.0 * z_loss\n") == []


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.name)
def test_only_one_file_computes_with_the_options_of_a_loss(path: Path) -> None:
    found = computed_options(path.read_text(encoding="utf-8"))
    if path.name == "tokens.py":
        assert found
    else:
        assert not found, f"these belong into tokens.py: {found}"


INTERPRETER = ("IS_INTERPRETED", "TRITON_INTERPRET")
"""names by which a file can ask whether kernels are interpreted"""
ASKING = {
    "backends/triton/kernels/intrinsics.py": "has a stand-in for every operation that the interpreter lacks",
    "backends/triton/lowering.py": "lets kernels take tensors on a CPU; no kernel depends on it",
    "lm/kernels/__init__.py": "lets kernels take tensors on a CPU; no kernel depends on it",
}


def test_only_intrinsics_depend_on_the_interpreter() -> None:
    package = ROOT / "src/sigsoftmax"
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(name in path.read_text(encoding="utf-8") for name in INTERPRETER)
    }
    assert found == set(ASKING), "a kernel that differs in the interpreter is not what runs on a GPU"
