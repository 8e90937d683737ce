"""A RabbitMQ node of a measurement's own: its ports, name and folders are free ones."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kombu import Connection

from tests.benchmarks.processes import free_port, start, stop

DEBIAN = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # the one on its PATH wants its own user
START_SECONDS = 90.0
POLL_SECONDS = 0.2


def unavailable() -> str | None:
    """Return why no node can run here; None when one can."""
    return None if _server() and _port_mapper() else "rabbitmq-server not found"


def _server() -> str | None:
    return str(DEBIAN) if DEBIAN.exists() else shutil.which("rabbitmq-server")


def _port_mapper() -> str | None:
    found = sorted(Path("/usr/lib/erlang").glob("erts-*/bin/epmd"))
    return shutil.which("epmd") or (str(found[-1]) if found else None)


@contextmanager
def running_rabbitmq(folder: Path) -> Iterator[str]:
    """Run a node for the duration of a block; yields its URL."""
    port, mapper_port = free_port(), free_port()
    folder.mkdir()
    environment = _environment(folder, port, mapper_port)
    url = f"amqp://guest:guest@127.0.0.1:{port}//"
    with ExitStack() as stack:
        # started here, or the node would start one that outlives it
        command = [_port_mapper() or "", "-port", str(mapper_port), "-address", "127.0.0.1"]
        stack.callback(stop, start(command, log=folder / "epmd.log"))
        log = folder.parent / "rabbitmq.log"
        node = start([_server() or ""], log=log, environment=environment)
        stack.callback(stop, node)
        _wait_until_answering(url, node)
        yield url


def _environment(folder: Path, port: int, mapper_port: int) -> dict[str, str]:
    (folder / "plugins").write_text("[].\n")
    (folder / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = 127.0.0.1:{port}\nlog.console = true\nlog.file = false\n"
        "disk_free_limit.absolute = 50MB\n"
    )
    return {
        "HOME": str(folder),
        "RABBITMQ_NODENAME": f"n{port}@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "ERL_EPMD_PORT": str(mapper_port),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "generated"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none "
        "-kernel inet_dist_use_interface {127,0,0,1}",
    }


def _wait_until_answering(url: str, node: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _answers(url):
        if node.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"RabbitMQ does not answer on {url}")
        time.sleep(POLL_SECONDS)


def _answers(url: str) -> bool:
    try:
        with Connection(url, connect_timeout=1) as connection:
            connection.ensure_connection(max_retries=0, interval_start=0)
    except Exception:  # whatever a node that is just starting answers with
        return False
    return True
