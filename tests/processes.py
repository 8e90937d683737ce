"""Child processes of the tests: each dies with the run, whatever ends the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

# A program in front of the program, because a preexec_fn is unsafe once there are threads. It asks
# the kernel for the signal, replaces itself, and so keeps the pid. Without Linux it only replaces.
_LAUNCHER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the test run is over")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Running(Protocol):
    """What is needed of a started program: the part of ``subprocess.Popen`` that is used here."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once there is one, or raise ``subprocess.TimeoutExpired``."""


class Process:
    """A program with its own session and log file, that can be stopped, frozen and killed."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.argv, self.log, self.env, self.cwd = list(argv), log, env, cwd
        self._running: Running | None = None

    @property
    def pid(self) -> int:
        """The id of the process, also after its end."""
        assert self._running is not None, "the process was never started"
        return self._running.pid

    def start(self) -> Process:
        """Start the program, in a session of its own."""
        self._running = self._spawn()
        return self

    def _spawn(self) -> Running:
        launcher = [sys.executable, "-ISc", _LAUNCHER, str(os.getpid())]
        environment = None if self.env is None else {**os.environ, **self.env}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*launcher, *self.argv],
                cwd=self.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_running(self) -> bool:
        """Say whether the program was started and has not ended."""
        return self._running is not None and self._running.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit status, or None while it runs."""
        return None if self._running is None else self._running.poll()

    def send(self, signum: int) -> None:
        """Send a signal to the program alone; one that has just ended does not mind."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def send_to_all(self, signum: int) -> None:
        """Send a signal to the program and to all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def freeze(self) -> None:
        """Stop the program and its children in mid-step."""
        self.send_to_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen program go on."""
        self.send_to_all(signal.SIGCONT)

    def kill(self) -> None:
        """End the program and its children at once, without a chance to say good-bye."""
        if self._running is not None:
            self.send_to_all(signal.SIGKILL)
            self._running.wait()

    def stop(self, signum: int = signal.SIGTERM, timeout: float = 10.0) -> float:
        """Ask the program to end, and return how many seconds it took."""
        asked = time.monotonic()
        self.send(signum)
        return self.wait(timeout) - asked

    def wait(self, timeout: float = 10.0) -> float:
        """Wait for the program's end, and return the moment (monotonic)."""
        assert self._running is not None, "the process was never started"
        try:
            self._running.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.argv} still runs after {timeout:g} s") from None
        return time.monotonic()

    def log_text(self) -> str:
        """Return all that the program has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""
