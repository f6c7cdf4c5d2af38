"""Losses on a GPU, with kernels in Triton for every member of the family.

``lowering`` picks a path: a fused one, one with the token arithmetic in kernels, or the chunk loop with rows by
kernels. The code of the device is in ``kernels``. Importing anything here but ``lowering`` needs triton.
"""
