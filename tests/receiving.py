"""Receives an app's events, as a monitor does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery

from tests.waiting import wait_until

_KNOCK = "test-knock"


@contextmanager
def receiving(app: Celery) -> Iterator[list[dict[str, Any]]]:
    """Gather the events that an app's broker carries meanwhile: none is missed."""
    found: list[dict[str, Any]] = []
    heard, ended = threading.Event(), threading.Event()

    def take(event: dict[str, Any]) -> None:
        heard.set() if event["type"] == _KNOCK else found.append(event)

    def receive() -> None:
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": take})
            with receiver.consumer_context() as (own, *_):
                while not ended.is_set():
                    try:
                        own.drain_events(timeout=0.2)
                    except TimeoutError:
                        continue

    def hears() -> bool:  # Redis subscribes a consumer with its first look alone
        dispatcher.send(_KNOCK)
        return heard.is_set()

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        with app.events.default_dispatcher() as dispatcher:
            wait_until(hears, "the receiver to hear", 10)
        yield found
    finally:
        ended.set()
        thread.join()
