"""Operations of the language models without their kernels."""

import functools
from unittest import mock

from sigsoftmax.lm import kernels


def plain(function):
    """The function by plain torch, whatever the device."""

    @functools.wraps(function)
    def without_kernels(*arguments, **options):
        with mock.patch.object(kernels, "run_on", return_value=False):
            return function(*arguments, **options)

    return without_kernels
