"""Plans of kernels: the division of a layer's recurrent matrix over the multiprocessors of a GPU.

The recurrent matrix stays on chip for a whole window, so the question is what fits where. A plan divides hidden units
over thread blocks (CTAs), columns of the batch over groups of CTAs that each hold the whole matrix, the inner dimension
of the product over warps, and the weights of a warp between registers and shared memory. A planner is a pure function
of the layer and a description of the GPU: it needs no GPU, and gives the same plan each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Direction", "GpuDescription", "KernelPlan", "LayerPlan", "PlanPrecision", "Refusal", "plan_layer"]

Direction = Literal["forward", "backward"]
PlanPrecision = Literal["bf16", "tf32"]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
BLOCK_BYTES = 64
"""bytes of one row in a block of the inner dimension: four lanes load 16 bytes each"""
FRAGMENT_BYTES = 32 * 16
"""bytes that the lanes of a warp load at once"""
RANKS = 4
"""CTAs of a cluster of the backward kernel"""
WARPS = 8
MOST_ROW_TILES = 10
MOST_COLUMN_TILES = 3
REGISTERS = 188
"""registers of a thread for weights, sums and values; the others of the 255 hold addresses and what gates need"""
FEW_ROW_TILES = 5
REGISTERS_OF_CELL = 20
"""registers of a thread for each cell beyond the first that it finishes, where row tiles are more than a few: with less
room the compiler spills, as compiling the plans of all recipes shows"""
SIZES = ("hidden", "padded", "batch", "shared_bytes", "ctas")
DIVISION = ("row_tiles", "column_tiles", "passes", "groups", "warps", "register_tiles")
"""numbers of a plan that its kernels are compiled with, in upper case"""


@dataclass(frozen=True)
class Refusal:
    """The reason why the persistent recurrence does not serve a layer."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class GpuDescription:
    """All that a plan depends on."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    """shared memory that one CTA can have"""
    cooperative: bool
    """True if a grid can be launched that is resident as a whole or not at all"""
    concurrent_runs: int = 1
    """runs that share the GPU: with several, a plan takes half of it where the layer fits there"""
    partition: str | None = None
    """the reason why a grid may not have the whole GPU, if other processes own parts of it"""


@dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """The constants that one kernel is compiled with."""

    direction: Direction
    precision: PlanPrecision
    hidden: int
    batch: int
    row_tiles: int
    """tiles of 16 rows of the matrix that a CTA multiplies"""
    column_tiles: int
    """tiles of 8 columns that are multiplied at once"""
    passes: int
    """number of times that a CTA does so in each time step, each time for other columns"""
    groups: int
    """groups of CTAs; each holds the whole matrix and serves its own columns"""
    register_tiles: int
    """tiles of the matrix that a warp keeps in registers; the others are in shared memory"""
    warps: int = WARPS

    @property
    def padded(self) -> int:
        """The width of state and matrix with padding."""
        multiple = BLOCK_BYTES // self.element_bytes
        return -(-self.hidden // multiple) * multiple

    @property
    def element_bytes(self) -> int:
        return 2 if self.precision == "bf16" else 4

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def units(self) -> int:
        """Hidden units that one CTA finishes."""
        return 4 * self.row_tiles

    @property
    def ctas(self) -> int:
        cluster = 1 if self.direction == "forward" else RANKS
        return self.groups * cluster * -(-self.padded // (cluster * self.units))

    @property
    def counters(self) -> int:
        """32-bit words for the counters of the exchange, one for each pass of each group, in a cache line each."""
        return self.groups * self.passes * 32

    @property
    def inner_blocks(self) -> int:
        return self.padded * self.element_bytes // BLOCK_BYTES

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in shared memory."""
        least, longer = divmod(self.inner_blocks, self.warps)
        tiles = longer * max(0, (least + 1) * self.row_tiles - self.register_tiles)
        tiles += (self.warps - longer) * max(0, least * self.row_tiles - self.register_tiles)
        return tiles * 2 * FRAGMENT_BYTES

    @property
    def shared_bytes(self) -> int:
        """Bytes of weights, of the warps' sums before they are added, of the ranks' sums, and of cells."""
        tiles = self.row_tiles * self.column_tiles
        if self.direction == "forward":
            sums, cells_per_thread = 0, -(-tiles // self.warps)
        else:
            cells = self.units * 8 * self.column_tiles
            sums, cells_per_thread = 2 * RANKS * cells * 4, -(-cells // self.threads)
        partials = self.warps * tiles * FRAGMENT_BYTES
        return self.weight_bytes + partials + sums + self.passes * cells_per_thread * self.threads * 4

    @property
    def register_need(self) -> int:
        """Registers of a thread for weights, sums and values, as an estimate that compiling confirms."""
        values = -(-self.inner_blocks // self.warps) * self.column_tiles * 4
        tiles = self.row_tiles * self.column_tiles
        cells = -(-tiles // self.warps)
        more = REGISTERS_OF_CELL * (cells - 1) if self.row_tiles > FEW_ROW_TILES else 0
        return self.register_tiles * 8 + tiles * 4 + values + more

    def header(self) -> str:
        """The constants as the kernels include them."""
        element = "Bf16" if self.precision == "bf16" else "float"
        lines = [f"constexpr int {name.upper()} = {getattr(self, name)};" for name in SIZES + DIVISION]
        return "\n".join(["#pragma once", f"typedef {element} Element;", *lines, ""])

    def microseconds(self) -> float:
        """Time of a step, by which plans that fit are ranked: measured on one H200 by ``benchmarks/recurrence.py``.

        A pass is a chain that nothing else fills: signal, wait, load the state, multiply, add up, gates. So its time is
        a constant and a share that grows with the product.
        """
        chain = 1.3 if self.direction == "forward" else 1.75
        return self.passes * (chain + 0.005 * self.row_tiles * self.column_tiles * self.inner_blocks)


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Both directions of one layer."""

    forward: KernelPlan
    backward: KernelPlan

    def fits(self, gpu: GpuDescription) -> bool:
        """Tell whether the planner could have made this plan for that GPU: a file may hold any numbers."""
        layer = self.forward.hidden, self.forward.batch, self.forward.precision
        return all(getattr(self, direction) in feasible(direction, *layer, gpu) for direction in DIRECTIONS)


def plan_layer(hidden: int, batch: int, precision: PlanPrecision, gpu: GpuDescription) -> LayerPlan | Refusal:
    """The plan of a layer of ``hidden`` units for ``batch`` columns, or why there is none."""
    if gpu.partition is not None:
        return Refusal(gpu.partition)
    if gpu.capability != (9, 0):
        return Refusal(f"the GPU has compute capability {gpu.capability[0]}.{gpu.capability[1]}, not 9.0 (Hopper)")
    if not gpu.cooperative:
        return Refusal("the GPU cannot launch cooperative grids")
    half = replace(gpu, multiprocessors=gpu.multiprocessors // 2)
    best: list[KernelPlan] = []
    for direction in DIRECTIONS:
        fitting = list(feasible(direction, hidden, batch, precision, half)) if gpu.concurrent_runs > 1 else []
        fitting = fitting or list(feasible(direction, hidden, batch, precision, gpu))
        if not fitting:
            return Refusal(
                f"a recurrent matrix of {4 * hidden:,} x {hidden:,} in {precision} for {batch} columns does not fit on "
                f"the {gpu.multiprocessors} multiprocessors of this GPU"
            )
        best.append(min(fitting, key=KernelPlan.microseconds))
    return LayerPlan(forward=best[0], backward=best[1])


def feasible(
    direction: Direction, hidden: int, batch: int, precision: PlanPrecision, gpu: GpuDescription
) -> Iterator[KernelPlan]:
    """All plans that fit, each with as many weights in registers as there is room for."""
    tiles = -(-batch // 8)
    # Clusters lie within a group of multiprocessors, and a few of each group are left over.
    most_ctas = gpu.multiprocessors if direction == "forward" else gpu.multiprocessors * 15 // 16
    smallest = KernelPlan(
        direction=direction,
        precision=precision,
        hidden=hidden,
        batch=batch,
        row_tiles=1,
        column_tiles=1,
        passes=1,
        groups=1,
        register_tiles=0,
    )
    for column_tiles in range(1, min(tiles, MOST_COLUMN_TILES) + 1):
        at_once = -(-tiles // column_tiles)
        for groups in range(1, at_once + 1):
            passes = -(-at_once // groups)
            if groups > 1 and -(-at_once // (groups - 1)) == passes:
                continue  # one group less does it in as many passes
            for row_tiles in range(1, MOST_ROW_TILES + 1):
                plan = replace(smallest, row_tiles=row_tiles, column_tiles=column_tiles, passes=passes, groups=groups)
                most = -(-plan.inner_blocks // plan.warps) * row_tiles
                room = (REGISTERS - plan.register_need) // 8
                plan = replace(plan, register_tiles=max(0, min(most, room)))
                if plan.ctas <= most_ctas and plan.shared_bytes <= gpu.shared_bytes and plan.register_need <= REGISTERS:
                    yield plan
