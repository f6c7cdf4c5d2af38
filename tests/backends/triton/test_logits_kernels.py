"""The logits kernels against the reference formulas in float64.

One table of rows drives them: ordinary logits, logits far from 0, peaks, masks, and rows that the loss does not use.
An error is bounded by that of the reference formulas in plain torch, float32 on the same logits, times ``SLACK``, plus
a few roundings of the numbers that are added up. All memory that kernels should write is full of NaN beforehand.

Shapes: R rows, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from tests.backends.triton.device import DEVICE, IS_INTERPRETED
from tests.tables import LEAST, MEMBERS, Member, by_label
from torch import Tensor

from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.backends.triton import logits_kernels, scaling
from sigsoftmax.backends.triton.logits_kernels import LogitsKernels
from sigsoftmax.backends.triton.tuning import softmax_shape
from sigsoftmax.contract import normalizing
from sigsoftmax.contract.rows import FusedRowRoutines, RowCoefficients, RowRoutines, RowStats, RowTargets

pytestmark = pytest.mark.usefixtures("_fresh_memory_is_nan")

SLACK = 2.0
"""The most that an error may be relative to plain torch's."""
ROUNDINGS = 8.0
"""The number of roundings, of float32 or of the dtype of the result, that an error may have besides."""

EPS = torch.finfo(torch.float32).eps

STEEP = replace(by_label["softmax"], label="softmax(alpha=10)", parameters={"alpha": 10.0})
"""Its exponentials overflow where those of softmax do not."""
TABLE = [*(m for m in MEMBERS if m.registers is None), STEEP]
every_member = pytest.mark.parametrize("member", TABLE, ids=str)
some_members = pytest.mark.parametrize(
    "member",
    [by_label[label] for label in ("softmax", "shifted(b=1.3)", "gss(k=0.5, c per class)", "relu", "softcap(c=5)")],
    ids=str,
)


@dataclass(frozen=True)
class Options:
    """The options of a call of the routines."""

    label: str
    is_fused: bool = True
    has_index: bool = True
    dense: str = ""
    """Weights over all classes: none, one "vector", or one for each row in a "matrix"."""
    has_z_slope: bool = False
    extras: bool = False
    learns: bool = False
    """Gradients of the member's arguments."""
    on_device: bool = False
    """Scalar arguments are read by the kernel, as learned ones are on a GPU."""

    def __str__(self) -> str:
        return self.label


PLAIN = Options("fused")
TWO_CALLS = Options("two calls", is_fused=False)
EVERYTHING = Options("everything", dense="vector", has_z_slope=True, extras=True, learns=True, on_device=True)
OPTIONS = [
    PLAIN,
    TWO_CALLS,
    Options("z-loss", has_z_slope=True),
    Options("smoothing", dense="vector"),
    Options("probabilities", has_index=False, dense="matrix", has_z_slope=True, learns=True),
    Options("extras, two calls", is_fused=False, dense="vector", extras=True),
    Options("learned, two calls", is_fused=False, learns=True, on_device=True),
    EVERYTHING,
]


@dataclass
class Problem:
    """Rows on the CPU with all that a call needs, in the dtypes that a loss would use."""

    member: Member
    logits: Tensor
    index: Tensor | None
    dense: Tensor | None
    z_slope: Tensor | None
    coefficients: RowCoefficients
    options: Options

    @property
    def used(self) -> Tensor:
        assert self.coefficients.unused is not None
        return ~self.coefficients.unused


@dataclass
class Results:
    """The results, on the CPU in float64."""

    stats: RowStats
    gradient: Tensor
    by_arguments: list[Tensor]


def hard_rows(num_classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(R, V) of logits, one row for each difficulty, and the rows that the loss does not use."""
    far = 1e4 if dtype == torch.float32 else 2e3
    last = num_classes - 1

    table = torch.randn(23, num_classes, dtype=torch.float64)
    table[1] *= 3.0
    table[2] -= 50.0
    table[3] += 50.0
    table[4] -= far
    table[5] += far
    table[6, 0] += 40.0
    table[7, last] += 60.0
    table[8, last] += 12.0
    table[9, last] -= 0.5 * far
    table[10, last] += far
    # Tiles that hold nothing, before others whose logits lie far from 0, or near it.
    table[11, :-9] = LEAST
    table[11] -= 40.0
    table[12, :-9] = LEAST
    table[13, ::2] = LEAST
    table[13, last] = 1.0
    table[14] = LEAST
    table[15] = math.nan
    table[16, last] = math.inf
    # A peak beyond the first tile, near enough to be summed with it.
    table[17, last] += 8.0
    table[17:19] -= far
    table[18, last] += 5.0
    # After empty tiles, logits whose exponentials, or their squares, are next to no float.
    table[19:21, :-9] = LEAST
    table[19] -= 43.5
    table[20] -= 87.0
    # The first tile left of the nonlinearity, the peak right of it: not the target, and the target.
    table[21:] -= 6.0
    table[21:, last] = 3.0
    return table.to(dtype), torch.tensor([15, 16])


def make_problem(member: Member, logits: Tensor, unused: Sequence[int] | Tensor, options: Options) -> Problem:
    count, classes = logits.shape
    # The other forms have nothing to learn.
    options = replace(options, learns=options.learns and member.make(classes).form.name == "logistic")
    is_unused = torch.zeros(count, dtype=torch.bool)
    is_unused[unused] = True

    def coefficient(sign: float) -> Tensor:
        return (sign * (0.5 + torch.rand(count))).masked_fill(is_unused, 0.0)

    index = torch.randint(classes, (count,))
    # Targets at both ends, and wherever the rows have their peaks.
    index[::3] = 0
    index[1::3] = classes - 1
    dense = None
    if options.dense:
        dense = torch.rand(classes) if options.dense == "vector" else torch.rand(count, classes)
    return Problem(
        member,
        logits,
        index if options.has_index else None,
        dense,
        coefficient(0.02) if options.has_z_slope else None,
        RowCoefficients(
            coefficient(1.0),
            coefficient(-1.0) if options.has_index else None,
            coefficient(-0.1) if options.dense else None,
            is_unused,
        ),
        options,
    )


def arguments_of(problem: Problem) -> list[Tensor]:
    classes = problem.logits.shape[-1]
    # Kernels take them in float32.
    return [a.detach().float().double() for a in problem.member.make(classes).arguments(classes)]


def by_reference(problem: Problem, dtype: torch.dtype) -> Results:
    """The reference formulas in float64, or in float32 on the logits' own dtype."""
    logits = problem.logits.to(dtype)

    def cast(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(torch.float64 if dtype == torch.float64 else torch.float32)

    form = problem.member.make(logits.shape[-1]).form
    routines = FormRows(form, arguments_of(problem), logits, problem.options.learns)
    targets = RowTargets(problem.index, cast(problem.dense), problem.options.extras, problem.options.extras)
    stats = routines.stats(logits, targets)
    by_normalizer = cast(problem.coefficients.normalizer)
    if problem.z_slope is not None:
        slope = cast(problem.z_slope) * (stats.offset + stats.normalizer)
        by_normalizer = by_normalizer + slope.masked_fill(~problem.used, 0.0)
    given = problem.coefficients
    coefficients = RowCoefficients(by_normalizer, cast(given.target), cast(given.dense), given.unused)
    out = torch.full_like(logits, math.nan)
    if logits.numel():
        routines.gradient(logits, targets, stats, coefficients, out)
    return results(routines, stats, out, routines.argument_gradients() if problem.options.learns else [])


def results(routines: RowRoutines, stats: RowStats, out: Tensor, by_arguments: Sequence[Tensor]) -> Results:
    """In float64, and what is said of targets no longer in units."""

    def wide(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.cpu().double()

    stats = RowStats(*map(wide, stats))
    target, dense = (None if t is None else t * float(routines.unit) for t in (stats.target, stats.dense))
    stats = stats._replace(target=target, dense=dense)
    return Results(stats, out.cpu().double(), [a.cpu().double() for a in by_arguments])


def to_device(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(DEVICE)


def in_wide_rows(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy whose rows lie apart, with NaN between them."""
    count, classes = values.shape
    chunk = torch.full((count, classes + 5), math.nan, dtype=dtype or values.dtype, device=DEVICE)
    chunk[:, :classes] = values.to(DEVICE)
    return chunk[:, :classes]


def assert_nothing_between_rows(values: Tensor) -> None:
    count, classes = values.shape
    between = values.as_strided((count, 5), values.stride(), values.storage_offset() + classes)
    assert between.isnan().all(), "written beyond the end of a row"


def by_kernels(problem: Problem, *, in_place: bool = False, out_dtype: torch.dtype | None = None) -> Results:
    """The routines under test, called as ``problem.options`` says."""
    options = problem.options
    logits = in_wide_rows(problem.logits)
    out = logits if in_place else in_wide_rows(torch.full(problem.logits.shape, math.nan), out_dtype or logits.dtype)
    arguments = [a.to(DEVICE, torch.float32) if options.on_device or a.ndim else a for a in arguments_of(problem)]
    routines = LogitsKernels(problem.member.make(logits.shape[-1]).form, arguments, logits, options.learns)
    assert isinstance(routines, FusedRowRoutines)
    z_slope = to_device(problem.z_slope)
    targets = RowTargets(to_device(problem.index), to_device(problem.dense), options.extras, options.extras)
    coefficients = RowCoefficients(*map(to_device, problem.coefficients))
    if options.is_fused:
        stats = routines.stats_and_gradient(logits, targets, coefficients, z_slope, out)
    else:
        assert z_slope is None, "with two calls z-loss is part of the coefficients"
        stats = routines.stats(logits, targets)
        routines.gradient(logits, targets, stats, coefficients, out)
    assert_nothing_between_rows(logits)
    assert_nothing_between_rows(out)
    return results(routines, stats, out, routines.argument_gradients() if options.learns else [])


def assert_within(name: str, found: Tensor, truth: Tensor, plain: Tensor, floor: Tensor) -> None:
    """Each row's error is at most SLACK times plain torch's, plus a floor; NaN and infinities must agree."""
    found, truth, plain = (t.unsqueeze(-1).flatten(1) for t in (found, truth, plain))
    is_number = truth.isfinite()
    same = torch.where(is_number, found.isfinite(), (found == truth) | (found.isnan() & truth.isnan()))
    where = (~same).nonzero()[:5].tolist()
    assert same.all(), f"{name}: {found[~same][:5].tolist()} for {truth[~same][:5].tolist()} at {where}"
    error, plain_error = ((t - truth).masked_fill(~is_number, 0.0).norm(dim=-1) for t in (found, plain))
    bound = SLACK * plain_error.nan_to_num(0.0, 0.0, 0.0) + floor
    excess = error / bound.clamp(min=1e-300)
    assert (error <= bound).all(), f"{name}: {excess.tolist()} of the bound {bound.tolist()}"


QUANTITIES: dict[str, Callable[[RowStats, Problem], Tensor | None]] = {
    "log normalizer": lambda stats, _: stats.offset + stats.normalizer,
    "log f": lambda stats, _: None if stats.target is None else stats.target - stats.normalizer,
    "sum of log f": lambda stats, problem: (
        None if stats.dense is None or problem.dense is None else stats.dense - problem.dense.sum(-1) * stats.normalizer
    ),
    "entropy": lambda stats, _: stats.entropy,
}
"""The numbers that losses make of the statistics; offsets are the backend's own."""


def assert_right(problem: Problem, found: Results, out_dtype: torch.dtype | None = None) -> None:
    truth, plain = by_reference(problem, torch.float64), by_reference(problem, problem.logits.dtype)
    used = problem.used
    for name, of in QUANTITIES.items():
        actual, exact, plainly = (of(r.stats, problem) for r in (found, truth, plain))
        assert (actual is None) == (exact is None), name
        if actual is not None and exact is not None and plainly is not None:
            # Kernels may sum relative to another class than the largest, e^20 below it.
            size = 4.0 + exact.abs() + (truth.stats.offset.abs() if name == "log normalizer" else 0.0)
            floor = ROUNDINGS * EPS * size.nan_to_num(4.0, 4.0, 4.0)
            assert_within(name, actual[used], exact[used], plainly[used], floor[used])
    if problem.options.extras:
        assert_argmax(problem, found)

    dtype = out_dtype or problem.logits.dtype
    assert (found.gradient[~used] == 0).all(), "the gradient of an unused row"
    floor = gradient_floor(problem, truth, dtype)
    assert_within("gradient", found.gradient[used], truth.gradient[used], plain.gradient[used], floor[used])
    floors = argument_floors(problem, truth) if found.by_arguments else []
    by_argument = zip(found.by_arguments, truth.by_arguments, plain.by_arguments, floors, strict=True)
    for i, (actual, exact, plainly, floor) in enumerate(by_argument):
        assert_within(f"argument {i}", actual[None], exact[None], plainly[None], floor)


def by_phi_sizes(problem: Problem, truth: Results) -> Tensor:
    """(R, V): the numbers that make up dL/dphi of every element, added by their sizes."""
    z = problem.logits.double()
    form = problem.member.make(z.shape[-1]).form
    size = problem.coefficients.normalizer.double().abs()
    if problem.z_slope is not None:
        size = size + (problem.z_slope * (truth.stats.offset + truth.stats.normalizer)).abs().nan_to_num(0.0, 0.0, 0.0)
    total = size[:, None] * normalizing.log_probs(z, form, arguments_of(problem)).exp().nan_to_num(0.0)
    if problem.index is not None and problem.coefficients.target is not None:
        total.scatter_add_(-1, problem.index[:, None], problem.coefficients.target.double().abs()[:, None])
    if problem.dense is not None and problem.coefficients.dense is not None:
        total += problem.coefficients.dense.double().abs()[:, None] * problem.dense
    return total


def gradient_floor(problem: Problem, truth: Results, dtype: torch.dtype) -> Tensor:
    """Roundings of what is added in float32, and one of the result."""
    z = problem.logits.double()
    slope = problem.member.make(z.shape[-1]).form.slope(z, *arguments_of(problem)).abs().nan_to_num(1.0)
    if not IS_INTERPRETED:
        # A GPU's exp loses the more digits the larger its argument is.
        slope *= 1.0 + z.abs().clamp(max=88.0).nan_to_num(0.0) / 16.0
    added = (by_phi_sizes(problem, truth) * slope).norm(dim=-1)
    info = torch.finfo(dtype)
    rounded = truth.gradient.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1) * info.eps
    underflow = info.smallest_normal * info.eps * math.sqrt(z.shape[-1])
    return ROUNDINGS * EPS * added + rounded + underflow


def argument_floors(problem: Problem, truth: Results) -> list[Tensor]:
    """Roundings of what is summed over rows and classes, which may cancel."""
    z = problem.logits.double()
    is_out = ~z.isfinite()
    peak = z.masked_fill(is_out, LEAST).amax(-1, keepdim=True).clamp(min=-1e30)
    form = problem.member.make(z.shape[-1]).form
    relative, offset = form.argument_slopes(torch.where(is_out, peak, z), peak, *arguments_of(problem))
    sizes = by_phi_sizes(problem, truth).masked_fill(is_out, 0.0)
    floors = []
    for argument, by_relative, by_offset in zip(arguments_of(problem), relative, offset, strict=True):
        summed = (sizes * (by_relative.abs() + by_offset.abs()).masked_fill(is_out, 0.0)).sum(0)
        floors.append(ROUNDINGS * EPS * (summed.norm() if argument.ndim else summed.sum()).view(1))
    return floors


def assert_argmax(problem: Problem, found: Results) -> None:
    """The class that is named has the largest phi, up to a rounding: members may tie."""
    z = problem.logits.double()
    form, arguments = problem.member.make(z.shape[-1]).form, arguments_of(problem)
    for row in problem.used.nonzero().flatten().tolist():
        if (z[row] == LEAST).all():
            continue
        peak = z[row].amax()
        relative, _ = form.relative(torch.where(z[row] == LEAST, peak, z[row]), peak, *arguments)
        relative = torch.where(z[row] == LEAST, z[row], relative)
        assert found.stats.argmax is not None
        best = relative[int(found.stats.argmax[row])]
        assert best >= relative.max() - 1e-5 * (1.0 + peak.abs()), f"argmax of row {row}"


@pytest.fixture(autouse=True)
def _scalars_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scalar on the CPU is a fixed number. Where the CPU is the device, let a float32 one be a learned one there."""
    if IS_INTERPRETED:
        original = logits_kernels.constant
        monkeypatch.setattr(logits_kernels, "constant", lambda a: original(a) if a.dtype == torch.float64 else None)


# The table


@pytest.mark.grid
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@every_member
def test_hard_rows(member: Member, options: Options) -> None:
    problem = make_problem(member, *hard_rows(301, torch.float32), options)
    assert_right(problem, by_kernels(problem))


@pytest.mark.grid
@pytest.mark.parametrize("options", [TWO_CALLS, EVERYTHING], ids=str)
@every_member
def test_hard_rows_in_float16(member: Member, options: Options) -> None:
    problem = make_problem(member, *hard_rows(301, torch.float16), options)
    assert_right(problem, by_kernels(problem))


@pytest.mark.parametrize("options", [PLAIN, EVERYTHING], ids=str)
@some_members
def test_hard_rows_in_bfloat16(member: Member, options: Options) -> None:
    problem = make_problem(member, *hard_rows(301, torch.bfloat16), options)
    # The interpreter reads bfloat16 rightly, but cuts it off where a GPU rounds.
    out_dtype = torch.float32 if IS_INTERPRETED else torch.bfloat16
    assert_right(problem, by_kernels(problem, out_dtype=out_dtype), out_dtype)


SHAPES = [(0, 5), (7, 1), (1, 2), (7, 3), (1, 127), (3, 128), (1, 4097), (2, 9001)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@some_members
def test_shapes(member: Member, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    options = replace(EVERYTHING, learns=dtype == torch.float32)
    problem = make_problem(member, (2.0 * torch.randn(shape)).to(dtype), [], options)
    assert_right(problem, by_kernels(problem))
    problem = make_problem(member, (2.0 * torch.randn(shape)).to(dtype), [], PLAIN)
    assert_right(problem, by_kernels(problem))


@pytest.mark.grid
@pytest.mark.parametrize("options", [PLAIN, TWO_CALLS, EVERYTHING], ids=str)
@some_members
def test_in_place_and_twice_give_the_same_bits(member: Member, options: Options) -> None:
    problem = make_problem(member, *hard_rows(301, torch.float32), options)
    first, second, in_place = by_kernels(problem), by_kernels(problem), by_kernels(problem, in_place=True)
    for other in (second, in_place):
        torch.testing.assert_close(other.gradient, first.gradient, rtol=0.0, atol=0.0, equal_nan=True)
        for a, b in zip((*other.stats, *other.by_arguments), (*first.stats, *first.by_arguments), strict=True):
            if a is not None or b is not None:
                torch.testing.assert_close(a, b, rtol=0.0, atol=0.0, equal_nan=True)


# Classes in ranges


@pytest.mark.grid
@pytest.mark.parametrize("options", [TWO_CALLS, replace(EVERYTHING, is_fused=False, has_z_slope=False)], ids=str)
@pytest.mark.parametrize(
    "member", [by_label[m] for m in ("softmax", "sigsoftmax", "gss(k=2, c=1)", "gss(k=0.5, c per class)")], ids=str
)
def test_gradients_a_block_of_classes_at_a_time(member: Member, options: Options) -> None:
    """The statistics are those of whole rows; then the gradient overwrites blocks of them."""
    table, unused = hard_rows(301, torch.float32)
    problem = make_problem(member, table, unused, options)
    logits = table.to(DEVICE)
    form, arguments = member.make(301).form, arguments_of(problem)
    arguments = [a.to(DEVICE, torch.float32) if options.on_device or a.ndim else a for a in arguments]
    routines = LogitsKernels(form, arguments, logits, problem.options.learns)
    targets = RowTargets(to_device(problem.index), to_device(problem.dense), options.extras, options.extras)
    # Unused rows are known by their coefficients.
    coefficients = RowCoefficients(*map(to_device, problem.coefficients))._replace(unused=None)
    stats = routines.stats(logits, targets)
    pieces = []
    for first, last in ((0, 128), (128, 192), (192, 193), (193, 301)):
        piece = logits[:, first:last].clone()
        routines.gradient(piece, targets._replace(first_class=first), stats, coefficients, piece)
        pieces.append(piece)
    by_arguments = routines.argument_gradients() if problem.options.learns else []
    assert_right(problem, results(routines, stats, torch.cat(pieces, -1), by_arguments))


# Numbers at the edges


@pytest.mark.parametrize("member", [by_label["sigsoftmax"], by_label["softmax"]], ids=str)
def test_many_classes_near_c_below_a_peak(member: Member) -> None:
    """Products of their numerators and denominators underflow, and together they are seen in the normaliser."""
    logits = 2.0 + 0.1 * torch.randn(3, 30_000)
    logits[:, 0] = torch.tensor([17.0, 19.9, 21.0])
    problem = make_problem(member, logits, [], PLAIN)
    assert_right(problem, by_kernels(problem))


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_classes", [512, 4096, 5000])
@pytest.mark.parametrize("member", [by_label["sigsoftmax"], by_label["shifted(b=1.3)"], by_label["softmax"]], ids=str)
def test_tiles_of_different_heights(member: Member, num_classes: int, dtype: torch.dtype) -> None:
    """Formulas that several tiles share, where their products are no floats any more."""
    blocks = 8
    heights = torch.randint(-60, 60, (40, blocks)).repeat_interleave(-(-num_classes // blocks), dim=1)
    heights[::2] = heights[::2].clamp(min=0) // 2
    logits = heights[:, :num_classes] + torch.randn(40, num_classes)
    # Three or four of one lane, above the first tile by as much as a product of two can bear.
    logits[:3] = torch.randn(3, num_classes).clamp(max=2.9)
    logits[:3, 1] = 3.0
    lanes = softmax_shape(num_classes, dtype.itemsize, is_sigsoftmax=True).lanes
    assert 3 * lanes < num_classes
    for row, rest in enumerate([(46.0, 27.0, 27.0), (25.0, 25.0, 25.0), (31.0, 31.0, 26.0)]):
        for tile, height in enumerate(rest, start=1):
            logits[row, tile * lanes + 1] = height
    problem = make_problem(member, logits.to(dtype), [], PLAIN)
    assert_right(problem, by_kernels(problem))


@pytest.mark.grid
@pytest.mark.parametrize("options", [PLAIN, TWO_CALLS, EVERYTHING], ids=str)
@every_member
def test_no_nan_for_any_finite_logit(member: Member, options: Options) -> None:
    largest = torch.finfo(torch.float32).max
    ramp = torch.linspace(-1.0, 1.0, 301)
    few = torch.tensor([ramp.tolist(), ramp.sign().tolist(), ramp.flip(0).tolist()])
    logits = torch.cat([few * largest, few.clamp(max=0.0) * largest, few.clamp(min=0.0) * largest, few * 1e-40])
    logits = torch.cat([logits, torch.full((1, 301), largest), torch.full((1, 301), -largest)])
    # z-loss squares such numbers, and sums over classes of them are not finite.
    problem = make_problem(member, logits, [], replace(options, has_z_slope=False, dense="", learns=False))
    found = by_kernels(problem)
    assert found.gradient.isfinite().all()
    assert found.stats.target is not None
    losses = found.stats.normalizer - found.stats.target
    assert not losses.isnan().any()
    assert (losses >= -1e-5).all()


# The incoming gradient


@pytest.mark.parametrize("factor", [1.0, 0.25, 0.0])
def test_scaling(factor: float) -> None:
    sizes = (9001, 1, 0, 4097)
    memory = [
        torch.randn(size + 1, device=DEVICE, dtype=dtype) for size in sizes for dtype in (torch.float32, torch.float16)
    ]
    memory = memory[: scaling.MOST]
    expected = [values * factor for values in memory]
    tensors = [values[:-1] for values in memory]
    scale = scaling.Scaling([tensor.numel() for tensor in tensors], torch.device(DEVICE))
    scale(tensors, torch.tensor(factor, device=DEVICE))
    for found, right in zip(memory, expected, strict=True):
        assert torch.equal(found[:-1], right[:-1])
        assert found[-1] * factor == right[-1], "written beyond the end"
