"""Errors of tasks are raised as what they are."""

from __future__ import annotations

import traceback

import pytest
from pyspark.errors import PySparkException
from strata_pipeline.errors import LakeBusy, LakeError, ObjectStoreError, PipelineError
from strata_pipeline.jobs.failures import translate_failures


@pytest.mark.parametrize("kind", [LakeError, LakeBusy, ObjectStoreError])
def test_an_error_of_ours_in_a_task_is_raised_as_what_it_is(kind):
    """Spark tells of it as the text of a traceback."""
    told = "".join(traceback.format_exception_only(kind("batch 3 is damaged")))
    with pytest.raises(kind, match=r"^batch 3 is damaged$"), translate_failures("erasing"):
        raise PySparkException(f"Job aborted.\nTraceback (most recent call last):\n{told}\nat java.lang")


def test_any_other_error_of_a_task_says_what_was_done():
    with (
        pytest.raises(PipelineError, match=r"^erasing: ZeroDivisionError: by zero$"),
        translate_failures("erasing"),
    ):
        raise PySparkException("Job aborted.\nZeroDivisionError: by zero\n")
