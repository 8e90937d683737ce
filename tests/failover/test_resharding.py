"""A service is given other shards while what takes part in that is killed."""

from __future__ import annotations

import pytest

from tests.failover.deployment import TIMEOUT, Deploy
from tests.waiting import wait_until

RESHARD = """
import sys
from celery_dtimer import DistributedTimer
from tests.failover.app import app

count = int(sys.argv[1])
DistributedTimer(app).reshard(count, on_progress=lambda moved: print("moved", moved, flush=True))
"""


@pytest.mark.parametrize("mode", ["atomic", "confirmed"])
def test_killed_beats_and_killed_commands_cost_no_run(deploy: Deploy, mode: str) -> None:
    deployment = deploy(dtimer_dispatch=mode)
    timers = deployment.timers
    beats = [deployment.start_beat() for _ in range(3)]
    names = deployment.create(250, interval=2.0, coalesce=False)
    ledger = deployment.read()
    wait_until(lambda: set(names) <= ledger.names(), "every timer to be sent", 20)

    for count in (4, 3):
        command = deployment.start_script(RESHARD, str(count))
        wait_until(lambda: "moved" in command.log_text(), "some timers to have moved", 20)  # noqa: B023
        command.kill()
        beats.pop(0).kill()
        beats.append(deployment.start_beat(dtimer_shards=count))
        assert timers.store.layout.is_moving or timers.store.read_layout().is_moving
        timers.reshard(count)
        alive = {beat.pid for beat in beats}
        wait_until(
            lambda: {each.port for each in timers.get_service_instances()} == alive,  # noqa: B023
            "the killed one to be gone",
            TIMEOUT + 20,
        )

    resharded_ms = deployment.now_ms()
    wait_until(
        lambda: all(ledger.latest()[name] > resharded_ms for name in names),
        "every timer to be sent after it",
        20,
    )
    if mode == "atomic":
        ledger.assert_nothing_doubled()
    ledger.assert_doubles_are_recognizable()
    ledger.assert_never_early()
    until_ms = min(ledger.latest()[name] for name in names)
    lost = {name: ledger.missing(name, 2000, until_ms) for name in names}
    assert not any(lost.values()), lost
    assert timers.check_consistency() == []
    assert all(beat.is_running() for beat in beats)
