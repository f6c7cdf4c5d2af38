"""Every kernel compiles for an H100 or H200 with no GPU present, at the sizes of the recipes: no spilled registers.

What is compiled is what is launched: the operations run on tensors without data, and their launches are recorded.
"""

import importlib
import os
import pkgutil

import pytest
import torch

triton = pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets kernels", allow_module_level=True)

from kernel_launches import Recorder, compiled, signature  # noqa: E402 - it needs triton

from sigsoftmax.lm import kernels  # noqa: E402
from sigsoftmax.lm.dynamic.adaptation import Adapted, Factors, TokenSum, adapt_  # noqa: E402
from sigsoftmax.lm.dynamic.few_tokens import linear, linear_input_gradient, lstm, lstm_gate_gradients  # noqa: E402
from sigsoftmax.lm.model.embedding import dropped_embedding  # noqa: E402
from sigsoftmax.lm.model.regularization import penalties  # noqa: E402
from sigsoftmax.lm.training.nt_asgd import AveragedSgd  # noqa: E402

WORDS, WIDTH, HIDDEN = 10_000, 400, 1150


@pytest.fixture
def launches(monkeypatch):
    recorded = []
    for module in pkgutil.iter_modules(kernels.__path__):
        loaded = importlib.import_module(f"{kernels.__name__}.{module.name}")
        for name, value in vars(loaded).copy().items():
            if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                monkeypatch.setattr(loaded, name, Recorder(value, recorded))
    monkeypatch.setattr(kernels, "run_on", lambda *_: True)
    return recorded


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, device="meta", dtype=dtype)


def aligned(*shape):
    return empty(*shape[:-1], -(-shape[-1] // 16) * 16)[..., : shape[-1]]


def assert_all_fit(launches, folder, names):
    assert {launch.kernel.__name__ for launch in launches} == names
    for text, launch in {str(signature(launch)): launch for launch in launches}.items():
        assert compiled(launch, folder).spilled_bytes == 0, f"{launch.kernel.__name__} {text}"


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("flag", [None, empty(dtype=torch.int32)])
def test_the_optimiser(launches, tmp_path, averaged, flag):
    shapes = [(WORDS, WIDTH), (4 * HIDDEN, WIDTH), (4 * HIDDEN, HIDDEN), (4 * HIDDEN,), (WORDS,), ()]
    optimizer = AveragedSgd([empty(*shape) for shape in shapes], clip=0.25, weight_decay=1e-6)
    if averaged:
        optimizer.begin_averaging()
    optimizer.update([empty(*shape) for shape in shapes], 1.0, skip=flag)
    assert_all_fit(launches, tmp_path, {"squares_kernel", "numbers_kernel", "update_kernel"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_and_penalties(launches, tmp_path, dtype):
    weight = empty(WORDS, WIDTH).requires_grad_()
    tokens = empty(70, 20, dtype=torch.int64)
    embedded = dropped_embedding(tokens, weight, empty(WORDS), empty(1, 20, WIDTH), dtype)
    embedded.sum().backward()
    outputs = [empty(70, 20, WIDTH, dtype=dtype).requires_grad_() for _ in range(2)]
    penalties(*outputs, activation=2.0, temporal_activation=1.0).backward()
    assert_all_fit(launches, tmp_path, {"forward_kernel", "sort_kernel", "backward_kernel"})


@pytest.mark.parametrize("models", [1, pytest.param(6, marks=pytest.mark.thorough)])
def test_dynamic_evaluation(launches, tmp_path, models):
    inputs, weight = empty(models, 5, HIDDEN), aligned(models, 4 * HIDDEN, HIDDEN)
    gates = linear(inputs, weight, empty(models, 4 * HIDDEN), empty(models, 4 * HIDDEN))
    steps = lstm(gates, weight, empty(models, HIDDEN), empty(models, HIDDEN))
    logits = linear(empty(models, 5, WIDTH), empty(models, WORDS, WIDTH), empty(models, WORDS))
    linear_input_gradient(logits, empty(models, WORDS, WIDTH))
    of_gates = lstm_gate_gradients(empty(models, 18, 5, HIDDEN), weight, steps)
    linear_input_gradient(of_gates, weight)
    adapt_(
        [
            Adapted(empty(models, WORDS, WIDTH), empty(WORDS, WIDTH), empty(WORDS, WIDTH)),
            Adapted(weight, aligned(4 * HIDDEN, HIDDEN), aligned(4 * HIDDEN, HIDDEN)),
            Adapted(empty(models, 4 * HIDDEN), empty(4 * HIDDEN), empty(4 * HIDDEN)),
            Adapted(empty(models), empty(), empty()),
        ],
        [
            Factors(empty(models, 10, WORDS), empty(models, 10, WIDTH)),
            Factors(of_gates, steps.hidden[:-1].transpose(0, 1)),
            TokenSum(of_gates),
            empty(models),
        ],
        empty(models, 4),
    )
    names = ("linear", "input_gradient", "lstm_step", "lstm_step_back", "thin", "dense")
    assert_all_fit(launches, tmp_path, {f"{name}_kernel" for name in names})
