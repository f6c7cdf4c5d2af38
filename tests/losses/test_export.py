"""Graphs that are exported: any module that contains ours, in torch's own operations, for any number of tokens."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import pytest
import torch
from tests.exported import MODELS
from torch import Tensor, nn

import sigsoftmax
from sigsoftmax.layers.output_layer import CrossEntropyLoss, LogProbs

every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
ANY_BATCH = ({0: torch.export.Dim.DYNAMIC},)
DEPRECATED = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def agrees(exported: Callable[[Tensor], Tensor], model: nn.Module) -> None:
    """On another number of tokens than it was exported with, and far from zero."""
    for scale in (1.0, 50.0):
        x = scale * torch.randn(7, 10)
        with torch.no_grad():
            torch.testing.assert_close(exported(x), model(x))


@every_model
def test_torch_export(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    program = torch.export.export(model, (torch.randn(3, 10),), dynamic_shapes=ANY_BATCH)
    operations = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not [name for name in operations if "sigsoftmax" in name]
    decision = sigsoftmax.explain()
    assert (decision.backend, decision.chosen_by) == ("reference", "the export")
    assert "not blocked: programs that run an exported graph know torch's own operations alone" in str(decision)
    agrees(program.module(), model)


@pytest.mark.slow
@every_model
def test_strict_torch_export(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    program = torch.export.export(model, (torch.randn(3, 10),), dynamic_shapes=ANY_BATCH, strict=True)
    agrees(program.module(), model)


@DEPRECATED
@every_model
def test_torch_jit_trace(make: Callable[[], nn.Module]) -> None:
    """A warning of the tracer would say that a size became a constant."""
    model = make().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, (torch.randn(3, 10),))
    agrees(traced, model)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    agrees(torch.jit.load(file), model)


@DEPRECATED
def test_a_trace_tells_its_backend() -> None:
    # The check of a trace runs the model once more, outside it.
    torch.jit.trace(LogProbs(function="sigsoftmax"), (torch.randn(3, 10),), check_trace=False)
    decision = sigsoftmax.explain()
    assert (decision.backend, decision.chosen_by) == ("reference", "the export")


def test_a_loss_is_exported_too() -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.loss = nn.Linear(10, 30), CrossEntropyLoss(function="sigsoftmax", label_smoothing=0.1)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            loss: Tensor = self.loss(self.linear(x), target)
            return loss

    model = Trained()
    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(
        model, (torch.randn(3, 10), torch.randint(30, (3,))), dynamic_shapes=({0: tokens}, {0: tokens})
    )
    assert not [node for node in program.graph.nodes if "sigsoftmax" in str(node.target)]
    example = torch.randn(7, 10), torch.randint(30, (7,))
    torch.testing.assert_close(program.module()(*example), model(*example))


def test_after_an_export_everything_is_as_before() -> None:
    """No tensor of a graph stays behind in what is kept between calls."""
    model = nn.Sequential(nn.Linear(10, 30), LogProbs(function="gss(k=0.317)"))
    torch.export.export(model, (torch.randn(3, 10),))
    model(torch.randn(3, 10)).sum().backward()
    assert sigsoftmax.explain().backend == "blocked"


@DEPRECATED
def test_another_backend_is_refused() -> None:
    class Fast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sigsoftmax.log_probs(x, function="sigsoftmax", backend="blocked")

    message = "backend 'blocked' cannot be used: programs that run an exported graph know .*; pass backend='reference'"
    with pytest.raises(ValueError, match=message):
        torch.export.export(Fast(), (torch.randn(3, 10),))
    with pytest.raises(ValueError, match=message):
        torch.jit.trace(Fast(), (torch.randn(3, 10),))
