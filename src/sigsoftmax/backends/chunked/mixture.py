"""A block of tokens of a mixture whose loss, result or extras need the mixed probability of every class.

Shapes: n tokens of a block, K components, V classes; R = n K rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.contract.rows import MASK, Logarithms
from sigsoftmax.contract.tokens import floored, log_sum


class MixtureBlock:
    """The mixed log-probability of every class for a block of tokens, and its gradient.

    The log-prior is given in the unit that :func:`common_unit` makes of its own and that of phi. ``normalizer_R``
    replaces the log normaliser of the rows, relative to their offset, where other classes count in it.
    """

    def __init__(
        self,
        routines: FormRows,
        logits_RV: Tensor,
        log_prior: Logarithms,
        floor: float,
        normalizer_R: Tensor | None = None,
    ) -> None:
        self.routines, self.logits_RV, self.floor = routines, logits_RV, floor
        tokens, components = log_prior.multiples.shape
        rows = routines.rows(logits_RV)
        if normalizer_R is not None:
            rows = rows._replace(normalizer=normalizer_R.unsqueeze(-1))
        self.log_normalizer_nK = rows.log_normalizer.view(tokens, components)
        log_f_RV, self.unit = rows.log_probs_in_units, log_prior.unit
        self.log_f = log_f_RV._replace(multiples=log_f_RV.multiples.view(tokens, components, -1))
        self.joint_nKV = log_prior.multiples.unsqueeze(-1) + self.log_f.over(self.unit)
        self.exact_log_p_nV = log_sum(self.joint_nKV, self.unit, 1).squeeze(1)
        self.log_p = Logarithms(floored(self.exact_log_p_nV, floor, self.unit), self.unit)

    def by_log_f(self, by_log_p_nV: Tensor) -> Tensor:
        """dL/dlog f of every component, (n, K, V), given dL/dlog P; its sum over all classes is dL/dlog prior."""
        if self.floor:
            by_log_p_nV = by_log_p_nV * torch.exp((self.exact_log_p_nV - self.log_p.multiples) * self.unit)
        responsibility = torch.exp((self.joint_nKV - self.exact_log_p_nV.unsqueeze(1)) * self.unit)
        responsibility.masked_fill_((self.exact_log_p_nV == MASK).unsqueeze(1), 0.0)
        return responsibility.mul_(by_log_p_nV.unsqueeze(1))

    def backpropagate(
        self, by_log_f_nKV: Tensor, minus_by_normalizer_nK: Tensor, unused_n1: Tensor | None, out_RV: Tensor
    ) -> None:
        """Write dL/dlogits to ``out_RV``, given dL/dlog f, and minus dL/dnormaliser of whole rows."""
        by_phi = by_log_f_nKV - self.log_f.values.exp_() * minus_by_normalizer_nK.unsqueeze(-1)
        if unused_n1 is not None:
            by_phi.masked_fill_(unused_n1.unsqueeze(-1), 0.0)
        self.routines.backpropagate(self.logits_RV, by_phi.reshape(self.logits_RV.shape), out_RV)
