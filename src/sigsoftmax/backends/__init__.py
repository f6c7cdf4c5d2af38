"""How the mathematics of ``family`` is computed: the readable truth, the fast versions, and who picks."""
