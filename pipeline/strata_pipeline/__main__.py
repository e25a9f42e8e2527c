"""`python -m strata_pipeline`: the same as `strata-pipeline`."""

from strata_pipeline.cli import main

main()
