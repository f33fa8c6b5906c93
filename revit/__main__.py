"""`python -m revit`, and `torchrun -m revit`: the command line."""

import sys

from revit.cli import main

sys.exit(main())
