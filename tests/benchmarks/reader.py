"""A process that takes the messages off the broker and counts them.

``python -m tests.benchmarks.reader URL QUEUE MODE FOLDER`` appends a line ``time count`` to
``FOLDER/counts`` whenever the count has grown, the first one at once. It parses nothing.

Its modes differ in what it costs. ``drop`` lets Redis count the list and drop it, which takes
almost nothing from what is measured; ``pop`` fetches the messages, as workers do; ``keep`` fetches
them and on SIGTERM writes ``[(time, payload), ...]`` to ``FOLDER/arrivals``. From RabbitMQ messages
are always dropped: it counts what it purges from a queue.
"""

from __future__ import annotations

import pickle
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import amqp
import redis

LOOK_SECONDS = 0.02
BATCH = 1_000

Take = Callable[[], int]
Arrivals = list[tuple[float, bytes]]


def dropping(client: redis.Redis, key: str) -> Take:
    """Return a function that lets the server count and drop what is in the list."""

    def take() -> int:
        time.sleep(LOOK_SECONDS)
        with client.pipeline(transaction=True) as pipeline:
            pipeline.llen(key)
            pipeline.unlink(key)
            return int(pipeline.execute()[0])

    return take


def popping(client: redis.Redis, key: str, arrivals: Arrivals | None) -> Take:
    """Return a function that fetches what is there, or the next message of the coming moment."""

    def take() -> int:
        batch: Any = client.rpop(key, BATCH)
        if not batch:
            found: Any = client.brpop([key], 0.2)
            batch = found[1:] if found else []
        if arrivals is not None:
            now = time.time()
            arrivals.extend((now, payload) for payload in batch)
        return len(batch)

    return take


def purging(url: str, queue: str) -> Take:
    """Return a function that empties a queue of RabbitMQ and says how much there was."""
    connection = amqp.Connection(url.removeprefix("amqp://").rpartition("@")[2].rstrip("/"))
    connection.connect()
    channel = connection.channel()
    channel.queue_declare(queue, durable=True, auto_delete=False)

    def take() -> int:
        time.sleep(LOOK_SECONDS)
        return channel.queue_purge(queue) or 0

    return take


def taking(url: str, queue: str, mode: str, arrivals: Arrivals) -> Take:
    """Return how messages are taken off the broker."""
    if url.startswith("amqp"):
        return purging(url, queue)
    client = redis.Redis.from_url(url, socket_timeout=None)
    if mode == "drop":
        return dropping(client, queue)
    return popping(client, queue, arrivals if mode == "keep" else None)


def main(url: str, queue: str, mode: str, folder: str) -> None:
    """Count until SIGTERM; then write what was kept."""
    arrivals: Arrivals = []
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopping.append(number))
    take, count, written = taking(url, queue, mode, arrivals), 0, 0.0
    with Path(folder, "counts").open("w", buffering=1) as counts:
        counts.write(f"{time.time():.6f} 0\n")
        while not stopping:
            found = take()
            count += found
            if found and time.time() - written >= LOOK_SECONDS:
                written = time.time()
                counts.write(f"{written:.6f} {count}\n")
    if mode == "keep":
        Path(folder, "arrivals").write_bytes(pickle.dumps(arrivals))


if __name__ == "__main__":
    main(*sys.argv[1:5])
