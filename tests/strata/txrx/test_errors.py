"""The errors: one tree, as the drawing shows it, still available under the old names in `strata.channel`."""

from __future__ import annotations

import importlib

import pytest
import strata.protocol.errors
from strata import _renamed, txrx
from strata.txrx import errors
from strata.txrx.metrics import ChannelMetrics, TxRxMetrics


def below(root: type[Exception]) -> set[type[Exception]]:
    return {root}.union(*[below(child) for child in root.__subclasses__()])


def test_every_error_is_in_the_drawing() -> None:
    drawing = strata.protocol.errors.__doc__
    assert drawing is not None
    for error in below(errors.TxRxError):
        if error.__module__ == errors.__name__:
            assert error.__name__ in drawing


@pytest.mark.parametrize("module", [name for name in _renamed.OLD_NAMES if name.startswith("strata.channel")])
def test_the_former_names_lead_to_the_same_classes(module: str) -> None:
    former = importlib.import_module(module)
    present = importlib.import_module(
        module.replace("strata.channel", "strata.txrx").replace("inbox", "queue")
    )
    for old, new in _renamed.OLD_NAMES[module].items():
        assert getattr(former, old) is getattr(present, new)


def test_the_documented_names_stay() -> None:
    assert txrx.ChannelSettings is txrx.TxRxSettings
    assert ChannelMetrics is TxRxMetrics
