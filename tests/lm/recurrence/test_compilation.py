"""Every kernel of every recipe compiles for Hopper without a GPU, and keeps its weights in registers."""

import re
import subprocess
from pathlib import Path

import pytest
from tests.lm.recurrence.layers import H200, plan_id, recipe_plans

from sigsoftmax.lm.recurrence.compilation import CompilationError, compiled
from sigsoftmax.lm.recurrence.plans import plan_layer

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
try:
    nvrtc.nvrtcVersion()
except RuntimeError as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)


def stack_bytes(binary, folder):
    """Bytes of local memory of each kernel: where ptxas puts registers that it has no room for."""
    triton = pytest.importorskip("triton", reason="needs the cuobjdump that Triton brings")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = folder / "kernel.cubin"
    path.write_bytes(binary)
    report = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return [int(stack) for stack in re.findall(r"REG:\d+ STACK:(\d+)", report)]


def check(plan, folder):
    for source, kernel in (("forward", plan.forward), ("backward", plan.backward), ("layout", plan.forward)):
        stacks = stack_bytes(compiled(source, kernel), folder)
        assert len(stacks) == (3 if source == "layout" else 1)
        assert not any(stacks), f"{kernel} spills {stacks} bytes"


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("hidden", [1150, 400])
def test_the_plans_of_penn_treebank_compile_without_spills(hidden, precision, tmp_path):
    check(plan_layer(hidden, 20, precision, H200), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("plan", recipe_plans(), ids=plan_id)
def test_every_plan_of_every_recipe_compiles_without_spills(plan, tmp_path):
    check(plan, tmp_path)


def test_what_does_not_compile_is_told_with_the_compilers_words():
    plan = plan_layer(400, 20, "bf16", H200).forward

    class Wrong(type(plan)):
        def header(self):
            return super().header().replace("constexpr int BATCH", "constexpr int NO_BATCH")

    with pytest.raises(CompilationError, match=r"forward\.cu does not compile.*BATCH"):
        compiled("forward", Wrong(**vars(plan)))
