"""DDP and the vocabulary over processes on a GPU: a group of one process, joined by NCCL.

One process cannot show that ranks agree, which the tests with gloo do; it shows that the kernels' gradients pass
through DDP's buckets and NCCL's streams as torch's own do.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.distributed.test_accumulation import K, accumulated, batches, made
from torch.nn.parallel import DistributedDataParallel

from sigsoftmax import distributed, linear_cross_entropy

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not dist.is_nccl_available():
    pytest.skip("torch has no NCCL here", allow_module_level=True)
pytest.importorskip("triton", reason="the package triton is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def _one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    yield
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("components", [0, K], ids=["linear", "mixture"])
def test_ddp_sums_what_plain_torch_sums(components: int) -> None:
    data = batches("cuda")
    alone = accumulated(made(components, "cuda"), data, exchanges_last=False)
    # In a function's scope: DDP waits forever if it is freed after its process group.
    found = accumulated(DistributedDataParallel(made(components, "cuda")), data, exchanges_last=True)
    plain = accumulated(made(components, "cuda", is_plain=True), data, exchanges_last=False)
    assert found.keys() == alone.keys() == plain.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, alone[name]), f"{name}: DDP changed it"
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("_one_process")
def test_a_vocabulary_in_one_shard_gives_the_whole_loss() -> None:
    hidden = torch.randn(40, 16, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(333, 16, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(333, (40,), device="cuda")
    whole = linear_cross_entropy(hidden, weight, target, function="sigsoftmax")
    expected = torch.autograd.grad(whole, [hidden, weight])
    shards = distributed.ClassShards.even(333)
    one = distributed.linear_cross_entropy(hidden, weight, target, function="sigsoftmax", shards=shards)
    torch.testing.assert_close(one, whole, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(one, [hidden, weight]), expected, strict=True):
        assert (a.double() - b.double()).norm() <= 2.0**-8 * b.double().norm()
