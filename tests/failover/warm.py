"""Beats and workers that start in a fraction of the time.

Importing Celery takes a second of CPU, three times a test. Here a process that has done so forks
itself into ``celery beat`` or ``celery worker``: the command is the same from its arguments on, the
process has its own session, environment and log, and ends as Python ends.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from celery_dtimer import faults
from tests.processes import Process, Running
from tests.waiting import wait_until

_PRELOADED = [
    "celery.bin.celery",
    "celery.apps.beat",
    "celery.apps.worker",
    "celery.app.amqp",
    "celery.app.events",
    "celery.fixups.django",
    "celery_dtimer",
    "kombu.transport.redis",
    "tests.failover.warm",
    "tests.integration.doomed",
]
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(_PRELOADED)


class CeleryProcess(Process):
    """A ``celery`` command, given by its arguments; otherwise like any other process."""

    def _spawn(self) -> Running:
        environment = {**os.environ, **(self.env or {})}
        process = _forks.Process(
            target=_run_celery, args=(self.argv, environment, self.cwd or Path.cwd(), self.log)
        )
        process.start()
        running = _Forked(process)
        wait_until(
            lambda: running.poll() is not None or os.getpgid(running.pid) == running.pid,
            "the forked process to have its own session",
        )
        return running


def run_warm(function: Callable[..., None], *args: Any) -> int | None:
    """Run a function in a process of its own; return the exit status, negative for a signal."""
    process = _forks.Process(target=function, args=args)
    process.start()
    process.join()
    exit_code = process.exitcode
    process.close()
    return exit_code


class _Forked:
    """Gives a ``multiprocessing`` process the manners of a ``subprocess`` one."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return self._process.exitcode


def _run_celery(argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> None:
    """Become a celery command, in the forked process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the forking process
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if env.get("DTIMER_CRASH_AT"):  # it is read at import, which was before
        faults.arm_from_environment(env["DTIMER_CRASH_AT"])
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["celery", *argv]
    from celery.__main__ import main

    try:
        main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
