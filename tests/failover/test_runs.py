"""Runs in real workers: what becomes of them is known, held apart, and survives dead workers."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_dtimer import RunRecord
from tests.failover.deployment import Deploy, Deployment
from tests.servers import RabbitMQ
from tests.waiting import wait_until

LEASE = 2  # seconds, of the runs in these tests
POOLS = [("-P", "prefork", "-c", "2"), ("-P", "threads", "-c", "2"), ("-P", "solo")]
POOL_NAMES = [pool[1] for pool in POOLS]
WORK = "tests.failover.app.work"
TWO = ("-P", "prefork", "-c", "2")


@pytest.fixture
def deployment(deploy: Deploy) -> Deployment:
    """A service whose runs are lost quickly."""
    return deploy(dtimer_run_lease=LEASE, dtimer_queued_lease=60)


def did(deployment: Deployment, name: str) -> list[str]:
    """Return what the runs of a timer have written down, in their order."""
    entries = deployment.entries_ran()
    return [f"{each['did']} {each['run']}" for each in entries if each.get("name") == name]


def let_go(deployment: Deployment, name: str, runs: int = 1) -> None:
    """Let runs of a timer end."""
    deployment.broker.client.rpush(f"{deployment.queue}.go.{name}", *["go"] * runs)


def record_of(deployment: Deployment, name: str) -> RunRecord | None:
    """Return the record of a timer's newest run."""
    return next(iter(deployment.timers.get_runs(name)), None)


def wait_state(deployment: Deployment, name: str, state: str, timeout: float = 15) -> RunRecord:
    """Wait until the newest run of a timer is in a state."""

    def is_there() -> bool:
        record = record_of(deployment, name)
        return record is not None and record.state == state

    wait_until(is_there, f"the run of {name} to be {state}", timeout)
    record = record_of(deployment, name)
    assert record is not None
    return record


def run_once(deployment: Deployment, name: str, callback: str, **options: Any) -> None:
    """Let a timer run now."""
    task = f"tests.failover.app.{callback}"
    deployment.timers.create_timer(name, timedelta(hours=1), task, **options)
    deployment.timers.trigger_timer(name)


# ------------------------------------------------------------------ what is noted


@pytest.mark.parametrize("pool", POOLS, ids=POOL_NAMES)
def test_what_becomes_of_runs_is_known_in_every_pool(
    deployment: Deployment, pool: tuple[str, ...]
) -> None:
    timers = deployment.timers
    deployment.start_beat()
    retries = {"autoretry_for": LookupError, "retry_backoff": True, "retry_jitter": False}
    run_once(deployment, "good", "record_timer")
    run_once(deployment, "bad", "fail")
    run_once(deployment, "third time lucky", "fail_twice", **retries)
    run_once(deployment, "never", "fail_twice", autoretry_for=KeyError)
    wait_until(lambda: len(timers.get_runs(state="queued")) == 4, "the runs to be sent", 15)
    queued = {record.name: record for record in timers.get_runs()}
    assert {record.worker for record in queued.values()} == {None}

    worker = deployment.start_worker(*pool)
    good = wait_state(deployment, "good", "succeeded")
    assert good.worker is not None
    assert good.worker.startswith("worker")
    assert good.sent_at == queued["good"].sent_at
    assert good.started_at is not None
    assert good.ended_at is not None
    assert good.took is not None
    assert good.sent_at is not None
    assert good.scheduled_at <= good.sent_at <= good.started_at <= good.ended_at
    bad = wait_state(deployment, "bad", "failed")
    assert bad.error == "RuntimeError: bad fails on purpose"
    never = wait_state(deployment, "never", "failed")
    assert never.retries == 0
    lucky = wait_state(deployment, "third time lucky", "succeeded")
    assert lucky.retries == 2

    letters = {letter.name: letter for letter in timers.get_dead_letters()}
    assert letters.keys() == {"bad", "never"}
    assert (letters["bad"].reason, letters["bad"].error) == ("failed", bad.error)
    assert letters["bad"].task == "tests.failover.app.fail"
    assert deployment.store.client.hlen(deployment.key("running")) == 0
    assert deployment.store.client.zcard(deployment.key("run_leases")) == 0
    worker.stop(timeout=20)


def test_a_run_that_expires_or_is_revoked_is_known(deployment: Deployment) -> None:
    deployment.start_beat()
    run_once(deployment, "late", "record_timer", expires=0.5)
    wait_state(deployment, "late", "queued")
    deployment.pass_time(0.6)
    deployment.start_worker("-P", "prefork", "-c", "1")
    wait_state(deployment, "late", "expired")

    run_once(deployment, "first", "work")
    wait_until(lambda: did(deployment, "first") == ["began 1"], "the first run to begin", 15)
    run_once(deployment, "second", "work")
    wait_state(deployment, "second", "queued")
    (message,) = [each for each in deployment.timers.get_runs("first") if each.state == "started"]
    assert message.task_id is not None
    deployment.app.control.revoke(message.task_id, terminate=True)
    wait_state(deployment, "first", "revoked")
    let_go(deployment, "second")
    wait_state(deployment, "second", "succeeded")


def test_a_child_that_dies_and_a_time_limit_are_failures(deployment: Deployment) -> None:
    deployment.start_beat()
    deployment.start_worker(*TWO)
    run_once(deployment, "dies", "die")
    record = wait_state(deployment, "dies", "failed")
    assert record.error is not None
    assert "WorkerLostError" in record.error
    run_once(deployment, "soft", "work", timeout=0.5)
    record = wait_state(deployment, "soft", "failed")
    assert record.error is not None
    assert "SoftTimeLimitExceeded" in record.error
    run_once(deployment, "hard", "work", time_limit=1)

    def is_over() -> bool:  # before Celery 5.7 no signal tells of it
        record = record_of(deployment, "hard")
        return record is not None and record.state in ("failed", "lost")

    wait_until(is_over, "the run to be known to have ended", 20)
    letters = {letter.name for letter in deployment.timers.get_dead_letters()}
    assert letters == {"dies", "soft", "hard"}


def test_nothing_is_noted_when_it_is_off(deploy: Deploy) -> None:
    deployment = deploy(dtimer_track_runs=False)
    deployment.start_beat()
    deployment.start_worker(*TWO)
    run_once(deployment, "good", "record_timer")
    wait_until(deployment.entries_ran, "the run", 15)
    run_once(deployment, "bad", "fail")
    run_once(deployment, "after", "record_timer")
    wait_until(lambda: len(deployment.entries_ran()) == 2, "what comes after", 15)
    assert {record.state for record in deployment.timers.get_runs()} == {"queued"}
    keys = ("runs", "running", "run_leases", "dead_timers")
    assert not deployment.store.client.exists(*map(deployment.key, keys))


# ------------------------------------------------------------------ lost runs


def test_a_run_whose_worker_is_killed_is_lost_and_sent_again_if_asked(
    deployment: Deployment,
) -> None:
    deployment.start_beat()
    worker = deployment.start_worker(*TWO)
    run_once(deployment, "kept", "work", resend_lost=True)
    run_once(deployment, "lost", "work")
    names = ("kept", "lost")
    wait_until(lambda: all(did(deployment, name) for name in names), "the runs to begin", 15)
    first = record_of(deployment, "kept")
    worker.kill()
    wait_state(deployment, "lost", "lost")
    (letter,) = deployment.timers.get_dead_letters()
    assert (letter.name, letter.reason) == ("lost", "lost")

    deployment.start_worker(*TWO)
    wait_until(lambda: len(did(deployment, "kept")) == 2, "the run to begin again", 15)
    let_go(deployment, "kept")
    record = wait_state(deployment, "kept", "succeeded")
    assert first is not None
    assert record.task_id == first.task_id
    assert did(deployment, "kept") == ["began 1", "began 1", "ended 1"]
    assert did(deployment, "lost") == ["began 1"]

    deployment.timers.requeue_dead_letter(letter)
    wait_until(lambda: len(did(deployment, "lost")) == 2, "the requeued run to begin", 15)
    let_go(deployment, "lost")
    wait_state(deployment, "lost", "succeeded")
    assert deployment.timers.get_dead_letters() == []


def test_a_one_shot_that_is_lost_can_be_sent_again_as_it_was(deployment: Deployment) -> None:
    deployment.start_beat()
    worker = deployment.start_worker(*TWO)
    soon = datetime.now(timezone.utc) + timedelta(seconds=0.5)
    options = {"kwargs": {"what": "secret"}, "headers": {"tenant": "acme"}, "time_limit": 50}
    deployment.timers.create_timer("once", soon, WORK, **options)
    wait_until(lambda: did(deployment, "once"), "the run to begin", 15)
    worker.kill()
    wait_state(deployment, "once", "lost")
    deployment.timers.delete_timer("once")
    (letter,) = deployment.timers.get_dead_letters()
    deployment.timers.requeue_dead_letter(letter)
    wait_until(lambda: deployment.messages, "the message", 15)
    (message,) = deployment.messages
    assert message["headers"]["tenant"] == "acme"
    assert message["headers"]["timelimit"] == [50, None]
    assert json.loads(base64.b64decode(message["body"]))[1] == {"what": "secret"}


def test_a_run_whose_process_is_gone_is_sent_again_if_asked(deployment: Deployment) -> None:
    deployment.start_beat()
    deployment.start_worker(*TWO)
    run_once(deployment, "dies", "die", resend_lost=2)

    def is_over() -> bool:
        return bool(deployment.timers.get_dead_letters())

    wait_until(is_over, "the run to be given up", 20)
    entries = list(deployment.timers.store.run_history())
    states = [entry["state"] for entry in reversed(entries)]
    assert states.count("started") == 3
    assert states.count("lost") == 2
    assert len({entry["task_id"] for entry in entries}) == 1


def test_the_worker_keeps_a_long_run_from_being_lost(deployment: Deployment) -> None:
    deployment.start_beat()
    deployment.start_worker(*TWO)
    run_once(deployment, "long", "work")
    wait_until(lambda: did(deployment, "long"), "the run to begin", 15)
    deployment.pass_time(2 * LEASE)
    let_go(deployment, "long")
    wait_state(deployment, "long", "succeeded")
    states = {entry["state"] for entry in deployment.timers.store.run_history()}
    assert states == {"started", "succeeded"}


@pytest.mark.parametrize("pool", POOLS[:2], ids=POOL_NAMES[:2])
def test_a_worker_that_is_asked_to_end_keeps_its_runs_to_their_end(
    deployment: Deployment, pool: tuple[str, ...]
) -> None:
    deployment.start_beat()
    worker = deployment.start_worker(*pool)
    run_once(deployment, "long", "work", resend_lost=True)
    wait_until(lambda: did(deployment, "long"), "the run to begin", 15)
    worker.send(signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in worker.log_text(), "the worker to be ending", 10)
    deployment.pass_time(2 * LEASE)
    let_go(deployment, "long")
    wait_state(deployment, "long", "succeeded")
    worker.wait(20)
    assert did(deployment, "long") == ["began 1", "ended 1"]


# ------------------------------------------------------------------ overlap


def overlapping(deployment: Deployment, overlap: str) -> Callable[[], list[str]]:
    """Create a timer that comes due each second while its run lasts; return what it did."""
    deployment.start_beat()
    deployment.start_worker("-P", "prefork", "-c", "4")
    deployment.timers.create_timer("often", 1.0, WORK, overlap=overlap, coalesce=False)
    wait_until(lambda: did(deployment, "often"), "the first run to begin", 15)
    return lambda: did(deployment, "often")


def skipped(deployment: Deployment) -> int:
    return deployment.timers.get_timer("often").skips.get("overlap", 0)


def test_skip_sends_no_run_while_another_is_out(deployment: Deployment) -> None:
    done = overlapping(deployment, "skip")
    wait_until(lambda: skipped(deployment) >= 2, "two runs to be skipped", 10)
    assert done() == ["began 1"]
    let_go(deployment, "often")
    wait_until(lambda: len(done()) >= 3, "the next run to begin", 10)
    assert done()[:3] == ["began 1", "ended 1", "began 2"]


def test_buffer_one_lets_one_run_wait(deployment: Deployment) -> None:
    done = overlapping(deployment, "buffer_one")
    deployment.pass_time(3)
    assert done() == ["began 1"]
    let_go(deployment, "often")
    wait_until(lambda: len(done()) == 3, "the run that waits to begin", 3)
    assert done() == ["began 1", "ended 1", "began 2"]
    wait_until(lambda: skipped(deployment) >= 1, "the others to be counted", 3)
    second, first = deployment.timers.get_runs("often")[:2]
    assert second.scheduled_at - first.scheduled_at == timedelta(seconds=1)
    assert second.started_at is not None
    assert first.ended_at is not None
    assert second.started_at - first.ended_at < timedelta(seconds=1)


def test_cancel_other_ends_the_run_that_is_out(deployment: Deployment) -> None:
    done = overlapping(deployment, "cancel_other")
    wait_until(lambda: len(done()) >= 3, "the next runs to begin", 10)
    assert done()[:3] == ["began 1", "began 2", "began 3"]
    found = {record.number: record.state for record in deployment.timers.get_runs("often")}
    assert found[1] == "revoked"


def test_cancel_other_ends_what_no_worker_has_started_or_a_dead_one_has(
    deployment: Deployment,
) -> None:
    deployment.start_beat()
    worker = deployment.start_worker(*TWO)
    often = {"overlap": "cancel_other", "coalesce": False, "resend_lost": True}
    deployment.timers.create_timer("often", 1.0, WORK, **often)
    wait_until(lambda: did(deployment, "often"), "the first run to begin", 15)
    worker.kill()
    began = len(did(deployment, "often"))

    def sent() -> list[RunRecord]:
        return deployment.timers.get_runs("often")

    wait_until(lambda: len(sent()) >= began + 4, "runs that no worker starts", 15)
    deployment.timers.pause_timer("often")
    last = max(record.number or 0 for record in sent())
    deployment.start_worker("-P", "prefork", "-c", "4")
    wait_until(lambda: f"began {last}" in did(deployment, "often"), "the last run to begin", 15)
    deployment.pass_time(2 * LEASE)
    assert did(deployment, "often")[began:] == [f"began {last}"]
    let_go(deployment, "often")
    wait_until(lambda: f"ended {last}" in did(deployment, "often"), "the last run to end", 5)
    states = [record.state for record in sent() if record.number != last]
    assert set(states) == {"revoked"}
    assert deployment.timers.get_dead_letters() == []


def test_a_killed_worker_holds_a_timer_up_for_no_longer_than_its_lease(
    deployment: Deployment,
) -> None:
    deployment.start_beat()
    worker = deployment.start_worker(*TWO)
    deployment.timers.create_timer("often", 1.0, WORK, overlap="skip")
    wait_until(lambda: did(deployment, "often"), "the first run to begin", 15)
    worker.kill()
    killed_ms = deployment.now_ms()
    deployment.start_worker(*TWO)
    wait_until(lambda: len(did(deployment, "often")) == 2, "the next run to begin", 15)
    (newest, *_) = deployment.timers.get_runs("often")
    sent_ms = round(newest.scheduled_at.timestamp() * 1000)
    assert sent_ms <= killed_ms + LEASE * 1000 + 1000
    let_go(deployment, "often")


# ------------------------------------------------------------------ beside dying beats


def test_of_overdue_timers_each_runs_once_and_is_tracked(deployment: Deployment) -> None:
    names = deployment.create(300, interval=3600)
    client, queue = deployment.store.client, deployment.key("timer_queue")
    for timer in deployment.timers.get_timers():
        now_ms = deployment.now_ms()
        client.hset(f"{deployment.key('timer')}:{timer.id}", mapping={"due": now_ms, "at": now_ms})
        client.zadd(queue, {timer.id: now_ms})
        client.zadd(f"{deployment.key('instance_timers')}:unassigned", {timer.id: now_ms})
    deployment.start_worker("-P", "threads", "-c", "4")
    for _ in range(3):
        deployment.start_beat()
    wait_until(lambda: len(deployment.entries_ran()) >= len(names), "all to run", 30)

    def ended() -> list[RunRecord]:
        return deployment.timers.get_runs(state="succeeded", limit=None)

    wait_until(lambda: len(ended()) >= len(names), "all to be noted", 10)
    assert sorted(record.name for record in ended()) == sorted(names)
    assert sorted(run.name for run in deployment.ran().runs) == sorted(names)


def test_beats_that_die_or_freeze_double_no_tracked_run(deployment: Deployment) -> None:
    names = deployment.create(40)
    deployment.start_worker("-P", "threads", "-c", "4")
    beats = deployment.start_beats(3)
    deployment.wait_ran(names, 1)
    beats[0].kill()
    beats[1].freeze()
    since_ms = deployment.now_ms() + 4000
    deployment.wait_ran(names, since_ms, 20)
    beats[1].thaw()
    deployment.start_beat(crash_at="between_publish_and_commit:3")
    deployment.start_beat()
    deployment.wait_ran(names, deployment.now_ms() + 4000, 20)
    deployment.ran().assert_nothing_doubled()
    slots = {run.slot for run in deployment.ran().runs}

    def tracked() -> set[tuple[str, int]]:
        found = deployment.timers.get_runs(state="succeeded", limit=None)
        return {(each.name, round(each.scheduled_at.timestamp() * 1000)) for each in found}

    wait_until(lambda: tracked() >= slots, "each run to be noted", 10)


# ------------------------------------------------------------------ another broker


def test_with_confirmed_dispatch_runs_are_held_apart_and_calls_wait_in_redis_too(
    deploy: Deploy, rabbitmq: RabbitMQ
) -> None:
    deployment = deploy(broker_url=rabbitmq.url, dtimer_run_lease=LEASE, dtimer_eta_threshold=1)
    deployment.app.conf.broker_url = rabbitmq.url
    done = overlapping(deployment, "skip")
    wait_until(lambda: skipped(deployment) >= 1, "a run to be skipped", 10)
    assert done() == ["began 1"]
    deployment.app.send_task("note", ["later"], countdown=2)
    (call,) = deployment.timers.get_pending(task="note")
    assert call.args == ["later"]

    def notes() -> int:
        return sum(entry.get("args") == ["later"] for entry in deployment.entries_ran())

    wait_until(notes, "the call that waits", 15)
    deployment.timers.update_timer("often", overlap="cancel_other")
    wait_until(lambda: len(done()) >= 2, "the run in place of the first", 10)

    def first_state() -> str | None:
        return {run.number: run.state for run in deployment.timers.get_runs("often")}[1]

    # A revoke is a message of its own, which the worker reads next to that of the next run.
    wait_until(lambda: first_state() == "revoked", "the first run to be revoked", 5)
    assert (notes(), deployment.timers.get_pending()) == (1, [])
    assert deployment.modes() == {"confirmed"}
