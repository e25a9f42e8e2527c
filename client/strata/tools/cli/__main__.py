"""`python -m strata.tools.cli`."""

from strata.tools.cli import main

main()
