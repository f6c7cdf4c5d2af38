"""NT-ASGD: plain SGD, then SGD with a running average once validation has stopped improving.

One update: clip the global norm, add the weight decay, step. All numbers that change from update to update live on the
device, so that an update can be captured in a CUDA graph.

The recursion is that of ``torch.optim.ASGD`` with t0 = 0 and lambd = 0, which the published results were made with. It
has two quirks, kept here: the step size that a window asks for is used one update late, and the first iterate is left
out of the average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

__all__ = ["AveragedSgd", "NonMonotonicTrigger", "clip_norm_", "joint_norm"]

# torch.nn.utils.clip_grad_norm_ has the same.
NORM_EPSILON = 1e-6


def joint_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all numbers together."""
    return torch.stack(torch._foreach_norm(list(gradients))).norm()


def clip_norm_(
    gradients: Sequence[Tensor], longest: float, norm_of: Callable[[Sequence[Tensor]], Tensor] = joint_norm
) -> Tensor:
    """Scale gradients in place so that their joint norm is at most ``longest``; returns the norm before."""
    norm = norm_of(gradients)
    scale = (longest / (norm + NORM_EPSILON)).clamp(max=1.0)
    torch._foreach_mul_(list(gradients), scale)
    return norm


class AveragedSgd:
    """SGD without momentum; after :meth:`begin_averaging` also the mean of the iterates.

    ``norm_of`` measures the gradients that are clipped, where these are a part of all.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        clip: float,
        weight_decay: float,
        norm_of: Callable[[Sequence[Tensor]], Tensor] = joint_norm,
    ) -> None:
        self.parameters = list(parameters)
        self.clip, self.weight_decay, self._norm_of = clip, weight_decay, norm_of
        self.averages: list[Tensor] = []
        device = self.parameters[0].device
        self._updates = torch.zeros((), dtype=torch.float64, device=device)
        """since averaging began"""
        self._step_size = torch.zeros((), device=device)
        """the step size that the previous update asked for"""

    @property
    def mode(self) -> Literal["sgd", "asgd"]:
        return "asgd" if self.averages else "sgd"

    @torch.no_grad()
    def begin_averaging(self) -> None:
        """From the current weights on. A second call changes nothing."""
        if not self.averages:
            self.averages = [parameter.detach().clone() for parameter in self.parameters]
            self._updates.zero_()

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor], step_size: float) -> None:
        """One update with gradients that may be overwritten."""
        gradients = list(gradients)
        clip_norm_(gradients, self.clip, self._norm_of)
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

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap weights and averages in place, once there are averages: twice is not at all."""
        if not self.averages:
            return
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            weights = parameter.clone()
            parameter.copy_(average)
            average.copy_(weights)

    def state(self) -> dict[str, Tensor]:
        """All but the weights."""
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
        """Whether this loss fires; it then counts among the earlier ones."""
        earlier = self.losses[: -self.patience]
        self.losses.append(loss)
        return bool(earlier) and loss > min(earlier)
