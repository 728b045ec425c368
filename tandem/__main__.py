"""`python -m tandem`: the `tandem` command, for the interpreter that is called."""

import sys

from tandem.deploy.cli import main

sys.exit(main())
