"""The errors: one tree, as the drawing shows it."""

from __future__ import annotations

import strata.protocol.errors
from strata.txrx import errors


def below(root: type[Exception]) -> set[type[Exception]]:
    return {root}.union(*[below(child) for child in root.__subclasses__()])


def test_every_error_is_in_the_drawing() -> None:
    drawing = strata.protocol.errors.__doc__
    assert drawing is not None
    for error in below(errors.TxRxError):
        if error.__module__ == errors.__name__:
            assert error.__name__ in drawing
