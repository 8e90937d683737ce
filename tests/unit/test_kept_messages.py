"""Durable countdowns without a server: the instant of an eta, and what is kept of a message."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.worker.request import Request
from kombu import Message
from kombu.utils.uuid import uuid

from celery_dtimer import InvalidTimerError
from celery_dtimer.messages import KeptMessage, keep, moment_of, priority_of, to_ms_up
from celery_dtimer.model import (
    Definition,
    countdown_id,
    decode_definition,
    is_countdown_id,
    is_timer_id,
    timer_id,
)

ETAS: dict[str, Any] = {
    "naive": datetime(2030, 7, 1, 12, 0, 0, 123456),  # noqa: DTZ001 - as users have them
    "naive in a gap": datetime(2030, 3, 10, 2, 30),  # noqa: DTZ001
    "naive and repeated": datetime(2030, 11, 3, 0, 30, fold=1),  # noqa: DTZ001
    "utc": datetime(2030, 7, 1, 12, tzinfo=timezone.utc),
    "aware": datetime(2030, 7, 1, 12, tzinfo=ZoneInfo("Europe/Paris")),
    "aware and repeated": datetime(2030, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Paris")),
    "odd offset": datetime(2030, 7, 1, 12, tzinfo=timezone(timedelta(hours=5, minutes=45))),
    "naive text": "2030-07-01T12:00:00",
    "aware text": "2030-07-01T12:00:00+05:30",
    "text with Z": "2030-07-01T12:00:00Z",
}


def app_in(zone: str | None, enable_utc: bool = True) -> Celery:
    app = Celery("orders", set_as_current=False, broker="memory://")
    app.conf.update(timezone=zone, enable_utc=enable_utc)

    @app.task(name="shop.add", shared=False)
    def add() -> None:
        """Do nothing."""

    return app


def workers_moment(app: Celery, eta: Any) -> datetime:
    """Return when a worker of the app would run a message with this eta."""
    message = app.amqp.as_task_v2(uuid(), "shop.add", eta=eta)

    delivered = Message(
        b'[[], {}, {"callbacks": null}]',
        headers=message.headers,
        content_type="application/json",
        content_encoding="utf-8",
        accept=["application/json"],
    )
    found: datetime = Request(delivered, app=app, task=app.tasks["shop.add"]).eta
    return found


@pytest.mark.parametrize("eta", ETAS)
@pytest.mark.parametrize("enable_utc", [True, False])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Kolkata", "America/St_Johns"])
def test_an_eta_is_the_instant_that_a_worker_takes_it_for(
    zone: str | None, enable_utc: bool, eta: str
) -> None:
    app = app_in(zone, enable_utc)
    assert moment_of(app, ETAS[eta]) == workers_moment(app, ETAS[eta])


@pytest.mark.parametrize("eta", ["no time", 7, None, object(), ""])
def test_what_is_no_moment_raises_what_celery_expects(eta: Any) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        moment_of(app_in("UTC"), eta)


def test_a_moment_is_rounded_up_to_milliseconds() -> None:
    start = datetime(2030, 1, 1, tzinfo=timezone.utc)
    whole = to_ms_up(start)
    assert [to_ms_up(start + timedelta(microseconds=us)) - whole for us in (0, 1, 999, 1000)] == [
        *(0, 1, 1, 1)
    ]


def test_no_named_timer_has_the_id_of_a_countdown() -> None:
    id = countdown_id("some task")
    assert is_countdown_id(id)
    assert not is_timer_id(id)
    assert not is_countdown_id(timer_id("eta-"))
    assert set(id) <= set("abcdefghijklmnopqrstuvwxyz234567-")


def sent_with(**how: Any) -> dict[str, Any]:
    """Return what Celery's sender gives to a producer."""
    headers = {"lang": "py", "task": "shop.add", "id": "one", "eta": "2030-01-01T00:00:00+00:00"}
    usual = {
        "exchange": "",
        "routing_key": "celery",
        "serializer": "json",
        "compression": None,
        "retry": True,
        "retry_policy": {},
        "delivery_mode": 2,
        "declare": None,
        "headers": headers,
        "timeout": None,
        "confirm_timeout": None,
        "correlation_id": "one",
    }
    return {**usual, **how}


BODY = ([1], {"a": 2}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None})


def test_what_is_kept_is_what_differs_and_it_comes_back_whole() -> None:
    definition = keep("one", "shop.add", BODY, sent_with(priority=3, reply_to="me"))
    restored = decode_definition(definition.blob)
    assert restored.message == definition.message
    assert (restored.id, restored.revision) == (definition.id, definition.revision)
    kept = KeptMessage(restored)
    assert kept.headers == {"lang": "py", "task": "shop.add", "id": "one", "eta": None}
    assert kept.properties == {"correlation_id": "one", "priority": 3, "reply_to": "me"}
    assert (kept.exchange, kept.routing_key, kept.queue) == ("", "celery", "celery")
    assert kept.content == {"args": [1], "kwargs": {"a": 2}}
    assert priority_of(restored.message or {}) == 3
    assert priority_of({}) == priority_of({"p": 7}) == priority_of({"p": {"priority": "x"}}) == 0


def test_flags_and_numbers_are_not_taken_for_each_other() -> None:
    headers = {**sent_with()["headers"], "retries": False, "ignore_result": 0}
    kept = KeptMessage(keep("one", "shop.add", BODY, sent_with(headers=headers)))
    assert kept.headers["retries"] is False
    assert kept.headers["ignore_result"] == 0
    assert kept.headers["ignore_result"] is not False


@pytest.mark.parametrize(
    "message",
    [{"data": "%", "type": "x", "encoding": "y"}, {"data": "eA=="}, {"h": 7}, {"q": 7}, {"p": []}],
    ids=str,
)
def test_a_damaged_message_is_said_to_be(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidTimerError, match="the stored message can not be read"):
        KeptMessage(Definition("x", "t", once(), message=message))


def once() -> Any:
    """Return the schedule of a countdown as it is decoded."""
    return decode_definition('{"name":"x","task":"t","message":{}}').schedule


@pytest.mark.parametrize(
    "blob",
    [
        '{"task":"t","message":{}}',
        '{"name":"x","message":{}}',
        '{"name":"x","task":"t","message":1}',
    ],
)
def test_a_damaged_definition_is_said_to_be(blob: str) -> None:
    with pytest.raises(InvalidTimerError):
        decode_definition(blob)
