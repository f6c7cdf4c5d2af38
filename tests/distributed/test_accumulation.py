"""Gradients summed over batches under DDP, exchanged with the last one alone, against plain torch in one process.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sigsoftmax

N, K, V, D = 12, 3, 31, 8
BATCHES = 3


class Net(nn.Module):
    """Hidden vectors through a layer, then a loss; ``is_plain`` computes it by torch alone."""

    def __init__(self, components: int, device: str = "cpu", *, is_plain: bool = False) -> None:
        super().__init__()
        self.components, self.is_plain = components, is_plain
        self.body = nn.Linear(D, D * max(1, components), device=device)
        self.prior = nn.Linear(D, components, device=device) if components else None
        self.weight = nn.Parameter(torch.randn(V, D, device=device) / D**0.5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.prior is None:
            if self.is_plain:
                logits = F.linear(hidden, self.weight)
                return F.cross_entropy(logits + F.logsigmoid(logits), target)
            return sigsoftmax.linear_cross_entropy(
                hidden, self.weight, target, function="sigsoftmax", chunk_bytes=5 * V * hidden.element_size()
            )
        hidden, prior = hidden.unflatten(-1, (self.components, D)), self.prior(x)
        if self.is_plain:
            logits = F.linear(hidden, self.weight)
            shares = torch.softmax(prior + F.logsigmoid(prior), -1)
            mixed = (torch.softmax(logits + F.logsigmoid(logits), -1) * shares.unsqueeze(-1)).sum(-2)
            return F.nll_loss(mixed.log(), target)
        return sigsoftmax.mixture_cross_entropy(
            hidden, prior, self.weight, target, function="sigsoftmax", chunk_bytes=5 * V * K * hidden.element_size()
        )


def made(components: int, device: str = "cpu", *, is_plain: bool = False) -> Net:
    torch.manual_seed(1)
    return Net(components, device, is_plain=is_plain)


def batches(device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(N, D, generator=generator).to(device),
            torch.randint(V, (N,), generator=generator).to(device),
        )
        for _ in range(BATCHES)
    ]


def accumulated(model: nn.Module, data: list[tuple[Tensor, Tensor]], *, exchanges_last: bool) -> dict[str, Tensor]:
    """Gradients of the mean over batches; with DDP only the last backward pass exchanges them."""
    for i, (x, target) in enumerate(data):
        waits = exchanges_last and i + 1 < len(data)
        with model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
            (model(x, target) / len(data)).backward()
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_two_processes(components: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    part = slice(rank * N // size, (rank + 1) * N // size)
    expected = accumulated(made(components, is_plain=True), batches(), exchanges_last=False)
    own = [(x[part], target[part]) for x, target in batches()]
    found = accumulated(DistributedDataParallel(made(components)), own, exchanges_last=True)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("components", [0, K], ids=["linear", "mixture"])
def test_two_processes_sum_what_plain_torch_sums(components: int, tmp_path: Path) -> None:
    on_ranks(tmp_path, 2, check_two_processes, components)
