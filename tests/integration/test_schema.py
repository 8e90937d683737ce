"""Versions beside each other: what a newer one has written, an older one leaves alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_dtimer import DistributedTimer
from celery_dtimer.errors import InvalidTimerError, NewerError, SchemaError
from celery_dtimer.membership import Identity, Membership
from celery_dtimer.model import SCHEMA, Definition, countdown_id, decode_definition
from celery_dtimer.store import HeldRun, OutRun, Reading, Settlement, Store
from tests.conftest import MakeApp, ReadQueue
from tests.integration.conftest import START_MS, Beat, Broker, Service, StartTimers
from tests.servers import RedisServer
from tests.waiting import wait_until

NEWER = SCHEMA + 1


class NewerStore(Store):
    """The store of a version to come."""

    schema = NEWER


@pytest.fixture
def newer(service: Service) -> Iterator[NewerStore]:
    """A newer version's look at the service."""
    store = NewerStore(service.settings, clock=service.clock)
    yield store
    store.close()


def schema_of(service: Service) -> int:
    """Return the schema that is stored."""
    return int(service.redis.hget(service.keys("meta"), "schema") or 0)  # type: ignore[arg-type]


def write_newer(service: Service, timer: Definition, **fields: Any) -> str:
    """Give a timer a definition as only a newer version writes it; return its text."""
    content = {**json.loads(timer.blob), **fields}
    blob = json.dumps(content)
    service.redis.set(service.keys("timer_definition", timer.id), blob)
    return blob


# ------------------------------------------------------------------ the number


def test_the_first_registration_notes_the_schema(service: Service) -> None:
    service.join()
    assert schema_of(service) == SCHEMA
    assert [instance.schema for instance in service.store.instances()] == [SCHEMA]


def test_the_schema_is_raised_once_no_older_instance_is_registered(
    service: Service, newer: NewerStore
) -> None:
    a = service.join("a")
    epoch = newer.register("b", {}).epoch
    assert schema_of(service) == SCHEMA
    assert service.join("c") > 0, "an older one still may join"
    service.store.leave("a", a)
    assert schema_of(service) == SCHEMA
    service.let_pass(31, b=epoch)  # c is dead
    newer.reap("b", epoch)
    assert schema_of(service) == NEWER


def test_the_older_instance_that_leaves_last_raises_it_itself(
    service: Service, newer: NewerStore
) -> None:
    a = service.join("a")
    newer.register("b", {})
    service.store.leave("a", a)
    assert schema_of(service) == NEWER


def test_a_newer_version_alone_raises_it_at_once_and_nothing_lowers_it(
    service: Service, newer: NewerStore
) -> None:
    service.store.leave("a", service.join("a"))
    epoch = newer.register("b", {}).epoch
    assert schema_of(service) == NEWER
    newer.leave("b", epoch)
    assert schema_of(service) == NEWER


def test_a_newer_version_reads_what_an_older_one_has_written(
    service: Service, newer: NewerStore
) -> None:
    timer = service.add()
    service.store.pause(service.add("paused").id)
    epoch = newer.register("b", {}).epoch
    newer.reap("b", epoch)
    service.clock.advance(10)
    (due,) = newer.due("b", epoch, Reading(10)).timers
    assert newer.commit("b", epoch, 1, [service.ran(due)]).codes == [1]
    assert newer.states([timer.id])[1][0].runs == 1  # type: ignore[union-attr]


# ------------------------------------------------------------------ an older version


def calls_of(service: Service, timer: Definition, epoch: int) -> list[Callable[[], object]]:
    """Return a call of each method that writes, or decides what is written."""
    store, run = service.store, OutRun("task", timer.id)
    due = Settlement(service.due_one("a", epoch), "run")
    held = HeldRun(timer.id, START_MS, 1, "skip", 0, ("task",))
    new = service.define("new")
    return [
        lambda: store.register("b", {}),
        lambda: store.heartbeat("a", epoch),
        lambda: store.report("a", epoch, {"broker": "up"}),
        lambda: store.leave("a", epoch),
        lambda: store.reap("a", epoch),
        lambda: store.rebalance("a", epoch),
        lambda: store.steal("a", epoch, 1),
        lambda: store.give_up("a", epoch),
        lambda: store.declare("a", epoch, "code", "digest", ["x"]),
        lambda: store.undeclare("a", epoch, "code", [timer.id]),
        lambda: store.note_timezone("a", epoch, "code", "UTC"),
        lambda: store.due("a", epoch, Reading(1)),
        lambda: store.commit("a", epoch, 1, [due]),
        lambda: store.save([new]),
        lambda: store.save_broken({"new": ("{}", "why")}, source="code"),
        lambda: store.hold(new, delay_ms=1),
        lambda: store.cancel([countdown_id("x")]),
        lambda: store.delete([timer.id]),
        lambda: store.pause(timer.id),
        lambda: store.stop(timer.id),
        lambda: service.resume(timer, START_MS),
        lambda: service.trigger(timer),
        lambda: store.purge(),
        lambda: store.mend(),
        lambda: store.scrub("a", epoch),
        lambda: store.scrub_runs("a", epoch),
        lambda: store.vanished("a", epoch, [(timer.id, timer.revision, 1)]),
        lambda: store.restore("a", epoch, [timer]),
        lambda: store.run_started(run, lease_ms=1, limit_ms=0, redelivered=False),
        lambda: store.run_ended(run, "succeeded"),
        lambda: store.renew_runs([("task", "message")], 1),
        lambda: store.open_runs("a", epoch, [held]),
        lambda: store.close_runs("a", [held]),
        lambda: store.revoke_runs(["task"], "why"),
        lambda: store.lose("a", epoch, ("task", ""), resent_id="", why="", name=""),
        lambda: store.requeue("letter", "id", "", "-", "{}"),
        lambda: store.purge_dead(None),
    ]


def test_an_older_version_changes_nothing_of_what_a_newer_one_keeps(service: Service) -> None:
    epoch = service.join()
    timer = service.add(at_ms=START_MS)
    calls = calls_of(service, timer, epoch)
    service.redis.hset(service.keys("meta"), "schema", NEWER)

    def stored() -> dict[str, object]:
        names = service.redis.scan_iter(f"{service.settings.key_prefix}*", count=1000)
        return {name: service.redis.dump(name) for name in names}

    before = stored()
    for call in calls:
        with pytest.raises(SchemaError, match=f"kept in schema {NEWER}, .*up to {SCHEMA}"):
            call()
    assert stored() == before


def test_what_is_no_number_is_no_schema(service: Service) -> None:
    service.redis.hset(service.keys("meta"), "schema", "nonsense")
    service.join()
    assert schema_of(service) == SCHEMA


def test_an_older_instance_does_nothing_until_its_schema_is_stored_again(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    member = Membership(
        service.store, Identity("a", "host", 1, "1.0"), clock=lambda: service.clock.now_ms / 1000
    )
    member.report_progress()
    member.step()
    assert member.lease is not None
    service.redis.hset(service.keys("meta"), "schema", NEWER)
    for _ in range(3):
        service.clock.advance(5)
        member.report_progress()
        with pytest.raises(SchemaError):
            member.step()
        assert member.lease is None
    service.redis.hset(service.keys("meta"), "schema", SCHEMA)
    member.step()
    assert member.lease is not None


def test_a_client_of_an_older_version_is_refused_and_may_look(
    make_app: MakeApp, redis_server: RedisServer, prefix: str
) -> None:
    timers = DistributedTimer(make_app())
    timers.create_timer("old", 3600, "record")
    redis_server.client.hset(f"{prefix}meta:{{orders}}", "schema", NEWER)
    for call in (
        lambda: timers.create_timer("new", 60, "record"),
        lambda: timers.update_timer("old", schedule=60),
        lambda: timers.pause_timer("old"),
        lambda: timers.delete_timer("old"),
        lambda: timers.trigger_timer("old"),
    ):
        with pytest.raises(SchemaError, match="knows schemas up to"):
            call()
    assert [timer.name for timer in timers.get_timers()] == ["old"]


# ------------------------------------------------------------------ one timer's definition

FIELDS: dict[str, dict[str, Any]] = {
    "a newer schema": {"schema": NEWER},
    "an unknown field": {"colour": "red"},
    "a newer kind of schedule": {"schema": NEWER, "schedule": {"type": "lunar"}},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
def test_a_newer_definition_is_told_from_nonsense(service: Service, fields: Any) -> None:
    blob = json.dumps({**json.loads(service.define().blob), **fields})
    with pytest.raises(NewerError) as caught:
        decode_definition(blob)
    assert caught.value.schema == NEWER


def test_a_definition_of_this_schema_may_say_so(service: Service) -> None:
    content = json.loads(service.define().blob)
    found = decode_definition(json.dumps({**content, "schema": SCHEMA}))
    assert found.blob == service.define().blob
    with pytest.raises(InvalidTimerError, match="not an int"):
        decode_definition(json.dumps({**content, "schema": "2"}))


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
def test_a_newer_definition_stays_as_it_is_and_stops_no_other(
    service: Service, broker: Broker, beat: Beat, caplog: pytest.LogCaptureFixture, fields: Any
) -> None:
    timer = service.add("new")
    service.add("old")
    blob = write_newer(service, timer, **fields)
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            service.clock.advance(1)
            beat.step()
    assert broker.slots("old") == [10, 20, 30]
    assert broker.slots("new") == []
    state = service.state(timer.id)
    assert (state.status, state.due_ms) == ("active", START_MS + 10_000)
    assert service.store.definitions([timer.id]) == [blob]
    told = [text for text in caplog.messages if "is left to another instance" in text]
    assert len(told) == 1
    assert 2 <= state.attempts <= 4, "it is looked at now and then"


def test_a_newer_definition_goes_to_an_instance_that_can_read_it(
    service: Service, beat: Beat, newer: NewerStore
) -> None:
    timer = service.add("new")
    for i in range(4):
        service.join(f"older {i}")
    epoch = newer.register("newer", {}).epoch
    write_newer(service, timer, schema=NEWER)
    service.clock.advance(10)
    beat.step()
    assert service.state(timer.id).owner == "newer"
    service.clock.advance(1)
    (due,) = newer.due("newer", epoch, Reading(10)).timers
    assert newer.commit("newer", epoch, 1, [service.ran(due)]).codes == [1]
    assert service.state(timer.id).attempts == 0


def test_a_newer_definition_does_not_go_to_one_that_is_not_new_enough(
    service: Service, beat: Beat, newer: NewerStore
) -> None:
    timer = service.add("new")
    newer.register("newer", {})
    write_newer(service, timer, schema=NEWER + 1)
    service.clock.advance(10)
    beat.step()
    assert service.state(timer.id).owner == "a"


def test_a_newer_timer_is_listed_with_its_status_and_why_it_can_not_be_read(
    make_app: MakeApp, redis_server: RedisServer, prefix: str
) -> None:
    timers = DistributedTimer(make_app())
    id = timers.create_timer("new", 3600, "record")
    key = f"{prefix}timer_definition:{{orders}}:{id}"
    content = {**json.loads(str(redis_server.client.get(key))), "schema": NEWER}
    redis_server.client.set(key, json.dumps(content))
    timer = timers.get_timer("new")
    assert (timer.status, timer.name, timer.schedule) == ("active", "new", None)
    assert "newer version" in (timer.reason or "")
    with pytest.raises(NewerError):
        timers.update_timer("new", schedule=60)
    timers.pause_timer("new")
    with pytest.raises(NewerError):
        timers.resume_timer("new")
    assert timers.get_timer("new").status == "paused"
    timers.delete_timer("new")


def test_a_real_instance_waits_for_its_schema_and_then_runs(
    make_app: MakeApp,
    redis_server: RedisServer,
    read_queue: ReadQueue,
    start_timers: StartTimers,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, meta = redis_server.client, f"{prefix}meta:{{orders}}"
    app = make_app(beat_schedule={"static": {"task": "record", "schedule": 0.3}})
    reader = read_queue(app)
    client.hset(meta, "schema", NEWER)
    with caplog.at_level(logging.ERROR):
        timers = start_timers(app)
        wait_until(lambda: "knows schemas up to" in caplog.text, "the refusal", 5)
    assert list(client.scan_iter(f"{prefix}*:{{orders}}*", count=1000)) == [meta]
    assert client.hgetall(meta) == {"schema": str(NEWER)}
    client.hset(meta, "schema", SCHEMA)
    wait_until(lambda: reader.ledger.names() == {"static"}, "it to run", 10)
    assert len([text for text in caplog.messages if "knows schemas up to" in text]) == 1
    assert timers.get_service_instances()
