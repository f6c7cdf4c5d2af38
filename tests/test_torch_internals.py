"""Interfaces of torch that are not public: each says the same as its public fallback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUESTIONS = """
import json, torch
from torch.autograd import forward_ad
from torch._subclasses import FakeTensorMode
from sigsoftmax import torch_internals as t

x = torch.ones(3, requires_grad=True)
told = {"outside": [t.transforms_active(), t.is_wrapped(x)]}
torch.func.vmap(lambda row: told.update(vmap=[t.transforms_active(), t.is_wrapped(row), t.is_wrapped(x)]) or row)(x)
torch.func.grad(lambda z: told.update(grad=[t.transforms_active(), t.is_wrapped(z)]) or z)(torch.tensor(1.0))
with forward_ad.dual_level():
    dual = forward_ad.make_dual(x.detach(), torch.ones(3))
    told["forward"] = [t.in_forward_mode(), t.has_tangent(dual), t.has_tangent(x)]

told["fake"] = [t.is_fake(x), t.is_fake(FakeTensorMode().from_tensor(x))]

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        ctx.save_for_backward(3 * tensor, None, tensor)
        return 2 * tensor
    @staticmethod
    def backward(ctx, by):
        told["saved"] = [saved if saved is None else saved.tolist() for saved in t.first_saved_tensors(ctx, 2)]
        told["keeps"] = told.get("keeps", []) + [t.keeps_graph()]
        return 2 * by

y = t.apply_eagerly(Double, x).sum()
y.backward(retain_graph=True)
y.backward()
told["gradient"] = x.grad.tolist()
(raising,) = t.raising_when_differentiated("no derivative", [x.detach().requires_grad_()])
try:
    raising.sum().backward()
except RuntimeError as error:
    told["raises"] = "no derivative" in str(error)
try:
    t.assert_on_device(torch.tensor(False))
except RuntimeError:
    told["asserts"] = True
t.assert_on_device(torch.tensor(True))
print(json.dumps(told))
"""


def answers(*, public_only: bool) -> dict[str, object]:
    import json

    environment = {**os.environ, "SIGSOFTMAX_PUBLIC_ONLY": "1" if public_only else "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", QUESTIONS], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_fallbacks_give_the_same_answers() -> None:
    private, public = answers(public_only=False), answers(public_only=True)
    # Whether a graph is kept is not public: a loss that does not know makes new gradients instead of scaling its own.
    assert private.pop("keeps") == [True, False]
    assert public.pop("keeps") == [True, True]
    assert private == public
    assert private["outside"] == [False, False]
    assert private["vmap"] == [True, True, False]
    assert private["grad"] == [True, True]
    assert private["fake"] == [False, True]
    assert private["saved"] == [[3.0, 3.0, 3.0], None]


@pytest.mark.slow
def test_losses_are_right_without_private_interfaces() -> None:
    """A newer torch may slow a loss down, and never break it."""
    files = ("tests/losses", "tests/backends/test_autograd.py", "tests/family")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *files],
        env={**os.environ, "SIGSOFTMAX_PUBLIC_ONLY": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
