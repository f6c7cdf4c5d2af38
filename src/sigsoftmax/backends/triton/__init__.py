"""Rows on a GPU in Triton: the two routines in one kernel a call, for every member of the family.

``forms`` transcribes the formulas of ``family`` for the device; ``fast`` is the kernel for softmax and sigsoftmax
(one read of the row from memory, one from the cache, one write); ``general`` serves every other member and option;
``rows`` chooses between them and launches. Importing this package needs triton.
"""
