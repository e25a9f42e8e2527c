"""The checks, one module for each section of the requirements, or for part of one."""

from __future__ import annotations

import functools
import itertools

from strata_testkit.conformance.checks import (
    authentication,
    canonical,
    delivery,
    documents,
    duplicates,
    encodings,
    errors,
    filters,
    freshness,
    identity,
    keys,
    limits,
    messages,
    paging,
    provenance,
    publishing,
    size,
    storage,
    structure,
    typed,
)
from strata_testkit.conformance.model import Check

__all__ = ["all_checks"]

_MODULES = (
    canonical,
    encodings,
    structure,
    identity,
    documents,
    keys,
    freshness,
    duplicates,
    size,
    messages,
    filters,
    paging,
    delivery,
    publishing,
    errors,
    provenance,
    typed,
    authentication,
    storage,
    limits,
)


@functools.cache
def all_checks() -> tuple[Check, ...]:
    """Every check, by section."""
    checks = itertools.chain.from_iterable(module.CHECKS for module in _MODULES)
    return tuple(sorted(checks, key=lambda check: check.section))
