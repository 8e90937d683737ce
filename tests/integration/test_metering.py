"""What dispatch and membership count, with the test's clock."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dtimer.meters import Meters, Spread
from celery_dtimer.model import timer_id
from celery_dtimer.planning import jitter_of
from celery_dtimer.policy import Policy
from celery_dtimer.publisher import BrokerDownError, RefusedError, UnsendableError
from celery_dtimer.store import Store
from tests.integration.conftest import START_MS, Beat, Broker, MakeMember, MakeService, Service
from tests.integration.test_overlaps import lose, start, step_at


def seen(spread: Spread) -> tuple[int, float]:
    """Return how many values there were, and their sum."""
    return spread.counts[-1], round(spread.total, 3)


# ------------------------------------------------------------------ dispatch


def test_a_run_is_counted_with_its_lag(beat: Beat) -> None:
    beat.service.add(every=10)
    step_at(beat, 10)
    step_at(beat, 22.5)
    reading = beat.meters.reading()
    assert reading.count("sent") == 2
    assert seen(reading.lag) == (2, 2.5)


def test_the_lag_ends_with_the_commit(beat: Beat, broker: Broker) -> None:
    """Between the read and the commit the broker takes two seconds."""
    beat.service.add(every=10)
    broker.on_send = lambda run: beat.service.clock.advance(2) and None
    step_at(beat, 11)
    assert seen(beat.meters.reading().lag) == (1, 3.0)


def test_jitter_is_no_lag(beat: Beat, broker: Broker) -> None:
    timer = beat.service.add(every=1000, policy=Policy(jitter_ms=500_000))
    due_ms = START_MS + 1_000_000
    jitter_ms = jitter_of(timer, due_ms)
    assert jitter_ms > 1000, "else the test shows nothing"
    step_at(beat, 1000)
    assert not broker.sent
    step_at(beat, 1000 + jitter_ms / 1000 + 1.5)
    assert seen(beat.meters.reading().lag) == (1, 1.5)


def test_triggers_have_a_lag_too(beat: Beat) -> None:
    timer = beat.service.add(every=1000)
    step_at(beat, 1)
    beat.service.trigger(timer)
    step_at(beat, 4)
    reading = beat.meters.reading()
    assert reading.count("sent") == 1
    assert seen(reading.lag) == (1, 3.0)


def test_a_lost_run_that_is_sent_again_is_counted_without_a_lag(beat: Beat, broker: Broker) -> None:
    beat.service.add(every=10_000, policy=Policy(resend_lost=1))
    step_at(beat, 10_000)
    start(beat.service, broker.sent[0])
    beat.service.clock.advance(61)
    assert lose(beat) == 1
    beat.step()
    assert [run.resent for run in broker.sent] == [0, 1]
    reading = beat.meters.reading()
    assert reading.count("sent") == 2
    assert seen(reading.lag) == (1, 0.0)


def test_skips_are_counted_by_their_reason(beat: Beat) -> None:
    beat.service.add("late", every=10, policy=Policy(grace_ms=1000))
    beat.service.add("many", every=10, policy=Policy(coalesce=True))
    step_at(beat, 45)
    reading = beat.meters.reading()
    assert reading.count("skipped", "misfire") == 4
    assert reading.count("skipped", "coalesced") == 3
    counters = beat.store.counters()
    assert (counters["skipped_misfire"], counters["skipped_coalesced"]) == (4, 3)


def test_refused_messages_and_what_is_given_up(make_service: MakeService, broker: Broker) -> None:
    beat = Beat(make_service(max_refusals=1), broker)
    beat.service.add(every=1000)
    broker.answers["*"] = RefusedError("full")
    step_at(beat, 1000)
    reading = beat.meters.reading()
    assert (reading.count("refused_messages"), reading.count("failed", "refused")) == (1, 0)
    step_at(beat, 1010)
    reading = beat.meters.reading()
    assert (reading.count("refused_messages"), reading.count("failed", "refused")) == (2, 1)
    assert reading.count("skipped", "refused") == 1
    assert reading.count("sent") == 0
    beat.store.close()


def test_timers_that_are_set_aside(beat: Beat, broker: Broker) -> None:
    beat.service.add(every=10)
    broker.answers["*"] = UnsendableError("can not be built")
    step_at(beat, 10)
    assert beat.meters.reading().count("failed", "broken") == 1


def test_nothing_is_sent_while_the_broker_is_down(beat: Beat, broker: Broker) -> None:
    beat.service.add(every=10)
    broker.answers["*"] = BrokerDownError("down")
    step_at(beat, 10)
    reading = beat.meters.reading()
    assert (reading.count("sent"), seen(reading.lag)) == (0, (0, 0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda service: service.store.delete([timer_id("timer")]), "deleted"),
        (lambda service: service.store.pause(timer_id("timer")), "inactive"),
        (lambda service: service.add(every=77), "changed"),
        (
            lambda service: service.set_field(timer_id("timer"), "owner", "unassigned"),
            "other_owner",
        ),
    ],
)
def test_what_changes_while_it_is_sent_is_a_conflict(
    beat: Beat, broker: Broker, change: Any, reason: str
) -> None:
    beat.service.is_damaged = reason == "other_owner"
    beat.service.add(every=10)
    broker.on_send = lambda run: change(beat.service) and None
    step_at(beat, 10)
    reading = beat.meters.reading()
    assert reading.count("commit_conflicts", reason) == 1
    assert reading.count("sent") == 0


# ------------------------------------------------------------------ membership


def test_a_failover_lasts_from_the_last_heartbeat_until_all_timers_have_moved(
    service: Service, make_member: MakeMember
) -> None:
    a, b = make_member("a"), make_member("b")
    a.step()
    b.step()
    service.add_many(4, every=3600)
    service.clock.advance(1)
    a.step()
    b.live(40)
    reading = b.meters.reading()
    count, total = seen(reading.failover)
    assert count == 1
    assert 30 < total < 31
    assert reading.count("failover_timers") == 2


def test_an_epoch_that_is_over_is_counted_once_whoever_finds_out(make_member: MakeMember) -> None:
    member = make_member("a")
    member.step()
    old = member.lease.epoch
    member.service.redis.delete(member.service.keys("service_instances"))
    member.membership.report_fenced(old)
    member.membership.report_fenced(old)
    member.step()
    assert member.lease.epoch > old
    assert member.meters.reading().count("fenced") == 1
    member.service.redis.delete(member.service.keys("service_instances"))
    member.step()
    assert member.meters.reading().count("fenced") == 2


def test_an_outage_of_the_broker_is_counted_once(make_member: MakeMember) -> None:
    member = make_member("a")
    member.step()
    for is_up in (True, False, False, True, False):
        member.membership.report_broker(is_up)
    assert member.meters.reading().count("broker_outages") == 2


def test_commits_that_reach_too_few_replicas_are_counted(make_member: MakeMember) -> None:
    member = make_member("a")
    member.step()
    for sequence, is_short in enumerate((False, True, True), 1):
        member.membership.report_commit(member.lease.epoch, sequence, is_short)
    assert member.meters.reading().count("unreplicated_commits") == 2


def test_what_redis_has_lost_is_counted(make_member: MakeMember) -> None:
    member = make_member("a")
    member.step()
    service = member.service
    service.clock.advance(5)
    member.step()
    service.redis.hset(service.keys("instance", "a"), "heartbeat_at", str(START_MS))
    service.clock.advance(5)
    member.step()
    member.step()
    assert member.meters.reading().count("replays") == 1


def test_a_lost_run_without_another_try_has_failed(
    beat: Beat, broker: Broker, make_member: MakeMember
) -> None:
    beat.service.add(every=10_000)
    step_at(beat, 10_000)
    start(beat.service, broker.sent[0])
    member = make_member("other")
    member.step()
    for _ in range(10):
        member.live(10)
        beat.store.heartbeat(beat.instance, beat.lease.epoch)
    assert member.meters.reading().count("failed", "lost") == 1


def test_the_time_since_the_last_heartbeat(make_member: MakeMember) -> None:
    member = make_member("a")
    assert member.membership.silence is None
    member.step()
    member.service.clock.advance(7)
    assert member.membership.silence == 7
    member.step()
    assert member.membership.silence == 0


# ------------------------------------------------------------------ store


def test_every_call_of_a_script_is_timed(service: Service) -> None:
    meters = Meters()
    store = Store(service.settings, clock=service.clock, on_call=meters.observe_call)
    store.register("a", {})
    store.purge()
    store.purge()
    calls = meters.reading().calls
    assert {name: spread.counts[-1] for name, spread in calls.items()} == {
        "register": 1,
        "purge": 2,
    }
    assert all(0 < spread.total < 5 for spread in calls.values())
    store.close()


def test_standing_of_an_empty_service(service: Service) -> None:
    assert set(service.store.standing(2000)) == {0}


def test_standing_counts_what_is_due_and_overdue(service: Service) -> None:
    service.add("soon", every=10)
    service.add("later", every=12)
    service.add("much later", every=100)
    service.clock.advance(13)
    found = service.store.standing(2000)
    assert (found.active, found.due, found.overdue, found.most_overdue_ms) == (3, 2, 1, 3000)
    assert (found.unassigned, found.finished, found.dead_letters, found.runs_out) == (3, 0, 0, 0)


def test_standing_does_not_mind_a_key_of_another_type(service: Service) -> None:
    service.is_damaged = True
    service.add()
    service.redis.set(service.keys("dead_timers"), "edited")
    found = service.store.standing(2000)
    assert (found.active, found.dead_letters) == (1, 0)


def test_set_aside_passes_the_finished(beat: Beat) -> None:
    service = beat.service
    service.add("once", at_ms=START_MS + 1000)
    for name in ("paused", "stopped"):
        service.add(name, every=1000)
    step_at(beat, 1)
    service.store.pause(timer_id("paused"))
    service.store.stop(timer_id("stopped"))
    assert service.store.standing(2000).finished == 1
    count, statuses = service.store.set_aside(0, 10)
    assert (count, sorted(statuses)) == (2, ["paused", "stopped"])
    assert [service.store.set_aside(offset, 1)[0] for offset in range(3)] == [1, 1, 0]
