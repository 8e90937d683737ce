"""Definitions are read once, and those of timers that come due soon in the time to spare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from celery_dtimer import definitions as module
from celery_dtimer.definitions import Definitions, LackingError
from celery_dtimer.errors import InvalidTimerError, StoreUnavailableError
from celery_dtimer.model import Definition
from celery_dtimer.store import DueTimer, Store
from tests.integration.conftest import START_MS, Service


class Read:
    """Definitions of instance "a", and what was asked of Redis for them."""

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        self.service, self.asked = service, []  # type: ignore[var-annotated]
        self.epoch = service.join("a")
        self.bound: dict[str, Definition] = {}
        self.store = service.another_store()
        self.definitions = Definitions(self.store, self.bound)
        begin = Store.begin_definitions

        def begin_definitions(store: Store, ids: Sequence[str]) -> Any:
            self.asked += ids
            return begin(store, ids)

        monkeypatch.setattr(Store, "begin_definitions", begin_definitions)

    def ahead(self, limit: int = 1000) -> list[str] | None:
        """Look ahead once; return the names that were read."""
        found = self.definitions.look_ahead("a", self.service.clock.now_ms, limit)
        return None if found is None else [each.name for each in found]

    def all_ahead(self, limit: int = 1000) -> list[str]:
        """Look ahead until there is nothing left to look at."""
        names: list[str] = []
        while (found := self.ahead(limit)) is not None:
            names += found
        return names

    def of(self, timers: Sequence[DueTimer]) -> dict[str, Any]:
        """Return what is known of timers: their definitions as they are stored."""
        found = self.definitions.of(timers)
        return {
            id: each.blob if isinstance(each, Definition) else each for id, each in found.items()
        }

    def due(self) -> list[DueTimer]:
        """Return what is due."""
        return self.service.due("a", self.epoch)

    def newly_asked(self) -> list[str]:
        """Return the ids that were asked for since the last call."""
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture
def read(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Read]:
    """Definitions of the only instance."""
    read = Read(service, monkeypatch)
    yield read
    read.store.close()


def test_a_definition_is_read_once_for_each_revision(read: Read, service: Service) -> None:
    timer = service.add(args=(1,))
    service.clock.advance(10)
    for _ in range(2):
        assert read.of(read.due()) == {timer.id: timer.blob}
    assert read.newly_asked() == [timer.id]
    changed = service.add(args=(2,))
    assert read.of(read.due()) == {timer.id: changed.blob}
    assert read.newly_asked() == [timer.id]


def test_what_was_requested_is_there_without_asking_again(read: Read, service: Service) -> None:
    timers = {timer.id: timer.blob for timer in service.add_many(3)}
    service.clock.advance(11)
    due = read.due()
    read.definitions.request(due)
    read.definitions.request(due)  # knows that they are on their way
    assert read.of(due) == timers
    assert sorted(read.newly_asked()) == sorted(timers)


def test_a_request_without_an_answer_fails_once(
    read: Read, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = service.add()
    service.clock.advance(10)

    def fails() -> Any:
        raise StoreUnavailableError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "begin_definitions", lambda store, ids: fails)
        read.definitions.request(read.due())
    with pytest.raises(StoreUnavailableError):
        read.definitions.of(read.due())
    assert read.of(read.due()) == {timer.id: timer.blob}


def test_what_comes_due_within_half_a_minute_is_read_ahead(read: Read, service: Service) -> None:
    near = [service.add(f"near {every}", every=every) for every in (5, 20, 30)]
    service.add("far", every=31)
    assert read.ahead() == [timer.name for timer in near]
    assert read.ahead() is None
    assert len(read.newly_asked()) == 3
    service.clock.advance(30)
    assert read.of(read.due()) == {timer.id: timer.blob for timer in near}
    assert read.newly_asked() == []


def test_it_is_looked_again_before_the_rest_comes_due(read: Read, service: Service) -> None:
    service.add("first", every=10)
    assert read.all_ahead() == ["first"]
    service.add("second", every=40)
    assert read.ahead() is None
    service.clock.advance(9)
    assert read.all_ahead() == []
    service.clock.advance(3)
    assert read.all_ahead() == ["second"]
    assert len(read.newly_asked()) == 2


@pytest.mark.parametrize("limit", [1, 7, 100, 1000])
def test_each_is_read_once_however_many_come_due_at_once(
    read: Read, service: Service, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(module, "_PAGE", 10)
    at_once = [service.define(f"at once {i}") for i in range(35)]
    service.store.save([*at_once, *(service.define(f"{i}", every=9 + i) for i in range(5))])
    names = read.all_ahead(limit)
    assert len(names) == len(set(names)) == 40
    assert read.ahead(limit) is None


def test_those_that_are_known_take_no_place(read: Read, service: Service) -> None:
    timers = service.add_many(5)
    service.clock.advance(10.002)
    read.definitions.of(read.due())
    service.clock.advance(-10.002)
    assert read.ahead(limit=2) == [timer.name for timer in timers[3:]]


def test_a_crowd_is_left_to_its_time(
    read: Read, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_SOON", 12)
    monkeypatch.setattr(module, "_PAGE", 10)
    timers = service.add_many(40)
    assert read.all_ahead() == [timer.name for timer in timers[:20]]
    service.clock.advance(2.999)
    assert read.ahead() is None
    for timer in timers[:15]:
        service.store.delete([timer.id])
    service.clock.advance(0.001)
    assert read.all_ahead() == [timer.name for timer in timers[20:30]]


def test_only_what_will_serve_is_kept(read: Read, service: Service) -> None:
    kept, edited, wrong = service.add("kept"), service.add("edited"), service.add("wrong")
    service.add("bound", code_bound=True)
    gone = service.add("gone")
    service.redis.set(service.keys("timer_definition", edited.id), "{")
    service.redis.set(service.keys("timer_definition", wrong.id), kept.blob)
    service.redis.delete(service.keys("timer_definition", gone.id))
    service.is_damaged = True
    assert read.ahead() == ["kept"]
    service.clock.advance(10)
    found = read.of(read.due())
    assert found[kept.id] == kept.blob
    assert isinstance(found[edited.id], InvalidTimerError)
    assert isinstance(found[gone.id], InvalidTimerError)
    assert [kind for kind in found.values() if isinstance(kind, LackingError)]


def test_a_change_after_the_look_is_seen(read: Read, service: Service) -> None:
    service.add(args=("old",))
    assert read.ahead() == ["timer"]
    changed = service.add(args=("new",))
    service.clock.advance(10)
    assert read.of(read.due()) == {changed.id: changed.blob}


@pytest.mark.parametrize("page", [2, 1000])
def test_a_clock_that_goes_back_is_gone_along_with(
    read: Read, service: Service, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(module, "_PAGE", page)
    service.clock.advance(3600)
    assert read.all_ahead() == []
    service.clock.now_ms = START_MS
    timers = service.add_many(5)
    assert read.all_ahead() == [timer.name for timer in timers]


def test_no_more_is_kept_than_there_is_room_for(
    read: Read, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    service.add_many(5)
    service.clock.advance(11)
    due = read.due()
    for _ in range(2):
        assert len(read.definitions.of(due)) == 5
    assert len(read.definitions._kept) == 3
    monkeypatch.setattr(module, "_MOST_BYTES", 1)
    assert len(read.definitions.of(due)) == 5
    assert not read.definitions._kept
