"""Log-probabilities of mixtures by kernels against the reference in float64, whole rows and rows in parts.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.backends.triton.device import DEVICE
from tests.recording import record_results
from tests.tables import Member, by_label
from torch import Tensor

import sigsoftmax
from sigsoftmax import OutputFunction
from sigsoftmax.backends.triton import chunk_loop, priors, tuning

N, K, V, D = 5, 3, 192, 4
LABELS = ("softmax", "sigsoftmax", "shifted(b per class)", "gss(k=0)", "gss(k=-1)", "relu", "softcap(c=5)")
few_members = pytest.mark.parametrize("member", [by_label[label] for label in LABELS], ids=str)


@pytest.fixture
def _rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as short as those of these tests are reduced in parts."""
    monkeypatch.setattr(tuning, "FEWEST_CLASSES_OF_A_PART", 16)


@pytest.fixture(autouse=True)
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parts of each chunk's rows; empty if the kernels were not used."""
    return record_results(monkeypatch, chunk_loop, "row_parts")


def tensors(deviation: float = 2.0, *, components: int = K, tokens: int = N) -> dict[str, Tensor]:
    shapes = {"hidden": (tokens, components, D), "prior": (tokens, components), "weight": (V, D), "bias": (V,)}
    return {name: deviation * torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}


def log_probs(
    given: dict[str, Tensor], function: OutputFunction | str, dtype: torch.dtype, backend: str, **options: Any
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and log normalisers."""
    t = {name: tensor.to(dtype) for name, tensor in given.items()}
    found, extras = sigsoftmax.mixture_log_probs(
        t["hidden"],
        t["prior"],
        t["weight"],
        linear_bias=t["bias"],
        function=function,
        prior_function="sigsoftmax",
        backend=backend,
        extras=["log_normalizer"],
        **options,
    )
    assert extras.log_normalizer is not None
    return found, extras.log_normalizer


def assert_as_the_reference(
    given: dict[str, Tensor], function: OutputFunction | str, *, tolerance: float = 2e-6, **options: Any
) -> None:
    found = log_probs(given, function, torch.float32, "triton", **options)
    assert "their values by kernels" in str(sigsoftmax.explain())
    options.pop("chunk_bytes", None)
    exact = log_probs({name: t.double() for name, t in given.items()}, function, torch.float64, "reference", **options)
    for actual, expected in zip(found, exact, strict=True):
        assert actual.dtype == torch.float32
        # Logits of float32 are rounded in proportion to their size.
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=10 * tolerance)


@few_members
def test_whole_rows(member: Member, computed: list[int]) -> None:
    assert_as_the_reference(tensors(), member.make(V), chunk_bytes=4 * 2 * K * V)
    assert set(computed) <= {1}


@pytest.mark.usefixtures("_rows_in_parts")
@few_members
def test_rows_in_parts(member: Member, computed: list[int]) -> None:
    assert_as_the_reference(tensors(tokens=1), member.make(V))
    # A shift per class is one of its place in the whole row.
    assert computed == ([] if member.per_class else [4])


@pytest.mark.usefixtures("_rows_in_parts")
@pytest.mark.parametrize("function", ["sigsoftmax", "gss(k=0.5)", "gss(k=-1)", "softcap"])
@pytest.mark.parametrize("deviation", [0.1, 30.0, 1000.0])
def test_logits_of_any_size(deviation: float, function: str) -> None:
    given = tensors(tokens=1)
    # Rounded logits of this size would be all the error; these are exact, and one part of the rows lies far above.
    given["hidden"], given["weight"] = torch.zeros_like(given["hidden"]), torch.zeros_like(given["weight"])
    given["bias"] = (deviation * torch.randn(V, device=DEVICE)).round(decimals=2)
    given["bias"][100:] += 3.0 * deviation
    assert_as_the_reference(given, function, tolerance=2e-6)


@pytest.mark.usefixtures("_rows_in_parts")
@pytest.mark.parametrize("floor", [1e-8, 0.05])
def test_a_floor(floor: float) -> None:
    assert_as_the_reference(tensors(), "sigsoftmax", floor=floor)


@pytest.mark.usefixtures("_rows_in_parts")
@pytest.mark.parametrize("function", ["sigsoftmax", "gss(k=0.5)"])
def test_masked_classes(function: str) -> None:
    given = tensors(tokens=1)
    # A whole part, and a class of another one.
    given["bias"][: V // 2] = -torch.inf
    given["bias"][-3] = -torch.inf
    assert_as_the_reference(given, function)
    found, _ = log_probs(given, function, torch.float32, "triton")
    assert (found[:, : V // 2] == -torch.inf).all()
    assert found[:, V // 2 : -3].isfinite().all()


@pytest.mark.usefixtures("_rows_in_parts")
@pytest.mark.parametrize("function", ["sigsoftmax", "gss(k=0.5)"])
def test_a_row_of_masked_classes_and_one_that_is_no_number(function: str) -> None:
    given = tensors()
    given["hidden"][1, 0] = torch.nan
    found, _ = log_probs(given, function, torch.float32, "triton")
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()
    given["bias"].fill_(-torch.inf)
    found, _ = log_probs(given, function, torch.float32, "triton")
    expected, _ = log_probs(given, function, torch.float32, "reference")
    assert found.isnan().all()
    assert expected.isnan().all()


@pytest.mark.usefixtures("_rows_in_parts")
@pytest.mark.parametrize("components", [1, 2, 7])
def test_any_number_of_components(components: int) -> None:
    assert_as_the_reference(tensors(components=components), "sigsoftmax")


def test_too_many_components_are_refused(monkeypatch: pytest.MonkeyPatch, computed: list[int]) -> None:
    monkeypatch.setattr(priors, "MOST_COMPONENTS", 2)
    log_probs(tensors(), "softmax", torch.float32, "triton", chunk_bytes=12345)
    assert "not triton, values by kernels: 3 components exceed its 2" in str(sigsoftmax.explain())
    sigsoftmax.log_probs(torch.randn(3, V, device=DEVICE), backend="triton")
    assert "not triton, values by kernels: only those of a mixture have a kernel" in str(sigsoftmax.explain())
    assert not computed


def test_learned_parameters_of_both_functions() -> None:
    given = tensors()
    k = torch.tensor(0.4, device=DEVICE)
    found, _ = log_probs(given, OutputFunction("gss", k=k), torch.float32, "triton")
    exact, _ = log_probs(given, OutputFunction("gss", k=k.double()), torch.float64, "reference")
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_no_tokens() -> None:
    found, log_normalizer = log_probs(tensors(tokens=0), "softmax", torch.float32, "triton")
    assert found.shape == (0, V)
    assert log_normalizer.shape == (0, K)


@pytest.mark.usefixtures("_rows_in_parts")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_its_logits(dtype: torch.dtype) -> None:
    given = {name: t.to(dtype).float() for name, t in tensors(1.0, tokens=1).items()}
    with torch.autocast(DEVICE.type, dtype):
        found, log_normalizer = log_probs(given, "sigsoftmax", torch.float32, "triton")
    assert found.dtype == log_normalizer.dtype == torch.float32
    rounded = torch.nn.functional.linear(given["hidden"].to(dtype), given["weight"].to(dtype), given["bias"].to(dtype))
    phi = OutputFunction("sigsoftmax").phi(rounded.double())
    prior = torch.log_softmax(OutputFunction("sigsoftmax").phi(given["prior"].double()), -1)
    exact = torch.logsumexp(prior.unsqueeze(-1) + torch.log_softmax(phi, -1), 1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_normalizer.double(), torch.logsumexp(phi, -1), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_reference() -> None:
    given = tensors()
    by_log_p = torch.randn(N, V, device=DEVICE)

    def gradients(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves = {name: t.to(dtype).requires_grad_() for name, t in given.items()}
        found, _ = log_probs(leaves, "sigsoftmax", dtype, backend)
        return [g.double() for g in torch.autograd.grad(found, list(leaves.values()), by_log_p.to(dtype))]

    found, exact = gradients(torch.float32, "triton"), gradients(torch.float64, "reference")
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
