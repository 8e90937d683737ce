"""The broker is away or frozen while the timers' Redis is well: later, not never."""

from __future__ import annotations

import pytest

from tests.conftest import FreshRedis
from tests.failover.deployment import OUTAGE, Deploy

RESUME = 6.0


@pytest.mark.timeout(OUTAGE + 90)
def test_a_broker_that_is_down_loses_nothing_and_sending_resumes(
    deploy: Deploy, fresh_redis: FreshRedis
) -> None:
    deployment = deploy(broker=fresh_redis(appendonly=True))
    deployment.start_beats(2)
    names = deployment.create(20)
    once = deployment.create_once(5, OUTAGE / 2)
    deployment.wait_firing(names)
    owned, epochs = deployment.owned(), deployment.epochs()

    deployment.broker.kill()
    deployment.pass_time(OUTAGE)
    assert deployment.epochs() == epochs, "no beat lost its registration for it"
    assert deployment.owned() == owned, "no timer was given up for it"
    deployment.broker.start()
    back_ms = deployment.now_ms()
    deployment.wait_sent(names, back_ms, RESUME + 1)
    deployment.wait_firing(once, RESUME)

    first = min(run.seen_ms for run in deployment.ledger.since(back_ms))
    assert first - back_ms <= RESUME * 1000
    deployment.ledger.assert_doubles_are_recognizable()
    deployment.ledger.assert_nothing_doubled()
    deployment.assert_accounted(names, 1000)


@pytest.mark.timeout(OUTAGE + 90)
def test_a_frozen_broker_loses_nothing_and_kills_nobody(
    deploy: Deploy, fresh_redis: FreshRedis
) -> None:
    """What a frozen broker has received and not answered may come again, with the same task id."""
    deployment = deploy(broker=fresh_redis())
    deployment.start_beats(2)
    names = deployment.create(20)
    deployment.wait_firing(names)
    owned, epochs = deployment.owned(), deployment.epochs()

    deployment.broker.freeze()
    deployment.pass_time(OUTAGE)
    assert deployment.epochs() == epochs, "no beat lost its registration for it"
    assert deployment.owned() == owned, "no timer was given up for it"
    deployment.broker.thaw()
    back_ms = deployment.now_ms()
    deployment.wait_sent(names, back_ms, RESUME + 1)

    first = min(run.seen_ms for run in deployment.ledger.since(back_ms))
    assert first - back_ms <= RESUME * 1000
    deployment.ledger.assert_doubles_are_recognizable()
    deployment.assert_accounted(names, 1000)
