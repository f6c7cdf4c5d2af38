"""Checks that the ranks of a group ask for the same loss of the same tokens, before they wait for each other.

Ranks that differ would hang, or silently mix the rows of different tokens: the classes are spread over the ranks,
the tokens are not.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from sigsoftmax.contract import value_checks
from sigsoftmax.contract.signature import checks_values
from sigsoftmax.distributed.exchange import Exchange


def agreed_sizes(
    exchange: Exchange,
    own_classes: int,
    sizes: tuple[int, ...] | None,
    facts: Mapping[str, object],
    target: Tensor,
) -> tuple[int, ...]:
    """The numbers of classes of all ranks, having checked that they state the same facts and targets.

    On a CPU, and where nobody knows ``sizes``, one exchange of a few numbers per rank tells both. Reading them from a
    GPU would stop its stream, so there the targets are compared on the device, and the facts if SIGSOFTMAX_CHECK=1.
    """
    checksum = _checksum(target)
    if sizes is not None and not checks_values(target.device):
        value_checks.check_same_targets((exchange.gather(checksum) == checksum).all())
        return sizes
    stated = torch.tensor([own_classes, *map(_as_integer, facts.values())], device=target.device)
    every = exchange.gather(torch.cat([stated, checksum.view(1)])).tolist()
    for column, name in enumerate([*facts, "targets"], start=1):
        found = [numbers[column] for numbers in every]
        if len(set(found)) > 1:
            own = f": {list(facts.values())[column - 1]} on this rank" if name in facts else ""
            raise ValueError(
                f"the ranks of the group differ in {name}{own} (rank {exchange.rank} of {exchange.size}); a "
                "vocabulary-parallel loss spreads classes over ranks, so that every rank must pass the same tokens and "
                "options. For other tokens on each rank use a process group for each of the two, or, if the weight was "
                "sharded by FSDP, call the loss inside forward"
            )
    return tuple(numbers[0] for numbers in every)


def _checksum(target: Tensor) -> Tensor:
    """A number that tells target vectors apart; 0 for probabilities, of which every rank has its own part."""
    if target.is_floating_point():
        return torch.zeros((), dtype=torch.int64, device=target.device)
    flat = target.reshape(-1).long()
    odd = 2 * torch.arange(flat.numel(), device=flat.device) + 0x9E3779B97F4A7C1
    return (flat * odd).sum()


def _as_integer(fact: object) -> int:
    if isinstance(fact, int):
        return int(fact)
    if isinstance(fact, float):
        return int(struct.unpack("<q", struct.pack("<d", fact))[0])
    return zlib.crc32(repr(fact).encode())
