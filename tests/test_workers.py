"""The workers of a run of tests: each test is run once, whatever happens to a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.support.workers import Groups

ROOT = Path(__file__).resolve().parents[1]

CONFTEST = """
from tests.support.workers import Groups, add_option, run_in_workers

def pytest_addoption(parser):
    add_option(parser)

def pytest_runtestloop(session):
    run_in_workers(session, 2, Groups([item.path for item in session.items], lambda key: False))
    return True
"""
MODULE = """
import os, pytest

@pytest.fixture(scope="module")
def made():
    yield
    print("taken down")

@pytest.mark.parametrize("number", range(8))
def test_one(number, made):
    print("said by", number)
    if number == 2:
        os.kill(os.getpid(), 9)
    assert number != 5

def test_skipped():
    pytest.skip("as asked")
"""


@given(st.lists(st.sampled_from("abw"), max_size=30), st.lists(st.integers(0, 3)))
def test_each_test_is_given_once_and_whole_groups_to_one_worker(keys: list[str], turns: list[int]) -> None:
    groups = Groups(keys, lambda key: key == "w")
    given: dict[int, int] = {}
    for turn, worker in enumerate([*turns, *range(4)]):
        test = groups.next(worker)
        if test is not None and turn % 3 == 2:
            groups.put_back(worker, test)
            test = groups.next(worker)
        while test is not None:
            assert test not in given
            given[test] = worker
            test = groups.next(worker) if turn >= len(turns) else None
    assert sorted(given) == list(range(len(keys)))
    for number, key in enumerate(keys[1:], 1):
        assert not key == keys[number - 1] == "w" or given[number] == given[number - 1]


def test_a_worker_that_dies_fails_its_test_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rsf", "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "2 failed, 6 passed, 1 skipped" in done.stdout
    assert "test_one[2] - The worker died in this test: signal SIGKILL" in done.stdout
    assert "said by 5" in done.stdout and "said by 4" not in done.stdout
    assert "as asked" in done.stdout
