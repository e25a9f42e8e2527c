"""Errors of tasks, raised as what they are and not as a page of Java."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from strata_pipeline import errors
from strata_pipeline.errors import LakeError, PipelineError
from strata_pipeline.log.database import without_password

__all__ = ["Refused", "translate_failures"]

_OURS = re.compile(r"(?:strata_pipeline\.(?:errors|lake_format(?:\.\w+)*))\.(\w+): (.+)")


@contextlib.contextmanager
def translate_failures(doing: str) -> Iterator[None]:
    """Raise one of our errors from a task as if raised here, and any other as `PipelineError`."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        text = str(error)
        if (found := _OURS.search(text)) is not None:
            kind = LakeError if found[1] == "LakeError" else getattr(errors, found[1], PipelineError)
            raise kind(found[2].strip()) from error
        text = text.partition("JVM stacktrace:")[0]  # a Connect server adds it, and it names classes only
        reason = next((line for line in reversed(text.splitlines()) if _tells(line)), text[:500])
        raise PipelineError(f"{doing}: {without_password(reason.strip())}") from error


class Refused:
    """The errors of some days, raised once the other days are done: one damaged day must not keep an operator
    from erasing elsewhere, or let the files of all later days pile up."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds
        self._errors: list[Exception] = []

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Collect the error of a day, if it is of one of the kinds."""
        try:
            yield
        except self._kinds as error:
            self._errors.append(error)

    def tell(self, done: str) -> None:
        """Raise the first error, if there is one; `done` says what was done elsewhere, or is empty."""
        if not self._errors:
            return
        first, others = self._errors[0], len(self._errors) - 1
        text = f"{first}. {others:,} more days were refused" if others else str(first)
        raise type(first)(f"{text}. {done}" if done else text) from first


def _tells(line: str) -> bool:
    """Whether a line of a traceback says what happened."""
    return bool(re.match(r"(\w+\.)*\w*(Error|Exception|Failure)\b", line.strip())) or "Caused by" in line
