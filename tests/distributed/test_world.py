"""Joining processes, and what the others do when one is lost: they stop with a message, in bounded time."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import end, start
from torch.nn.parallel import DistributedDataParallel

from sigsoftmax import OutputLayer, distributed

ROOT = Path(__file__).parents[2]
V, D = 30, 8
SILENCE_S = 4.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def lose_a_rank(rank: int, size: int, port: int, folder: str, how: str, lost: int) -> None:
    """Train until the rank ``lost`` dies or falls silent; what the others say goes to files."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.stderr = (Path(folder) / f"{rank}.txt").open("w", encoding="utf-8")
    torch.set_num_threads(1)
    with distributed.processes(timeout_s=SILENCE_S) as world:
        torch.manual_seed(0)
        hidden, target = torch.randn(6, D), torch.randint(V, (6,))
        layer = OutputLayer(D, V)
        shards = distributed.ClassShards.even(V)
        weight = layer.weight.detach()[shards.own].clone().requires_grad_()
        wrapped = DistributedDataParallel(torch.nn.Linear(D, V)) if how == "killed under DDP" else None
        for step in range(1000):
            if world.rank == lost and step == 2:
                if how == "raising":
                    raise OSError("the disk is full")
                os.kill(os.getpid(), signal.SIGSTOP if how == "silent" else signal.SIGKILL)
            if wrapped is not None:
                wrapped(hidden).sum().backward()
            else:
                distributed.linear_cross_entropy(hidden, weight, target, function="softmax", shards=shards).backward()


@pytest.mark.parametrize(
    ("how", "lost"), [("killed", 0), ("killed", 1), ("killed under DDP", 1), ("raising", 1), ("silent", 1)]
)
def test_the_others_stop_with_a_message(how: str, lost: int, tmp_path: Path) -> None:
    size = 3
    processes = start(lose_a_rank, size, free_port(), str(tmp_path), how, lost)
    others = [process for rank, process in enumerate(processes) if rank != lost]
    began = time.monotonic()
    codes = end(others, 60.0)
    took = time.monotonic() - began
    # One that was stopped by a signal does not end by itself.
    end([processes[lost]], 0.0 if how == "silent" else 10.0)
    assert all(code not in (None, 0) for code in codes), f"exit codes {codes}; None had to be killed"
    for rank in range(size):
        said = (tmp_path / f"{rank}.txt").read_text(encoding="utf-8")
        if rank != lost:
            last = [line for line in said.splitlines() if line.strip()][-1]
            assert "LostRankError" in last, said
            assert re.search(rf"rank {rank} of {size} stops.*has died, has raised an error, or did not come", last)
    assert took < 60.0
    if how == "raising":
        assert "the disk is full" in (tmp_path / f"{lost}.txt").read_text(encoding="utf-8")


def test_a_world_of_one_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    hidden, target = torch.randn(6, D), torch.randint(V, (6,))
    layer = OutputLayer(D, V)
    with distributed.processes() as world:
        assert (world.rank, world.size, world.is_first) == (0, 1, True)
        loss = distributed.linear_cross_entropy(
            hidden.to(world.device),
            layer.weight.to(world.device),
            target.to(world.device),
            function="sigsoftmax",
            linear_bias=layer.bias,
        )
        torch.testing.assert_close(loss, layer.loss(hidden, target))
        with pytest.raises(ValueError, match="initialised already"), distributed.processes():
            pass
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="timeout_s must be"), distributed.processes(timeout_s=0.0):
        pass


def test_errors_of_the_program_keep_their_type() -> None:
    with pytest.raises(KeyError), distributed.processes():
        raise KeyError("not an exchange")
    assert not dist.is_initialized(), "and one process can try again"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_calls_the_loss_uncompiled() -> None:
    linear = torch.nn.Linear(D, D)
    weight, hidden, target = torch.randn(V, D, requires_grad=True), torch.randn(6, D), torch.randint(V, (6,))

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        return 2.0 * distributed.linear_cross_entropy(linear(hidden), weight, target, function="sigsoftmax")

    with distributed.processes():
        expected, found = loss(hidden), torch.compile(loss, backend="aot_eager")(hidden)
        torch.testing.assert_close(found, expected)
        (wanted,) = torch.autograd.grad(expected, weight)
        torch.testing.assert_close(torch.autograd.grad(found, weight)[0], wanted)


@pytest.mark.slow
def test_the_example_runs_under_torchrun() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*launcher, "examples/vocabulary_parallel.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ranks: 2" in result.stdout
