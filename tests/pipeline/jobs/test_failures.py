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


def test_of_what_a_connect_server_says_the_cause_is_told_and_not_the_name_of_its_class():
    told = "[PATH_ALREADY_EXISTS] Path file:/x already exists. SQLSTATE: 42K04"
    traced = "\n\nJVM stacktrace:\norg.apache.spark.sql.AnalysisException\n\tat org.apache.spark"
    with (
        pytest.raises(PipelineError, match=r"^archiving: \[PATH_ALREADY_EXISTS\] Path file:/x .* 42K04$"),
        translate_failures("archiving"),
    ):
        raise PySparkException(told + traced)


def test_any_other_error_of_a_task_says_what_was_done():
    with (
        pytest.raises(PipelineError, match=r"^erasing: ZeroDivisionError: by zero$"),
        translate_failures("erasing"),
    ):
        raise PySparkException("Job aborted.\nZeroDivisionError: by zero\n")
