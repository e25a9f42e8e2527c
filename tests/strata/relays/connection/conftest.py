from __future__ import annotations

import pytest
from strata.protocol.ids import Identity


@pytest.fixture
def me(identities: tuple[Identity, Identity]) -> Identity:
    return identities[0]
