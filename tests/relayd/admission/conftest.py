"""Admission of one relay in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.relayd.admission.admission_rig import Rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.close()
