"""``python -m sigsoftmax``."""

import sys

from sigsoftmax.cli import main

sys.exit(main())
