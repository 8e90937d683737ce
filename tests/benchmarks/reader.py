"""A process that drains the broker's list and notes when each message arrived.

``python -m tests.benchmarks.reader URL LIST FILE`` prints ``ready``, then ``first`` with the first
message. It parses nothing while it runs; on SIGTERM it writes ``[(time, payload), ...]`` to FILE.
"""

from __future__ import annotations

import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

import redis

BATCH = 500


def pop(client: redis.Redis, key: str) -> list[Any]:
    """Return the messages that are there, or the next one of the coming moment."""
    batch = client.rpop(key, BATCH)
    if isinstance(batch, list):
        return batch
    found = client.brpop([key], 0.2)
    return [found[1]] if found else []


def main(url: str, key: str, path: str) -> None:
    """Read until SIGTERM, then write what arrived."""
    client = redis.Redis.from_url(url, socket_timeout=None)
    arrivals: list[tuple[float, bytes]] = []
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopping.append(number))
    print("ready", flush=True)
    while not stopping:
        batch = pop(client, key)
        now = time.time()
        if batch and not arrivals:
            print("first", flush=True)
        arrivals.extend((now, payload) for payload in batch)
    Path(path).write_bytes(pickle.dumps(arrivals))


if __name__ == "__main__":
    main(*sys.argv[1:4])
