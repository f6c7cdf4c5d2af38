"""Every kernel compiles for an H100 or H200, with no GPU present: no spilled registers, loads as wide as can be.

What is compiled is what is launched: the routines run on tensors without data, their launches are recorded, and each
becomes a signature as Triton itself would derive it.

Shapes: R rows, V classes.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.problems import log_probs_problem_of, problem_of
from torch import Tensor

from sigsoftmax import OutputFunction
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Refusal

triton = pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets kernels", allow_module_level=True)

from kernel_launches import TARGET, Launch, Recorder, assembler_report, signature  # noqa: E402 - it needs triton

R, V = 64, 128_256

MOST_SPILLED = 64
"""Bytes a thread may store and load again: a few scalars of a row, where every array of a tile is 16 or 32 bytes."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    from sigsoftmax.backends import triton as kernels

    recorded: list[Launch] = []
    names = [module.name for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    for module in map(importlib.import_module, names):
        for name, value in vars(module).copy().items():
            if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Recorder(value, recorded))
    return recorded


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile anew, and leave nothing behind."""
    with triton.knobs.cache.scope():
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        yield


def compiled(launch: Launch) -> Any:
    from triton.compiler import ASTSource

    return triton.compile(ASTSource(launch.kernel, *signature(launch)), target=TARGET, options=launch.options)


def spilled_bytes(kernel: Any, folder: Path) -> int:
    """The assembler's report on the kernel's PTX."""
    report = assembler_report(kernel.asm["ptx"], folder)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert spills, report
    return sum(map(int, spills))


def load_widths(kernel: Any) -> set[int]:
    """Bytes that a thread loads from global memory at once."""
    loads = re.findall(r"ld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfu](\d+)\s", kernel.asm["ptx"])
    return {int(count or 1) * int(bits) // 8 for count, bits in loads}


def without_data(*shape: int, dtype: torch.dtype = torch.float32, learned: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=learned)


def row_launches(
    launches: list[Launch],
    function: OutputFunction,
    dtype: torch.dtype,
    *,
    classes: int = V,
    index: bool = True,
    dense: int = 0,
    z_slope: bool = False,
    entropy: bool = False,
    learns: bool = False,
    stats: bool = True,
    gradient: bool = True,
) -> list[Launch]:
    from sigsoftmax.backends.triton.logits_kernels import LogitsKernels
    from sigsoftmax.contract.rows import RowCoefficients, RowStats, RowTargets

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    logits = torch.empty(R, classes, dtype=dtype, device="meta")
    routines = LogitsKernels(function.form, function.arguments(classes), logits, learns)
    index_R = torch.empty(R, dtype=torch.int64, device="meta") if index else None
    weights = [None, numbers(classes), numbers(R, classes)][dense]
    targets = RowTargets(index_R, weights, entropy=entropy)
    by = RowCoefficients(numbers(R), numbers(R) if index else None, numbers(R) if dense else None, None)
    if stats and gradient:
        slope = numbers(R) if z_slope else None
        routines.stats_and_gradient(logits, targets, by, slope, torch.empty_like(logits))
    elif stats:
        routines.stats(logits, targets)
    else:
        known = RowStats(*(numbers(R) for _ in range(3)), numbers(R) if index else None, None, None, None)
        routines.gradient(logits, targets, known, by, logits)
    return launches


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SOFTMAX = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "z-loss": {"dtype": torch.bfloat16, "z_slope": True},
    "stats": {"dtype": torch.bfloat16, "gradient": False},
    "gradient": {"dtype": torch.bfloat16, "stats": False},
    "few classes": {"dtype": torch.bfloat16, "classes": 10_000},
}


@pytest.mark.grid
@pytest.mark.parametrize("name", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("options", SOFTMAX.values(), ids=SOFTMAX)
def test_the_softmax_kernel(options: dict[str, Any], name: str, launches: list[Launch], tmp_path: Path) -> None:
    (launch,) = row_launches(launches, OutputFunction(name), **options)
    assert launch.kernel.__name__ == "softmax_logits_kernel"
    assert "LANES" in launch.values
    kernel = compiled(launch)
    assert spilled_bytes(kernel, tmp_path) <= MOST_SPILLED
    # 128 bits a thread, or its share of a tile if that is less.
    share = launch.values["LANES"] // (32 * launch.options["num_warps"]) * options["dtype"].itemsize
    assert min(16, share) in load_widths(kernel)
    assert min(16, share) >= 8


def test_the_softmax_kernel_for_rows_that_are_not_aligned(launches: list[Launch], tmp_path: Path) -> None:
    (launch,) = row_launches(launches, OutputFunction("sigsoftmax"), torch.bfloat16, classes=50_257)
    assert spilled_bytes(compiled(launch), tmp_path) <= MOST_SPILLED


ALL = {"dense": 1, "z_slope": True, "entropy": True}
FORMS = {
    "relu": ("relu", {"dtype": torch.bfloat16, **ALL}),
    "softcap": ("softcap", {"dtype": torch.float16, **ALL}),
    "gss": ("gss(k=0.2)", {"dtype": torch.float32, **ALL}),
    "plain": ("gss(k=0.2)", {"dtype": torch.bfloat16}),
    "stats": ("gss(k=0.2)", {"dtype": torch.bfloat16, "gradient": False}),
    "gradient": ("gss(k=0.2)", {"dtype": torch.bfloat16, "stats": False}),
    "probabilities": ("sigsoftmax", {"dtype": torch.bfloat16, "index": False, "dense": 2}),
}


@pytest.mark.parametrize(("function", "options"), FORMS.values(), ids=FORMS)
def test_the_form_kernel(function: str, options: dict[str, Any], launches: list[Launch], tmp_path: Path) -> None:
    (launch,) = row_launches(launches, OutputFunction.parse(function), **options)
    assert "FORM" in launch.values
    assert spilled_bytes(compiled(launch), tmp_path) <= MOST_SPILLED


@pytest.mark.parametrize("dense", [0, 1], ids=["index", "dense"])
@pytest.mark.parametrize("per_class", [False, True], ids=["scalar", "per class"])
def test_the_kernels_for_learned_arguments(per_class: bool, dense: int, launches: list[Launch], tmp_path: Path) -> None:
    k = torch.empty((), device="meta")
    c = torch.empty(V if per_class else (), device="meta")
    row_launches(launches, OutputFunction("gss", k=k, c=c), torch.bfloat16, dense=dense, z_slope=True, learns=True)
    names = [launch.kernel.__name__ for launch in launches]
    assert names == (
        ["form_logits_kernel", "per_class_kernel", "form_logits_kernel"] if per_class else ["form_logits_kernel"]
    )
    for launch in launches:
        assert spilled_bytes(compiled(launch), tmp_path) <= MOST_SPILLED


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_the_kernels_around_the_rows(is_weighted: bool, launches: list[Launch], tmp_path: Path) -> None:
    from sigsoftmax.backends.triton import fused_tokens

    operands = Operands(
        input=without_data(R, V, dtype=torch.bfloat16, learned=True),
        target=without_data(R, dtype=torch.int64),
        class_weight=without_data(V) if is_weighted else None,
        token_weights=without_data(R) if is_weighted else None,
    )
    options: dict[str, Any] = {"z_loss": 0.1, "reduction": "sum"} if is_weighted else {}
    problem = problem_of(operands, **options)
    assert fused_tokens.why_refused(problem) is None
    with torch.no_grad():
        fused_tokens.FusedTokensLoss(problem).compute(operands)
    assert [launch.kernel.__name__ for launch in launches] == [
        "prepare_tokens_kernel",
        "softmax_logits_kernel",
        "finish_tokens_kernel",
    ]
    for launch in launches:
        assert spilled_bytes(compiled(launch), tmp_path) <= MOST_SPILLED


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_the_kernels_of_a_mixture(is_weighted: bool, launches: list[Launch], tmp_path: Path) -> None:
    from sigsoftmax.backends.triton import fused_tokens

    tokens, components, features, classes = 64, 15, 8, 1024
    operands = Operands(
        input=without_data(tokens, components, features, dtype=torch.bfloat16, learned=True),
        weight=without_data(classes, features, dtype=torch.bfloat16, learned=True),
        prior_logits=without_data(tokens, components, learned=True),
        target=without_data(tokens, dtype=torch.int64),
        class_weight=without_data(classes) if is_weighted else None,
        token_weights=without_data(tokens) if is_weighted else None,
    )
    options: dict[str, Any] = {"z_loss": 0.1, "floor": 1e-8, "reduction": "sum"} if is_weighted else {}
    problem = problem_of(operands, chunk_bytes=2**30, **options)
    assert fused_tokens.why_refused(problem) is None
    with torch.no_grad():
        fused_tokens.FusedTokensLoss(problem).compute(operands)
    names = ["log_prior", "prepare_tokens", "softmax_logits", "mixture", "softmax_logits", "total", "log_prior"]
    assert [launch.kernel.__name__ for launch in launches] == [f"{name}_kernel" for name in names]
    for launch in launches:
        assert spilled_bytes(compiled(launch), tmp_path) <= MOST_SPILLED


@pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("classes", [10_000, 128_256])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_the_kernel_of_few_tokens(
    z_loss: float, smoothing: float, classes: int, function: str, launches: list[Launch], tmp_path: Path
) -> None:
    from sigsoftmax.backends.triton import fused_loss

    operands = Operands(
        input=without_data(1400, 8, dtype=torch.bfloat16, learned=True),
        weight=without_data(classes, 8, dtype=torch.bfloat16),
        target=without_data(1400, dtype=torch.int64),
    )
    options: dict[str, Any] = {"z_loss": z_loss, "label_smoothing": smoothing, "chunk_bytes": 2**30}
    path = fused_loss.lower(problem_of(operands, function, **options))
    assert not isinstance(path, Refusal)
    with torch.no_grad():
        path.compute(operands)
    (launch,) = launches
    kernel = compiled(launch)
    assert spilled_bytes(kernel, tmp_path) <= MOST_SPILLED
    assert 16 in load_widths(kernel)


@pytest.mark.grid
@pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [50_304, 128_256])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_the_kernels_of_many_given_logits(
    z_loss: float, classes: int, dtype: torch.dtype, function: str, launches: list[Launch], tmp_path: Path
) -> None:
    from sigsoftmax.backends.triton import fused_loss

    operands = Operands(
        input=without_data(8192, classes, dtype=dtype, learned=True), target=without_data(8192, dtype=torch.int64)
    )
    path = fused_loss.lower(problem_of(operands, function, z_loss=z_loss, chunk_bytes=1))
    assert not isinstance(path, Refusal)
    with torch.no_grad():
        path.compute(operands)
    assert [launch.kernel.__name__ for launch in launches] == ["pipelined_kernel", "finish_kernel"]
    # The memory of what threads spill would be in the cache where rows are to be.
    assert [spilled_bytes(compiled(launch), tmp_path) for launch in launches] == [0, 0]


def test_the_kernels_of_a_mixture_over_few_tokens(launches: list[Launch], tmp_path: Path) -> None:
    from sigsoftmax.backends.triton import fused_mixture

    shapes = ((64, 15, 8), (64, 15), (1024, 8), (1024,))
    hidden, prior, weight, bias = (without_data(*shape, dtype=torch.bfloat16, learned=True) for shape in shapes)
    operands = Operands(hidden, weight, bias, prior, without_data(64, dtype=torch.int64))
    options: dict[str, Any] = {"z_loss": 0.1, "floor": 1e-8, "chunk_bytes": 2**20, "weight_gradient": "buffered"}
    path = fused_mixture.lower(problem_of(operands, **options))
    assert not isinstance(path, Refusal)
    with torch.no_grad():
        path.compute(operands)
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["softmax_logits_kernel", "fused_mixture_kernel", "softmax_logits_kernel"] * 2
    for launch in launches:
        assert spilled_bytes(compiled(launch), tmp_path) <= MOST_SPILLED


LOG_PROBS = {
    "one token": {"function": "sigsoftmax", "tokens": 1},
    "softmax": {"function": "softmax", "tokens": 64},
    "many components": {"function": "sigsoftmax", "tokens": 1, "components": 256},
    "floor": {"function": "gss(k=0.2)", "tokens": 64, "floor": 1e-8},
    "float32": {"function": "sigsoftmax", "tokens": 64, "dtype": torch.float32},
    "relu": {"function": "relu", "tokens": 1},
    "softcap": {"function": "softcap", "tokens": 1, "components": 15},
}


@pytest.mark.parametrize("case", LOG_PROBS.values(), ids=LOG_PROBS)
def test_the_kernels_of_a_mixtures_log_probabilities(
    case: dict[str, Any], launches: list[Launch], tmp_path: Path
) -> None:
    from sigsoftmax.backends.triton.chunk_loop import MixtureLogProbs, why_log_probs_refused

    tokens, components, features = case["tokens"], case.get("components", 4), 8
    dtype = case.get("dtype", torch.bfloat16)
    operands = Operands(
        input=without_data(tokens, components, features, dtype=dtype),
        weight=without_data(V, features, dtype=dtype),
        prior_logits=without_data(tokens, components),
    )
    problem = log_probs_problem_of(
        operands, case["function"], floor=case.get("floor", 0.0), extras=("log_normalizer",), chunk_bytes=2**30
    )
    assert why_log_probs_refused(problem) is None
    MixtureLogProbs(problem).compute(operands)
    prior, rows, mix = launches
    assert prior.kernel.__name__ == "log_prior_kernel"
    assert rows.kernel.__name__ in ("softmax_logits_kernel", "form_logits_kernel")
    assert mix.kernel.__name__ == "mixture_log_probs_kernel"
    # A single token is four rows, of which each is reduced by several programs.
    assert mix.values["PARTS"] == (8 if tokens * components < 8 else 4 if tokens * components < 32 else 1)
    for launch in launches:
        assert spilled_bytes(compiled(launch), tmp_path) <= MOST_SPILLED
    assert max(load_widths(compiled(mix))) == 16


@pytest.mark.parametrize("function", ["sigsoftmax", "gss(k=0.2)", "relu"])
def test_the_kernels_of_vocabulary_blocks(function: str, launches: list[Launch], tmp_path: Path) -> None:
    from sigsoftmax.backends.chunked.logits import LinearLogits
    from sigsoftmax.backends.chunked.vocabulary_blocks import VocabularyBlocks
    from sigsoftmax.backends.triton.logits_kernels import LogitsKernels
    from sigsoftmax.backends.triton.vocabulary_blocks import reduce_blocks

    member, index = OutputFunction.parse(function), without_data(R, dtype=torch.int64)
    hidden, weight = (without_data(*shape, dtype=torch.bfloat16, learned=True) for shape in ((R, 8), (1000, 8)))
    operands = Operands(hidden, weight, target=index)
    provider = LinearLogits(problem_of(operands, chunk_bytes=R * 500 * 2, weight_gradient="exact"), operands)
    kernels = LogitsKernels(member.form, member.arguments(), provider.logits_like)
    with torch.no_grad():
        reduce_blocks(kernels, VocabularyBlocks(provider), index, torch.empty(6, R, device="meta"))
    names = [launch.kernel.__name__ for launch in launches]
    rows = "softmax_logits_kernel" if function == "sigsoftmax" else "form_logits_kernel"
    assert names == [rows, *[rows, "add_block_kernel"] * (len(names) // 2)]
    assert "add_block_kernel" in names
    assert spilled_bytes(compiled(launches[-1]), tmp_path) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_of_column_sums(dtype: torch.dtype, launches: list[Launch], tmp_path: Path) -> None:
    from sigsoftmax.backends.triton import per_class_gradients

    per_class_gradients.add_by_kernel(
        torch.empty(1024, device="meta"), torch.empty(R, 1024, dtype=dtype, device="meta"), is_first=False
    )
    assert [launch.kernel.__name__ for launch in launches] == ["column_sums_kernel"] * 2
    kernel = compiled(launches[0])
    assert spilled_bytes(kernel, tmp_path) == 0
    assert 16 in load_widths(kernel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_scaling_kernel(dtype: torch.dtype, launches: list[Launch], tmp_path: Path) -> None:
    from sigsoftmax.backends.triton import scaling

    scale = scaling.Scaling([2**20], torch.device("meta"))
    scale([torch.empty(2**20, dtype=dtype, device="meta")], torch.empty((), device="meta"))
    (launch,) = launches
    kernel = compiled(launch)
    assert spilled_bytes(kernel, tmp_path) <= MOST_SPILLED
    assert 16 in load_widths(kernel)
