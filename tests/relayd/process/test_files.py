"""The limit of open files: raised as far as allowed, and what it leaves for sockets."""

from __future__ import annotations

import resource

import pytest

from relayd.process.files import SPARE_FILES, most_files, room_for_sockets


@pytest.mark.req("R-321")
@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "raised", "room"),
    [
        (1024, 4096, 500, None, 500),
        (1024, 4096, 2000, 2000 + SPARE_FILES + 4, 2000),
        (1024, 4096, 9000, 4096, 4096 - SPARE_FILES - 4),
        (1024, resource.RLIM_INFINITY, 9000, 9000 + SPARE_FILES + 4, 9000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 9000, None, 9000),
        (64, 64, 9000, 64, 1),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may(monkeypatch, soft, hard, wanted, raised, room):
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: given.append(limits))
    assert room_for_sockets(wanted, 4) == room
    assert given == ([] if raised is None else [(raised, hard)])
    assert most_files() >= min(wanted, hard if hard != resource.RLIM_INFINITY else wanted)
