"""Redis as people run it, on the loopback: sentinels over a master, a cluster, TLS."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
from redis.crc import key_slot

from tests.processes import Process
from tests.servers import RedisServer, free_port
from tests.waiting import wait_until

MASTER = "timers"
_DOWN_AFTER_MS, _FAILOVER_MS, _NODE_TIMEOUT_MS = 500, 2000, 1000
_SLOTS = 16384
_BUS = 10_000
_FIRST_EPHEMERAL = 32_768
_QUICK_SYNC = ("--repl-diskless-sync-delay", "0")


def new_server(
    program: str, folder: Path, *options: str, has_bus: bool = False, **client: Any
) -> RedisServer:
    """Return a server that is not started; ``client`` is how a test talks to it.

    A node of a cluster has a bus, which listens 10,000 ports above it.
    """
    folder.mkdir(parents=True)
    server = RedisServer(program, folder, *options)
    while has_bus and not _is_free(server.port + _BUS):
        server = RedisServer(program, folder, *options)
    if client:
        server.client = redis.Redis(
            port=server.port, decode_responses=True, socket_timeout=5, **client
        )
    return server


def _is_free(port: int) -> bool:
    """Say whether nothing listens on a port, nor will a connection that goes out have it."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return port < _FIRST_EPHEMERAL


class Certificates:
    """An authority of the test's own, with certificates for a server and for a client."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._make("ca", "-x509", "-subj", "/CN=tests")
        for name in ("server", "client"):
            self._make(name, "-subj", f"/CN={name}")
            self._sign(name)
        (folder / "other").mkdir()
        self._make("other/ca", "-x509", "-subj", "/CN=somebody else")

    def __getitem__(self, name: str) -> str:
        """Return the path of a file such as ``ca.crt`` or ``server.key``."""
        return str(self.folder / name)

    def _make(self, name: str, *args: str) -> None:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        out = f"{name}.crt" if "-x509" in args else f"{name}.csr"
        self._run("req", *curve, *args, "-keyout", f"{name}.key", "-out", out)

    def _sign(self, name: str) -> None:
        (self.folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        authority = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30")
        request = ("-req", "-in", f"{name}.csr", "-extfile", "names", "-out", f"{name}.crt")
        self._run("x509", *request, *authority)

    def _run(self, *args: str) -> None:
        subprocess.run(["openssl", *args], cwd=self.folder, check=True, capture_output=True)

    @property
    def files(self) -> dict[str, str]:
        """A server's options: what it shows, and whom it trusts."""
        return {
            "tls-cert-file": self["server.crt"],
            "tls-key-file": self["server.key"],
            "tls-ca-cert-file": self["ca.crt"],
            "tls-replication": "yes",
        }

    @property
    def of_client(self) -> dict[str, Any]:
        """redis-py's options of a client that shows a certificate, and checks the server's."""
        return {
            "ssl_ca_certs": self["ca.crt"],
            "ssl_certfile": self["client.crt"],
            "ssl_keyfile": self["client.key"],
        }

    def secured(self, server: RedisServer, *options: str) -> RedisServer:
        """Let a server that is not started take TLS alone, from clients with a certificate."""
        listening = ("--port", "0", "--tls-port", str(server.port))
        files = [text for name, value in self.files.items() for text in (f"--{name}", value)]
        server.options = (*server.options, *listening, *files, *options)
        server.process = server._new_process()
        server.client = redis.Redis(
            port=server.port, decode_responses=True, socket_timeout=5, ssl=True, **self.of_client
        )
        return server


class Sentinels:
    """A master with replicas, and the sentinels that promote one of them when it is gone.

    Attributes:
        password: of the servers; ``sentinel_password`` is that of the sentinels.
        servers: the master first, as it was at the start.
    """

    def __init__(
        self,
        program: str,
        folder: Path,
        *,
        replicas: int = 1,
        sentinels: int = 3,
        password: str = "",
        sentinel_password: str = "",
        certificates: Certificates | None = None,
    ) -> None:
        self.program, self.folder, self.count = program, folder, sentinels
        self.password, self.sentinel_password = password, sentinel_password
        self.certificates = certificates
        client = {"password": password} if password else {}
        secret = ("--requirepass", password, "--masterauth", password) if password else ()
        master = new_server(program, folder / "server-0", *secret, *_QUICK_SYNC, **client)
        following = (*secret, *_QUICK_SYNC, "--replicaof", "127.0.0.1", str(master.port))
        self.servers = [master]
        for number in range(replicas):
            place = folder / f"server-{number + 1}"
            self.servers.append(new_server(program, place, *following, **client))
        if certificates is not None:
            for server in self.servers:
                certificates.secured(server)
        self.ports = [free_port() for _ in range(sentinels)]
        self.processes = [self._sentinel(port) for port in self.ports]

    def _sentinel(self, port: int) -> Process:
        place = self.folder / f"sentinel-{port}"
        place.mkdir()
        lines = [f"port {port}"]
        if self.certificates is not None:
            lines = ["port 0", f"tls-port {port}"]
            lines += [f"{name} {value}" for name, value in self.certificates.files.items()]
        lines += [
            "bind 127.0.0.1",
            f"dir {place}",
            f"sentinel monitor {MASTER} 127.0.0.1 {self.servers[0].port} {self.count // 2 + 1}",
            f"sentinel down-after-milliseconds {MASTER} {_DOWN_AFTER_MS}",
            f"sentinel failover-timeout {MASTER} {_FAILOVER_MS}",
        ]
        if self.password:
            lines.append(f"sentinel auth-pass {MASTER} {self.password}")
        if self.sentinel_password:
            lines += [f"requirepass {self.sentinel_password}"]
            lines += [f"sentinel sentinel-pass {self.sentinel_password}"]
        (place / "sentinel.conf").write_text("\n".join(lines) + "\n")
        argv = [self.program, str(place / "sentinel.conf"), "--sentinel"]
        return Process(argv, log=place / "log")

    def start(self) -> Sentinels:
        """Start all; return them once each sentinel knows the others and the replicas."""
        for server in self.servers:
            server.start()
        for process in self.processes:
            process.start()
        wait_until(self._is_settled, "the sentinels to know everybody", 20)
        return self

    def _is_settled(self) -> bool:
        return (
            all(
                state is not None
                and int(state["num-slaves"]) == len(self.servers) - 1
                and int(state["num-other-sentinels"]) == self.count - 1
                for state in map(self._state, self.ports)
            )
            and all(
                server.client.info("replication").get("master_link_status") == "up"  # type: ignore[union-attr]
                for server in self.servers[1:]
            )
        )

    def _state(self, port: int) -> Any:
        try:
            with self.sentinel(port) as client:
                return client.sentinel_master(MASTER)
        except redis.RedisError:  # not listening yet
            return None

    def sentinel(self, port: int) -> redis.Redis:
        """Return a client of one sentinel."""
        password = self.sentinel_password or None
        tls = {"ssl": True, **self.certificates.of_client} if self.certificates else {}
        return redis.Redis(
            port=port, password=password, decode_responses=True, socket_timeout=1, protocol=2, **tls
        )

    @property
    def url(self) -> str:
        """The URL, as Celery writes it, with the servers' password."""
        secret = f":{quote(self.password)}@" if self.password else ""
        return ";".join(f"sentinel://{secret}127.0.0.1:{port}" for port in self.ports)

    @property
    def options(self) -> dict[str, Any]:
        """What Celery's ``broker_transport_options`` say beside the URL."""
        options: dict[str, Any] = {"master_name": MASTER}
        if self.sentinel_password:
            options["sentinel_kwargs"] = {"password": self.sentinel_password}
        return options

    @property
    def master(self) -> RedisServer:
        """The master that the first sentinel names."""
        state = self._state(self.ports[0])
        (found,) = [each for each in self.servers if each.port == int(state["port"])]
        return found

    @property
    def client(self) -> redis.Redis:
        """A client of the master."""
        return self.master.client

    def url_of(self, server: RedisServer) -> str:
        """Return the URL of one of the servers, past the sentinels."""
        secret = f":{quote(self.password)}@" if self.password else ""
        return f"redis://{secret}127.0.0.1:{server.port}/0"

    def fail_over(self) -> RedisServer:
        """Have a replica promoted while the master lives; return the new master."""
        before = self.master
        with self.sentinel(self.ports[0]) as client:
            client.sentinel_failover(MASTER)
        return self.wait_promoted(before)

    def wait_promoted(self, before: RedisServer) -> RedisServer:
        """Wait until another server is the master for all sentinels; return it."""

        def is_another() -> bool:
            states = [self._state(port) for port in self.ports]
            return all(state and int(state["port"]) != before.port for state in states)

        wait_until(is_another, "a replica to be promoted", 20)
        master = self.master
        wait_until(lambda: master.client.role()[0] == "master", "it to be a master", 10)
        return master

    def close(self) -> None:
        """End everything that was started."""
        for process in self.processes:
            process.kill()
        for server in self.servers:
            server.thaw()
            server.close()


class Cluster:
    """Masters that share the slots, and replicas of the one that has the tests' service."""

    #: Where the keys of the service ``orders`` are.
    slot = key_slot(b"{orders}")

    def __init__(
        self,
        program: str,
        folder: Path,
        *options: str,
        masters: int = 2,
        replicas: int = 0,
        certificates: Certificates | None = None,
    ) -> None:
        self.masters = masters
        own = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(_NODE_TIMEOUT_MS))
        own = (*own, "--cluster-allow-replica-migration", "no", *_QUICK_SYNC, *options)
        self.servers: list[RedisServer] = []
        for number in range(masters + replicas):
            server = new_server(program, folder / f"node-{number}", *own, has_bus=True)
            if certificates is not None:
                certificates.secured(server, "--tls-cluster", "yes")
            self.servers.append(server)

    @property
    def url(self) -> str:
        """The URL of all nodes."""
        nodes = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return f"redis+cluster://{nodes}"

    def start(self) -> Cluster:
        """Start the nodes; return them once all of them know all."""
        for server in self.servers:
            server.start()
        owners, replicas = self.servers[: self.masters], self.servers[self.masters :]
        for number, server in enumerate(owners):
            first = round(number * _SLOTS / len(owners))
            last = round((number + 1) * _SLOTS / len(owners)) - 1
            self.ask(server, "ADDSLOTS", *range(first, last + 1))
            self.ask(server, "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            self.ask(self.servers[0], "MEET", "127.0.0.1", server.port)
        wait_until(lambda: self._views_have(len(self.servers), ""), "all nodes to meet", 10)
        for server in replicas:
            self.ask(server, "REPLICATE", self.id_of(self.owner))
        wait_until(lambda: self._views_have(len(replicas), "slave"), "the replicas to be known", 10)
        wait_until(lambda: all(map(self._is_ready, self.servers)), "the cluster to be ready", 10)
        return self

    @staticmethod
    def ask(server: RedisServer, *command: Any) -> Any:
        """Send a CLUSTER command to a node; return its answer as it comes."""
        raw = redis.Redis(connection_pool=server.client.connection_pool)
        raw.response_callbacks = {}  # type: ignore[assignment]
        return raw.execute_command("CLUSTER", *command)

    def id_of(self, server: RedisServer) -> str:
        """Return the id of a node."""
        return str(self.ask(server, "MYID"))

    def _views_have(self, count: int, flag: str) -> bool:
        views = [str(self.ask(server, "NODES")).splitlines() for server in self.servers]
        return all(
            sum(flag in row.split()[2] and "handshake" not in row.split()[2] for row in rows)
            == count
            for rows in views
        )

    def _is_ready(self, server: RedisServer) -> bool:
        is_whole = "cluster_state:ok" in str(self.ask(server, "INFO"))
        state: Any = server.client.info("replication")
        return is_whole and state.get("master_link_status", "up") == "up"

    @property
    def owner(self) -> RedisServer:
        """The node that has the service, by what the first node that answers says."""
        for server in self.servers:
            if not server.process.is_running():
                continue
            for first, last, master, *_ in self.ask(server, "SLOTS"):
                if first <= self.slot <= last:
                    (found,) = [each for each in self.servers if each.port == int(master[1])]
                    return found
        raise AssertionError(f"nobody has slot {self.slot}")

    @property
    def client(self) -> redis.Redis:
        """A client of that node."""
        return self.owner.client

    @property
    def other(self) -> RedisServer:
        """Another master."""
        owner = self.owner
        return next(each for each in self.servers[: self.masters] if each is not owner)

    def move(self) -> Move:
        """Let the service's slot begin to move to another master."""
        return Move(self, self.owner, self.other)

    def close(self) -> None:
        """End the nodes."""
        for server in self.servers:
            server.thaw()
            server.close()


class Move:
    """A slot on its way: keys that are not at its source any more are asked of its target."""

    def __init__(self, cluster: Cluster, source: RedisServer, target: RedisServer) -> None:
        self._cluster, self.source, self.target = cluster, source, target
        ask, slot = cluster.ask, cluster.slot
        ask(target, "SETSLOT", slot, "IMPORTING", cluster.id_of(source))
        ask(source, "SETSLOT", slot, "MIGRATING", cluster.id_of(target))

    def carry(self, count: int = 10_000) -> int:
        """Move so many keys; return how many there were."""
        keys: Sequence[str] = self._cluster.ask(
            self.source, "GETKEYSINSLOT", self._cluster.slot, count
        )
        for key in keys:
            self.source.client.migrate("127.0.0.1", self.target.port, key, 0, 5000)
        return len(keys)

    def end(self) -> None:
        """Move what is left, and give the slot to its target."""
        while self.carry():
            pass
        for server in (self.target, self.source):
            self._cluster.ask(
                server, "SETSLOT", self._cluster.slot, "NODE", self._cluster.id_of(self.target)
            )
