"""``python -m sigsoftmax``."""

import os
import sys

from sigsoftmax.cli import main

code = main()
if "TORCHELASTIC_RUN_ID" in os.environ:
    # Under torchrun, threads of torch's exchanges can outlive the interpreter and abort a process whose work is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
