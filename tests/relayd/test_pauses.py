"""Waits between attempts, in virtual time."""

from __future__ import annotations

from strata_testkit.sim.loop import run_virtually, virtual_time

from relayd.pauses import Pauses


def test_each_wait_is_twice_as_long_up_to_a_limit_and_the_first_again_after_success():
    async def work() -> None:
        pauses = Pauses(0.5, 4.0)
        for longest in (0.5, 1.0, 2.0, 4.0, 4.0):
            began = virtual_time()
            await pauses.wait()
            assert longest / 2 <= virtual_time() - began <= longest
        pauses.reset()
        began = virtual_time()
        await pauses.wait()
        assert virtual_time() - began <= 0.5

    run_virtually(work)
