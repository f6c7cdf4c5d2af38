"""Shapes, dtypes and options of what users pass in: those of another kind are refused by their name.

Further errors are in ``test_validation``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sigsoftmax


def _call(name: str, tensor: Tensor, **options: Any) -> Any:
    y = torch.zeros(tensor.shape[0] if not tensor.is_nested else 1, dtype=torch.int64, device=tensor.device)
    if name == "log_probs":
        return sigsoftmax.log_probs(tensor, function="sigsoftmax", **options)
    if name == "cross_entropy":
        return sigsoftmax.cross_entropy(tensor, y, function="sigsoftmax", **options)
    weight = torch.ones(5, 7, device=tensor.device)
    return sigsoftmax.linear_cross_entropy(tensor, weight, y, function="sigsoftmax", **options)


every_function = pytest.mark.parametrize("name", ["log_probs", "cross_entropy", "linear_cross_entropy"])


@every_function
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda z: z.to_sparse(), r"dense tensor, got one of layout torch.sparse_coo; convert it with .to_dense\(\)"),
        (lambda z: z.to_sparse_csr(), "layout torch.sparse_csr"),
        (lambda z: z.to_mkldnn(), "layout torch._mkldnn"),
        (lambda z: torch.nested.nested_tensor([z[:1], z[1:]], layout=torch.jagged), r"nested one; pass its values\(\)"),
        (lambda z: z.to(torch.float8_e4m3fn), "one of float16, bfloat16, float32, float64, got torch.float8_e4m3fn"),
    ],
    ids=["coo", "csr", "mkldnn", "nested", "float8"],
)
@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors).*")
def test_tensors_of_another_kind_are_refused(name: str, make: Callable[[Tensor], Tensor], message: str) -> None:
    if "mkldnn" in message and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    with pytest.raises(ValueError, match=message):
        _call(name, make(torch.randn(4, 7)))


@every_function
def test_meta_tensors_have_shapes_and_gradients(name: str) -> None:
    tensor = torch.empty(4, 7, device="meta", requires_grad=True)
    result = _call(name, tensor)
    assert result.device.type == "meta"
    assert result.shape == ((4, 7) if name == "log_probs" else ())
    result.sum().backward()
    assert tensor.grad.shape == (4, 7)


def test_a_mixture_of_meta_tensors() -> None:
    shapes = ((4, 2, 7), (4, 2), (5, 7))
    tensors = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    loss = sigsoftmax.mixture_cross_entropy(
        *tensors, torch.zeros(4, dtype=torch.int64, device="meta"), function="softmax"
    )
    loss.backward()
    assert [tensor.grad.shape for tensor in tensors] == [tensor.shape for tensor in tensors]


@pytest.mark.parametrize("dim", ["1", None, True, 1.0])
def test_a_dim_that_is_no_whole_number(dim: Any) -> None:
    with pytest.raises(ValueError, match=f"dim must be a whole number, got {dim!r}"):
        sigsoftmax.log_probs(torch.randn(2, 3), function="sigsoftmax", dim=dim)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("z_loss", None, "z_loss must be a number, got None"),
        ("z_loss", "much", "z_loss must be a number, got 'much'"),
        ("label_smoothing", None, "label_smoothing must be a number, got None"),
        ("ignore_index", None, "ignore_index must be a whole number, got None"),
        ("ignore_index", 1.5, "ignore_index must be a whole number, got 1.5"),
        ("ignore_index", True, "ignore_index must be a whole number, got True"),
        ("extras", 5, r"extras must be a sequence of names, like \('log_normalizer',\), got 5"),
    ],
)
@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_options_of_another_type(name: str, option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(name, torch.randn(4, 7), **{option: value})


def test_a_floor_that_is_no_number() -> None:
    inputs = torch.randn(4, 2, 7), torch.randn(4, 2), torch.randn(5, 7), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="floor must be a number, got None"):
        sigsoftmax.mixture_cross_entropy(*inputs, function="softmax", floor=None)
