"""The kernels that a program launches without data, and the count of variants; compiling is another test's."""

import os

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets kernels", allow_module_level=True)

import compile_times
import kernel_launches
import torch

import sigsoftmax
from sigsoftmax.backends.triton import lowering as triton_lowering
from sigsoftmax.backends.triton import scaling
from sigsoftmax.backends.triton.kernels import formulas, token_losses
from sigsoftmax.contract import signature
from sigsoftmax.losses import lowering


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels that would be compiled."""
    names = []

    def compile_nothing(launch, folder):
        names.append(launch.kernel.__name__)
        return kernel_launches.Compiled(launch.kernel.__name__, 10.0, 32 + len(names), 0)

    monkeypatch.setattr(kernel_launches, "compiled", compile_nothing)
    return names


def test_programs_add_up_their_variants(compiled):
    found = {m.implementation: m for m in compile_times.without_a_device()}
    counts = {name: m.compiled_variants for name, m in found.items()}
    assert min(counts.values()) >= 2
    assert counts["ours: training, bf16, batches of any size"] > counts["ours: training, bf16"]
    many = "ours: every member on logits, each dtype and option"
    assert counts[many] > counts["ours: every member on logits, bf16"]
    # What an earlier program compiled is counted again, but not compiled again.
    assert len(compiled) < sum(counts.values())
    assert all(m.milliseconds == 10.0 * m.compiled_variants for m in found.values())
    assert found[many].most_registers == 32 + len(compiled)


def test_launches_differ_by_what_triton_specialises():
    kernel = token_losses.total_kernel
    x = torch.empty(64, device="meta")

    def launch(size, values=x, block=4096):
        recorded = []
        constants = {
            "FORM": formulas.CODES["logistic"],
            "ALPHA_IS_POINTER": False,
            "BETA_IS_POINTER": False,
            "BLOCK": block,
        }
        tensors = (values, x, x, x, x, x)
        kernel_launches.Recorder(kernel, recorded)[(1,)](*tensors, 1.0, 1.0, size, **constants, num_warps=8)
        return recorded[0]

    same = [launch(32), launch(64), launch(1024)]
    assert len(kernel_launches.variants(same)) == 1
    others = [launch(33), launch(1), launch(2**40), launch(64, x.bfloat16()), launch(64, x[1:]), launch(64, block=8)]
    assert len(kernel_launches.variants([*same, *others])) == 1 + len(others)


def test_recording_leaves_all_as_it_was():
    sigsoftmax.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]), function="softmax")
    lowered, kernel = dict(lowering._lowered), scaling.scale_kernel
    replaced = (triton_lowering._refusal, signature.checks_values)
    with kernel_launches.recorded() as launches:
        compile_times.training("meta")
        assert scaling.scale_kernel is not kernel
        assert not lowered.keys() & lowering._lowered.keys()
    assert "scale_kernel" in {launch.kernel.__name__ for launch in launches}
    assert lowered
    assert lowered == lowering._lowered
    assert scaling.scale_kernel is kernel
    assert replaced == (triton_lowering._refusal, signature.checks_values)
