"""Kernels on a GPU: loaded, checked against what the GPU can hold at once, launched on torch's stream.

A grid whose CTAs wait for each other must be resident as a whole. Launches are cooperative, which the driver refuses
where the grid does not fit, and which do not begin before the whole of it has room; occupancy is asked for when a
kernel is loaded, so that a refusal comes before a run and not in it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sigsoftmax.lm.recurrence.compilation import KernelFile, checked, compile_together, compiled
from sigsoftmax.lm.recurrence.plans import RANKS, GpuDescription, KernelPlan, LayerPlan

__all__ = ["DriverError", "LayerKernels", "describe_gpu"]


class DriverError(RuntimeError):
    """The CUDA driver refused something, or the GPU cannot hold a plan's grid at once."""


_checked = functools.partial(checked, error=DriverError, library="the CUDA driver")


def _launch(
    function: Any,
    types: tuple[Any, ...],
    threads: int,
    shared_bytes: int,
    cooperative: bool,
    grid: int,
    *arguments: Tensor | float | None,
) -> None:
    """Launch a function of a loaded module. Arguments are tensors, None (a null pointer), ints, and floats."""
    from cuda.bindings import driver

    values = tuple(a.data_ptr() if isinstance(a, Tensor) else (0 if a is None else a) for a in arguments)
    shape = (grid, 1, 1, threads, 1, 1, shared_bytes, torch.cuda.current_stream().cuda_stream)
    if cooperative:
        _checked(driver.cuLaunchCooperativeKernel(function, *shape, (values, types)))
    else:
        _checked(driver.cuLaunchKernel(function, *shape, (values, types), 0))


POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_float
KERNELS: dict[str, tuple[KernelFile, tuple[Any, ...]]] = {
    "lstm_forward": ("forward", (*[POINTER] * 9, LONG, INT, INT)),
    "lstm_backward": ("backward", (*[POINTER] * 10, LONG, LONG, LONG, INT)),
    "pack_weights": ("layout", (POINTER, POINTER, FLOAT, *[POINTER] * 6, INT, INT, POINTER, INT)),
    "unpack_gradients": ("layout", (*[POINTER] * 3, FLOAT, *[POINTER] * 4, INT, INT)),
    "mask_rows": ("layout", (*[POINTER] * 3, INT, INT, INT)),
}
"""the file and the types of the parameters of each kernel"""
FORWARD_ALONE = KERNELS.keys() - {"lstm_backward", "unpack_gradients"}


class LayerKernels:
    """The kernels of one layer's plan on one device."""

    def __init__(self, plan: LayerPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self._loaded: dict[str, Callable[..., None]] = {}

    def launch(self, name: str, grid: int, *arguments: Tensor | float | None) -> None:
        self._loaded[name](grid, *arguments)

    def is_loaded(self, *, backward: bool) -> bool:
        return (KERNELS.keys() if backward else FORWARD_ALONE) <= self._loaded.keys()

    def load(self, *, backward: bool) -> None:
        """Compile and load all that a pass needs; not while a graph is captured.

        Raises :class:`DriverError` where the GPU cannot hold a grid at once.
        """
        if self.is_loaded(backward=backward):
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, and the kernels of an LSTM layer are not loaded yet; run the layer "
                "once before"
            )
        names = KERNELS.keys() if backward else FORWARD_ALONE
        sources = dict.fromkeys(KERNELS[name][0] for name in names)
        compile_together([(source, self._plan_of(source)) for source in sources])
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()  # torch has made its context by then
            for name in names:
                self._loaded[name] = self._kernel(name)

    def _plan_of(self, source: KernelFile) -> KernelPlan:
        return self.plan.backward if source == "backward" else self.plan.forward

    def _kernel(self, name: str) -> Callable[..., None]:
        from cuda.bindings import driver

        source, types = KERNELS[name]
        plan = self._plan_of(source)
        module = _module(source, plan, self.device.index)
        function = _checked(driver.cuModuleGetFunction(module, name.encode()))
        if source == "layout":
            return functools.partial(_launch, function, types, plan.threads, 0, False)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, attribute, plan.shared_bytes))
        room = _resident_ctas(function, plan, self.device)
        if room < plan.ctas:
            raise DriverError(
                f"the {plan.direction} recurrence of {plan.hidden} units needs {plan.ctas} thread blocks at once, and "
                f"this GPU holds {room}"
            )
        return functools.partial(_launch, function, types, plan.threads, plan.shared_bytes, True)


@functools.cache
def _module(source: KernelFile, plan: KernelPlan, device_index: int) -> Any:
    from cuda.bindings import driver

    return _checked(driver.cuModuleLoadData(compiled(source, plan)))


def _resident_ctas(function: Any, plan: KernelPlan, device: torch.device) -> int:
    from cuda.bindings import driver

    if plan.direction == "forward":
        each = _checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, plan.threads, plan.shared_bytes))
        return int(each) * torch.cuda.get_device_properties(device).multi_processor_count
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = plan.ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = plan.threads, 1, 1
    config.sharedMemBytes = plan.shared_bytes
    return RANKS * int(_checked(driver.cuOccupancyMaxActiveClusters(function, config)))


@functools.cache
def describe_gpu(device: torch.device, concurrent_runs: int = 1) -> GpuDescription:
    """The facts about a GPU that plans depend on."""
    from cuda.bindings import driver

    handle = _checked(driver.cuDeviceGet(device.index))

    def attribute(name: str) -> int:
        known = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        return 0 if known is None else int(_checked(driver.cuDeviceGetAttribute(known, handle)))

    properties = torch.cuda.get_device_properties(device)
    partition = "several processes share the GPU (MPS)" if attribute("MPS_ENABLED") else None
    return GpuDescription(
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        shared_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        cooperative=bool(attribute("COOPERATIVE_LAUNCH")),
        concurrent_runs=concurrent_runs,
        partition="the GPU is partitioned (MIG)" if "MIG" in torch.cuda.get_device_name(device) else partition,
    )
