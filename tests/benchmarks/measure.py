"""What is read off processes and Redis, and how it is summed up."""

from __future__ import annotations

import pickle
import re
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import psutil  # type: ignore[import-untyped]

from tests.benchmarks.processes import Server, python_module, start, stop

BROKER_LIST = "celery"
FIRST_SECONDS = 120.0

Arrival = tuple[float, bytes]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of the values do not exceed; NaN of none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used, in all of its threads."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def used_memory(server: Server) -> int:
    """Return the bytes that the server's data takes."""
    return int(server.client().info("memory")["used_memory"])


class Reader:
    """The process that pops the messages, for the duration of a ``with`` block.

    Read ``arrivals`` after the block.
    """

    def __init__(self, server: Server) -> None:
        self.arrivals: list[Arrival] = []
        self._path = server.directory / "arrivals"
        self._process = start(
            python_module("tests.benchmarks.reader", server.url, BROKER_LIST, str(self._path)),
            log=server.directory / "reader.log",
            stdout=-1,
        )

    def __enter__(self) -> Reader:  # noqa: PYI034 - Self is of Python 3.11
        self._expect(b"ready")
        return self

    def __exit__(self, *_: object) -> None:
        stop(self._process)
        if self._path.exists():
            self.arrivals = pickle.loads(self._path.read_bytes())  # noqa: S301 - our own child's

    def wait_first(self) -> None:
        """Wait for the first message."""
        self._expect(b"first")

    def _expect(self, word: bytes) -> None:
        output = self._process.stdout
        assert output is not None
        readable, _, _ = select.select([output], [], [], FIRST_SECONDS)
        line = output.readline().strip() if readable else b"nothing"
        if line != word:
            raise RuntimeError(f"the reader said {line!r} instead of {word!r}")


_MONITORED = re.compile(rb'^\+[\d.]+ \[\d+ (\S+)\] "([^"]*)"', re.MULTILINE)


def requests_during(server: Server, seconds: float) -> Counter[str]:
    """Return how often each command was requested in the next seconds.

    ``INFO`` counts the commands inside scripts like those of clients; MONITOR tells them apart.
    """
    received = bytearray()
    deadline = time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"MONITOR\r\n")
        while (left := deadline - time.monotonic()) > 0:
            if select.select([connection], [], [], left)[0]:
                received += connection.recv(1 << 16)
    return count_requests(bytes(received))


def count_requests(monitored: bytes) -> Counter[str]:
    """Return how often each command stands in MONITOR's output, leaving out those of scripts."""
    return Counter(
        command.decode().lower()
        for source, command in _MONITORED.findall(monitored)
        if source != b"lua"
    )


SLOWLOG_US = 20  # scripts faster than this are left out; each logged command costs the server time
SLOWLOG_DRAIN_SECONDS = 0.25
SLOWLOG_LENGTH = 100_000


class ScriptTimes:
    """The durations of all script calls during a ``with`` block, in milliseconds, by script."""

    def __init__(self, server: Server, names: Mapping[str, str]) -> None:
        self.by_script: dict[str, list[float]] = {}
        self._names = names
        self._client = server.client()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ScriptTimes:  # noqa: PYI034 - likewise
        self._client.config_set("slowlog-max-len", SLOWLOG_LENGTH)
        self._client.config_set("slowlog-log-slower-than", SLOWLOG_US)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._client.config_set("slowlog-log-slower-than", -1)
        self._drain()

    def _run(self) -> None:
        while not self._ended.wait(SLOWLOG_DRAIN_SECONDS):
            self._drain()

    def _drain(self) -> None:
        with self._client.pipeline(transaction=True) as pipeline:
            pipeline.slowlog_get(SLOWLOG_LENGTH)
            pipeline.slowlog_reset()
            entries, _ = pipeline.execute()
        for entry in entries:
            script = script_of(entry["command"], self._names)
            if script is not None:
                self.by_script.setdefault(script, []).append(entry["duration"] / 1000)


def script_of(command: bytes, names: Mapping[str, str]) -> str | None:
    """Return the name of the script that a slow-log entry called; None for another command."""
    words = command.split(b" ", 2)
    called = words[0].upper()
    if not called.startswith((b"EVALSHA", b"FCALL")):
        return None
    identity = words[1].decode()
    return names.get(identity, identity)
