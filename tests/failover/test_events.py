"""Events of real beats: what a failover looks like, and a broker that does not take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import FreshRedis
from tests.failover.deployment import TAKEOVER, Deploy, Deployment
from tests.receiving import receiving
from tests.waiting import wait_until


@pytest.fixture
def deployment(deploy: Deploy, prefix: str) -> Deployment:
    """A service that sends events, by an exchange that no other test uses."""
    return deploy(dtimer_send_events=True, event_exchange=f"{prefix}events")


@pytest.fixture
def found(deployment: Deployment) -> Iterator[list[dict[str, Any]]]:
    """The deployment's events."""
    with receiving(deployment.app) as events:
        yield events


def test_a_failover_is_told_as_events(deployment: Deployment, found: list[dict[str, Any]]) -> None:
    first, second = deployment.start_beats(2)
    deployment.create(10, 0.5)
    deployment.wait_balanced()
    dead, other = (deployment.registered()[beat.pid] for beat in (first, second))

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in found if event["type"] == f"dtimer-{kind}"]

    wait_until(lambda: len(events("instance-joined")) == 2, "both to be told")
    first.kill()
    (moved,) = wait_until(lambda: events("failover"), "the failover", 2 * TAKEOVER)
    assert {event["instance"] for event in events("instance-joined")} == {dead, other}
    (left,) = wait_until(lambda: events("instance-left"), "its end", 2)
    assert (left["instance"], left["is_dead"]) == (dead, True)
    assert (moved["instance"], moved["dead"]) == (other, [dead])
    assert moved["timers"] >= 5
    assert moved["pid"] == second.pid
    second.stop()
    wait_until(lambda: len(events("instance-left")) == 2, "the other's end", 2)
    assert events("instance-left")[-1]["is_dead"] is False


def test_a_broker_that_is_frozen_holds_up_neither_heartbeats_nor_the_end(
    deploy: Deploy, fresh_redis: FreshRedis
) -> None:
    deployment = deploy(broker=fresh_redis(), dtimer_send_events=True)
    beat = deployment.start_beat()
    deployment.wait_registered([beat])
    epochs = deployment.epochs()
    deployment.broker.freeze()
    for number in range(3):  # each of them is told as an event
        other = deployment.start_beat()
        wait_until(lambda: len(deployment.registered()) == 2, "it to join", 10)
        other.kill()
        wait_until(lambda: len(deployment.registered()) == 1, f"failover {number}", 3 * TAKEOVER)
    assert deployment.epochs() == epochs, "its lease has never ended"
    assert beat.stop() < 2
    deployment.broker.thaw()
    assert beat.log_text().count("Events wait") <= 1
