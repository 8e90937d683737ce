"""What the machine can do at most: a ready message, its ids put in, pushed by a minimal script.

Run as a program it does so until SIGTERM: one call for a hundred runs, each of which is pushed,
rescheduled and counted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from tests.benchmarks.measure import BROKER_LIST, FIRST_SECONDS, Counter, wait_until
from tests.benchmarks.peer import Lags, Peer
from tests.benchmarks.processes import Server, python_module
from tests.benchmarks.workload import Workload

BATCH = 100
SCRIPT = """
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, #ARGV - 2)
for i, timer in ipairs(due) do
  redis.call('LPUSH', KEYS[2], ARGV[i + 2])
  redis.call('ZADD', KEYS[1], ARGV[2], timer)
  redis.call('HINCRBY', KEYS[3], timer, 1)
end
return #due
"""


@dataclass(frozen=True)
class Limit(Peer):
    """The least that any scheduler does for a run, on the message of a real one.

    Attributes:
        subject: The scheduler whose message it pushes.
    """

    subject: Peer

    def create(self, server: Server, workload: Workload, how: str = "", **settings: Any) -> float:
        """Store the timers, and the message that a real run of one of them sends."""
        one, client = Workload(1, every=0.1), server.client()
        self.subject.create(server, one)
        with self.subject.beat(server, one):
            wait_until(lambda: client.llen(BROKER_LIST) > 0, "a real message", FIRST_SECONDS)
        message: Any = client.lrange(BROKER_LIST, -1, -1)[0]
        _message_file(server.directory).write_bytes(message)
        client.flushdb()
        client.zadd("due", {entry.name: 0 for entry in workload.entries()})
        return 0.0

    def command(self, server: Server) -> list[str]:
        """Return the command line of the process that pushes."""
        return python_module("tests.benchmarks.limit", str(server.directory))

    def lags(self, counter: Counter, workload: Workload) -> Lags:
        """Return nothing: it waits for no time."""
        return iter(())


def _message_file(folder: Path) -> Path:
    return folder / "message"


def builder(text: str) -> Callable[[], str]:
    """Return a function that makes the text of a message with new ids in it."""
    message = json.loads(text)
    text = text.replace("{", "{{").replace("}", "}}")
    text = text.replace(message["headers"]["id"], "{0}")
    render = text.replace(message["properties"]["delivery_tag"], "{1}").format
    return lambda: render(str(uuid.uuid4()), str(uuid.uuid4()))


def main(folder: str) -> None:
    """Push until SIGTERM."""
    client = redis.Redis.from_url(os.environ["BENCH_REDIS_URL"], socket_timeout=None)
    build = builder(_message_file(Path(folder)).read_text())
    script = client.register_script(SCRIPT)
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopping.append(number))
    while not stopping:
        now = int(1000 * time.time())
        messages = [build() for _ in range(BATCH)]
        script(keys=["due", BROKER_LIST, "runs"], args=[now, now, *messages])


if __name__ == "__main__":
    main(sys.argv[1])
