"""A master, its replicas and sentinels on loopback, all with a password."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from tests.processes import Process
from tests.servers import free_port
from tests.waiting import wait_until

MASTER, PASSWORD = "timers", "s:e@c/r#et"
#: For clients of the suite: a call that fails has failed once, and does not try for long.
PROMPT: dict[str, Any] = {"socket_timeout": 1, "retry": Retry(NoBackoff(), 0)}

_REPLICAS, _SENTINELS = 2, 3
_DOWN_AFTER_MS, _FAILOVER_TIMEOUT_MS = 1500, 2000


class SentinelSet:
    """A master with two replicas and three sentinels; any of them may be killed and comes back."""

    #: What Celery and the package need to know beside the address.
    options: ClassVar[dict[str, Any]] = {
        "master_name": MASTER,
        "sentinel_kwargs": {"password": PASSWORD},
    }

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.ports = [free_port() for _ in range(1 + _REPLICAS)]
        self.sentinel_ports = [free_port() for _ in range(_SENTINELS)]
        self.nodes: dict[int, Process] = {}
        self.sentinels: list[Process] = []
        self._clients: dict[int, redis.Redis] = {}
        self._sentinel = Sentinel(
            [("127.0.0.1", port) for port in self.sentinel_ports],
            **PROMPT,
            sentinel_kwargs={"password": PASSWORD, **PROMPT},
        )

    @property
    def url(self) -> str:
        """The address, as Celery reads it."""
        secret = quote(PASSWORD, safe="")
        return ";".join(f"sentinel://:{secret}@127.0.0.1:{port}/0" for port in self.sentinel_ports)

    def start(self) -> SentinelSet:
        """Start all of them and return once they know each other."""
        for port in self.ports:
            self.start_node(port, None if port == self.ports[0] else self.ports[0])
        self.sentinels = [self._start_sentinel(port) for port in self.sentinel_ports]
        wait_until(self.is_whole, "the sentinels to know all nodes", 30)
        return self

    def start_node(self, port: int, master: int | None) -> None:
        """Start a node, as a replica of another one unless it is the master."""
        folder = self.folder / f"node-{port}"
        folder.mkdir(exist_ok=True)
        argv = [self.program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        argv += ["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"]
        argv += ["--requirepass", PASSWORD, "--masterauth", PASSWORD]
        if master is not None:
            argv += ["--replicaof", "127.0.0.1", str(master)]
        self.nodes[port] = Process(argv, log=folder / "log").start()

    def _start_sentinel(self, port: int) -> Process:
        folder = self.folder / f"sentinel-{port}"
        folder.mkdir()
        (folder / "sentinel.conf").write_text(
            f'port {port}\nbind 127.0.0.1\ndir {folder}\nrequirepass "{PASSWORD}"\n'
            f"sentinel monitor {MASTER} 127.0.0.1 {self.ports[0]} {_SENTINELS // 2 + 1}\n"
            f'sentinel auth-pass {MASTER} "{PASSWORD}"\nsentinel sentinel-pass "{PASSWORD}"\n'
            f"sentinel down-after-milliseconds {MASTER} {_DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {MASTER} {_FAILOVER_TIMEOUT_MS}\n"
            f"sentinel parallel-syncs {MASTER} {_REPLICAS}\n"
        )
        argv = [self.program, str(folder / "sentinel.conf"), "--sentinel"]
        return Process(argv, log=folder / "log").start()

    def node(self, port: int) -> redis.Redis:
        """Return a client of one node."""
        if port not in self._clients:
            self._clients[port] = redis.Redis(
                port=port, password=PASSWORD, decode_responses=True, **PROMPT
            )
        return self._clients[port]

    @property
    def port(self) -> int:
        """The port of the master, as the sentinels have it now."""
        return int(self._sentinel.discover_master(MASTER)[1])

    def connect(self, **options: Any) -> redis.Redis:
        """Return a client of what is the master now."""
        host, port = self._sentinel.discover_master(MASTER)
        return redis.Redis(host=host, port=port, password=PASSWORD, **{**PROMPT, **options})

    def is_whole(self) -> bool:
        """Say whether every sentinel knows every node, and all replicas follow the master."""
        try:
            for port in self.sentinel_ports:
                with redis.Redis(port=port, password=PASSWORD, **PROMPT) as sentinel:
                    known = sentinel.sentinel_master(MASTER)
                    if (known["num-slaves"], known["num-other-sentinels"]) != (
                        _REPLICAS,
                        _SENTINELS - 1,
                    ):
                        return False
                    if known["is_sdown"] or known["is_odown"]:
                        return False
            master = self.port
            return self.node(master).info("replication")["connected_slaves"] == _REPLICAS and all(
                self.node(port).info("replication").get("master_link_status") == "up"
                for port in self.ports
                if port != master
            )
        except (redis.RedisError, OSError, KeyError):
            return False

    def cut_replication(self) -> None:
        """Let the replicas follow no more, by a password that is not the master's."""
        master = self.port
        for port in self.ports:
            if port != master:
                self.node(port).config_set("masterauth", "not " + PASSWORD)
        self.node(master).execute_command("CLIENT", "KILL", "TYPE", "replica")

    def mend_replication(self) -> None:
        """Let the replicas follow again."""
        for port, process in self.nodes.items():
            if process.is_running():
                self.node(port).config_set("masterauth", PASSWORD)

    def kill_master(self) -> int:
        """Kill the master, and return its port."""
        port = self.port
        self.nodes[port].kill()
        return port

    def freeze(self) -> None:
        """Stop the master in mid-step."""
        self.nodes[self.port].freeze()

    def thaw(self) -> None:
        """Let all nodes go on."""
        for node in self.nodes.values():
            node.thaw()

    def kill(self) -> None:
        """End all of them at once."""
        for process in [*self.nodes.values(), *self.sentinels]:
            process.send_to_all(signal.SIGCONT)
            process.kill()

    def close(self) -> None:
        """End all of them for good."""
        for client in self._clients.values():
            client.close()
        self.kill()
