"""Token statistics on the backend triton: values and gradients against the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.backends.triton.device import DEVICE

import sigsoftmax

N, K, V, D = 6, 2, 40, 5


@pytest.mark.parametrize("is_mixture", [False, True])
@pytest.mark.parametrize(("topk", "names"), [(0, ("log_probs",)), (0, ("log_probs", "entropy")), (3, None)])
def test_values_and_gradients(is_mixture: bool, topk: int, names: tuple[str, ...] | None) -> None:
    hidden = torch.randn(N, *((K,) if is_mixture else ()), D, device=DEVICE)
    weight, prior = torch.randn(V, D, device=DEVICE), torch.randn(N, K, device=DEVICE)
    target = torch.randint(V, (N,), device=DEVICE)
    target[1] = -100
    names = names or ("log_probs", "entropy", "log_normalizer", "topk_log_probs")

    def results(backend: str, dtype: torch.dtype) -> tuple[Any, ...]:
        options: dict[str, Any] = {"function": "sigsoftmax", "entropy": True, "topk": topk, "backend": backend}
        leaves = [t.to(dtype).detach().requires_grad_() for t in (hidden, weight, *((prior,) if is_mixture else ()))]
        if is_mixture:
            got = sigsoftmax.mixture_token_statistics(leaves[0], leaves[2], leaves[1], target, **options)
        else:
            got = sigsoftmax.linear_token_statistics(leaves[0], leaves[1], target, **options)
        total = torch.stack([(i + 1.0) * getattr(got, name).square().sum() for i, name in enumerate(names)]).sum()
        values = [v.double() if v.is_floating_point() else v for v in got if v is not None]
        return values, [gradient.double() for gradient in torch.autograd.grad(total, leaves)]

    found = results("triton", torch.float32)
    assert "log-probabilities alone as" in str(sigsoftmax.explain())
    exact = results("reference", torch.float64)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
