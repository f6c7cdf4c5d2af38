"""Fixtures that tests of patched models share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone, as DDP and FSDP need one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
