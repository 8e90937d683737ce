"""Whatever is stored, or sent to a worker, is read or refused by the declared errors: no crash."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime
from typing import Any

from celery import Celery
from celery.app.task import Context
from hypothesis import given
from hypothesis import strategies as st

from celery_dtimer import history, planning, schedules
from celery_dtimer.countdowns import PendingTask
from celery_dtimer.dispatcher import _decide
from celery_dtimer.errors import InvalidTimerError, SettingsError
from celery_dtimer.messages import KeptMessage, priority_of
from celery_dtimer.model import Definition, Run, Timer, TimerState, decode_definition, revision_of
from celery_dtimer.options import check_options
from celery_dtimer.policy import Defaults, Policy, decode_policy, parse_policy
from celery_dtimer.publisher import Failure, Publisher, RefusedError, UnsendableError
from celery_dtimer.runs import DeadLetter, RunRecord, _noted, told
from celery_dtimer.settings import Settings
from celery_dtimer.store import DueTimer, Message, OutRun, _instance, _state, _turn, out_run
from celery_dtimer.worker import CallbackTimer, timer_of
from tests.fuzz.amount import TRIED, share
from tests.fuzz.garbage import json_values, spoilt, spoilt_texts, texts, values
from tests.fuzz.records import BLOBS, HEADER, SCHEDULES

NOW_MS = 1_790_000_000_000

# ------------------------------------------------------------------ definitions


def use(definition: Definition, blob: str) -> None:
    """Do with a definition all that instances and the API do before they send it."""
    assert isinstance(definition.blob, str)
    assert isinstance(revision_of(definition, blob), str)
    assert isinstance(definition.summary, str)
    assert definition.last_ms is None or isinstance(definition.last_ms, int)
    assert isinstance(definition.schedule.describe(), str)
    timer = DueTimer(definition.id, "active", "r", str(NOW_MS), str(NOW_MS), "3")
    decided = _decide(timer, definition, NOW_MS + 5000, Defaults(), None)
    assert decided.detail


@given(spoilt(BLOBS))
@share(0.22)
def test_a_stored_definition_is_read_or_refused(blob: str) -> None:
    TRIED["stored definitions"] += 1
    state = TimerState("id", "active", "r", NOW_MS, NOW_MS)
    assert isinstance(Timer.from_stored(state, blob), Timer)
    try:
        definition = decode_definition(blob)
    except InvalidTimerError:
        return
    use(definition, blob)


@given(spoilt(BLOBS[-4:]))
@share(0.08)
def test_a_stored_call_is_read_or_refused(blob: str) -> None:
    TRIED["stored calls that wait"] += 1
    with suppress(InvalidTimerError):
        definition = decode_definition(blob)
        if definition.message is None:
            return
        assert isinstance(priority_of(definition.message), int)
        kept = KeptMessage(definition)
        assert isinstance(kept.queue, str)
        assert isinstance(kept.request, Context)
        assert isinstance(PendingTask.from_stored(definition, NOW_MS).args, (list, type(None)))


@given(spoilt(SCHEDULES))
@share(0.05)
def test_a_stored_schedule_is_read_or_refused(text: str) -> None:
    TRIED["stored schedules"] += 1
    data = None
    with suppress(InvalidTimerError, ValueError, RecursionError):
        data = json.loads(text)
    with suppress(InvalidTimerError):
        rule = schedules.decode(data)
        assert schedules.decode(rule.encode()) == rule
        first = rule.first_run(NOW_MS)
        assert first is None or isinstance(first, int)


@given(st.dictionaries(st.sampled_from(list(Policy.__slots__)), json_values, max_size=3))
@share(0.03)
def test_a_stored_policy_is_read_or_refused(stored: dict[str, Any]) -> None:
    TRIED["stored policies"] += 1
    with suppress(InvalidTimerError):
        assert decode_policy(decode_policy(stored).encode()) == decode_policy(stored)


_app = Celery("decoders", broker="redis://127.0.0.1:1/0", set_as_current=False)
_app.conf.update(broker_connection_retry=False, broker_connection_max_retries=0)


@_app.task(name="tasks.record", shared=False)
def record(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


@given(st.lists(spoilt(BLOBS), min_size=1, max_size=3))
@share(0.05)
def test_a_message_is_built_or_refused(blobs: list[str]) -> None:
    """Without a broker: what has to ask it is down, all else is built or set aside."""
    TRIED["messages to build"] += len(blobs)
    publisher = Publisher(_app, timeout=0.2)
    runs = []
    for blob in blobs:
        with suppress(InvalidTimerError):
            definition = decode_definition(blob)
            assert isinstance(publisher.urgency(definition), int)
            runs.append(Run("orders", "i", "id", "id", NOW_MS, NOW_MS, 1, definition))
    for answer in publisher.build(runs):
        assert isinstance(answer, (Message, RefusedError, UnsendableError, Failure))


# ------------------------------------------------------------------ rows, lines and hashes


def rows(*fields: str) -> st.SearchStrategy[dict[str, str]]:
    """Return hashes with some of these fields, and others."""
    text = texts | st.integers().map(str) | st.sampled_from(BLOBS)
    return st.dictionaries(st.sampled_from(fields) | texts, text, max_size=len(fields))


STATE = (
    *("status", "revision", "created", "due", "at", "last_run", "last_sent", "runs", "attempts"),
    *("owner", "source", "parent", "reason"),
)


@given(rows(*STATE, "skipped_paused", "skipped_"), st.sampled_from(BLOBS) | texts)
@share(0.05)
def test_a_timers_hash_is_read(row: dict[str, str], blob: str) -> None:
    TRIED["hashes of timers"] += 1
    state = _state("id", row)
    assert (state is None) == ("revision" not in row)
    if state is None:
        return
    timer = Timer.from_stored(state, blob)
    assert isinstance(timer.skipped, int)
    with suppress(InvalidTimerError):
        definition = decode_definition(blob)
        answer = history.explain(definition, state, NOW_MS, NOW_MS, [])
        assert isinstance(answer, str)
        if definition.message is None:
            planning.arm(definition, state, NOW_MS)
            planning.given_up(definition, state, NOW_MS, definition)
            planning.resume(definition, state, NOW_MS)


@given(
    rows("id", "service", "host", "port", "status", "epoch", "started_at", "heartbeat_at", "sent")
)
@share(0.02)
def test_an_instances_hash_is_read(row: dict[str, str]) -> None:
    TRIED["hashes of instances"] += 1
    assert _instance(row, 3).timers == 3


@given(st.lists(texts | st.integers().map(str), max_size=12).map(" ".join))
@share(0.03)
def test_a_due_row_is_read(line: str) -> None:
    TRIED["rows of due timers"] += 1
    turn = _turn(["1790000000000 5 1790000000000 0 -1 -1 0", line])
    (timer,) = turn.timers
    if timer.is_readable:
        assert timer.due_ms >= 0
        assert timer.run_number >= 1
    assert timer.refusals >= 0
    assert isinstance(timer.is_sent, bool)


@given(st.lists(texts | st.integers().map(str), max_size=10).map(" ".join))
@share(0.02)
def test_what_is_said_of_a_run_that_is_out_is_read(text: str) -> None:
    TRIED["runs that are out"] += 1
    found = out_run("id", text)
    assert found is None or isinstance(found, OutRun)


_lines = st.lists(
    st.lists(texts | st.integers().map(str), max_size=6).map(" ".join), max_size=3
).map("\n".join)


@given(_lines, _lines, st.sampled_from(BLOBS))
@share(0.03)
def test_the_history_is_read(sent: str, skipped: str, blob: str) -> None:
    TRIED["lines of the history"] += 1
    entries = [{"at": str(NOW_MS), "sent": sent, "skipped": skipped}]
    for id in ("", "a", sent.partition(" ")[0], skipped.partition(" ")[0]):
        found = list(history.records(entries, id))
        definition = decode_definition(blob)
        if definition.message is None:
            state = TimerState(id, "active", "r", NOW_MS)
            answer = history.explain(definition, state, NOW_MS, NOW_MS, found)
            assert isinstance(answer, str)


@given(
    st.lists(
        rows(
            "task_id",
            "timer",
            "due",
            "state",
            "number",
            "retries",
            "took",
            "worker",
            "error",
            "shard",
        ),
        max_size=4,
    )
)
@share(0.02)
def test_what_workers_have_noted_is_read(entries: list[dict[str, str]]) -> None:
    TRIED["notes of workers"] += 1
    records = _noted([{**entry, "at": str(NOW_MS)} for entry in entries], None)
    assert all(isinstance(each, RunRecord) for each in records)
    assert isinstance(told(records), str)


@given(
    rows(
        *(
            "timer",
            "name",
            "due",
            "number",
            "shard",
            "task_id",
            "retries",
            "reason",
            "error",
            "where",
        ),
        *("task", "call", "options", "definition", "revision", "shards"),
    ),
    spoilt(['[[1, {"a": 2}], {"k": 1}]']),
    spoilt(BLOBS),
)
@share(0.05)
def test_a_dead_letter_is_read(row: dict[str, str], call: str, blob: str) -> None:
    TRIED["dead letters"] += 1
    letter = DeadLetter.from_stored(
        "id", {**row, "call": call, "definition": blob, "at": str(NOW_MS)}
    )
    assert isinstance(letter.at, datetime)
    assert letter.args is None or isinstance(letter.args, list)


# ------------------------------------------------------------------ in workers


@given(
    json_values
    | st.dictionaries(st.sampled_from(list(HEADER)), json_values).map(
        lambda some: {**HEADER, **some}
    )
)
@share(0.05)
def test_a_messages_header_is_read_or_ignored(header: Any) -> None:
    TRIED["headers of messages"] += 1
    found = timer_of(Context({"id": "task", "dtimer": header}))
    if found is None:
        return
    assert isinstance(found, CallbackTimer)
    assert found.scheduled_at.utcoffset() is not None
    assert all(
        isinstance(text, str) for text in (found.id, found.name, found.service, found.instance)
    )
    assert all(isinstance(number, int) for number in (found.run, found.shard_index, found.resent))


# ------------------------------------------------------------------ settings

NAMES = [
    *("dtimer_redis_url", "dtimer_redis_options", "dtimer_service", "dtimer_key_prefix"),
    *("dtimer_heartbeat_interval", "dtimer_batch_size", "dtimer_keep_finished", "dtimer_history"),
    *("dtimer_dispatch", "dtimer_coalesce", "dtimer_eta_threshold", "dtimer_misfire_grace_time"),
]
URLS = [
    "redis://user:pw@host:6379/0?socket_timeout=5",
    "rediss://:p%40w@[::1]:1/2",
    "redis+socket:///tmp/x?virtual_host=1",
    "embedded:///dir",
    "sentinel://:pw@h1;sentinel://:pw@h2",
]


@given(st.dictionaries(st.sampled_from(NAMES), values, max_size=3), spoilt_texts(URLS) | values)
@share(0.04)
def test_settings_are_taken_or_refused(conf: dict[str, Any], url: Any) -> None:
    TRIED["settings"] += 1
    app = Celery("orders", set_as_current=False)
    with suppress(SettingsError):
        app.conf.update({"dtimer_redis_url": url, **conf})
        settings = Settings.from_app(app)
        assert isinstance(settings.masked_url, str)
        assert isinstance(repr(settings), str)


# ------------------------------------------------------------------ what is asked for


@given(
    st.dictionaries(
        st.sampled_from(
            "expires countdown headers link queue priority timeout eta serializer x".split()
        ),
        values,
        max_size=3,
    )
)
@share(0.04)
def test_options_are_taken_or_refused(options: dict[str, Any]) -> None:
    TRIED["options"] += 1
    with suppress(InvalidTimerError):
        assert isinstance(check_options(options), dict)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "start_at",
                "end_at",
                "max_runs",
                "jitter",
                "coalesce",
                "overlap",
                "shards",
                "resend_lost",
                "misfire_grace_time",
                "max_catch_up",
            ]
        ),
        values,
        max_size=3,
    )
)
@share(0.03)
def test_policies_are_taken_or_refused(keywords: dict[str, Any]) -> None:
    TRIED["policies"] += 1
    with suppress(InvalidTimerError):
        assert isinstance(parse_policy(keywords, "UTC"), Policy)
