"""The GPU benchmark: the gradients it takes for true, its inputs, its records, and its cases on a CPU at tiny sizes."""

import os
import subprocess
import sys
from pathlib import Path

import gpu
import gpu_models
import gpu_problems
import pytest
import torch
from gpu_machine import Machine
from gpu_problems import (
    Implementation,
    Problem,
    exact_gradients,
    linear_problem,
    logits_problem,
    mixture_problem,
    relative_errors,
    torch_gradients,
)
from measuring import RECORDS, Measurement
from torch.nn import functional as F

from sigsoftmax.records import read

ROOT = Path(__file__).parents[2]
N, K, D, V = 7, 3, 5, 31
FUNCTIONS = ("softmax", "sigsoftmax")


def problems(dtype: torch.dtype) -> dict[str, Problem]:
    return {
        "logits": logits_problem("cpu", N, V, deviation=3.0),
        "linear": linear_problem("cpu", N, D, V, dtype=dtype, product_dtype=dtype, has_bias=True),
        "mixture": mixture_problem("cpu", N, K, D, V, dtype=dtype, has_bias=True),
    }


def plainly(problem: Problem, function: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """By autograd through all of it at once, logits rounded to ``dtype``, the arithmetic in float32 at least."""
    leaves = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in problem.leaves.items()}
    if problem.weight is None:
        logits = leaves["logits"]
    else:
        logits = F.linear(leaves["hidden"], leaves["weight"], leaves.get("bias"))
    wide = logits.to(torch.promote_types(dtype, torch.float32))
    log_g = wide + F.logsigmoid(wide) if function == "sigsoftmax" else wide
    if problem.prior is None:
        loss = F.cross_entropy(log_g, problem.target)
    else:
        prior = leaves["prior"].to(wide.dtype)
        shares = torch.softmax(prior + F.logsigmoid(prior) if function == "sigsoftmax" else prior, -1)
        mixed = (torch.softmax(log_g, -1) * shares.unsqueeze(-1)).sum(-2)
        loss = F.nll_loss(mixed.log(), problem.target)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.fixture
def _small_chunks(monkeypatch):
    monkeypatch.setattr(gpu_problems, "CHUNK_BYTES", 2 * K * V * 8)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["logits", "linear", "mixture"])
def test_the_truth_is_the_gradient_in_float64(name, function):
    problem = problems(torch.bfloat16)[name]
    found, expected = exact_gradients(problem, function), plainly(problem, function, torch.float64)
    assert found.keys() == expected.keys() == problem.leaves.keys()
    for key, gradient in found.items():
        assert gradient.dtype == torch.float64
        torch.testing.assert_close(gradient, expected[key], rtol=1e-10, atol=1e-13)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["logits", "linear", "mixture"])
def test_what_errors_are_relative_to_is_plain_torch(name, function):
    """Chunks change its memory, not its result: it has no sums over chunks."""
    problem = problems(torch.float32)[name]
    dtype = problem.product_dtype
    found, expected = torch_gradients(problem, function), plainly(problem, function, dtype)
    for key, gradient in found.items():
        assert gradient.dtype == problem.leaves[key].dtype
        tolerance = 4.0 * torch.finfo(dtype).eps
        torch.testing.assert_close(gradient, expected[key].to(gradient.dtype), rtol=tolerance, atol=tolerance)


def test_errors_are_relative_and_tell_what_is_off():
    def loss(p: Problem) -> torch.Tensor:
        return F.cross_entropy(F.linear(p.hidden, p.weight).float(), p.target)

    def off(p: Problem) -> torch.Tensor:
        # The gradient of the weight alone is a tenth too large.
        return loss(p) + 0.1 * F.cross_entropy(F.linear(p.hidden.detach(), p.weight).float(), p.target)

    kinds = {"deviation 1": lambda: linear_problem("cpu", N, D, V)}
    losses = {"plain": Implementation("softmax", loss), "off": Implementation("softmax", off)}
    found = relative_errors(losses, kinds)
    assert list(found["plain"]) == ["hidden, deviation 1", "weight, deviation 1"]
    assert found["plain"]["weight, deviation 1"] == pytest.approx(1.0, rel=0.2)
    assert found["off"]["hidden, deviation 1"] == pytest.approx(1.0, rel=0.2)
    assert found["off"]["weight, deviation 1"] > 10.0


@pytest.mark.parametrize("deviation", [1.0, 3.0])
def test_logits_have_the_deviation_that_is_asked_for(deviation):
    linear = linear_problem("cpu", 200, 64, 300, deviation=deviation, dtype=torch.float32)
    mixture = mixture_problem("cpu", 100, 3, 64, 300, deviation=deviation, dtype=torch.float32)
    for problem in (linear, mixture):
        logits = F.linear(problem.hidden, problem.weight).detach()
        assert float(logits.std()) == pytest.approx(deviation, rel=0.05)
    logits = logits_problem("cpu", 200, 300, deviation=deviation).hidden.detach().float()
    assert float(logits.std()) == pytest.approx(deviation, rel=0.05)


def test_peaked_logits_have_a_class_with_most_of_the_mass():
    classes = 20_000
    linear = linear_problem("cpu", 40, 512, classes, peaked=True, dtype=torch.float32)
    given = logits_problem("cpu", 40, classes, peaked=True)
    for problem, logits in ((linear, F.linear(linear.hidden, linear.weight)), (given, given.hidden.float())):
        best = torch.softmax(logits.detach(), -1).amax(-1)
        assert 0.8 < float(best.mean()) < 0.999
        is_best = logits.argmax(-1) == problem.target
        assert 0.5 < float(is_best.float().mean()) < 0.95


def run_gpu(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)


def assert_written(result: subprocess.CompletedProcess[str], out: Path) -> set[str]:
    assert result.returncode == 0, result.stdout + result.stderr
    written = [record.payload_as(Measurement) for record in read(out)]
    assert all(m.case in result.stdout and m.implementation in result.stdout for m in written)
    assert {m.suite for m in written} == {"gpu"}
    return {m.case for m in written}


@pytest.mark.thorough
def test_some_cases_on_a_cpu(tmp_path):
    before = (RECORDS / "gpu.jsonl").read_bytes()
    out = tmp_path / "gpu.jsonl"
    labels = ("beside sigsoftmax", "growth logits", "decoding")
    result = run_gpu("--smoke", *(word for label in labels for word in ("--only", label)), "--out", str(out))
    assert len(assert_written(result, out)) == 3
    assert (RECORDS / "gpu.jsonl").read_bytes() == before


@pytest.mark.slow
def test_every_case_on_a_cpu(tmp_path):
    out = tmp_path / "gpu.jsonl"
    result = run_gpu("--smoke", "--out", str(out))
    assert len(assert_written(result, out)) == 22
    assert "failed: none" in result.stdout


@pytest.mark.parametrize(("most", "found"), [(0, 0), (1, 1), (5, 5), (8, 8), (100, 96), (900, 512)])
def test_the_largest_batch_is_found_by_halving(most, found):
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most

    assert gpu_models.largest_fitting(fits, 512) == found
    assert len(tried) == len(set(tried)) <= 13


def test_a_case_that_fails_does_not_end_the_run(capsys):
    def fails() -> list[Measurement]:
        raise RuntimeError("out of memory")

    assert gpu.run("this one", fails, Machine("cpu")) == []
    told = capsys.readouterr()
    assert "(this one FAILED: " in told.out
    assert "out of memory" in told.err


def test_every_target_of_the_full_sizes_can_be_judged():
    """Targets are checked when a case is made; at full size that would be too late."""
    from sigsoftmax.records import targets

    small = gpu.small_mixture("TF32", (1, 1, 1, 1), "<= 1.5 ms")
    large = gpu.large_mixture((1, 1, 1, 1), (1, 1), "<= 300 MiB", "<= 1.2x", has_plain=False)
    for mixture in (small, large):
        named = {name.removeprefix("ours MoSS, ").removesuffix(", in a CUDA graph") for name in mixture.targets}
        assert named <= mixture.ways.keys()
    for named in (*gpu.LINEAR_TARGETS.values(), small.targets, large.targets):
        for text in named.values():
            assert targets.clauses(text)


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as ended:
        gpu.main(options)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_command_says_what_it_needs_and_knows(capsys):
    assert "the labels are: logits, logits device alone" in refused(capsys, "--list", "--only", "nonsense")
    assert "--rounds must be at least 6, got 2" in refused(capsys, "--rounds", "2")
    if not torch.cuda.is_available():
        assert "--smoke needs none" in refused(capsys)
    assert gpu.main(["--list", "--only", "mixture"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "mixture 10000 float32"
