"""What a failover, or a restart without the last writes, has lost is found out and told."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from celery_dtimer.dispatcher import StaleServerError
from celery_dtimer.model import Instance, to_datetime
from celery_dtimer.store import Replay
from tests.conftest import delete_prefix
from tests.integration.conftest import SECOND, START_MS, Beat, MakeService, Member, Service


def the_instance(service: Service) -> Instance:
    (instance,) = service.store.instances()
    return instance


def replayed(service: Service) -> list[str]:
    """Return what the history says was lost."""
    return [entry["replayed"] for entry in service.store.history(0) if "replayed" in entry]


def test_a_heartbeat_that_was_confirmed_and_is_lost_is_noted(service: Service) -> None:
    epoch = service.join()
    confirmed_ms = service.clock.advance(5)
    service.store.heartbeat("a", epoch, heartbeat_ms=START_MS)
    service.redis.hset(service.keys("instance", "a"), "heartbeat_at", str(START_MS))
    now_ms = service.clock.advance(2)
    found = service.store.heartbeat("a", epoch, heartbeat_ms=confirmed_ms).replay
    assert found == Replay(1, START_MS, now_ms)
    instance = the_instance(service)
    assert (instance.replays, instance.replayed_from) == (1, to_datetime(START_MS))
    assert instance.replayed_until == to_datetime(now_ms)
    assert replayed(service) == [f"{START_MS} {now_ms}"]


def test_what_is_known_is_no_loss(service: Service) -> None:
    epoch, timer = service.join(), service.add(every=1)
    for sequence in (1, 2):
        service.clock.advance(1)
        service.commit("a", epoch, service.ran(service.due_one("a", epoch), every=1))
        heard = service.store.heartbeat("a", epoch, heartbeat_ms=START_MS, sequence=sequence)
        assert heard.replay == Replay()
    assert service.store.heartbeat("a", epoch).replay == Replay()
    assert (the_instance(service).replays, replayed(service)) == (0, [])
    assert service.state(timer.id).runs == 2


def test_a_commit_that_was_confirmed_and_is_lost_is_noted_by_a_heartbeat(service: Service) -> None:
    epoch = service.join()
    service.add(every=1)
    known_ms = service.clock.advance(1)
    service.commit("a", epoch, service.ran(service.due_one("a", epoch), every=1))
    now_ms = service.clock.advance(1)
    for _ in range(2):  # the second one knows that it was noted
        heard = service.store.heartbeat("a", epoch, sequence=3)
        assert heard.replay == Replay(1, known_ms, now_ms)


def test_a_commit_behind_lost_ones_notes_it_and_the_next_heartbeat_does_not(
    service: Service,
) -> None:
    epoch, _ = service.join(), service.add(every=1)
    confirmed_ms = START_MS + 500
    now_ms = service.clock.advance(1)
    service.commit("a", epoch, at=4)
    assert the_instance(service).replays == 1
    heard = service.store.heartbeat("a", epoch, heartbeat_ms=confirmed_ms, sequence=4)
    assert heard.replay == Replay(1, START_MS, now_ms)
    service.commit("a", epoch, at=5)
    heard = service.store.heartbeat("a", epoch, heartbeat_ms=now_ms, sequence=5)
    assert heard.replay == Replay(1, START_MS, now_ms)


def test_the_commit_behind_a_loss_that_a_heartbeat_has_noted_does_not_note_it_again(
    service: Service,
) -> None:
    epoch, _ = service.join(), service.add(every=1)
    now_ms = service.clock.advance(1)
    service.store.heartbeat("a", epoch, sequence=3)
    service.clock.advance(5)
    service.store.heartbeat("a", epoch, sequence=3)
    service.clock.advance(1)
    service.commit("a", epoch, at=4)
    heard = service.store.heartbeat("a", epoch, sequence=4)
    assert heard.replay == Replay(1, START_MS, now_ms)


def test_a_registration_that_was_lost_is_noted_by_the_next_one(service: Service) -> None:
    old = service.join("b")
    service.clock.advance(1)
    lost = service.join("a")
    service.redis.hset(service.keys("meta"), "last_epoch", str(old))
    service.redis.zrem(service.keys("service_instances"), "a")
    now_ms = service.clock.advance(1)
    answer = service.store.register("a", {}, former=lost)
    assert answer.last_epoch == old
    (found,) = [each for each in service.store.instances() if each.id == "a"]
    assert (found.replayed_from, found.replayed_until) == (to_datetime(old), to_datetime(now_ms))


def test_a_service_of_which_nothing_is_left_has_nothing_to_replay(service: Service) -> None:
    answer = service.store.register("a", {}, former=START_MS)
    assert (answer.last_epoch, the_instance(service).replays) == (0, 0)


def test_a_service_without_a_history_keeps_the_span_in_the_instance(
    make_service: MakeService,
) -> None:
    service = make_service(history=0)
    epoch = service.join()
    service.store.heartbeat("a", epoch, sequence=1)
    assert (the_instance(service).replays, replayed(service)) == (1, [])


def test_a_loss_is_logged_once_with_its_span(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    member = Member(service, "a")
    member.step()
    member.membership.report_commit(member.lease.epoch, 2, is_short=False)
    service.clock.advance(5)
    with caplog.at_level(logging.WARNING):
        member.step()
        service.clock.advance(5)
        member.step()
    (told,) = [record.message for record in caplog.records if "has lost" in record.message]
    since, until = to_datetime(START_MS), to_datetime(START_MS + 5 * SECOND)
    assert since.isoformat(timespec="milliseconds") in told
    assert until.isoformat(timespec="milliseconds") in told
    member.store.close()


def test_the_commits_of_an_epoch_that_is_over_are_no_loss(service: Service) -> None:
    member = Member(service, "a")
    member.step()
    member.membership.report_commit(member.lease.epoch, 7, is_short=False)
    member.membership.report_fenced(member.lease.epoch)
    service.clock.advance(1)
    member.step()
    service.clock.advance(5)
    member.step()
    assert the_instance(service).replays == 0
    member.store.close()


def test_data_that_are_lost_altogether_are_told(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    member = Member(service, "a")
    member.step()
    delete_prefix(service.redis, service.settings.key_prefix)
    service.clock.advance(5)
    with caplog.at_level(logging.WARNING):
        while not service.store.instances():
            member.step()
    assert "knows nothing of service orders any more: its data are lost" in caplog.text
    assert the_instance(service).replays == 0
    member.store.close()


def test_commits_are_counted_anew_in_each_epoch(beat: Beat) -> None:
    service = beat.service
    service.add(every=1)
    for _ in range(2):
        service.clock.advance(1)
        assert beat.step().sent == 1
    first = beat.lease.epoch
    beat.register()
    service.clock.advance(1)
    assert beat.step().sent == 1
    assert beat.committed == [(first, 1, False), (first, 2, False), (beat.lease.epoch, 1, False)]
    assert the_instance(service).replays == 0


def test_a_server_that_lacks_a_heartbeat_is_not_dispatched_from(beat: Beat) -> None:
    service, timer = beat.service, beat.service.add(every=1)
    beat.lease = replace(beat.lease, heartbeat_ms=START_MS + 500)
    service.clock.advance(1)
    with pytest.raises(StaleServerError, match="another server answers"):
        beat.step()
    assert (beat.broker.sent, service.state(timer.id).runs) == ([], 0)
    service.store.heartbeat("a", beat.lease.epoch)
    assert beat.step().sent == 1
