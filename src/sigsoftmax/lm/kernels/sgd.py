"""One update of NT-ASGD in three launches: a norm in fixed order, the numbers of the step, the step itself.

The plain torch is ``AveragedSgd`` in ``training.nt_asgd``, which reads and writes the parameters and gradients
five times and more; here gradients are read twice, parameters and averages read and written once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sigsoftmax.lm.kernels.tensor_lists import block_count, chosen, find_block

__all__ = ["squares", "update_"]

SQUARES_BLOCK = 8192
UPDATE_BLOCK = 4096
WARPS = 8


@triton.jit
def squares_kernel(gradients, sizes, partials, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    index, block = find_block(program, sizes, BLOCK)
    size, offsets = chosen(sizes, index), block * BLOCK + tl.arange(0, BLOCK)
    places = chosen(gradients, index) + offsets
    # Whole blocks have no mask, which would keep a thread from loading 16 bytes at once.
    if (block + 1) * BLOCK <= size:
        gradient = tl.load(places)
    else:
        gradient = tl.load(places, mask=offsets < size, other=0.0)
    tl.store(partials + program, tl.sum(gradient * gradient))


@triton.jit
def numbers_kernel(
    partials, count, clip, norm_epsilon, step_size, updates, last_step_size, skip, numbers, BLOCK: tl.constexpr
):
    """Writes the factor of the gradients, the step size and the share of the new iterate in the average."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        total += tl.load(partials + offsets, mask=offsets < count, other=0.0)
    scale = clip / (tl.sqrt(tl.sum(total)) + norm_epsilon)
    # Not a minimum, which would hide that the norm is no number.
    tl.store(numbers, tl.where(scale > 1.0, 1.0, scale))
    if updates is None:
        tl.store(numbers + 1, step_size)
    else:
        done = tl.load(updates)
        tl.store(numbers + 1, tl.where(done == 0.0, step_size, tl.load(last_step_size)))
        tl.store(numbers + 2, (1.0 / tl.maximum(done, 1.0)).to(tl.float32))
        is_made = True
        if skip is not None:
            is_made = tl.load(skip) == 0
        tl.store(updates, done + 1.0, mask=is_made)
        tl.store(last_step_size, step_size, mask=is_made)


@triton.jit
def _step(parameters, gradients, averages, numbers, weight_decay, mask):
    parameter = tl.load(parameters, mask=mask)
    gradient = tl.load(gradients, mask=mask) * tl.load(numbers)
    gradient += weight_decay * parameter
    parameter -= gradient * tl.load(numbers + 1)
    tl.store(parameters, parameter, mask=mask)
    if averages is not None:
        share = tl.load(numbers + 2)
        average = tl.load(averages, mask=mask)
        change = parameter - average
        # Two forms, as in torch's lerp: with a share of 1 the average is the parameter exactly.
        average = tl.where(share < 0.5, average + share * change, parameter - change * (1.0 - share))
        tl.store(averages, average, mask=mask)


@triton.jit
def update_kernel(parameters, gradients, averages, sizes, numbers, weight_decay, skip, BLOCK: tl.constexpr):
    index, block = find_block(tl.program_id(0), sizes, BLOCK)
    size, offsets = chosen(sizes, index), block * BLOCK + tl.arange(0, BLOCK)
    if skip is not None:
        size = tl.where(tl.load(skip) == 0, size, 0)
    own_parameters, own_gradients = chosen(parameters, index) + offsets, chosen(gradients, index) + offsets
    own_averages = None
    if averages is not None:
        own_averages = chosen(averages, index) + offsets
    if (block + 1) * BLOCK <= size:
        _step(own_parameters, own_gradients, own_averages, numbers, weight_decay, None)
    else:
        _step(own_parameters, own_gradients, own_averages, numbers, weight_decay, offsets < size)


def squares(gradients: Sequence[Tensor]) -> Tensor:
    """Sums of squares of all gradients together, one for each block; their own sum is the square of the norm."""
    sizes = tuple(gradient.numel() for gradient in gradients)
    blocks = block_count(sizes, SQUARES_BLOCK)
    partials = torch.empty(blocks, device=gradients[0].device)
    squares_kernel[(blocks,)](tuple(gradients), sizes, partials, BLOCK=SQUARES_BLOCK, num_warps=WARPS)
    return partials


def update_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    *,
    partials: Tensor,
    clip: float,
    norm_epsilon: float,
    weight_decay: float,
    step_size: float,
    updates: Tensor,
    last_step_size: Tensor,
    skip: Tensor | None,
) -> None:
    """Change parameters, averages and the two numbers of averaging in place; nothing if ``skip`` is not zero.

    ``partials`` sum to the square of the norm. Tensors must be contiguous; without ``averages`` it is plain SGD.
    """
    device = parameters[0].device
    numbers = torch.empty(3, device=device)
    numbers_kernel[(1,)](
        partials,
        partials.numel(),
        clip,
        norm_epsilon,
        step_size,
        updates if averages else None,
        last_step_size if averages else None,
        skip,
        numbers,
        BLOCK=1024,
    )
    sizes = tuple(parameter.numel() for parameter in parameters)
    update_kernel[(block_count(sizes, UPDATE_BLOCK),)](
        tuple(parameters),
        tuple(gradients),
        tuple(averages) if averages else None,
        sizes,
        numbers,
        weight_decay,
        skip,
        BLOCK=UPDATE_BLOCK,
        num_warps=WARPS,
    )
