"""A persistent LSTM recurrence for Hopper GPUs, private to the language models.

The recurrent matrix of a layer is read once for a window and stays in registers and shared memory; multiprocessors
exchange the state through the L2 cache. ``plans`` divides the work, ``compilation`` and ``loading`` bring the kernels
(``kernels/*.cu``) to the GPU, ``operation`` is the autograd function, ``selection`` decides where it is used.
"""

from sigsoftmax.lm.recurrence.loading import LayerKernels
from sigsoftmax.lm.recurrence.operation import persistent_lstm
from sigsoftmax.lm.recurrence.plans import Refusal, plan_layer
from sigsoftmax.lm.recurrence.selection import Recurrence, RecurrenceFailed

__all__ = ["LayerKernels", "Recurrence", "RecurrenceFailed", "Refusal", "persistent_lstm", "plan_layer"]
