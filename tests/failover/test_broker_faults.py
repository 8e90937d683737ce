"""The broker is away or frozen while the timers' Redis is well: later, not never."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import FreshRedis
from tests.failover.deployment import OUTAGE, TIMEOUT, Deploy, Deployment
from tests.processes import Process
from tests.servers import RedisServer
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until

RESUME = 6.0

GOES, COMES_BACK = "The broker does not answer", "The broker answers again"


def firing_beats(deployment: Deployment) -> tuple[list[Process], list[str]]:
    """Start two beats that fire 20 timers of one second."""
    beats = deployment.start_beats(2)
    names = deployment.create(20)
    deployment.wait_firing(names)
    assert deployment.modes() == {"confirmed"}
    return beats, names


def assert_said_once(beats: list[Process]) -> None:
    """Fail unless each beat says in one line that the broker went, and in one that it is back."""
    for beat in beats:
        wait_until(lambda beat=beat: COMES_BACK in beat.log_text(), "it to be said")
        text = beat.log_text()
        assert (text.count(GOES), text.count(COMES_BACK)) == (1, 1), text
        assert "Traceback" not in text


@pytest.mark.timeout(OUTAGE + 90)
def test_a_broker_that_is_down_loses_nothing_and_sending_resumes(
    deploy: Deploy, fresh_redis: FreshRedis
) -> None:
    deployment = deploy(broker=fresh_redis(appendonly=True))
    beats, names = firing_beats(deployment)
    once = deployment.create_once(5, OUTAGE / 2)
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
    assert_said_once(beats)
    deployment.ledger.assert_doubles_are_recognizable()
    deployment.ledger.assert_nothing_doubled()
    deployment.assert_accounted(names, 1000)


@pytest.mark.timeout(OUTAGE + 90)
def test_a_frozen_broker_loses_nothing_and_kills_nobody(
    deploy: Deploy, fresh_redis: FreshRedis
) -> None:
    """What a frozen broker has received and not answered may come again, with the same task id."""
    deployment = deploy(broker=fresh_redis())
    beats, names = firing_beats(deployment)
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
    assert_said_once(beats)
    deployment.ledger.assert_doubles_are_recognizable()
    deployment.assert_accounted(names, 1000)


@pytest.mark.parametrize("fault", ["refused", "no answer"])
def test_a_beat_that_alone_cannot_send_gives_its_timers_up_and_gets_them_back(
    deploy: Deploy,
    fresh_redis: FreshRedis,
    tcp_proxy: Callable[[RedisServer], TcpProxy],
    fault: str,
) -> None:
    """After a third of the instance timeout, since the other beat says that its broker works."""
    deployment = deploy(broker=fresh_redis())
    proxy = tcp_proxy(deployment.broker)
    lonely = deployment.start_beat(broker_url=proxy.url)
    other = deployment.start_beat()
    deployment.wait_registered([lonely, other])
    names = deployment.create(20)
    deployment.wait_firing(names)
    epochs = deployment.epochs()

    cut_ms = deployment.now_ms()
    proxy.refuse = fault == "refused"
    proxy.black_hole = fault == "no answer"
    if proxy.refuse:
        proxy.cut()
    wait_until(lambda: deployment.owned_by(lonely) == 0, "its timers to be given up", 6)
    given_up_ms = deployment.now_ms()
    end_ms = deployment.pass_time(1.5)
    deployment.wait_sent(names, end_ms - 999)
    # A run of its is due within a second, a call or two run out, and a third of the timeout passes.
    assert given_up_ms - cut_ms <= 1000 + TIMEOUT * 1000 / 2 + TIMEOUT * 1000 / 3 + 500
    assert {run.pid for run in deployment.ledger.since(given_up_ms + 500)} == {other.pid}
    assert lonely.log_text().count("timers given up") == 1

    proxy.refuse = proxy.black_hole = False
    wait_until(lambda: deployment.owned_by(lonely) >= 9, "its share to come back", RESUME + 2)
    end_ms = deployment.pass_time(1.5)
    deployment.wait_sent(names, end_ms - 999)
    assert lonely.pid in {run.pid for run in deployment.ledger.since(end_ms - 1000)}
    assert deployment.epochs() == epochs, "it kept its registration"
    assert_said_once([lonely])
    deployment.ledger.assert_doubles_are_recognizable()
    deployment.assert_accounted(names, 1000)
