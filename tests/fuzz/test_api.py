"""Whatever the API is called with, it works or raises a declared error, and stores nothing half."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dtimer import DistributedTimer
from celery_dtimer.declarations import declaration_of
from celery_dtimer.errors import DistributedTimerError
from celery_dtimer.timers import _FIELDS
from tests.conftest import MakeApp, delete_prefix
from tests.fuzz.amount import TRIED, share
from tests.fuzz.garbage import texts, values
from tests.servers import RedisServer

GOOD = {"name": "good", "schedule": 10, "callback": "tasks.record"}
OPTIONS = (
    *("queue", "priority", "expires", "headers", "link", "countdown", "serializer", "shadow"),
    *("timeout", "exchange", "routing_key", "autoretry_for", "chain", "chord", "task_id"),
)


@pytest.fixture
def timers(make_app: MakeApp) -> Iterator[DistributedTimer]:
    """The timers of a service that is emptied before each try."""
    made = DistributedTimer(make_app(dtimer_eta_threshold=1))
    yield made
    made.store.close()


@pytest.fixture
def empty(redis_server: RedisServer, prefix: str) -> Callable[[], None]:
    """Delete all that the service has stored."""
    return lambda: delete_prefix(redis_server.client, prefix)


keywords = st.dictionaries(
    st.sampled_from(sorted(_FIELDS)) | st.sampled_from(OPTIONS) | texts, values, max_size=4
)


def stored(timers: DistributedTimer) -> set[str]:
    """Return the names of all timers, which must all be whole."""
    assert not timers.check_consistency()
    found = timers.get_timers()
    assert all(timer.status != "broken" for timer in found), [timer.reason for timer in found]
    return {timer.name for timer in found}


@given(keywords=keywords)
@share(0.08)
def test_a_timer_is_created_or_refused(
    timers: DistributedTimer, empty: Callable[[], None], keywords: dict[str, Any]
) -> None:
    TRIED["keywords of create_timer"] += 1
    empty()
    given_ = {**GOOD, **keywords}
    try:
        id = timers.create_timer(**given_)
    except DistributedTimerError:
        assert stored(timers) == set()
    else:
        assert stored(timers) == {given_["name"]}
        assert timers.get_timer(id).name == given_["name"]


@given(bad=st.lists(keywords | values, min_size=1, max_size=3))
@share(0.04)
def test_of_many_timers_all_are_created_or_none(
    timers: DistributedTimer, empty: Callable[[], None], bad: list[Any]
) -> None:
    TRIED["dicts of create_timers"] += len(bad)
    empty()
    entries = [
        GOOD,
        *(
            {**GOOD, "name": f"bad{i}", **each} if isinstance(each, dict) and i else each
            for i, each in enumerate(bad)
        ),
    ]
    try:
        ids = timers.create_timers(entries)
    except DistributedTimerError:
        assert stored(timers) == set()
    else:
        assert len(stored(timers)) == len(ids) == len(entries)


@given(changes=keywords)
@share(0.06)
def test_a_timer_is_changed_or_stays_as_it_is(
    timers: DistributedTimer, empty: Callable[[], None], changes: dict[str, Any]
) -> None:
    TRIED["changes of update_timer"] += 1
    empty()
    id = timers.create_timer(**GOOD)
    before = timers.get_timer(id)
    try:
        timers.update_timer(
            "good", **{key: each for key, each in changes.items() if key not in ("timer", "self")}
        )
    except DistributedTimerError:
        assert timers.get_timer(id) == before
    assert stored(timers) == {"good"}


CALLS: dict[str, tuple[str, ...]] = {
    "get_timer": ("timer",),
    "get_timers": ("status", "name", "task", "instance", "offset", "limit"),
    "get_instance_timers": ("instance",),
    "pending_count": ("instance",),
    "get_runs": ("timer", "state", "offset", "limit"),
    "get_dead_letters": ("offset", "limit"),
    "requeue_dead_letter": ("letter",),
    "purge_dead_letters": ("before",),
    "why": ("timer", "moment"),
    "preview": (
        "timer_or_schedule",
        "n",
        "after",
        "timezone",
        "dst",
        "relative",
        "start_at",
        "max_runs",
    ),
    "pause_timer": ("timer",),
    "resume_timer": ("timer",),
    "stop_timer": ("timer",),
    "trigger_timer": ("timer",),
    "delete_timer": ("timer",),
    "get_pending": ("task", "args", "kwargs", "queue", "after", "before", "offset", "limit"),
    "cancel": ("task_id",),
    "register_callback": ("name", "task"),
    "callback": ("name", "schedule", "run_once", "timezone", "args", "jitter"),
    "on_failure": ("function",),
}
_NEEDED = {
    "timer": "good",
    "moment": None,
    "letter": "x",
    "task_id": "x",
    "name": "n",
    "task": "t",
    "timer_or_schedule": "good",
    "function": None,
}


@st.composite
def calls(draw: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """Return a method and what it is called with."""
    method = draw(st.sampled_from(sorted(CALLS)))
    names = CALLS[method]
    needed = {
        name: _NEEDED[name]
        for name in names
        if name in _NEEDED and method not in ("get_timers", "get_runs", "get_pending", "callback")
    }
    return method, {**needed, **draw(st.dictionaries(st.sampled_from(names), values, max_size=3))}


@given(call=calls())
@share(0.08)
def test_a_call_answers_or_is_refused(
    timers: DistributedTimer, empty: Callable[[], None], call: tuple[str, dict[str, Any]]
) -> None:
    TRIED["calls of other methods"] += 1
    method, arguments = call
    empty()
    timers.create_timer(**GOOD)
    with suppress(DistributedTimerError):
        getattr(timers, method)(**arguments)
    assert stored(timers) <= {"good"}


def is_hashable(value: Any) -> bool:
    """Say whether a value can be a key."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


@given(
    entries=st.dictionaries(
        texts | values.filter(is_hashable),
        values
        | st.dictionaries(
            st.sampled_from(
                ["task", "schedule", "args", "kwargs", "options", "relative", "last_run_at", "x"]
            ),
            values,
            max_size=4,
        ),
        max_size=3,
    )
)
@share(0.05)
def test_entries_of_any_shape_are_declared_or_broken(
    timers: DistributedTimer, entries: dict[Any, Any]
) -> None:
    TRIED["entries of beat_schedule"] += len(entries)
    declaration = declaration_of(
        timers.app, "orders", {**entries, "good": {"task": "t", "schedule": 5}}
    )
    assert "good" in declaration.definitions
    assert len(declaration.ids) >= 1
    assert isinstance(declaration.digest, str)


@given(
    args=values,
    how=st.dictionaries(
        st.sampled_from(
            [
                "task_id",
                "countdown",
                "eta",
                "expires",
                "headers",
                "queue",
                "link",
                "priority",
                "serializer",
                "kwargs",
            ]
        ),
        values,
        max_size=3,
    ),
    id=texts,
)
@share(0.05)
def test_a_call_that_waits_is_kept_whole_or_not_at_all(
    timers: DistributedTimer, empty: Callable[[], None], args: Any, how: dict[str, Any], id: str
) -> None:
    TRIED["calls with a countdown"] += 1
    empty()
    options = {"task_id": id, "countdown": 1000, **how}
    before = timers.pending_count()
    try:
        timers.app.send_task("tasks.record", args, **options)
    except Exception:  # Celery's, kombu's, or ours: as without us, but nothing of it is stored
        assert timers.pending_count() == before
    else:
        pending = timers.get_pending()
        assert len(pending) == timers.pending_count()
    assert not timers.check_consistency()
