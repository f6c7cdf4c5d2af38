"""The two routines of the interface, launched on a GPU.

Shapes: R rows, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigsoftmax.backends.triton.kernels import fast_rows, forms, general, stream
from sigsoftmax.backends.triton.launches import Launch, launch
from sigsoftmax.backends.triton.shapes import PER_CLASS_SHAPE, fast_shape, general_shape, multiprocessors, stagger
from sigsoftmax.contract import normalizing
from sigsoftmax.contract.normalizing import constant
from sigsoftmax.contract.rows import RowCoefficients, RowStats
from sigsoftmax.contract.tokens import with_z_slopes
from sigsoftmax.family.formulas import Form
from sigsoftmax.family.parameters import ParameterKind, kind_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def routines(form: Form, arguments: Sequence[Tensor], logits_like: Tensor, needs_arguments: bool) -> TritonRows:
    return TritonRows(form, arguments, logits_like, needs_arguments)


def why_refused(form: Form, dtype: torch.dtype) -> str | None:
    if form.name not in forms.CODES:
        return f"{form.name!r} is registered by the user and has no kernel"
    if dtype not in DTYPES:
        return f"logits of {dtype} (the kernels take float32, bfloat16 and float16)"
    return None


class TritonRows:
    """Kernels for one output function. The target of a row is at its index divided by ``rows_of_target``."""

    max_rows: int | None = None

    def __init__(
        self,
        form: Form,
        arguments: Sequence[Tensor],
        logits_like: Tensor,
        needs_arguments: bool = False,
        rows_of_target: int = 1,
    ) -> None:
        self.form = form
        self.rows_of_target = rows_of_target
        self.device = logits_like.device
        self.needs_arguments = needs_arguments
        self.arguments = [a.detach() if a.requires_grad else a for a in arguments]
        self.values = [constant(a) for a in self.arguments]
        self.pointers = [
            None if v is not None else a.to(self.device).contiguous()
            for a, v in zip(self.arguments, self.values, strict=True)
        ]
        self.per_class = len(self.arguments) == 3 and kind_of(self.arguments[2]) is ParameterKind.PER_CLASS
        self.centre = self.pointers[2].float().mean() if self.per_class and self.pointers[2] is not None else None
        properties = form.properties(self.values)
        self.is_increasing = properties.is_increasing is True
        self.is_sigsoftmax = properties.is_sigsoftmax is True
        # The kernels of softmax start from the highest logit of a row and multiply gaps, which may be infinite.
        self.is_fast = (properties.is_softmax is True or self.is_sigsoftmax) and not needs_arguments
        self._sums: list[Tensor] = []
        if needs_arguments:
            self._sums = [torch.zeros(a.shape, dtype=torch.float32, device=self.device) for a in self.arguments]

    def stats(
        self,
        logits_RV: Tensor,
        index_R: Tensor | None,
        dense: Tensor | None,
        argmax: bool,
        entropy: bool,
        vectors_6R: Tensor | None = None,
        first_class: int = 0,
    ) -> RowStats:
        """``vectors_6R`` is memory for what is measured, in the order of ``RowStats``.

        The logits may be a range of all classes; where the target is elsewhere, what is said of it means nothing.
        """
        return self._run(
            logits_RV,
            index_R,
            dense,
            argmax=argmax,
            entropy=entropy,
            stats=None,
            coefficients=None,
            vectors_6R=vectors_6R,
            first_class=first_class,
        )

    def gradient(
        self,
        logits_RV: Tensor,
        stats: RowStats,
        coefficients: RowCoefficients,
        index_R: Tensor | None,
        dense: Tensor | None,
        out_RV: Tensor,
    ) -> None:
        self._run(logits_RV, index_R, dense, stats=stats, coefficients=coefficients, out_RV=out_RV)

    def stats_and_gradient(
        self,
        logits_RV: Tensor,
        coefficients: RowCoefficients,
        z_slope_R: Tensor | None,
        index_R: Tensor | None,
        dense: Tensor | None,
        out_RV: Tensor,
        argmax: bool,
        entropy: bool,
        vectors_6R: Tensor | None = None,
    ) -> RowStats:
        """Both in one pass, where the coefficients do not wait for the stats: by_normalizer += z_slope * log sum g."""
        return self._run(
            logits_RV,
            index_R,
            dense,
            argmax=argmax,
            entropy=entropy,
            stats=None,
            coefficients=coefficients,
            z_slope_R=z_slope_R,
            out_RV=out_RV,
            vectors_6R=vectors_6R,
        )

    def gradient_of_classes(
        self,
        logits_RV: Tensor,
        stats: RowStats,
        coefficients: RowCoefficients,
        index_R: Tensor | None,
        dense: Tensor | None,
        first_class: int,
        out_RV: Tensor,
    ) -> None:
        last_class = first_class + logits_RV.shape[1]
        self._run(
            logits_RV,
            index_R,
            None if dense is None else dense[..., first_class:last_class],
            stats=stats,
            coefficients=coefficients,
            out_RV=out_RV,
            first_class=first_class,
        )

    def argument_gradients(self) -> list[Tensor]:
        return self._sums

    def _run(
        self,
        logits_RV: Tensor,
        index_R: Tensor | None,
        dense: Tensor | None,
        *,
        stats: RowStats | None,
        coefficients: RowCoefficients | None,
        argmax: bool = False,
        entropy: bool = False,
        z_slope_R: Tensor | None = None,
        out_RV: Tensor | None = None,
        first_class: int = 0,
        vectors_6R: Tensor | None = None,
    ) -> RowStats:
        rows = logits_RV.shape[0]
        # Kernels take rows of numbers that follow each other.
        if logits_RV.stride(-1) != 1:
            logits_RV = logits_RV.contiguous()
        if dense is not None and dense.stride(-1) != 1:
            dense = dense.contiguous()
        if argmax and out_RV is not None and out_RV.data_ptr() == logits_RV.data_ptr():
            # The gradient will overwrite what argmax reads.
            best = self._argmax(logits_RV)
        else:
            best = None
        measure = stats is None
        if stats is None:
            if vectors_6R is None:
                vectors_6R = torch.empty(6, rows, dtype=torch.float32, device=self.device)
            anchor, offset, normalizer, at_target, at_dense, of_entropy = vectors_6R.unbind()
            stats = RowStats(
                anchor,
                offset,
                normalizer,
                None if index_R is None else at_target,
                None if dense is None else at_dense,
                None,
                of_entropy if entropy else None,
            )
        if rows:
            if self.is_fast and dense is None and not entropy:
                self._launch_fast(logits_RV, index_R, stats, coefficients, z_slope_R, out_RV, measure, first_class)
            else:
                self._launch_general(
                    logits_RV, index_R, dense, stats, coefficients, z_slope_R, out_RV, measure, first_class
                )
        if argmax and best is None:
            best = self._argmax(logits_RV)
        return stats._replace(argmax=best) if best is not None else stats

    def _argmax(self, logits_RV: Tensor) -> Tensor:
        if self.is_increasing and not self.per_class:
            return logits_RV.argmax(-1)
        return normalizing.rows(logits_RV, self.form, self.arguments).relative.argmax(-1)

    def _launch_fast(
        self,
        logits_RV: Tensor,
        index_R: Tensor | None,
        stats: RowStats,
        coefficients: RowCoefficients | None,
        z_slope_R: Tensor | None,
        out_RV: Tensor | None,
        measure: bool,
        first_class: int,
    ) -> None:
        unused = stats.peak
        has_gradient = coefficients is not None
        launch = self.fast_launch(
            logits_RV,
            logits_RV if out_RV is None else out_RV,
            has_index=index_R is not None,
            has_z_slope=z_slope_R is not None,
            measure=measure,
            has_gradient=has_gradient,
            first_class=first_class,
        )
        launch(
            logits_RV,
            logits_RV if out_RV is None else out_RV,
            unused if index_R is None else index_R,
            unused if coefficients is None else coefficients.normalizer,
            unused if coefficients is None or coefficients.target is None else coefficients.target,
            unused if z_slope_R is None else z_slope_R,
            stats.peak,
            stats.offset,
            stats.normalizer,
            unused if stats.target is None else stats.target,
        )

    def fast_launch(
        self,
        logits_RV: Tensor,
        out_RV: Tensor,
        *,
        has_index: bool,
        has_z_slope: bool,
        measure: bool,
        has_gradient: bool,
        first_class: int = 0,
    ) -> Launch:
        """For logits and a gradient of these shapes."""
        rows, classes = logits_RV.shape
        size = logits_RV.element_size()
        streamed = None
        if measure and has_gradient and logits_RV.data_ptr() % stream.ALIGNMENT == 0:
            streamed = stream.shape_of(classes, logits_RV.stride(0), size, self.is_sigsoftmax)
        shape = streamed or fast_shape(classes, size, self.is_sigsoftmax, measures=measure, writes=has_gradient)
        programs = min(rows, shape.per_processor * multiprocessors(self.device))
        return Launch(
            fast_rows.rows_kernel,
            programs,
            (
                logits_RV.stride(0),
                out_RV.stride(0),
                rows,
                classes,
                self.rows_of_target,
                first_class,
                self.values[0] or 0.0,
                self.values[2] or 0.0,
                stagger(rows, classes, size, programs) if measure and has_gradient else 0,
            ),
            {
                "IS_SIG": self.is_sigsoftmax,
                "HAS_INDEX": has_index,
                "HAS_Z_SLOPE": has_z_slope,
                "STATS": measure,
                "GRADIENT": has_gradient,
                "IS_EARLY": shape.is_early,
                "IS_STREAM": streamed is not None,
                "LANES": shape.lanes,
            },
            num_warps=shape.warps,
        )

    def _launch_general(
        self,
        logits_RV: Tensor,
        index_R: Tensor | None,
        dense: Tensor | None,
        stats: RowStats,
        coefficients: RowCoefficients | None,
        z_slope_R: Tensor | None,
        out_RV: Tensor | None,
        measure: bool,
        first_class: int,
    ) -> None:
        rows, classes = logits_RV.shape
        unused = stats.peak
        wants_arguments = self.needs_arguments and coefficients is not None
        if wants_arguments and self.per_class and measure:
            # The sums over rows need the logits and all rows' statistics, so the gradient has to wait for both.
            self._launch_general(logits_RV, index_R, dense, stats, None, None, None, True, 0)
            assert coefficients is not None
            by_normalizer = with_z_slopes(coefficients.normalizer, stats, z_slope_R)
            coefficients, z_slope_R = coefficients._replace(normalizer=by_normalizer), None
            measure = False
        if wants_arguments and self.per_class:
            assert coefficients is not None
            self._launch_per_class(logits_RV, index_R, dense, stats, coefficients, first_class)
        by_arguments = torch.empty(rows if wants_arguments else 0, 3, dtype=torch.float32, device=self.device)
        size = logits_RV.element_size()
        # Where phi may decrease, both ends of a row are looked for.
        sums_much = (
            stats.entropy is not None
            or (measure and not self.is_increasing)
            or (wants_arguments and (self.per_class or dense is not None or size == 4))
        )
        block, warps, per_processor = general_shape(classes, size, sums_much)
        launch(
            general.rows_kernel,
            min(rows, per_processor * multiprocessors(self.device)),
            (
                logits_RV,
                logits_RV if out_RV is None else out_RV,
                unused if index_R is None else index_R,
                unused if dense is None else dense,
                unused if coefficients is None else coefficients.normalizer,
                unused if coefficients is None or coefficients.target is None else coefficients.target,
                unused if coefficients is None or coefficients.dense is None else coefficients.dense,
                unused if z_slope_R is None else z_slope_R,
                stats.peak,
                stats.offset,
                stats.normalizer,
                unused if stats.target is None else stats.target,
                unused if stats.dense is None else stats.dense,
                unused if stats.entropy is None else stats.entropy,
                by_arguments,
                *self.argument_pointers(unused, first_class),
            ),
            (
                logits_RV.stride(0),
                logits_RV.stride(0) if out_RV is None else out_RV.stride(0),
                dense.stride(0) if dense is not None and dense.ndim == 2 else 0,
                *self.argument_values(),
                rows,
                classes,
                self.rows_of_target,
                first_class,
            ),
            {
                "FORM": forms.CODES[self.form.name],
                **self.argument_flags(),
                "C_PER_CLASS": self.per_class,
                "HAS_INDEX": index_R is not None,
                "HAS_DENSE": dense is not None,
                "HAS_ENTROPY": stats.entropy is not None and measure,
                "HAS_Z_SLOPE": z_slope_R is not None,
                "STATS": measure,
                "GRADIENT": coefficients is not None,
                "ARGUMENTS": wants_arguments,
                "IS_INCREASING": self.is_increasing,
                "BLOCK": block,
            },
            num_warps=warps,
        )
        if wants_arguments:
            for i, total in enumerate(self._sums):
                if total.ndim == 0:
                    total += by_arguments[:, i].sum()

    def _launch_per_class(
        self,
        logits_RV: Tensor,
        index_R: Tensor | None,
        dense: Tensor | None,
        stats: RowStats,
        coefficients: RowCoefficients,
        first_class: int,
    ) -> None:
        rows, classes = logits_RV.shape
        unused = stats.peak
        block_rows, block, warps = PER_CLASS_SHAPE
        launch(
            general.per_class_kernel,
            -(-classes // block),
            (
                logits_RV,
                unused if index_R is None else index_R,
                unused if dense is None else dense,
                coefficients.normalizer,
                unused if coefficients.target is None else coefficients.target,
                unused if coefficients.dense is None else coefficients.dense,
                stats.peak,
                stats.normalizer,
                self._sums[2][first_class:],
                *self.argument_pointers(unused, first_class),
            ),
            (
                logits_RV.stride(0),
                dense.stride(0) if dense is not None and dense.ndim == 2 else 0,
                *self.argument_values()[:2],
                rows,
                classes,
                self.rows_of_target,
                first_class,
            ),
            {
                "ALPHA_IS_POINTER": self.values[0] is None,
                "BETA_IS_POINTER": self.values[1] is None,
                "HAS_INDEX": index_R is not None,
                "HAS_DENSE": dense is not None,
                "FORM": forms.CODES[self.form.name],
                "ROWS": block_rows,
                "BLOCK": block,
            },
            num_warps=warps,
        )

    def argument_pointers(self, unused: Tensor, first_class: int) -> list[Tensor]:
        """Of alpha, beta, c and its mean; a form with one argument has it in alpha's place."""
        pointers = [*self.pointers, None, None][:3]
        if self.per_class and pointers[2] is not None:
            pointers[2] = pointers[2][first_class:]
        return [unused if p is None else p for p in (*pointers, self.centre)]

    def argument_values(self) -> list[float]:
        return [0.0 if v is None else v for v in [*self.values, None, None][:3]]

    def argument_flags(self) -> dict[str, bool]:
        pointers = [*self.pointers, None, None][:3]
        names = ("ALPHA_IS_POINTER", "BETA_IS_POINTER", "C_IS_POINTER")
        return {name: p is not None for name, p in zip(names, pointers, strict=True)}
