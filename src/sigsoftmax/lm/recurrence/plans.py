"""Which kernels serve a layer: how its recurrent matrix is divided over the multiprocessors of a GPU.

The recurrent matrix stays on chip for a whole window, so the question is what fits where. A plan divides hidden units
over thread blocks (CTAs), columns of the batch over groups of CTAs that each hold the whole matrix, the inner dimension
of the product over warps, and the weights of a warp between registers and shared memory. A planner is a pure function
of the layer and a description of the GPU: it needs no GPU, and gives the same plan each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Direction", "GpuDescription", "KernelPlan", "LayerPlan", "PlanPrecision", "Refusal", "plan_layer"]

Direction = Literal["forward", "backward"]
PlanPrecision = Literal["bf16", "tf32"]

BLOCK_BYTES = 64
"""of one row in a block of the inner dimension: four lanes load 16 bytes each"""
FRAGMENT_BYTES = 32 * 16
"""what the lanes of a warp load at once"""
RANKS = 4
"""CTAs of a cluster of the backward kernel"""
WARPS = 8
MOST_ROW_TILES = 10
MOST_COLUMN_TILES = 3
REGISTERS = 188
"""of a thread, for weights, sums and values; the others of the 255 hold addresses and what gates need"""
FEW_ROW_TILES = 5
REGISTERS_OF_CELL = 20
"""of a thread, for each cell beyond the first that it finishes, where row tiles are more than a few: with less room the
compiler spills, as compiling the plans of all recipes shows"""


@dataclass(frozen=True)
class Refusal:
    """Why the persistent recurrence does not serve a layer."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class GpuDescription:
    """All that a plan depends on."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    """shared memory that one CTA can have"""
    cooperative: bool
    """whether a grid can be launched that is resident as a whole or not at all"""
    concurrent_runs: int = 1
    """runs that share the GPU: with several, a plan takes half of it where the layer fits there"""


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
    """how often a CTA does so in each time step, each time for other columns"""
    groups: int
    """of CTAs; each holds the whole matrix and serves its own columns"""
    register_tiles: int
    """tiles of the matrix that a warp keeps in registers; the others are in shared memory"""
    warps: int = WARPS

    @property
    def padded(self) -> int:
        """The width of state and matrix with padding."""
        return _rounded_up(self.hidden, BLOCK_BYTES // self.element_bytes)

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
    def ctas_per_group(self) -> int:
        if self.direction == "forward":
            return -(-self.padded // self.units)
        return RANKS * -(-self.padded // (RANKS * self.units))

    @property
    def ctas(self) -> int:
        return self.groups * self.ctas_per_group

    @property
    def counters(self) -> int:
        """32-bit words for the counters of the exchange, one for each pass of each group, in a cache line each."""
        return self.groups * self.passes * 32

    @property
    def inner_blocks(self) -> int:
        return self.padded * self.element_bytes // BLOCK_BYTES

    @property
    def weight_bytes(self) -> int:
        """In shared memory."""
        least, longer = divmod(self.inner_blocks, self.warps)
        tiles = longer * max(0, (least + 1) * self.row_tiles - self.register_tiles)
        tiles += (self.warps - longer) * max(0, least * self.row_tiles - self.register_tiles)
        return tiles * 2 * FRAGMENT_BYTES

    @property
    def partial_bytes(self) -> int:
        """Of the sums of the warps, before they are added."""
        return self.warps * self.row_tiles * self.column_tiles * FRAGMENT_BYTES

    @property
    def shared_bytes(self) -> int:
        tiles = self.row_tiles * self.column_tiles
        if self.direction == "forward":
            cells = self.passes * -(-tiles // self.warps) * self.threads * 4
            return self.weight_bytes + self.partial_bytes + cells
        cells = self.units * 8 * self.column_tiles
        sums = 2 * RANKS * cells * 4
        return (
            self.weight_bytes + self.partial_bytes + sums + self.passes * -(-cells // self.threads) * self.threads * 4
        )

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
        constants = {
            "HIDDEN": self.hidden,
            "PADDED": self.padded,
            "BATCH": self.batch,
            "ROW_TILES": self.row_tiles,
            "COLUMN_TILES": self.column_tiles,
            "PASSES": self.passes,
            "GROUPS": self.groups,
            "WARPS": self.warps,
            "REGISTER_TILES": self.register_tiles,
            "SHARED_BYTES": self.shared_bytes,
            "CTAS": self.ctas,
        }
        element = "Bf16" if self.precision == "bf16" else "float"
        lines = [f"constexpr int {name} = {value};" for name, value in constants.items()]
        return "\n".join(["#pragma once", f"typedef {element} Element;", *lines, ""])

    def microseconds(self) -> float:
        """Of a time step, by which plans that fit are ranked: measured on one H200 by ``benchmarks/recurrence.py``.

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
        """Whether the planner could have made this plan for that GPU; what a file says need not be a plan at all."""
        layer = self.forward.hidden, self.forward.batch, self.forward.precision
        whole = gpu.multiprocessors
        return self.forward in feasible("forward", *layer, gpu, multiprocessors=whole) and self.backward in feasible(
            "backward", *layer, gpu, multiprocessors=whole
        )


def plan_layer(hidden: int, batch: int, precision: PlanPrecision, gpu: GpuDescription) -> LayerPlan | Refusal:
    """The plan of a layer of ``hidden`` units for ``batch`` columns, or why there is none."""
    if gpu.capability != (9, 0):
        return Refusal(f"the GPU has compute capability {gpu.capability[0]}.{gpu.capability[1]}, not 9.0 (Hopper)")
    if not gpu.cooperative:
        return Refusal("the GPU cannot launch cooperative grids")
    kernels = []
    for direction in ("forward", "backward"):
        kernel = _best(direction, hidden, batch, precision, gpu)
        if kernel is None:
            return Refusal(
                f"a recurrent matrix of {4 * hidden:,} x {hidden:,} in {precision} for {batch} columns does not fit on "
                f"the {gpu.multiprocessors} multiprocessors of this GPU"
            )
        kernels.append(kernel)
    return LayerPlan(forward=kernels[0], backward=kernels[1])


def _best(
    direction: Direction, hidden: int, batch: int, precision: PlanPrecision, gpu: GpuDescription
) -> KernelPlan | None:
    shares = (2, 1) if gpu.concurrent_runs > 1 else (1,)
    for share in shares:
        fitting = feasible(direction, hidden, batch, precision, gpu, multiprocessors=gpu.multiprocessors // share)
        best = min(fitting, key=KernelPlan.microseconds, default=None)
        if best is not None:
            return best
    return None


def feasible(
    direction: Direction,
    hidden: int,
    batch: int,
    precision: PlanPrecision,
    gpu: GpuDescription,
    *,
    multiprocessors: int,
) -> Iterator[KernelPlan]:
    """All plans that fit, each with as many weights in registers as there is room for."""
    tiles = -(-batch // 8)
    # Clusters lie within a group of multiprocessors, and a few of each group are left over.
    most_ctas = multiprocessors if direction == "forward" else multiprocessors * 15 // 16
    for column_tiles in range(1, min(tiles, MOST_COLUMN_TILES) + 1):
        at_once = -(-tiles // column_tiles)
        for groups in range(1, at_once + 1):
            passes = -(-at_once // groups)
            if groups > 1 and -(-at_once // (groups - 1)) == passes:
                continue  # one group less does it in as many passes
            for row_tiles in range(1, MOST_ROW_TILES + 1):
                plan = KernelPlan(
                    direction=direction,
                    precision=precision,
                    hidden=hidden,
                    batch=batch,
                    row_tiles=row_tiles,
                    column_tiles=column_tiles,
                    passes=passes,
                    groups=groups,
                    register_tiles=0,
                )
                plan = _with_registers(plan)
                if plan.ctas <= most_ctas and plan.shared_bytes <= gpu.shared_bytes and plan.register_need <= REGISTERS:
                    yield plan


def _with_registers(plan: KernelPlan) -> KernelPlan:
    most = -(-plan.inner_blocks // plan.warps) * plan.row_tiles
    return replace(plan, register_tiles=max(0, min(most, (REGISTERS - plan.register_need) // 8)))


def _rounded_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
