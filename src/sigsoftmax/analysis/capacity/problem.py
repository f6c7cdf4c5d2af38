"""Fitting a head to given distributions with everything free: each context's h, the output matrix, the class bias.

The loss is the weighted mean over contexts of KL(P || Q). Its gradient by the logits is the family's,
``slope(z) * (f - P)``, and that of a mixture follows from the responsibilities: autograd takes five times as long, and
serves the few parameters of phi alone. What phi is stays in ``family``. Nothing is learned or generalised here: the
least KL is what the head *can* express.

Shapes: N contexts, V vocabulary, K components, R = N K rows, d width, e = d + 1 with the class bias. A point of the
search is one flat float64 vector; ``Parts`` are its views.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.analysis.capacity.distributions import Distributions
from sigsoftmax.analysis.capacity.lbfgs import Apply
from sigsoftmax.analysis.spectrum.factorizations import damped_inverse
from sigsoftmax.contract import normalizing
from sigsoftmax.contract.rows import Logarithms
from sigsoftmax.contract.spec import check_positive
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.heads import Head
from sigsoftmax.family.parameters import ParameterKind

__all__ = ["Parts", "Problem"]


BLOCK = 40_000
"""Logits computed at once. At 320 kB an array allocations also stay below what the C library returns to the system."""


class Parts(NamedTuple):
    """Views of a flat vector of parameters (or of a gradient)."""

    h_Rd: Tensor
    """R = N * K rows, the components of a context one after the other"""
    output_Ve: Tensor
    """output matrix and class bias in one: e = d + 1 columns, the bias last"""
    prior_NK: Tensor | None
    """logits of the prior, for mixtures. They are free, so softmax reaches every prior that any member reaches"""
    learned: dict[str, Tensor]
    """parameters of phi that are fitted too"""


class Problem:
    """A head of some width, facing distributions: its loss, gradient, preconditioner and log-probabilities."""

    def __init__(self, truth: Distributions, head: Head, width: int) -> None:
        self.contexts, self.vocabulary = truth.log_p_NV.shape
        check_positive(width=width)
        self.truth, self.head, self.width = truth, head, width
        self.weights_N, p_NV = truth.weights_N, truth.log_p_NV.exp()
        self.weighted_p_NV = p_NV * self.weights_N[:, None]
        self.negative_entropy = -float(self.weights_N @ torch.special.entr(p_NV).sum(1))
        self.learned = head.learned(self.vocabulary)
        # For a linear phi that is not fitted, phi costs no more than a factor.
        is_line = head.function.is_linear and not self.learned
        self.linear_slope = head.function.properties.affine_slope if is_line else None
        self.block = max(1, BLOCK // (head.components * self.vocabulary))
        rows = self.contexts * head.components
        self._shapes: list[tuple[int, ...]] = [(rows, width), (self.vocabulary, width + 1)]
        if head.components > 1:
            self._shapes.append((self.contexts, head.components))
        self._shapes += [shape for _, shape in self.learned.values()]
        self.size = sum(math.prod(shape) for shape in self._shapes)

    def views(self, x: Tensor) -> Parts:
        """The parts of a point."""
        pieces = x.split([math.prod(shape) for shape in self._shapes])
        views = [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]
        prior_NK = views.pop(2) if self.head.components > 1 else None
        return Parts(views[0], views[1], prior_NK, dict(zip(self.learned, views[2:], strict=True)))

    def function_at(self, x: Tensor) -> OutputFunction:
        return self.head.with_learned(self.views(x).learned)

    def logits(self, x: Tensor) -> Tensor:
        """The logits of all components, (N * K, V)."""
        parts = self.views(x)
        return torch.addmm(parts.output_Ve[:, -1], parts.h_Rd, parts.output_Ve[:, :-1].T)

    def log_output(self, x: Tensor) -> Tensor:
        """log Q, (N, V), by the reference backend: what every reported figure is computed from."""
        function, prior_NK = self.function_at(x), self.views(x).prior_NK
        form, arguments = function.form, function.arguments(self.vocabulary)
        z_RV = self.logits(x)
        if prior_NK is None:
            return normalizing.log_probs(z_RV, form, arguments)
        z_NKV = z_RV.view(self.contexts, self.head.components, self.vocabulary)
        log_prior = Logarithms(torch.log_softmax(prior_NK, -1))
        return normalizing.mixture_log_probs(z_NKV, log_prior, form, arguments)

    def kl(self, log_q_NV: Tensor) -> float:
        return self.negative_entropy - float((self.weighted_p_NV * log_q_NV).sum())

    # --- the search -----------------------------------------------------------------------------------------

    def evaluate(self, x: Tensor) -> tuple[float, Tensor]:
        """KL and its gradient, a block of contexts at a time: temporaries then stay in the processor's cache."""
        gradient = torch.zeros_like(x)
        parts, slots = self.views(x), self.views(gradient)
        function = self.function_at(x)
        leaves = {key: value.detach().clone().requires_grad_() for key, value in parts.learned.items()}
        w_Vd, bias_V = parts.output_Ve[:, :-1], parts.output_Ve[:, -1]
        components = self.head.components
        kl = self.negative_entropy
        for first in range(0, self.contexts, self.block):
            of_contexts = slice(first, first + self.block)
            of_rows = slice(first * components, (first + self.block) * components)
            h_Rd = parts.h_Rd[of_rows]
            z_RV = torch.addmm(bias_V, h_Rd, w_Vd.T)
            log_g_RV = z_RV * self.linear_slope if self.linear_slope is not None else function.phi(z_RV)
            if parts.prior_NK is None or slots.prior_NK is None:
                cross_entropy, error_RV = self._single_error(log_g_RV, of_contexts)
            else:
                cross_entropy, error_RV, prior_error_NK = self._mixture_error(
                    log_g_RV, torch.softmax(parts.prior_NK[of_contexts], -1), of_contexts
                )
                slots.prior_NK[of_contexts] = prior_error_NK
            kl += cross_entropy
            if leaves:
                # Rows of the error sum to 0, so that offsets of phi do not count.
                learned = torch.autograd.grad(self.head.with_learned(leaves).phi(z_RV), [*leaves.values()], error_RV)
                for key, value in zip(leaves, learned, strict=True):
                    slots.learned[key].add_(value)
            error_RV.mul_(self.linear_slope if self.linear_slope is not None else function.slope(z_RV))
            torch.mm(error_RV, w_Vd, out=slots.h_Rd[of_rows])
            slots.output_Ve[:, :-1].addmm_(error_RV.T, h_Rd)
            slots.output_Ve[:, -1] += error_RV.sum(0)
        return kl, gradient

    def _single_error(self, log_g_RV: Tensor, of_contexts: slice) -> tuple[float, Tensor]:
        """Cross-entropy of some contexts, and its derivative by log g: f - P."""
        weighted_p_NV = self.weighted_p_NV[of_contexts]
        log_q_NV = torch.log_softmax(log_g_RV, -1)
        cross_entropy = -float((weighted_p_NV * log_q_NV).sum())
        return cross_entropy, log_q_NV.exp_().mul_(self.weights_N[of_contexts, None]).sub_(weighted_p_NV)

    def _mixture_error(self, log_g_RV: Tensor, prior_NK: Tensor, of_contexts: slice) -> tuple[float, Tensor, Tensor]:
        """The same for a mixture, with the derivative by the prior's logits.

        In probability space a mixture takes one exp an element; it underflows only where KL is hopeless, and then
        the loss is inf and the line search turns back.
        """
        weighted_p_NV = self.weighted_p_NV[of_contexts]
        f_NKV = torch.softmax(log_g_RV, -1).view(*prior_NK.shape, self.vocabulary)
        q_NV = torch.bmm(prior_NK[:, None], f_NKV)[:, 0]
        cross_entropy = -float((weighted_p_NV * q_NV.log()).sum())
        ratio_NV = weighted_p_NV / q_NV
        share_NK = torch.bmm(f_NKV, ratio_NV[..., None])[..., 0]
        error_NKV = (share_NK[..., None] - ratio_NV[:, None]).mul_(f_NKV).mul_(prior_NK[..., None])
        return cross_entropy, error_NKV.view_as(log_g_RV), prior_NK * (self.weights_N[of_contexts, None] - share_NK)

    def preconditioner_at(self, x: Tensor) -> Apply:
        """Inverse blocks of the Fisher information, with f replaced by its mean over contexts.

        Then the block of each context's h is a multiple of one d x d matrix, W^T diag(q) W with q_j the mean of
        f_j slope_j^2, and that of each token's weights a multiple of the Gram matrix of h.
        """
        parts = self.views(x)
        z_RV = self.logits(x)
        function = self.function_at(x)
        components = self.head.components
        row_weight_R = (self.weights_N / components).repeat_interleave(components)
        f_RV = torch.softmax(function.phi(z_RV), -1)
        q_V = row_weight_R @ f_RV.mul_(function.slope(z_RV).square_())
        q_V = q_V.clamp_min(float(q_V.mean()) * 1e-2)
        w_Vd = parts.output_Ve[:, :-1]
        h_Re = torch.nn.functional.pad(parts.h_Rd, (0, 1), value=1.0)
        of_h_dd = damped_inverse(w_Vd.T @ (q_V[:, None] * w_Vd))
        of_output_ee = damped_inverse(h_Re.T @ (row_weight_R[:, None] * h_Re))
        row_weight_R = row_weight_R.clamp_min(float(row_weight_R.mean()) * 1e-2)

        def apply(gradient: Tensor) -> Tensor:
            result = torch.empty_like(gradient)
            given, slots = self.views(gradient), self.views(result)
            torch.mm(given.h_Rd / row_weight_R[:, None], of_h_dd, out=slots.h_Rd)
            torch.mm(given.output_Ve / q_V[:, None], of_output_ee, out=slots.output_Ve)
            if given.prior_NK is not None and slots.prior_NK is not None:
                torch.div(given.prior_NK, row_weight_R.view_as(given.prior_NK), out=slots.prior_NK)
            for key, value in given.learned.items():
                differs_by_class = self.head.function.kinds[key] is ParameterKind.PER_CLASS
                slots.learned[key].copy_(value / (q_V if differs_by_class else q_V.sum()))
            return result

        return apply
