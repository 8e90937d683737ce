"""Redis is out of reach, for one beat or for all: one line in the log, and all is well after it."""

from __future__ import annotations

import signal

import pytest

from tests.conftest import FreshRedis
from tests.failover.deployment import IS_LONG, OUTAGE, TIMEOUT, Deploy
from tests.failover.test_redis_faults import RECOVERY
from tests.failover.test_stopping_states import FAULTS, MakeProxy, refuse, swallow
from tests.processes import Process
from tests.waiting import wait_until

LENGTH = OUTAGE if IS_LONG else 3.0
AGAIN = "Redis answers again"


def complaints(text: str) -> list[str]:
    """Return the lines of a log that ask for attention."""
    found = [line for line in text.splitlines() if ": WARNING/" in line or ": ERROR/" in line]
    return [line for line in found if "Redis keeps nothing on disk" not in line]  # at each start


def wait_back(beats: list[Process], begun: dict[int, int]) -> None:
    """Wait until each beat has said that its Redis answers again."""
    for beat in beats:
        wait_until(
            lambda beat=beat: AGAIN in beat.log_text()[begun[beat.pid] :],
            "a beat to say that Redis is back",
            RECOVERY + 2,
        )


@pytest.mark.parametrize("has_broker_elsewhere", [False, True] if IS_LONG else [False])
def test_each_kind_of_outage_is_said_once_and_needs_no_restart(
    deploy: Deploy, tcp_proxy: MakeProxy, has_broker_elsewhere: bool
) -> None:
    deployment = deploy()
    spoilt = ["dtimer_redis_url", *(() if has_broker_elsewhere else ["broker_url"])]
    proxies = {fault: tcp_proxy(deployment.store) for fault in FAULTS}
    beats = {
        fault: deployment.start_beat(**dict.fromkeys(spoilt, proxy.url))
        for fault, proxy in proxies.items()
    }
    deployment.wait_registered(beats.values())
    names = deployment.create(30, 0.5)
    deployment.wait_firing(names)
    begun = {beat.pid: len(beat.log_text()) for beat in beats.values()}
    for fault, proxy in proxies.items():
        fault(proxy)
    deployment.pass_time(LENGTH)
    during = {fault.__name__: beat.log_text()[begun[beat.pid] :] for fault, beat in beats.items()}
    for proxy in proxies.values():
        proxy.heal()
    healed_ms = deployment.now_ms()
    wait_back(list(beats.values()), begun)
    deployment.wait_registered(beats.values())
    deployment.wait_sent(names, healed_ms, RECOVERY)
    deployment.wait_balanced(10)

    found = {name: complaints(text) for name, text in during.items()}
    assert {name: len(lines) for name, lines in found.items()} == dict.fromkeys(during, 1), found
    assert not [text for text in during.values() if "Traceback" in text]
    for beat in beats.values():
        assert beat.is_running()
        assert beat.log_text()[begun[beat.pid] :].count(AGAIN) == 1
    deployment.ledger.assert_nothing_doubled()
    deployment.assert_accounted(names, 500)


def test_the_start_before_redis_is_one_line_too(
    deploy: Deploy, fresh_redis: FreshRedis, tcp_proxy: MakeProxy
) -> None:
    """Whatever there is in Redis' place, and for how long."""
    store = fresh_redis(running=False)
    deployment = deploy(store=store, broker=store)
    proxies = [tcp_proxy(store) for _ in range(3)]
    swallow(proxies[1])
    refuse(proxies[2])
    urls = [store.url, *(proxy.url for proxy in proxies)]
    beats = [deployment.start_beat(dtimer_redis_url=url, broker_url=url) for url in urls]
    for beat in beats:
        wait_until(lambda beat=beat: complaints(beat.log_text()), "it to be said", 15)
    deployment.pass_time(LENGTH / 2)
    assert [len(complaints(beat.log_text())) for beat in beats] == [1] * len(beats)
    store.start()
    for proxy in proxies:
        proxy.heal()
    deployment.wait_registered(beats, 10)
    names = deployment.create(12)
    deployment.wait_firing(names)


def test_a_host_whose_name_leads_nowhere_for_a_while(deploy: Deploy) -> None:
    """At the start, and again when the connections are lost."""
    deployment = deploy()
    hosts = deployment.folder / "hosts"
    hosts.write_text("")
    url = deployment.store.url.replace("127.0.0.1", "redis.test")
    beat = deployment.start_beat(hosts=hosts, dtimer_redis_url=url, broker_url=url)
    wait_until(lambda: complaints(beat.log_text()), "the failure to be said", 10)
    deployment.pass_time(1)
    assert len(complaints(beat.log_text())) == 1
    assert "name resolution" in complaints(beat.log_text())[0]
    hosts.write_text("redis.test")
    deployment.wait_registered([beat], 5)
    names = deployment.create(5, 0.5)
    deployment.wait_firing(names)

    hosts.write_text("")
    begun = {beat.pid: len(beat.log_text())}
    deployment.store.client.client_kill_filter(_type="normal", skipme=True)
    deployment.store.client.client_kill_filter(_type="pubsub", skipme=True)
    wait_until(lambda: complaints(beat.log_text()[begun[beat.pid] :]), "the outage to be said", 5)
    deployment.pass_time(1)
    hosts.write_text("redis.test")
    healed_ms = deployment.now_ms()
    wait_back([beat], begun)
    deployment.wait_sent(names, healed_ms, RECOVERY)
    assert len(complaints(beat.log_text()[begun[beat.pid] :])) == 1
    assert beat.stop(signal.SIGTERM) < 2


@pytest.mark.parametrize("end", ["forgotten", "reset"])
def test_connections_that_a_firewall_ends_while_nothing_happens(
    deploy: Deploy, tcp_proxy: MakeProxy, end: str
) -> None:
    """Forgotten: nothing arrives on them any more, and nobody is told; new ones work."""
    deployment = deploy()
    proxy = tcp_proxy(deployment.store)
    beat = deployment.start_beat(dtimer_redis_url=proxy.url, broker_url=proxy.url)
    deployment.wait_registered([beat])
    deployment.timers.create_timer("hourly", 3600, "record")
    wait_until(lambda: "Dispatch is" in beat.log_text(), "it to run")
    proxy.forget() if end == "forgotten" else proxy.cut()
    ended_ms = deployment.now_ms()
    names = deployment.create(5, 0.5)
    deployment.wait_sent(names, ended_ms, TIMEOUT + 1)
    deployment.pass_time(1)
    end_ms = deployment.now_ms()
    deployment.wait_sent(names, end_ms, 2)
    channel = f"{deployment.key('wake')}:{deployment.registered()[beat.pid]}"
    listening = 2 if end == "forgotten" else 1  # the server still sees the one that is forgotten
    wait_until(
        lambda: deployment.store.client.pubsub_numsub(channel)[0][1] == listening,
        "it to listen on a new connection",
    )
    deployment.ledger.assert_nothing_doubled()
    assert len(complaints(beat.log_text())) <= 1
