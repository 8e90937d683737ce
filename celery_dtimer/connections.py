"""Connections to Redis wherever it runs: a server, the master that sentinels know, a cluster node.

All keys of a service lie in one slot, so one node of a cluster serves it. The client of a cluster
is therefore one node's client that follows its slot: MOVED and ASK lead it on, TRYAGAIN, which a
script hears while the slot moves, is waited out, and a node that does not answer has it ask the
others. redis-py's own cluster client could neither send scripts ahead of their answers nor tell the
time of the node that has the slot.

Nothing is repeated here but what a node has refused unseen. redis-py's own retries are off, and
every call has a time limit.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.connection import SSLConnection
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from celery_dtimer import urls
from celery_dtimer.errors import SettingsError, is_number, shown
from celery_dtimer.masking import masked, secrets_in
from celery_dtimer.settings import Settings
from celery_dtimer.timelimits import limited

_redis_py: Any = redis  # much of it is not typed
_CONNECTIONS = 2  # that one store uses at once: a call is prepared while another is answered
_SENTINEL_PORT = 26379
_REFUSAL = re.compile(r"(?P<kind>MOVED|ASK|TRYAGAIN) (?:\d+ (?P<host>\S*):(?P<port>\d+)$)?")
_SENTINEL_PATIENCE = 1.0  # seconds: one that is frozen must not cost a call all of its time
_LOOK_EVERY = 1.0  # seconds between two looks who is the master,
_LOOKING = 0.05  # of the time at most, when sentinels do not answer
_FIRST_PAUSE, _LAST_PAUSE = 0.005, 0.05  # seconds until a node that said TRYAGAIN is asked again
_TIME = "return redis.call('TIME')"

#: ``ssl_cert_reqs`` as Celery spells it in URLs, to redis-py's words.
_CERT_REQS = {"CERT_NONE": "none", "CERT_OPTIONAL": "optional", "CERT_REQUIRED": "required"}

Address: TypeAlias = "tuple[str, int]"
Command: TypeAlias = "tuple[Any, ...]"
T = TypeVar("T")


def connect(settings: Settings, timeout: float, key: str) -> Client:
    """Return a client with a time limit on every call; nothing is contacted.

    Args:
        settings: where Redis is.
        timeout: seconds that a call may take.
        key: one of those that are used: in a cluster, its slot decides the node.

    Raises:
        SettingsError: redis-py does not take the options.
    """
    url = settings.redis_url
    if urls.is_embedded(url):
        from celery_dtimer import embedded  # few need it, and it runs as a program of its own

        url = embedded.resolve(url)
    try:
        client = _client(url, settings.redis_options, timeout, key)
    except (TypeError, ValueError, redis.RedisError) as exc:
        raise SettingsError(
            "dtimer_redis_options, or an option in dtimer_redis_url, is not what redis-py takes: "
            + masked(exc, secrets_in(url, dict(settings.redis_options)))
        ) from None  # its text may hold a password
    if client.most_connections < _CONNECTIONS:
        raise SettingsError(
            f"max_connections={client.most_connections} of redis-py's options is too few: "
            f"expected at least {_CONNECTIONS}"
        )
    return client


def described(exc: Exception) -> str:
    """Return what an error of redis-py says, without the addresses and options it may list."""
    if isinstance(exc, MasterNotFoundError):
        return str(exc).partition(" : ")[0]
    return " ".join(str(exc).split())


class Refusal(NamedTuple):
    """What a node of a cluster says instead of serving a command."""

    kind: str  #: MOVED and ASK name another node; TRYAGAIN does not
    node: Address = "", 0


def refusal_in(answer: object) -> Refusal | None:
    """Return what an answer says of the nodes of a cluster; older redis-py's leave it a text."""
    if isinstance(answer, AskError):  # a MovedError is one too
        kind = "MOVED" if isinstance(answer, MovedError) else "ASK"
        return Refusal(kind, (answer.host, answer.port))
    if isinstance(answer, TryAgainError):
        return Refusal("TRYAGAIN")
    found = _REFUSAL.match(str(answer)) if isinstance(answer, ResponseError) else None
    if found is None:
        return None
    return Refusal(found["kind"], (found["host"] or "", int(found["port"] or 0)))


def is_redirection(exc: Exception) -> bool:
    """Say whether an answer only says that another node of a cluster has the keys."""
    refusal = refusal_in(exc)
    return refusal is not None and refusal.kind != "TRYAGAIN"


def _client(url: str, own: Mapping[str, Any], timeout: float, key: str) -> Client:
    members = urls.members(url)
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "health_check_interval": 30,
        **own,
        **_url_options(members[0]),
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": True,
        "encoding_errors": "backslashreplace",
    }
    _spell_as_redis_py(options)
    _check_seconds(options)
    uses_tls = bool(options.pop("ssl", False))
    if uses_tls:
        options["connection_class"] = SSLConnection
    if urls.is_sentinel(url):
        return _sentinel_client(members, options, uses_tls)
    connection_class = limited(options.get("connection_class", redis.Connection))
    options["connection_class"] = connection_class
    connection_class(**{name: options[name] for name in options if name not in _OF_POOLS})
    if urls.is_cluster(url):
        return SlotClient([_address(each, 6379) for each in members], options, timeout, key)
    client: Client = Client.of_pool(redis.ConnectionPool(**options))
    return client


def _spell_as_redis_py(options: dict[str, Any]) -> None:
    """Take how certificates are checked in Celery's words too."""
    level = options.get("ssl_cert_reqs")
    if isinstance(level, str):
        options["ssl_cert_reqs"] = _CERT_REQS.get(level, level)


def _check_seconds(options: Mapping[str, Any]) -> None:
    for name in ("socket_timeout", "socket_connect_timeout"):
        seconds = options[name]
        is_usable = is_number(seconds) and 0 < seconds < float("inf")
        if seconds is not None and not is_usable:
            raise SettingsError(
                f"dtimer_redis_options[{name!r}]={shown(seconds)}, or in dtimer_redis_url: "
                "expected seconds above 0, or None"
            )


_OF_POOLS = ("connection_class", "max_connections")  # options that no connection knows


def _url_options(url: str) -> dict[str, Any]:
    """Return the options in a URL, as redis-py reads them."""
    scheme = urls.scheme_of(url)
    plain = url.removeprefix(scheme)
    if scheme == "redis+socket":  # Celery's …?virtual_host=1 is …?db=1
        plain = plain.replace("virtual_host=", "db=")
    known = {"redis+socket": "unix", "rediss+cluster": "rediss", "redis+cluster": "redis"}
    options: dict[str, Any] = _redis_py.connection.parse_url(
        known.get(scheme, "redis" if scheme == "sentinel" else scheme) + plain
    )
    if "timeout" in options:  # of a pool that waits for connections, which ours does not
        options.setdefault("socket_timeout", options.pop("timeout"))
    return options


def _address(url: str, default_port: int) -> Address:
    parts = urlsplit(url)
    return parts.hostname or "localhost", parts.port or default_port


def _sentinel_client(members: Sequence[str], options: dict[str, Any], uses_tls: bool) -> Client:
    """Return a client of the master, which sentinels are asked for with each new connection."""
    timeout = float(options["socket_timeout"] or 0) or None
    patience = min(_SENTINEL_PATIENCE, timeout / (len(members) + 1)) if timeout else None
    own = {
        "socket_timeout": patience,
        "socket_connect_timeout": patience,
        "retry": options["retry"],
        **(options.pop("sentinel_kwargs", None) or {}),
    }
    _spell_as_redis_py(own)
    _check_seconds(own)
    sentinel = _redis_py.sentinel.Sentinel(
        [_address(each, _SENTINEL_PORT) for each in members],
        min_other_sentinels=options.pop("min_other_sentinels", 0),
        sentinel_kwargs=own,
    )
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    pool = _redis_py.sentinel.SentinelConnectionPool(
        options.pop("master_name"), sentinel, ssl=uses_tls, **options
    )
    pool.connection_class = limited(pool.connection_class)
    pool.connection_class(**pool.connection_kwargs)  # an option it does not know shows here
    client: MasterClient = MasterClient.of_pool(pool)
    return client


def _connection_of(pool: Any) -> Any:
    try:
        return pool.get_connection()
    except TypeError:  # before redis-py 5.3
        return pool.get_connection("EVALSHA")


class Client(redis.Redis):
    """The client of one server, which can also be asked now and heard later."""

    @classmethod
    def of_pool(cls, pool: redis.ConnectionPool) -> Any:
        """Return a client that owns a pool."""
        client = cls(connection_pool=pool)
        client.auto_close_connection_pool = True
        return client

    @property
    def database(self) -> int:
        """The number of the database."""
        return int(self._options.get("db") or 0)

    @property
    def most_connections(self) -> int:
        """How many connections may be open at once."""
        return int(self.connection_pool.max_connections)

    @property
    def _options(self) -> Mapping[str, Any]:
        options: Mapping[str, Any] = self.connection_pool.connection_kwargs
        return options

    def begin(self, *commands: Command) -> Callable[[], list[Any]]:
        """Send commands on one connection; return what waits for their answers.

        An answer that is an error is among them; what is no answer is raised.
        """
        pool = self.connection_pool
        connection = _connection_of(pool)
        with _released_on_failure(pool, connection):
            connection.send_packed_command(connection.pack_commands(commands))

        def finish() -> list[Any]:
            with _released_on_failure(pool, connection):
                answers = [_answer(connection) for _ in commands]
            pool.release(connection)
            return answers

        return finish

    def hashes_like(self, pattern: str, count: int) -> Iterator[str]:
        """Yield the keys of hashes that match a pattern, some of them twice.

        Args:
            pattern: as SCAN takes it.
            count: so many keys are passed with one call.
        """
        return cast("Iterator[str]", self.scan_iter(match=pattern, count=count, _type="HASH"))

    def look_up_anew(self) -> None:
        """Let the next call open a new connection; other threads finish what they do."""
        self.connection_pool.disconnect(inuse_connections=False)

    def drop(self) -> None:
        """Drop all connections."""
        self.connection_pool.disconnect()


def _answer(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as exc:
        return exc


@contextmanager
def _released_on_failure(pool: Any, connection: Any) -> Iterator[None]:
    """Cut a connection and give it back when a block fails: an answer may be on its way."""
    try:
        yield
    except BaseException:
        connection.disconnect()
        pool.release(connection)
        raise


class MasterClient(Client):
    """The client of the master that sentinels name.

    A master that is replaced while it lives goes on to take writes, which are lost, until the
    sentinels make it a replica: eight seconds. So they are asked once a second who it is.
    """

    _look_at = 0.0

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command to the master; return its answer."""
        self._look()
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def begin(self, *commands: Command) -> Callable[[], list[Any]]:
        """Send commands on one connection; return what waits for their answers."""
        self._look()
        return super().begin(*commands)

    def drop(self) -> None:
        """Drop all connections, those to the sentinels too."""
        super().drop()
        pool: Any = self.connection_pool
        for sentinel in pool.sentinel_manager.sentinels:
            sentinel.connection_pool.disconnect()

    def _look(self) -> None:
        """Ask who is the master, unless that was done; idle connections to another one go."""
        started = time.monotonic()
        if started < self._look_at:
            return
        self._look_at = started + _LOOK_EVERY
        pool: Any = self.connection_pool
        try:
            pool.get_master_address()
        except (RedisConnectionError, RedisTimeoutError, OSError):  # the master may serve still
            took = time.monotonic() - started
            self._look_at = started + max(_LOOK_EVERY, took / _LOOKING)


class UnreachableNodeError(RedisConnectionError):
    """A node takes no connections: nothing was sent."""


class _NodePool(redis.ConnectionPool):
    """Connections to one node, which tell when none can be made."""

    def get_connection(self, *args: Any, **options: Any) -> Any:
        try:
            return super().get_connection(*args, **options)
        except RedisConnectionError as exc:
            raise UnreachableNodeError(str(exc)) from exc


def _execute(client: redis.Redis, command: Command, options: dict[str, Any]) -> Any:
    return redis.Redis.execute_command(client, *command, **options)  # type: ignore[no-untyped-call]


class SlotClient(Client):
    """The client of the node that has one slot of a cluster, wherever that goes.

    It learns the nodes on first use, and asks them anew after each failure.
    """

    def __init__(
        self, nodes: Sequence[Address], options: Mapping[str, Any], timeout: float, key: str
    ) -> None:
        """Prepare a client; nothing is contacted.

        Args:
            nodes: some of the cluster's nodes.
            options: of redis-py's connection pools.
            timeout: seconds that a call may take.
            key: has the slot.
        """
        self.key = key
        self._slot = key_slot(key.encode())
        self._nodes = list(nodes)
        self._node_options = {k: v for k, v in options.items() if k not in ("host", "port")}
        self._timeout = timeout
        self._masters: list[Address] = []
        self._pools: dict[Address, redis.ConnectionPool] = {}
        self._current: redis.ConnectionPool | None = None
        self._finding = threading.Lock()
        # redis-py reads one option of the pool as it makes a client: of the first node's, say.
        super().__init__(connection_pool=self._pool_of(self._nodes[0]))
        self._current = None

    @property
    def connection_pool(self) -> redis.ConnectionPool:
        """The connections to the node that has the slot."""
        with self._finding:
            if self._current is None:
                self._current = self._pool_of(self._find())
            return self._current

    @connection_pool.setter
    def connection_pool(self, pool: redis.ConnectionPool) -> None:
        self._current = pool

    @property
    def _options(self) -> Mapping[str, Any]:
        return self._node_options

    @property
    def most_connections(self) -> int:
        """How many connections may be open at once to a node."""
        return int(self._pool_of(self._nodes[0]).max_connections)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command to the node that has the slot; return its answer."""
        try:
            return self._reaching(lambda: _execute(self, args, options))
        except ResponseError as exc:
            refusal = refusal_in(exc)
            if refusal is None:
                raise
            (answer,) = self._follow(refusal, [args], options)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def begin(self, *commands: Command) -> Callable[[], list[Any]]:
        """Send commands on one connection; return what waits for their answers.

        They are sent again as a whole when the node refuses the first one.
        """
        finish_here = self._reaching(lambda: Client.begin(self, *commands))

        def finish() -> list[Any]:
            answers = finish_here()
            refusal = refusal_in(answers[0])
            return answers if refusal is None else self._follow(refusal, commands, {})

        return finish

    def time(self, **_: Any) -> Any:
        """Return the time of the node that has the slot: TIME alone has no key to go by."""
        return self.eval(_TIME, 1, self.key)

    def pipeline(self, transaction: bool = False, shard_hint: Any = None) -> Pipeline:
        """Return a pipeline of reads, which are asked again where a node refers to another."""
        assert not transaction, shard_hint  # noqa: S101 - a transaction could not be followed
        return _SlotPipeline(self)

    def hashes_like(self, pattern: str, count: int) -> Iterator[str]:
        """Yield the keys of hashes on all masters that match a pattern, some of them twice."""
        self._find()
        for node in list(self._masters):
            found = Client(connection_pool=self._pool_of(node)).hashes_like(pattern, count)
            yield from found

    def look_up_anew(self) -> None:
        """Let the next call ask which node has the slot; other threads finish what they do."""
        with self._finding:
            pool, self._current = self._current, None
        if pool is not None:
            pool.disconnect(inuse_connections=False)

    def drop(self) -> None:
        """Drop all connections."""
        with self._finding:
            self._current = None
        for pool in list(self._pools.values()):
            pool.disconnect()

    def _pool_of(self, node: Address) -> redis.ConnectionPool:
        host, port = node
        made = self._pools.get(node) or _NodePool(host=host, port=port, **self._node_options)
        return self._pools.setdefault(node, made)

    # -- where the slot is

    def _reaching(self, act: Callable[[], T]) -> T:
        """Act; once more if the node does not take connections and another one has the slot."""
        pool = self.connection_pool
        try:
            return act()
        except UnreachableNodeError:
            self.look_up_anew()
            if self.connection_pool is pool:
                raise
            return act()

    def _find(self) -> Address:
        """Ask node after node which has the slot."""
        failure: Exception = ClusterDownError("no node of the cluster is known")
        patience = self._timeout / (len(self._nodes) + 1)
        for node in list(self._nodes):
            try:
                return self._learn(self._slots(node, patience), node)
            except (RedisConnectionError, RedisTimeoutError, OSError, ClusterDownError) as exc:
                failure = exc
                self._nodes.remove(node)  # the next look begins with the others
                self._nodes.append(node)
        raise failure

    def _slots(self, node: Address, patience: float) -> list[Any]:
        """Return a node's view of the slots: first, last, master, replicas."""
        options = {k: v for k, v in self._node_options.items() if k not in _OF_POOLS}
        limits = {"socket_timeout": patience, "socket_connect_timeout": patience}
        make = self._node_options["connection_class"]
        connection = make(host=node[0], port=node[1], **{**options, **limits})
        try:
            connection.send_command("CLUSTER", "SLOTS")
            return cast("list[Any]", connection.read_response())
        finally:
            connection.disconnect()

    def _learn(self, rows: list[Any], asked: Address) -> Address:
        """Remember the nodes in an answer; return which has the slot."""
        owner = None
        self._masters = list(dict.fromkeys(self._seen(row[2][:2], asked) for row in rows))
        for first, last, *nodes in rows:
            known = [self._seen(each[:2], asked) for each in nodes]
            if first <= self._slot <= last:
                owner = known[0]
            self._nodes += [node for node in known if node not in self._nodes]
        if owner is None:
            raise ClusterDownError(f"no node of the cluster has slot {self._slot}")
        return owner

    @staticmethod
    def _seen(named: Sequence[Any], asked: Address) -> Address:
        """Return a node's address; a node that does not know its own host leaves it out."""
        host, port = named
        return host or asked[0], int(port)

    # -- following it

    def _follow(
        self, refusal: Refusal, commands: Sequence[Command], options: dict[str, Any]
    ) -> list[Any]:
        """Return the answers to commands that a node has refused because the slot moves.

        The refusal is still among them when it moves for longer than a call may wait.
        """
        until = time.monotonic() + self._timeout / 2
        pause = 0.0
        while True:
            pool = self.connection_pool
            if refusal.kind != "TRYAGAIN":
                asked: Address = str(pool.connection_kwargs["host"]), 0
                pool = self._pool_of(self._seen(refusal.node, asked))
            if refusal.kind == "MOVED":
                with self._finding:
                    self._current = pool
            time.sleep(pause)
            answers = self._ask(pool, refusal.kind == "ASK", commands, options)
            again = refusal_in(answers[0])
            if again is None or time.monotonic() > until:
                return answers
            refusal = again
            pause = min(_LAST_PAUSE, max(_FIRST_PAUSE, 2 * pause))

    def _ask(
        self, pool: Any, is_asking: bool, commands: Sequence[Command], options: dict[str, Any]
    ) -> list[Any]:
        connection = _connection_of(pool)
        with _released_on_failure(pool, connection):
            sent = [*([("ASKING",)] if is_asking else []), *commands]
            connection.send_packed_command(connection.pack_commands(sent))
            answers = [_parsed(self, connection, each, options) for each in sent]
        pool.release(connection)
        return answers[-len(commands) :]


def _parsed(client: Any, connection: Any, command: Command, options: dict[str, Any]) -> Any:
    """Return the answer to a command as redis-py hands it to callers; an error is one too."""
    try:
        return client.parse_response(connection, command[0], **options)
    except ResponseError as exc:
        return exc


class _SlotPipeline(Pipeline):
    """Reads that are sent together, and asked again one by one if a node refers to another."""

    def __init__(self, client: SlotClient) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, False, None)
        self._client = client

    def time(self, **_: Any) -> Any:
        """Ask for the time of the node that has the slot."""
        return self.eval(_TIME, 1, self._client.key)

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Send the reads; return their answers."""
        commands = list(self.command_stack)
        try:
            answers: list[Any] = super().execute(raise_on_error=False)
            is_elsewhere = any(refusal_in(answer) is not None for answer in answers)
        except UnreachableNodeError:
            is_elsewhere = True
        if is_elsewhere:
            answers = [self._again(args, options) for args, options in commands]
        if raise_on_error:
            self.raise_first_error(commands, answers)  # type: ignore[no-untyped-call]
        return answers

    def _again(self, args: Command, options: dict[str, Any]) -> Any:
        try:
            return self._client.execute_command(*args, **options)
        except ResponseError as exc:
            return exc
