"""Local processes in the place of a Docker engine, for pytest-celery.

pytest-celery reaches Docker through one fixture, ``docker_client``. A :class:`ProcessEngine` has
the part of ``docker.DockerClient`` that is used through it: an image is a name, a volume a folder,
a container a process with its log, a network nothing at all. So the same tests run on containers
where an engine answers, and on processes elsewhere.

Not promised: isolation. A process sees this machine, and its "network address" is the loopback.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors

from tests.processes import Process
from tests.servers import free_port
from tests.waiting import wait_until

_ADDRESS = "127.0.0.1"


class ProcessContainer:
    """What ``docker.models.containers.Container`` is to its user, on one local process."""

    def __init__(
        self,
        engine: ProcessEngine,
        image: object,
        command: str | Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        ports: Mapping[str, Any] | None = None,
        volumes: Mapping[str, Mapping[str, str]] | None = None,
        network: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        **_: object,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.name = name or f"process-{self.id[:12]}"
        self.image, self.labels = str(image), dict(labels or {})
        self._engine = engine
        self._folder = engine.new_folder(self.name)
        self._command = [command] if isinstance(command, str) else list(command)
        self._environment = dict(environment or {})
        self._network = network or "loopback"
        self._ports = {spec: int(port or free_port()) for spec, port in (ports or {}).items()}
        self._mounts = {
            mount["bind"]: engine.volumes.get(volume).path
            for volume, mount in (volumes or {}).items()
        }
        self._process: Process | None = None
        self.reload()

    # Life

    def start(self) -> None:
        """Start the process, with the folders of its volumes in place of their mount points."""
        self._process = Process(
            self._local(self._program()),
            log=self._log,
            env=self._local_environment(),
            cwd=self._cwd,
        )
        self._process.start()
        self.reload()

    def kill(self, signal: str | int | None = None) -> None:
        """Send a signal; SIGKILL ends all that the process started, as a container's end does."""
        process = self._running()
        signum = _signal_number(signal)
        if signum == _signal_number("SIGKILL"):
            process.kill()
            return
        process.send(signum)
        with contextlib.suppress(AssertionError):  # it may well ignore the signal
            process.wait(5 if signum == _signal_number("SIGTERM") else 0.05)

    def pause(self) -> None:
        """Freeze the process."""
        self._running().freeze()

    def unpause(self) -> None:
        """Let a frozen process go on."""
        self._running().thaw()

    def stop(self, timeout: float = 10) -> None:
        """Ask the process to end, and end it when it does not."""
        if self._process is not None and self._process.is_running():
            with contextlib.suppress(AssertionError):
                self._process.stop(timeout=timeout)
            self._process.kill()

    def restart(self, timeout: float = 10) -> None:
        """Stop the process and start it again, on the same ports and folders."""
        self.stop(timeout)
        self.start()

    def wait(self, timeout: float = 10) -> dict[str, int | None]:
        """Wait for the end, and return the exit status as Docker does."""
        if self._process is not None:
            self._process.wait(timeout)
        return {"StatusCode": self._process.exit_code if self._process else 0}

    def remove(self, **_: object) -> None:
        """End the process and delete its folder."""
        if self._process is not None:
            self._process.thaw()
            self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _running(self) -> Process:
        if self._process is None or not self._process.is_running():
            raise docker.errors.APIError(f"container {self.name} is not running")
        return self._process

    # What the process gets

    @property
    def _log(self) -> Path:
        return self._folder / "container.log"

    @property
    def _cwd(self) -> Path:
        return next(iter(self._mounts.values()), self._folder)

    def _program(self) -> list[str]:
        name, *arguments = self._command or [self.image]
        if name == "redis-server":
            port = str(self._ports["6379/tcp"])
            options = ["--port", port, "--bind", _ADDRESS, "--dir", str(self._folder)]
            return [self._engine.redis_server, *arguments, *options]
        if name == "celery":
            return [sys.executable, "-m", "celery", *arguments]
        raise docker.errors.ImageNotFound(f"no process stands for {self._command or self.image}")

    def _local(self, argv: Sequence[str]) -> list[str]:
        return [self._local_argument(argument.replace("%h", self.id[:12])) for argument in argv]

    def _local_argument(self, argument: str) -> str:
        flag, equals, value = argument.partition("=")
        return flag + equals + self._local_path(value) if equals else self._local_path(argument)

    def _local_path(self, path: str) -> str:
        for bind, folder in self._mounts.items():
            if path == bind or path.startswith(f"{bind}/"):
                return str(folder) + path[len(bind) :]
        return path

    def _local_environment(self) -> dict[str, str]:
        folders = self._environment.get("PYTHONPATH", "").split(os.pathsep)
        paths = [self._local_path(folder) for folder in folders if folder]
        paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        return {**self._environment, "PYTHONPATH": os.pathsep.join(paths)}

    # What the test sees

    def reload(self) -> None:
        """Bring ``status`` and ``attrs`` up to date."""
        process = self._process
        running = process is not None and process.is_running()
        self.status = "running" if running else "exited" if process else "created"
        bindings = {
            spec: [{"HostIp": _ADDRESS, "HostPort": str(port)}]
            for spec, port in self._ports.items()
        }
        port = next(iter(self._ports.values()), None)
        self.attrs: dict[str, Any] = {
            "State": {
                "Pid": process.pid if process else 0,
                "ExitCode": process.exit_code if process else None,
            },
            "Config": {
                # The name by which other containers reach this one; here the port rides along.
                "Hostname": f"{_ADDRESS}:{port}" if port else self.id[:12],
                "Labels": self.labels,
                "Env": [f"{key}={value}" for key, value in self._environment.items()],
                "Cmd": self._command,
            },
            "HostConfig": {"PortBindings": bindings},
            "NetworkSettings": {
                "Networks": {self._network: {"IPAddress": _ADDRESS}},
                "Ports": bindings,
            },
            "Mounts": [],
        }

    def logs(self, **_: object) -> bytes:
        """Return all that the process printed."""
        return self._log.read_bytes() if self._log.exists() else b""

    def exec_run(self, command: str | Sequence[str], **_: object) -> tuple[int, bytes]:
        """Run another program with the same folders and environment."""
        if isinstance(command, str) and command.startswith("cat /proc/net/"):
            return 0, "\n".join(self.listening()).encode()
        argv = self._local(shlex.split(command) if isinstance(command, str) else command)
        argv[0] = sys.executable if argv[0] == "python" else argv[0]
        done = subprocess.run(
            argv,
            cwd=self._cwd,
            env={**os.environ, **self._local_environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return done.returncode, done.stdout

    def listening(self) -> list[str]:
        """Return the container's view of its open ports, as lines of ``/proc/net/tcp``."""
        lines = []
        for spec, port in self._ports.items():
            inner = int(spec.partition("/")[0])
            with contextlib.suppress(OSError), socket.create_connection((_ADDRESS, port), 0.2):
                lines.append(f"0: 0100007F:{inner:04X} 00000000:0000 0A")
        return lines

    def is_listening(self) -> bool:
        """Say whether all its ports are open, or the process has ended."""
        self.reload()
        return self.status == "exited" or len(self.listening()) == len(self._ports)

    def put_archive(self, path: str, data: Any) -> bool:
        """Unpack a tar file into one of the container's folders."""
        target = Path(self._local_path(path))
        target.mkdir(parents=True, exist_ok=True)
        raw = data.read() if hasattr(data, "read") else data
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            archive.extractall(target, filter="data")
        return True

    def get_archive(self, path: str) -> tuple[Iterator[bytes], dict[str, Any]]:
        """Return one of the container's files or folders as a tar file."""
        buffer, source = io.BytesIO(), Path(self._local_path(path))
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(source, arcname=source.name)
        return iter([buffer.getvalue()]), {}


def _signal_number(name: str | int | None) -> int:
    if isinstance(name, int):
        return name
    text = name or "SIGKILL"
    return signal.Signals[text if text.startswith("SIG") else f"SIG{text}"].value


class ProcessEngine:
    """What ``docker.DockerClient`` is to its user, on local processes."""

    def __init__(self, redis_server: str, folder: Path) -> None:
        self.redis_server, self.folder = redis_server, folder
        self._containers: dict[str, ProcessContainer] = {}
        self._volumes: dict[str, SimpleNamespace] = {}
        self.containers = SimpleNamespace(
            run=self._run,
            create=self._create,
            get=self._get,
            list=lambda **_: list(self._containers.values()),
        )
        self.images = SimpleNamespace(build=self._build, pull=_image, get=_image)
        self.networks = SimpleNamespace(create=_network)
        self.volumes = SimpleNamespace(create=self._create_volume, get=self._volumes.__getitem__)

    def new_folder(self, name: str) -> Path:
        """Return a new empty folder."""
        folder = self.folder / re.sub(r"\W", "_", name)
        folder.mkdir()
        return folder

    def close(self) -> None:
        """End all processes and delete all folders."""
        for container in self._containers.values():
            container.remove()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _create(self, image: object, command: Any = (), **options: Any) -> ProcessContainer:
        options.pop("detach", None)
        container = ProcessContainer(self, image, command or (), **options)
        self._containers[container.name] = container
        return container

    def _run(self, image: object, command: Any = (), **options: Any) -> ProcessContainer:
        container = self._create(image, command, **options)
        container.start()
        # The caller looks once a second; this look spares it the first one.
        wait_until(container.is_listening, f"{container.name} to listen")
        return container

    def _get(self, name: str) -> ProcessContainer:
        if name not in self._containers:
            raise docker.errors.NotFound(name)
        return self._containers[name]

    def _build(
        self, path: str = "", tag: str = "", **_: object
    ) -> tuple[SimpleNamespace, list[str]]:
        return _image(tag or path), []

    def _create_volume(self, name: str, **_: object) -> SimpleNamespace:
        path = self.new_folder(name)
        volume = SimpleNamespace(
            name=name, id=name, path=path, remove=lambda *_: shutil.rmtree(path, ignore_errors=True)
        )
        self._volumes[name] = volume
        return volume


def _image(name: object, **_: object) -> SimpleNamespace:
    return SimpleNamespace(id=name if isinstance(name, str) else "image", tags=[name])


def _network(name: str, **_: object) -> SimpleNamespace:
    return SimpleNamespace(name=name, id=name, remove=lambda: None)
