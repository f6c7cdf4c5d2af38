"""Output layers on many processes: losses of classes that are spread over ranks, on torch.distributed.

Data-parallel training (DDP, FSDP2) needs nothing from here but, if you like, :func:`processes`: wrap the model and call
its loss. This package is for output matrices that are themselves divided (tensor parallelism), where each rank holds
some of the classes. docs/distributed.md tells when to use what.
"""

from sigsoftmax.distributed.classes import ClassShards
from sigsoftmax.distributed.exchange import LostRankError
from sigsoftmax.distributed.layers import keep_scalars_whole, shard_classes
from sigsoftmax.distributed.losses import linear_cross_entropy, mixture_cross_entropy
from sigsoftmax.distributed.world import World, processes

__all__ = [
    "ClassShards",
    "LostRankError",
    "World",
    "keep_scalars_whole",
    "linear_cross_entropy",
    "mixture_cross_entropy",
    "processes",
    "shard_classes",
]
