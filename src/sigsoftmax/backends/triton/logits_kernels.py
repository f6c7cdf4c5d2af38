"""The row routines of the contract by logits kernels, launched on a GPU.

Shapes: R rows, V classes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigsoftmax.backends.triton.kernels import form_logits, formulas, softmax_logits
from sigsoftmax.backends.triton.launch import LOGITS_DTYPES, Launch, launch
from sigsoftmax.backends.triton.per_class_gradients import per_class_kernel
from sigsoftmax.backends.triton.tuning import (
    ALIGNMENT,
    PER_CLASS_SHAPE,
    form_shape,
    multiprocessors,
    pipelined_shape,
    softmax_shape,
    stagger,
)
from sigsoftmax.contract import normalizing
from sigsoftmax.contract.normalizing import constant
from sigsoftmax.contract.rows import RowCoefficients, RowStats, RowTargets
from sigsoftmax.contract.tokens import with_z_slopes
from sigsoftmax.family.formulas import Form
from sigsoftmax.family.parameters import ParameterKind, kind_of


def why_refused(form: Form, dtype: torch.dtype) -> str | None:
    """The reason why the kernels do not take logits; None if they do."""
    if form.name not in formulas.CODES:
        return f"{form.name!r} is registered by the user and has no kernel"
    if dtype not in LOGITS_DTYPES:
        return f"logits of {dtype} (the kernels take float32, bfloat16 and float16)"
    return None


def _present(unused: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Tensors, or in the place of absent ones one that the kernel does not touch."""
    return [unused if tensor is None else tensor for tensor in tensors]


def _with_rows_in_order(matrix: Tensor) -> Tensor:
    """Kernels take rows of numbers that follow each other."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


class _Call(NamedTuple):
    """One call of the kernels: statistics of rows, their gradient, or both."""

    logits_RV: Tensor
    targets: RowTargets
    stats: RowStats
    """memory for the statistics, or what is known"""
    coefficients: RowCoefficients | None = None
    """None without a gradient"""
    out_RV: Tensor | None = None
    z_slope_R: Tensor | None = None
    reduces: bool = True
    """True if statistics are computed"""

    @property
    def gradient_RV(self) -> Tensor:
        return self.logits_RV if self.out_RV is None else self.out_RV

    @property
    def dense_stride(self) -> int:
        dense = self.targets.dense
        return dense.stride(0) if dense is not None and dense.ndim == 2 else 0


class LogitsKernels:
    """``FusedRowRoutines`` for one output function. The target of a row is at its index // ``rows_per_target``."""

    max_rows: int | None = None

    def __init__(
        self,
        form: Form,
        arguments: Sequence[Tensor],
        logits_like: Tensor,
        needs_arguments: bool = False,
        rows_per_target: int = 1,
    ) -> None:
        self.form, self.rows_per_target, self.needs_arguments = form, rows_per_target, needs_arguments
        self.device = logits_like.device
        self.arguments = [a.detach() if a.requires_grad else a for a in arguments]
        values = [constant(a) for a in self.arguments]
        pointers = [
            a.to(self.device).contiguous() if v is None else None for a, v in zip(self.arguments, values, strict=True)
        ]
        # A form with one argument has it in the place of alpha; beta and c are absent.
        self.values = [0.0 if v is None else v for v in (*values, None, None)][:3]
        self.pointers = [*pointers, None, None][:3]
        names = ("ALPHA_IS_POINTER", "BETA_IS_POINTER", "C_IS_POINTER")
        self.flags = {name: p is not None for name, p in zip(names, self.pointers, strict=True)}
        c = self.pointers[2]
        self.per_class = c is not None and kind_of(self.arguments[2]) is ParameterKind.PER_CLASS
        self.centre = c.float().mean() if c is not None and self.per_class else None
        properties = form.properties(values)
        self.is_increasing = properties.is_increasing is True
        self.is_sigsoftmax = properties.is_sigsoftmax is True
        # The kernels of softmax start from the highest logit of a row and multiply gaps, which may be infinite.
        self.is_softmax = (properties.is_softmax is True or self.is_sigsoftmax) and not needs_arguments
        self._sums: list[Tensor] = []
        if needs_arguments:
            self._sums = [torch.zeros(a.shape, dtype=torch.float32, device=self.device) for a in self.arguments]

    def stats(self, logits_RV: Tensor, targets: RowTargets, memory_6R: Tensor | None = None) -> RowStats:
        """``memory_6R`` takes the statistics, in the order of ``RowStats``.

        The logits may be a block of the vocabulary; where the target is elsewhere, what is said of it means nothing.
        """
        return self._reduce(logits_RV, targets, memory_6R)

    def gradient(
        self, logits_RV: Tensor, targets: RowTargets, stats: RowStats, coefficients: RowCoefficients, out_RV: Tensor
    ) -> None:
        if targets.dense is not None:
            end = targets.first_class + logits_RV.shape[1]
            targets = targets._replace(dense=targets.dense[..., targets.first_class : end])
        self._launch(_Call(logits_RV, targets, stats, coefficients, out_RV, reduces=False))

    def stats_and_gradient(
        self,
        logits_RV: Tensor,
        targets: RowTargets,
        coefficients: RowCoefficients,
        z_slope_R: Tensor | None,
        out_RV: Tensor,
        memory_6R: Tensor | None = None,
    ) -> RowStats:
        call: dict[str, Any] = {"coefficients": coefficients, "z_slope_R": z_slope_R, "out_RV": out_RV}
        return self._reduce(logits_RV, targets, memory_6R, **call)

    def argument_gradients(self) -> list[Tensor]:
        return self._sums

    def _reduce(self, logits_RV: Tensor, targets: RowTargets, memory_6R: Tensor | None, **call: Any) -> RowStats:
        """The statistics of rows, by a call that may write their gradient too."""
        if memory_6R is None:
            memory_6R = torch.empty(6, logits_RV.shape[0], dtype=torch.float32, device=self.device)
        peak, offset, normalizer, at_target, at_dense, entropy = memory_6R.unbind()
        stats = RowStats(
            peak,
            offset,
            normalizer,
            None if targets.index_R is None else at_target,
            None if targets.dense is None else at_dense,
            # Before the gradient may overwrite the logits.
            self._argmax(logits_RV) if targets.argmax else None,
            entropy if targets.entropy else None,
        )
        self._launch(_Call(logits_RV, targets, stats, **call))
        return stats

    def _argmax(self, logits_RV: Tensor) -> Tensor:
        if self.is_increasing and not self.per_class:
            return logits_RV.argmax(-1)
        return normalizing.rows(logits_RV, self.form, self.arguments).relative.argmax(-1)

    def _launch(self, call: _Call) -> None:
        if not call.logits_RV.shape[0]:
            return
        targets = call.targets
        if targets.dense is not None:
            targets = targets._replace(dense=_with_rows_in_order(targets.dense))
        call = call._replace(logits_RV=_with_rows_in_order(call.logits_RV), targets=targets)
        if self.is_softmax and targets.dense is None and not (call.reduces and targets.entropy):
            self._launch_softmax(call)
        else:
            self._launch_form(call)

    def _launch_softmax(self, call: _Call) -> None:
        stats, targets = call.stats, call.targets
        by_normalizer, by_target, *_ = call.coefficients or (None, None)
        launch = self.softmax_launch(
            call.logits_RV,
            call.gradient_RV,
            has_index=targets.index_R is not None,
            has_z_slope=call.z_slope_R is not None,
            reduces=call.reduces,
            has_gradient=call.coefficients is not None,
            first_class=targets.first_class,
        )
        given = (targets.index_R, by_normalizer, by_target, call.z_slope_R, *stats[:4])
        launch(call.logits_RV, call.gradient_RV, *_present(stats[0], *given))

    def softmax_launch(
        self,
        logits_RV: Tensor,
        out_RV: Tensor,
        *,
        has_index: bool,
        has_z_slope: bool,
        reduces: bool,
        has_gradient: bool,
        first_class: int = 0,
    ) -> Launch:
        """The launch of the softmax kernel for logits and a gradient of these shapes."""
        rows, classes = logits_RV.shape
        size = logits_RV.element_size()
        pipelined = None
        if reduces and has_gradient and logits_RV.data_ptr() % ALIGNMENT == 0:
            pipelined = pipelined_shape(classes, logits_RV.stride(0), size, self.is_sigsoftmax)
        shape = pipelined or softmax_shape(classes, size, self.is_sigsoftmax, reduces=reduces, writes=has_gradient)
        programs = min(rows, shape.per_processor * multiprocessors(self.device))
        return Launch(
            softmax_logits.softmax_logits_kernel,
            programs,
            (
                logits_RV.stride(0),
                out_RV.stride(0),
                rows,
                classes,
                self.rows_per_target,
                first_class,
                self.values[0],
                self.values[2],
                stagger(rows, classes, size, programs) if reduces and has_gradient else 0,
            ),
            {
                "IS_SIG": self.is_sigsoftmax,
                "HAS_INDEX": has_index,
                "HAS_Z_SLOPE": has_z_slope,
                "STATS": reduces,
                "GRADIENT": has_gradient,
                "IS_EARLY": shape.is_early,
                "IS_PIPELINED": pipelined is not None,
                "LANES": shape.lanes,
            },
            num_warps=shape.warps,
        )

    def _launch_form(self, call: _Call) -> None:
        wants_arguments = self.needs_arguments and call.coefficients is not None
        if wants_arguments and self.per_class:
            if call.reduces:
                # The sums over rows need the logits and all rows' statistics, so the gradient has to wait for both.
                self._launch_form(call._replace(coefficients=None, out_RV=None, z_slope_R=None))
                assert call.coefficients is not None
                by_normalizer = with_z_slopes(call.coefficients.normalizer, call.stats, call.z_slope_R, self.unit)
                known = call.coefficients._replace(normalizer=by_normalizer)
                call = call._replace(coefficients=known, z_slope_R=None, reduces=False)
            self._launch_per_class(call)
        logits_RV, targets, stats = call.logits_RV, call.targets, call.stats
        rows, classes = logits_RV.shape
        by_arguments = torch.empty(rows if wants_arguments else 0, 3, dtype=torch.float32, device=self.device)
        coefficients = (None,) * 3 if call.coefficients is None else call.coefficients[:3]
        given = (targets.index_R, targets.dense, *coefficients, call.z_slope_R)
        shape = form_shape(classes, logits_RV.element_size(), self._sums_much(call, wants_arguments))
        launch(
            form_logits.form_logits_kernel,
            min(rows, shape.per_processor * multiprocessors(self.device)),
            (
                logits_RV,
                call.gradient_RV,
                *_present(stats[0], *given, *stats[:5], stats.entropy),
                by_arguments,
                *self.argument_pointers(stats[0], targets.first_class),
            ),
            (
                logits_RV.stride(0),
                call.gradient_RV.stride(0),
                call.dense_stride,
                *self.values,
                rows,
                classes,
                self.rows_per_target,
                targets.first_class,
            ),
            {
                "FORM": formulas.CODES[self.form.name],
                **self.flags,
                "C_PER_CLASS": self.per_class,
                "HAS_INDEX": targets.index_R is not None,
                "HAS_DENSE": targets.dense is not None,
                "HAS_ENTROPY": stats.entropy is not None and call.reduces,
                "HAS_Z_SLOPE": call.z_slope_R is not None,
                "STATS": call.reduces,
                "GRADIENT": call.coefficients is not None,
                "ARGUMENTS": wants_arguments,
                "IS_INCREASING": self.is_increasing,
                "BLOCK": shape.lanes,
            },
            num_warps=shape.warps,
        )
        if wants_arguments:
            for i, total in enumerate(self._sums):
                if total.ndim == 0:
                    total += by_arguments[:, i].sum()

    def _sums_much(self, call: _Call, wants_arguments: bool) -> bool:
        """True if the kernel sums more over the classes than a normaliser."""
        # Where phi may decrease, both ends of a row are looked for.
        is_searched = call.reduces and not self.is_increasing
        has_wide_sums = self.per_class or call.targets.dense is not None or call.logits_RV.element_size() == 4
        return call.stats.entropy is not None or is_searched or (wants_arguments and has_wide_sums)

    def _launch_per_class(self, call: _Call) -> None:
        rows, classes = call.logits_RV.shape
        stats, targets = call.stats, call.targets
        assert call.coefficients is not None
        block_rows, block, warps = PER_CLASS_SHAPE
        launch(
            per_class_kernel,
            -(-classes // block),
            (
                call.logits_RV,
                *_present(stats[0], targets.index_R, targets.dense, *call.coefficients[:3]),
                stats[0],
                stats.normalizer,
                self._sums[2][targets.first_class :],
                *self.argument_pointers(stats[0], targets.first_class),
            ),
            (
                call.logits_RV.stride(0),
                call.dense_stride,
                *self.values[:2],
                rows,
                classes,
                self.rows_per_target,
                targets.first_class,
            ),
            {
                "ALPHA_IS_POINTER": self.flags["ALPHA_IS_POINTER"],
                "BETA_IS_POINTER": self.flags["BETA_IS_POINTER"],
                "HAS_INDEX": targets.index_R is not None,
                "HAS_DENSE": targets.dense is not None,
                "FORM": formulas.CODES[self.form.name],
                "ROWS": block_rows,
                "BLOCK": block,
            },
            num_warps=warps,
        )

    @functools.cached_property
    def unit(self) -> Tensor | float:
        values = tuple(self.values[: len(self.arguments)])
        if any(pointer is not None for pointer in self.pointers[:2]):
            like = torch.empty(0, device=self.device)
            return self.form.unit(*normalizing.arguments_like(like, self.form, self.arguments))
        return normalizing.fixed_unit(self.form, values, torch.float32)

    def unit_pointers(self, unused: Tensor) -> list[Tensor]:
        """The tensors of the numbers that the unit depends on, of which kernels make it."""
        return _present(unused, *self.pointers[:2])

    @property
    def unit_constants(self) -> dict[str, int | bool]:
        """The form, and which of these numbers are pointers, as constants of kernels."""
        alpha, beta = "ALPHA_IS_POINTER", "BETA_IS_POINTER"
        return {"FORM": formulas.CODES[self.form.name], alpha: self.flags[alpha], beta: self.flags[beta]}

    def argument_pointers(self, unused: Tensor, first_class: int) -> list[Tensor]:
        """The tensors of alpha, beta, c and its mean."""
        alpha, beta, c = self.pointers
        if self.per_class and c is not None:
            c = c[first_class:]
        return _present(unused, alpha, beta, c, self.centre)
