"""The demo's child processes. None outlives the demo, whatever ends it.

A guard, a bare Python, waits at the other end of a pipe that only the demo holds. It reads the ids
of the children; once the pipe is closed (by the demo's end, also by ``kill -9``) it kills what is
left of them, and removes their logs. Children have sessions of their own, so that Ctrl-C reaches
the demo alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_GUARD = """
import os, shutil, signal, sys
children = set()
for pid in sys.stdin:
    children ^= {int(pid)}  # told a second time: it has ended
for pid in children:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


class Child:
    """One process of the demo, with its log."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self.pid, self.log = name, popen.pid, log
        self._popen = popen

    def is_running(self) -> bool:
        """Say whether it has not ended."""
        return self._popen.poll() is None

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self._popen.kill()
        self._popen.wait()

    def terminate(self) -> None:
        """Ask it to end, as ``kill`` does."""
        self._popen.terminate()

    def wait(self, seconds: float) -> None:
        """Wait for its end; kill it when it takes longer."""
        try:
            self._popen.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            self.kill()

    def log_text(self) -> str:
        """Return all that it has said so far."""
        return self.log.read_text(errors="replace")


class Children:
    """Starts the demo's processes, and ends them all."""

    def __init__(self, folder: Path) -> None:
        """Prepare to run programs in a folder; their logs go to a temporary one."""
        self._folder = folder
        self._logs = Path(tempfile.mkdtemp(prefix="celery-dtimer-demo-"))
        self._running: list[Child] = []
        self._guard = subprocess.Popen(  # noqa: S603 - a list of our own, no shell
            [sys.executable, "-I", "-S", "-c", _GUARD, str(self._logs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def start(self, name: str, arguments: Sequence[str], env: Mapping[str, str]) -> Child:
        """Start ``python -m arguments``."""
        log = self._logs / f"{name.replace(' ', '-')}.log"
        with log.open("wb") as output:
            popen = subprocess.Popen(  # noqa: S603 - a list of our own, no shell
                [sys.executable, "-m", *arguments],
                cwd=self._folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child = Child(name, popen, log)
        self._running.append(child)
        self._tell_guard(child)
        return child

    def kill(self, child: Child) -> None:
        """End one of them as ``kill -9`` does."""
        child.kill()
        self._forget(child)

    def stop(self, children: Sequence[Child], seconds: float = 8.0) -> None:
        """End some of them: they are asked, and killed when they take longer."""
        for child in children:
            child.terminate()
        deadline = time.monotonic() + seconds
        for child in children:
            child.wait(deadline - time.monotonic())
            self._forget(child)

    def stop_all(self) -> None:
        """End all of them, those that were started last first, and remove their logs."""
        while self._running:
            last = self._running[-1].name.split()[0]
            self.stop([child for child in self._running if child.name.split()[0] == last])
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard.wait()

    def check(self) -> None:
        """Say that all run.

        Raises:
            DemoError: One has ended by itself.
        """
        for child in self._running:
            if not child.is_running():
                end = "\n".join(child.log_text().splitlines()[-15:])
                raise DemoError(f"{child.name} has ended by itself; its log ends with:\n{end}")

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        """Return when the condition holds.

        Raises:
            DemoError: It did not come true in time, or a process ended meanwhile.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise DemoError(f"waited {seconds:g} s in vain for {what}")
            time.sleep(0.05)

    def _tell_guard(self, child: Child) -> None:
        if self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(f"{child.pid}\n".encode())
                self._guard.stdin.flush()

    def _forget(self, child: Child) -> None:
        if child in self._running:
            self._running.remove(child)
            self._tell_guard(child)


def raise_on_signals() -> None:
    """Let Ctrl-C, ``kill`` and a closed terminal end the program by `SystemExit`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)


def _leave(number: int, _: object) -> None:
    for later in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(later, signal.SIG_IGN)  # the end is on its way: the children are being ended
    raise SystemExit(128 + number)
