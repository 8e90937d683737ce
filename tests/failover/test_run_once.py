"""Callbacks with ``run_once`` in workers that die: the run goes on, its duplicate does not."""

from __future__ import annotations

import uuid

from tests.conftest import FreshRedis
from tests.failover.deployment import Deploy, Deployment
from tests.servers import RedisServer
from tests.waiting import wait_until

TASK = "tests.failover.app.record_once"
VISIBILITY_TIMEOUT = 1  # seconds
DROPPED = "was started from another message"


def send(deployment: Deployment, message: str, run: str, seconds: float = 0) -> None:
    """Send one message of a run, as an instance of its own."""
    header = {
        "id": "x",
        "name": "nightly",
        "service": deployment.service,
        "instance": f"h:1:{message}",
        "scheduled_at": "2026-01-01T03:00:00.000+00:00",
        "run": 1,
    }
    deployment.app.send_task(
        TASK, [message, seconds], task_id=run, headers={"dtimer": header}, retry=False
    )


def all_are_visible(broker: RedisServer) -> bool:
    """Say whether the next worker that starts restores what nobody has acknowledged."""
    taken = broker.client.zrange("unacked_index", 0, -1, withscores=True)
    return all(score * 1000 < broker.now_ms() - VISIBILITY_TIMEOUT * 1000 for _, score in taken)


def ran(deployment: Deployment) -> list[str]:
    return [entry["message"] for entry in deployment.entries_ran()]


def test_a_message_whose_worker_was_killed_runs_again_and_its_duplicate_is_dropped(
    deploy: Deploy, fresh_redis: FreshRedis
) -> None:
    broker = fresh_redis()  # its own: the lists of unacknowledged messages are the server's
    deployment = deploy(
        broker=broker,
        store=broker,
        broker_transport_options={"visibility_timeout": VISIBILITY_TIMEOUT},
    )
    run = str(uuid.uuid4())
    first = deployment.start_worker("-P", "prefork", "-c", "1")
    send(deployment, "original", run, seconds=600)
    wait_until(lambda: ran(deployment) == ["original"], "the run to start", 20)
    first.kill()
    send(deployment, "duplicate", run)
    wait_until(lambda: all_are_visible(broker), "the messages to be delivered again", 20)

    second = deployment.start_worker("-P", "prefork", "-c", "1")
    wait_until(lambda: ran(deployment) == ["original"] * 2, "the run to start again", 30)
    wait_until(lambda: DROPPED in second.log_text(), "the duplicate to be dropped", 20)
    send(deployment, "another run", str(uuid.uuid4()))
    wait_until(lambda: "another run" in ran(deployment), "another run", 20)
    assert ran(deployment) == ["original", "original", "another run"]
    second.stop(timeout=20)
    assert second.exit_code == 0
