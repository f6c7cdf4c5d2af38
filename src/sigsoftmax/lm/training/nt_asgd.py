"""NT-ASGD (Merity et al. 2018): plain SGD, then with a running average once validation has stopped improving.

One update: clip the global norm, add the weight decay, step. All numbers that change from update to update live on the
device, so that an update can be captured in a CUDA graph. What plain torch does in many passes over the parameters,
the kernels of ``kernels.sgd`` do in two.

The recursion is that of ``torch.optim.ASGD`` with t0 = 0 and lambd = 0, which the published results were made with. It
has two quirks, kept here: the step size that a window asks for is used one update late, and the first iterate is left
out of the average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from sigsoftmax.lm import kernels

__all__ = ["AveragedSgd", "NonMonotonicTrigger", "clip_norm_", "joint_squares"]

# torch.nn.utils.clip_grad_norm_ has the same.
NORM_EPSILON = 1e-6


def joint_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Sums of squares, whose sum is the square of the norm of all numbers together."""
    if all(map(kernels.run_on, gradients)):
        from sigsoftmax.lm.kernels import sgd

        return sgd.squares([gradient.contiguous() for gradient in gradients])
    return torch.stack(torch._foreach_norm(list(gradients))).square()


def clip_norm_(
    gradients: Sequence[Tensor], longest: float, squares_of: Callable[[Sequence[Tensor]], Tensor] = joint_squares
) -> Tensor:
    """Scale gradients in place so that their joint norm is at most ``longest``; returns the norm before."""
    norm = squares_of(gradients).sum().sqrt()
    scale = (longest / (norm + NORM_EPSILON)).clamp(max=1.0)
    torch._foreach_mul_(list(gradients), scale)
    return norm


class AveragedSgd:
    """SGD without momentum; after :meth:`begin_averaging` also the mean of the iterates.

    ``squares_of`` sums the squares of the gradients of the whole model, of which these may be a part. Parameters are
    contiguous.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        clip: float,
        weight_decay: float,
        squares_of: Callable[[Sequence[Tensor]], Tensor] = joint_squares,
    ) -> None:
        self.parameters = list(parameters)
        self.clip, self.weight_decay, self._squares_of = clip, weight_decay, squares_of
        self.averages: list[Tensor] = []
        device = self.parameters[0].device
        self._updates = torch.zeros((), dtype=torch.float64, device=device)
        """updates since averaging began"""
        self._step_size = torch.zeros((), device=device)
        """the step size that the previous update asked for"""

    @property
    def mode(self) -> Literal["sgd", "asgd"]:
        return "asgd" if self.averages else "sgd"

    @torch.no_grad()
    def begin_averaging(self) -> None:
        """Average from the current weights on. A second call changes nothing."""
        if not self.averages:
            self.averages = [parameter.detach().clone() for parameter in self.parameters]
            self._updates.zero_()

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor], step_size: float, *, skip: Tensor | None = None) -> None:
        """One update with gradients that may be overwritten.

        ``skip`` is an error flag on the device, one int32: where it is not zero, nothing changes.
        """
        gradients = list(gradients)
        if all(map(kernels.run_on, self.parameters)):
            self._update_by_kernels(gradients, step_size, skip)
        elif skip is None:
            self._update_by_torch(gradients, step_size)
        else:
            changed = [*self.parameters, *self.averages, self._updates, self._step_size]
            before = [tensor.clone() for tensor in changed]
            self._update_by_torch(gradients, step_size)
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(torch.where(skip == 0, tensor, old))

    def _update_by_torch(self, gradients: list[Tensor], step_size: float) -> None:
        clip_norm_(gradients, self.clip, self._squares_of)
        if self.weight_decay:
            torch._foreach_add_(gradients, self.parameters, alpha=self.weight_decay)
        if not self.averages:
            torch._foreach_add_(self.parameters, gradients, alpha=-step_size)
            return
        torch._foreach_mul_(gradients, torch.where(self._updates == 0.0, step_size, self._step_size))
        torch._foreach_sub_(self.parameters, gradients)
        self._step_size.fill_(step_size)
        # lerp with weight 1 gives its end exactly: the average after the first two updates is the iterate itself.
        share = (1.0 / self._updates.clamp(min=1.0)).to(torch.float32)
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            average.lerp_(parameter, share)
        self._updates.add_(1.0)

    def _update_by_kernels(self, gradients: list[Tensor], step_size: float, skip: Tensor | None) -> None:
        from sigsoftmax.lm.kernels import sgd

        gradients = [gradient.contiguous() for gradient in gradients]
        sgd.update_(
            self.parameters,
            gradients,
            self.averages,
            partials=self._squares_of(gradients),
            clip=self.clip,
            norm_epsilon=NORM_EPSILON,
            weight_decay=self.weight_decay,
            step_size=step_size,
            updates=self._updates,
            last_step_size=self._step_size,
            skip=skip,
        )

    @torch.no_grad()
    def swap_averages(self) -> None:
        """Swap weights and averages in place, once there are averages; a second call swaps them back."""
        if not self.averages:
            return
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            weights = parameter.clone()
            parameter.copy_(average)
            average.copy_(weights)

    def state(self) -> dict[str, Tensor]:
        """The state of the optimiser: everything but the weights."""
        tensors = {"updates": self._updates, "step_size": self._step_size}
        return tensors | {f"average.{index}": average for index, average in enumerate(self.averages)}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        if "average.0" in state:
            self.begin_averaging()
            for index, average in enumerate(self.averages):
                average.copy_(state[f"average.{index}"])
        self._updates.copy_(state["updates"])
        self._step_size.copy_(state["step_size"])


class NonMonotonicTrigger:
    """Fires when a loss is above the best of all but the last ``patience`` losses before it."""

    def __init__(self, patience: int, losses: Sequence[float] = ()) -> None:
        self.patience = patience
        self.losses = list(losses)

    def fires(self, loss: float) -> bool:
        """Return True if this loss fires; it then counts among the earlier ones."""
        earlier = self.losses[: -self.patience]
        self.losses.append(loss)
        return bool(earlier) and loss > min(earlier)
