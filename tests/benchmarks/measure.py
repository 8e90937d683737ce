"""What is read off processes and Redis, and how it is summed up."""

from __future__ import annotations

import pickle
import re
import select
import socket
import subprocess
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.benchmarks.processes import Server, python_module, start, stop

BROKER_LIST = "celery"
FIRST_SECONDS = 120.0
POLL_SECONDS = 0.01

Arrival = tuple[float, bytes]
Figures = dict[str, float]


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


def resident_mib(pid: int) -> float:
    """Return the memory that a process has in RAM, in MiB."""
    return float(psutil.Process(pid).memory_info().rss) / 2**20


def used_memory(server: Server) -> int:
    """Return the bytes that the server's data takes."""
    return int(server.client().info("memory")["used_memory"])


class Counter:
    """The file in which whoever takes the messages writes how many there were, and when.

    Rates come from its own moments, so that it does not matter when the file is read.

    Attributes:
        pid: The process that does nothing but count; None where the scheduler counts itself.
    """

    def __init__(self, folder: Path, pid: int | None = None) -> None:
        self.pid = pid
        self._folder = folder

    def samples(self) -> list[tuple[float, int]]:
        """Return all moments and counts so far."""
        path = self._folder / "counts"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [
            (float(moment), int(count)) for moment, _, count in (x.partition(" ") for x in lines)
        ]

    def sample(self) -> tuple[float, int]:
        """Return the last moment and count; nothing has come while there is none."""
        return (self.samples() or [(time.time(), 0)])[-1]

    def wait_first(self, beat: subprocess.Popen[bytes]) -> float:
        """Wait for the first message of a beat, and return when it came."""

        def is_over() -> bool:
            return self.sample()[1] > 0 or beat.poll() is not None

        wait_until(is_over, "a first message", FIRST_SECONDS)
        if beat.poll() is not None:
            raise RuntimeError(f"the beat ended with {beat.returncode}")
        return next(moment for moment, count in self.samples() if count)

    def rate_during(self, seconds: float) -> float:
        """Return the messages a second of the coming seconds."""
        before = self.sample()
        time.sleep(seconds)
        return rate(before, self.sample())

    def arrivals(self) -> list[Arrival]:
        """Return the messages that were kept, once the one who kept them has ended."""
        return list(pickle.loads((self._folder / "arrivals").read_bytes()))  # noqa: S301 - our own

    def lines(self) -> list[str]:
        """Return what was kept by one who writes text."""
        return (self._folder / "arrivals").read_text().splitlines()


def rate(before: tuple[float, int], after: tuple[float, int]) -> float:
    """Return the messages a second between two samples."""
    return (after[1] - before[1]) / max(after[0] - before[0], 1e-9)


@contextmanager
def reading(server: Server, mode: str, broker_url: str | None = None) -> Iterator[Counter]:
    """Take the messages off the broker's queue for the duration of a block; see `reader`."""
    for name in ("counts", "arrivals"):
        (server.directory / name).unlink(missing_ok=True)
    process = start(
        python_module(
            "tests.benchmarks.reader",
            *(broker_url or server.url, BROKER_LIST, mode, str(server.directory)),
        ),
        log=server.directory / "reader.log",
    )
    counter = Counter(server.directory, process.pid)
    try:
        wait_until(lambda: bool(counter.samples()), "the reader", FIRST_SECONDS)
        yield counter
    finally:
        stop(process)


STEADY_SECONDS = 1.0
STEADY_RATES = 3
STEADY_SPREAD = 0.1
CYCLES = 1.5


def warm_up(counter: Counter, beat: subprocess.Popen[bytes], timers: int, limit: float) -> float:
    """Wait until every timer has run and the rate is steady; return the seconds that this took.

    A scheduler that does not get there within the limit is measured as it is then.
    """
    counter.wait_first(beat)
    started, rates = time.monotonic(), [0.0]
    while time.monotonic() - started < limit:
        rates.append(counter.rate_during(STEADY_SECONDS))
        last = rates[-STEADY_RATES:]
        is_steady = max(last) - min(last) <= STEADY_SPREAD * max(last)
        if is_steady and counter.sample()[1] >= CYCLES * timers:
            break
    return time.monotonic() - started


def saturated(
    beats: Sequence[subprocess.Popen[bytes]], server: Server, counter: Counter, seconds: float
) -> Figures:
    """Return the rate of the coming seconds and the CPU that each part used meanwhile."""
    before, started = _cpu_of_all(beats, server, counter), time.monotonic()
    first = counter.sample()
    time.sleep(seconds)
    last = counter.sample()
    elapsed = time.monotonic() - started
    used = {name: cpu - before[name] for name, cpu in _cpu_of_all(beats, server, counter).items()}
    shares = {f"{name}_cpu_pct": 100 * cpu / elapsed for name, cpu in used.items()}
    runs_per_s = rate(first, last)
    return {
        "runs_per_s": runs_per_s,
        "cpu_us_per_run": 1e6 * used["beat"] / elapsed / max(runs_per_s, 1e-9),
        "rss_mib": max(resident_mib(beat.pid) for beat in beats),
        **shares,
    }


def _cpu_of_all(
    beats: Sequence[subprocess.Popen[bytes]], server: Server, counter: Counter
) -> dict[str, float]:
    found = server.client().info("cpu")
    used = {
        "beat": sum(cpu_seconds(beat.pid) for beat in beats),
        "redis": float(found["used_cpu_user"]) + float(found["used_cpu_sys"]),
    }
    return used if counter.pid is None else {**used, "reader": cpu_seconds(counter.pid)}


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Wait until a condition holds; that it does not is an error."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {seconds:g} s for {what}, in vain")
        time.sleep(POLL_SECONDS)


def sleep_until(moment: float) -> None:
    """Wait for a moment of the clock on the wall."""
    time.sleep(max(0.0, moment - time.time()))


_MONITORED = re.compile(rb'^\+[\d.]+ \[\d+ (\S+)\] "([^"]*)"', re.MULTILINE)


def requests_during(server: Server, seconds: float) -> Tally[str]:
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


def count_requests(monitored: bytes) -> Tally[str]:
    """Return how often each command stands in MONITOR's output, leaving out those of scripts."""
    return Tally(
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
