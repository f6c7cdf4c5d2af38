"""Tests of the kernels of language models; ``test_interpreted`` runs some of them in Triton's interpreter."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import tests.interpreter  # noqa: F401
