"""Choice of the recurrence of a layer: the persistent one where it can serve, torch's own LSTM everywhere else.

A plan is asked for, compiled, loaded and tried once, at the first pass of a layer with that batch, and kept. Whatever
stands in its way (another device, shape or dtype, a library that is missing, a GPU that is partitioned or busy) is a
reason to use torch's LSTM, and the reason can be read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sigsoftmax.lm.recurrence.compilation import CompilationError
from sigsoftmax.lm.recurrence.loading import DriverError, LayerKernels, describe_gpu
from sigsoftmax.lm.recurrence.operation import PATIENCE_NS, persistent_lstm
from sigsoftmax.lm.recurrence.plans import LayerPlan, PlanPrecision, Refusal, plan_layer

__all__ = ["SWITCH", "Recurrence", "RecurrenceFailed"]

SWITCH = "SIGSOFTMAX_RECURRENCE"
"""environment variable; ``torch`` makes every layer run on torch's own LSTM"""
TRIAL_NS = 500_000_000
NO_BINDINGS = Refusal("the package cuda-bindings is not installed")
Key = tuple[int, int, PlanPrecision]
"""hidden units, columns, precision"""


class RecurrenceFailed(ArithmeticError):
    """Thread blocks of a recurrence waited for each other in vain, so that its results are NaN."""

    ADVICE = f"Do other processes use the GPU, or has a debugger stopped it? {SWITCH}=torch uses torch's own LSTM"

    def __init__(self, direction: str) -> None:
        self.problem = (
            f"the {direction} LSTM recurrence waited in vain for {PATIENCE_NS / 1e9:g} s, and its results since then "
            "are NaN"
        )
        super().__init__(f"{self.problem}. {self.ADVICE}")


class Recurrence:
    """The recurrence of a model's layers: settings, plans, and the error flag that its kernels share.

    ``concurrent_runs`` is how many runs share the GPU. Copies share no state: they have the same settings.
    """

    def __init__(self, *, concurrent_runs: int = 1, plans: Iterable[LayerPlan] = ()) -> None:
        self.concurrent_runs = concurrent_runs
        self._asked = {_key(plan): plan for plan in plans}
        self._chosen: dict[tuple[Key, torch.device], LayerKernels | Refusal] = {}
        self._flag: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Recurrence, concurrent_runs=self.concurrent_runs, plans=[*self._asked.values()]), ()

    def choose(
        self, hidden: int, batch: int, dtype: torch.dtype, device: torch.device, *, backward: bool
    ) -> LayerKernels | Refusal:
        """Kernels that are loaded, for ``backward`` too if asked for, or why there are none."""
        precision = _precision(dtype, device)
        if isinstance(precision, Refusal):
            return precision
        place = ((hidden, batch, precision), _indexed(device))
        chosen = self._chosen.get(place)
        if chosen is None:
            chosen = self._chosen[place] = self._new(*place)
        if isinstance(chosen, LayerKernels) and not chosen.is_loaded(backward=backward):
            refusal = _loaded_and_tried(chosen, dtype, backward=backward)
            if refusal is not None:
                chosen = self._chosen[place] = refusal
        return chosen

    def _new(self, key: Key, device: torch.device) -> LayerKernels | Refusal:
        try:
            gpu = describe_gpu(device, self.concurrent_runs)
        except ImportError:
            return NO_BINDINGS
        except (RuntimeError, OSError) as error:
            return Refusal(f"the CUDA driver cannot be asked: {error}")
        plan, asked = plan_layer(*key, gpu), self._asked.get(key)
        if isinstance(plan, Refusal):
            return plan
        return LayerKernels(asked if asked is not None and asked.fits(gpu) else plan, device)

    def error_flag(self, device: torch.device) -> Tensor:
        """One int32 on the device, 0 as long as all went well: kernels set it when a wait outlasts their patience.

        From then on no kernel of this model waits, and results are NaN.
        """
        if self._flag is None or self._flag.device != _indexed(device):
            self._flag = torch.zeros(1, dtype=torch.int32, device=_indexed(device))
        return self._flag

    def raise_if_failed(self) -> None:
        """Raise if a recurrence gave up waiting; looks at the device, so that it waits for it."""
        flag = 0 if self._flag is None else int(self._flag)
        if flag:
            raise RecurrenceFailed("forward" if flag == 1 else "backward")

    def describe(self, hidden: Sequence[int], batch: int, dtype: torch.dtype, device: torch.device) -> str:
        """One sentence that names the recurrence of layers of these widths, and the reason."""
        widths: dict[str, list[int]] = {}
        for width in dict.fromkeys(hidden):
            chosen = self.choose(width, batch, dtype, device, backward=True)
            widths.setdefault(chosen.reason if isinstance(chosen, Refusal) else "", []).append(width)
        parts = []
        for reason, served in widths.items():
            which = "" if len(widths) == 1 else f" for layers of {' and '.join(map(str, served))} units"
            persistent = f"persistent kernels{which}, the recurrent weights staying on chip for a whole window"
            parts.append(f"torch's own LSTM{which}, because {reason}" if reason else persistent)
        return "LSTM recurrence: " + "; ".join(parts)

    def plans_in_use(self) -> tuple[LayerPlan, ...]:
        """The plans that a checkpoint holds: with the same ones a run gives the same bits."""
        used = {key: kernels.plan for (key, _), kernels in self._chosen.items() if isinstance(kernels, LayerKernels)}
        return tuple(used.values())

    def restore(
        self, plans: Iterable[LayerPlan], hidden: Sequence[int], batch: int, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Use the plans of :meth:`plans_in_use` for a run of these layers; says why, if it goes on differently."""
        self._asked = {_key(plan): plan for plan in plans}
        self._chosen.clear()
        precision: PlanPrecision = "bf16" if dtype == torch.bfloat16 else "tf32"
        for width in dict.fromkeys(hidden):
            asked = self._asked.get((width, batch, precision))
            now = self.choose(width, batch, dtype, device, backward=True)
            if asked is not None and isinstance(now, Refusal):
                return f"the persistent recurrence that the run was begun on cannot be had here: {now.reason}"
            if isinstance(now, LayerKernels) and now.plan != asked:
                begun = "torch's own LSTM" if asked is None else "a plan that does not fit this GPU"
                return f"the run was begun on {begun} and goes on with another plan of the persistent recurrence"
        return None


def _key(plan: LayerPlan) -> Key:
    return plan.forward.hidden, plan.forward.batch, plan.forward.precision


def _indexed(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())


def _precision(dtype: torch.dtype, device: torch.device) -> PlanPrecision | Refusal:
    if device.type != "cuda" or torch.version.cuda is None:
        return Refusal(f"the layer is on {device}, not on an NVIDIA GPU")
    if switch := os.environ.get(SWITCH):
        if switch != "torch":
            raise ValueError(f"the environment variable {SWITCH} must be torch, or not set, got {switch!r}")
        return Refusal(f"{SWITCH}=torch was set")
    if dtype == torch.bfloat16:
        return "bf16"
    if dtype != torch.float32:
        return Refusal(f"the layer computes in {dtype}, not in bfloat16 or float32")
    library: Any = torch.backends.cudnn.rnn
    return "tf32" if library.fp32_precision == "tf32" else Refusal("IEEE float32 products were asked for, not TF32")


def _loaded_and_tried(kernels: LayerKernels, dtype: torch.dtype, *, backward: bool) -> Refusal | None:
    """Run a window of two steps on zeros, so that errors come before a run."""
    try:
        kernels.load(backward=backward)
        hidden, batch, _ = _key(kernels.plan)
        flag = torch.zeros(1, dtype=torch.int32, device=kernels.device)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=kernels.device, requires_grad=backward)

        with torch.enable_grad():
            output, *_ = persistent_lstm(
                kernels,
                zeros(2, batch, 1, dtype=dtype),
                zeros(1, batch, hidden, dtype=dtype),
                zeros(1, batch, hidden, dtype=dtype),
                (zeros(4 * hidden, 1), zeros(4 * hidden, hidden), zeros(4 * hidden), zeros(4 * hidden)),
                error_flag=flag,
                patience_ns=TRIAL_NS,
            )
            if backward:
                output.sum().backward()
        if int(flag):
            return Refusal(f"thread blocks waited in vain for {TRIAL_NS / 1e9:g} s in a trial: the GPU is busy")
    except ImportError:
        return NO_BINDINGS
    except (CompilationError, DriverError, OSError) as error:
        return Refusal(str(error))
    return None
