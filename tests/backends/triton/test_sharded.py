"""The kernels where each process holds some of the classes, the gradient by ranges of classes included.

Shapes: N tokens, V classes.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.backends.ranks_in_threads import N, V, assert_equals_one, in_one_process, in_threads, inputs
from tests.backends.triton.device import DEVICE
from tests.tables import LEAST

from sigsoftmax import OutputFunction
from sigsoftmax.backends.triton.launch import Launch

SIZES = (4, 1, 6)


@pytest.fixture(autouse=True)
def _one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is not made for threads."""
    lock, launch = threading.Lock(), Launch.__call__

    def launch_alone(*arguments: Any) -> Any:
        with lock:
            return launch(*arguments)

    monkeypatch.setattr(Launch, "__call__", launch_alone)


@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "gss(k=0.3)"])
@pytest.mark.parametrize("mixture", [False, True], ids=["plain", "mixture"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_kernels_serve_a_part_of_the_classes(name: str, mixture: bool, smoothing: float) -> None:
    tensors = {key: t.to(DEVICE) for key, t in inputs(mixture, torch.float32).items()}
    target = torch.randint(V, (N,), device=DEVICE)
    target[3] = -100
    # One rank has nothing but masked classes.
    tensors["bias"][4:5] = LEAST if not smoothing else 0.5
    options = {"label_smoothing": smoothing, "z_loss": 0.01}
    function = OutputFunction.parse(name)
    one = in_one_process(function, tensors, {}, target, backend="blocked", **options)
    ranks = in_threads(SIZES, function, tensors, {}, target, backend="triton", **options)
    assert_equals_one(one, ranks, tolerance=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_exact_gradient_of_a_half_precision_weight(smoothing: float) -> None:
    tensors = {key: t.to(DEVICE) for key, t in inputs(False, torch.float16, 0.5).items()}
    target = torch.randint(V, (N,), device=DEVICE)
    function = OutputFunction("sigsoftmax")
    exact = {key: t.double().cpu() for key, t in tensors.items()}
    one = in_one_process(function, exact, {}, target.cpu(), label_smoothing=smoothing)
    options = {"weight_gradient": "exact", "chunk_bytes": 48, "label_smoothing": smoothing}
    ranks = in_threads(SIZES, function, tensors, {}, target, backend="triton", **options)
    for outcome in ranks:
        torch.testing.assert_close(outcome.loss.cpu().double(), one.loss, rtol=2e-3, atol=2e-3)
    for key, whole in one.gradients.items():
        found = sum(outcome.gradients[key].cpu().double() for outcome in ranks)
        assert (found - whole).norm() <= 3e-3 * whole.norm(), key
