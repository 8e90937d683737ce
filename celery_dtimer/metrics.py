"""Prometheus metrics: of a service, as Redis says, and of this process's own instances.

``dtimer_service_*`` is the same from every beat of a service: take the maximum. What an instance
tells of itself, ``dtimer_instance_*``, adds up. `FAMILIES` has all of them.

A scrape reads a bounded part of what is stored within a bounded time, on connections of its own,
and no thread of an instance waits for it. When Redis does not answer in time, what the process
itself knows is told all the same.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from celery import Celery

from celery_dtimer.errors import SettingsError, missing_extra
from celery_dtimer.membership import Membership, local_host
from celery_dtimer.metering import CONFLICTS, FAILED
from celery_dtimer.meters import Counted, Meters, Spread
from celery_dtimer.model import Instance
from celery_dtimer.planning import REASONS
from celery_dtimer.settings import Settings
from celery_dtimer.sharding import Shards
from celery_dtimer.store import Standing, Store
from celery_dtimer.version import __version__

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

_CALL = 1.0  # seconds that one call of a scrape to Redis may take,
_SCRAPE = 3.0  # and all of them; Prometheus waits for ten
_PAGE = 1000  # timers set aside whose statuses are read at once,
_LOOKED_AT = 2000  # and by one scrape,
_COUNT_AGAIN = 30.0  # and seconds after which they are counted anew
_BIND_AGAIN = 5.0  # seconds after which a port that is taken is tried again

_SERVICE, _INSTANCE = ("service",), ("service", "instance_id")


class Family(NamedTuple):
    """What is told under one name."""

    name: str
    kind: str  #: gauge, counter or histogram
    labels: tuple[str, ...]
    text: str


def _service(name: str, kind: str, text: str, *labels: str) -> Family:
    return Family(f"dtimer_service_{name}", kind, (*_SERVICE, *labels), text)


def _instance(name: str, kind: str, text: str, *labels: str) -> Family:
    return Family(f"dtimer_instance_{name}", kind, (*_INSTANCE, *labels), text)


#: Every family, in the order in which they are told.
FAMILIES = (
    _service("timers", "gauge", "Timers by status", "status"),
    _service("timers_due", "gauge", "Timers that are due"),
    _service("timers_overdue", "gauge", "Timers that are due for longer than dtimer_lag_limit"),
    _service("most_overdue_seconds", "gauge", "Seconds for which the first timer is due"),
    _service("timers_unassigned", "gauge", "Timers that no instance owns"),
    _service("instances", "gauge", "Registered instances by state", "state"),
    _service("instances_without_broker", "gauge", "Instances that do not reach their broker"),
    _service("dead_letters", "gauge", "Runs that have failed for good, and are kept"),
    _service("runs_out", "gauge", "Runs that workers have, or are to get, as far as tracked"),
    _service("sent_total", "counter", "Runs that were sent, ever"),
    _service("skipped_total", "counter", "Runs that did not happen, ever", "reason"),
    _service("lost_total", "counter", "Runs that workers have lost, ever"),
    _service("repaired_total", "counter", "Repairs of what was stored, ever"),
    Family("dtimer_redis_up", "gauge", _INSTANCE, "Whether Redis has answered this scrape"),
    _instance("info", "gauge", "Always 1", "host", "version", "dispatch"),
    _instance("timers", "gauge", "Timers that the instance owns"),
    _instance("heartbeat_age_seconds", "gauge", "Seconds since the last heartbeat was answered"),
    _instance("has_lease", "gauge", "Whether the instance may dispatch"),
    _instance("broker_up", "gauge", "Whether the broker works, once that is known"),
    _instance("clock_offset_seconds", "gauge", "Seconds by which the clock is ahead of Redis's"),
    _instance("sent_total", "counter", "Runs that were sent"),
    _instance("skipped_total", "counter", "Runs that did not happen", "reason"),
    _instance("failed_total", "counter", "Timers set aside, and runs given up", "reason"),
    _instance("refused_messages_total", "counter", "Messages that the broker refused"),
    _instance("broker_outages_total", "counter", "Times that the broker was found down"),
    _instance("commit_conflicts_total", "counter", "Timers that were not committed", "reason"),
    _instance("fenced_total", "counter", "Registrations that were over before the instance left"),
    _instance("failover_seconds", "histogram", "Last heartbeat of the dead until all had moved"),
    _instance("failover_timers_total", "counter", "Timers moved away from the dead, and nobody"),
    _instance("script_seconds", "histogram", "Call of a script until its answer is read", "script"),
    _instance("lag_seconds", "histogram", "Moment of a run until its commit"),
    _instance("unreplicated_commits_total", "counter", "Commits that reached too few replicas"),
    _instance("replays_total", "counter", "Times that Redis has lost what it had confirmed"),
)

_LABELS: Mapping[Counted, Sequence[str]] = {
    "skipped": REASONS,
    "failed": (*dict.fromkeys(FAILED.values()), "lost"),
    "commit_conflicts": tuple(CONFLICTS.values()),
}
_UNLABELLED: tuple[Counted, ...] = (
    *("sent", "refused_messages", "broker_outages", "fenced", "failover_timers"),
    *("unreplicated_commits", "replays"),
)


class Source(NamedTuple):
    """An instance of this process."""

    settings: Settings
    instance: str
    meters: Meters
    memberships: Callable[[], Sequence[Membership]]  #: one for each shard


# ------------------------------------------------------------------ the service


@dataclass(frozen=True, slots=True)
class _Stored:
    """What Redis says of a service."""

    standings: Sequence[Standing]
    set_aside: Mapping[str, int] | None  #: by status; None before they were counted
    instances: Sequence[Instance]
    states: Mapping[str, int]  #: how many of them are in each
    counters: Mapping[str, int]


class _SetAside:
    """Counts timers that are paused, stopped or broken: a bounded part of them at a time.

    What it answers is of the last time that it got through.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._again = 0.0
        self._place, self._offset = 0, 0
        self._tally: Counter[str] = Counter()
        self._found: Counter[str] | None = None

    def read(self, stores: Sequence[Store]) -> Mapping[str, int] | None:
        left = _LOOKED_AT
        while left > 0 and self._clock() >= self._again:
            left -= self._step(stores, min(left, _PAGE))
        return self._found

    def _step(self, stores: Sequence[Store], limit: int) -> int:
        """Count some of a shard; return how many."""
        count = 0
        if self._place < len(stores):  # else there were more shards
            count, statuses = stores[self._place].set_aside(self._offset, limit)
            self._tally.update(statuses)
            self._offset += count
        if count < limit:
            self._place, self._offset = self._place + 1, 0
        if self._place >= len(stores):
            self._found, self._tally, self._place = self._tally, Counter(), 0
            self._again = self._clock() + _COUNT_AGAIN
        return count


class _ServiceReader:
    """Reads what Redis says of a service."""

    def __init__(self, settings: Settings) -> None:
        self._lag_ms = round(settings.lag_limit * 1000)
        self._timeout_ms = settings.instance_timeout * 1000
        self._shards = Shards(settings, timeout=min(_CALL, settings.call_timeout))
        self._set_aside = _SetAside()

    def read(self) -> _Stored:
        """Return what Redis says; call it from one thread at a time.

        Raises:
            StoreError: Redis did not answer, or refused.
        """
        shards = self._shards
        stores = shards.stores
        standings = [store.standing(self._lag_ms) for store in stores]
        instances, counters = shards.instances(), shards.counters()
        now_ms = stores[0].now_ms()
        states = Counter(_state(each, now_ms, self._timeout_ms) for each in instances)
        set_aside = self._set_aside.read(stores)
        return _Stored(standings, set_aside, instances, states, counters)

    def close(self) -> None:
        """Drop all connections."""
        self._shards.close()


class _Attempt(threading.Thread):
    """Reads once: in a thread of its own, since not all that may take long has a limit."""

    def __init__(self, reader: _ServiceReader) -> None:
        super().__init__(name="dtimer-metrics-read", daemon=True)
        self._reader = reader
        self.stored: _Stored | None = None
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self.stored = self._reader.read()
        except Exception as exc:  # whatever it is: the rest of the scrape does not depend on it
            self.failure = exc


class _Readings:
    """What Redis says of a service whenever it is asked for: in time, or not at all."""

    def __init__(self, settings: Settings) -> None:
        self._reader = _ServiceReader(settings)
        self._service = settings.service
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        self._has_failed = False

    def begin(self) -> _Attempt:
        """Begin to read, unless somebody else has begun and is not through."""
        with self._lock:
            if self._attempt is None or not self._attempt.is_alive():
                self._attempt = _Attempt(self._reader)
                self._attempt.start()
            return self._attempt

    def finish(self, attempt: _Attempt, until: float) -> _Stored | None:
        """Return what was read until a moment; None when Redis has not answered."""
        attempt.join(max(0.0, until - time.monotonic()))
        stored = None if attempt.is_alive() else attempt.stored
        if stored is None:
            why = attempt.failure or f"no answer within {_SCRAPE:g} s"
            level = logging.DEBUG if self._has_failed else logging.WARNING
            logger.log(level, "Metrics: service %s can not be read: %s", self._service, why)
        self._has_failed = stored is None
        return stored

    def close(self) -> None:
        """Drop all connections."""
        self._reader.close()


# ------------------------------------------------------------------ families


class _Families:
    """The families of one scrape, being filled."""

    def __init__(self) -> None:
        from prometheus_client import core

        kinds: Mapping[str, Any] = {
            "gauge": core.GaugeMetricFamily,
            "counter": core.CounterMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        self._families = {
            each.name: kinds[each.kind](each.name, each.text, labels=each.labels)
            for each in FAMILIES
        }

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample; nothing when it is not known."""
        if value is not None:
            self._families[name].add_metric(labels, float(value))

    def add_spread(self, name: str, spread: Spread, *labels: str) -> None:
        """Add a histogram."""
        bounds = (*map(str, spread.bounds), "+Inf")
        buckets = list(zip(bounds, spread.counts, strict=True))
        self._families[name].add_metric(labels, buckets, spread.total)


def _add_service(families: _Families, service: str, stored: _Stored) -> None:
    def add(name: str, value: float | None, *labels: str) -> None:
        families.add(f"dtimer_service_{name}", value, service, *labels)

    standings = stored.standings
    for status, count in _statuses(stored):
        add("timers", count, status)
    add("timers_due", sum(each.due for each in standings))
    add("timers_overdue", sum(each.overdue for each in standings))
    add("most_overdue_seconds", max(each.most_overdue_ms for each in standings) / 1000)
    add("timers_unassigned", sum(each.unassigned for each in standings))
    for state in ("live", "leaving", "silent"):
        add("instances", stored.states.get(state, 0), state)
    add("instances_without_broker", sum(each.broker == "down" for each in stored.instances))
    add("dead_letters", sum(each.dead_letters for each in standings))
    add("runs_out", sum(each.runs_out for each in standings))
    counters = stored.counters
    for reason in REASONS:
        add("skipped_total", counters.get(f"skipped_{reason}", 0), reason)
    for name in ("sent", "lost", "repaired"):
        add(f"{name}_total", counters.get(name, 0))


def _statuses(stored: _Stored) -> Iterator[tuple[str, int | None]]:
    """Yield how many timers have each status; None where that is not known yet."""
    yield "active", sum(each.active for each in stored.standings)
    yield "finished", sum(each.finished for each in stored.standings)
    for status in ("paused", "stopped", "broken"):
        yield status, None if stored.set_aside is None else stored.set_aside.get(status, 0)


def _state(instance: Instance, now_ms: int, timeout_ms: float) -> str:
    if instance.silence_ms(now_ms) > timeout_ms:
        return "silent"
    return "leaving" if instance.status == "leaving" else "live"


def _add_instance(families: _Families, source: Source, stored: _Stored | None) -> None:
    own = source.settings.service, source.instance

    def add(name: str, value: float | None, *labels: str) -> None:
        families.add(f"dtimer_instance_{name}", value, *own, *labels)

    memberships = source.memberships()
    dispatch = sorted({each.told.dispatch for each in memberships} - {""})
    families.add("dtimer_redis_up", stored is not None, *own)
    add("info", 1, local_host(), __version__, ",".join(dispatch))
    if stored is not None:
        add("timers", sum(each.timers for each in stored.instances if each.id == source.instance))
    ages = [each.silence for each in memberships]
    add("heartbeat_age_seconds", max((age for age in ages if age is not None), default=None))
    add("has_lease", bool(memberships) and all(each.lease is not None for each in memberships))
    brokers = {each.told.broker for each in memberships} - {""}
    add("broker_up", "down" not in brokers if brokers else None)
    offsets = [each.told.clock_offset_ms for each in memberships]
    add("clock_offset_seconds", next((ms / 1000 for ms in offsets if ms is not None), None))
    _add_counted(families, source)


def _add_counted(families: _Families, source: Source) -> None:
    own = source.settings.service, source.instance
    reading = source.meters.reading()
    for what in _UNLABELLED:
        families.add(f"dtimer_instance_{what}_total", reading.count(what), *own)
    for what, labels in _LABELS.items():
        for label in labels:
            count = reading.count(what, label)
            families.add(f"dtimer_instance_{what}_total", count, *own, label)
    families.add_spread("dtimer_instance_lag_seconds", reading.lag, *own)
    families.add_spread("dtimer_instance_failover_seconds", reading.failover, *own)
    for script, spread in sorted(reading.calls.items()):
        families.add_spread("dtimer_instance_script_seconds", spread, *own, script)


class Collector:
    """Collects the families for a registry of prometheus_client, which calls it at each scrape."""

    def __init__(self) -> None:
        """Start without instances."""
        self._lock = threading.Lock()
        self._sources: list[Source] = []
        self._readings: dict[str, _Readings] = {}

    def add(self, source: Source) -> None:
        """Tell of an instance, and of its service, from now on."""
        with self._lock:
            self._sources.append(source)
            if source.settings.service not in self._readings:
                self._readings[source.settings.service] = _Readings(source.settings)

    def remove(self, source: Source) -> bool:
        """Tell no more of an instance; say whether there are others."""
        service = source.settings.service
        with self._lock:
            self._sources.remove(source)
            if all(each.settings.service != service for each in self._sources):
                self._readings.pop(service).close()
            return bool(self._sources)

    def describe(self) -> Iterable[Metric]:
        """Return what is told, without samples."""
        return _Families()

    def collect(self) -> Iterable[Metric]:
        """Return what is told now."""
        with self._lock:
            sources, readings = self._sources[:], dict(self._readings)
        families = _Families()
        until = time.monotonic() + _SCRAPE
        attempts = {service: reader.begin() for service, reader in readings.items()}
        stored = {
            service: readings[service].finish(attempt, until)
            for service, attempt in attempts.items()
        }
        for service, found in stored.items():
            if found is not None:
                _add_service(families, service, found)
        for source in sources:
            _add_instance(families, source, stored.get(source.settings.service))
        return families


def exposition(app: Celery, service: str | None = None) -> str:
    """Return what Redis says of a service, in Prometheus' text format.

    Args:
        app: the Celery app whose settings are used.
        service: a service to use in place of the app's own.

    Raises:
        SettingsError: a setting cannot be used, or prometheus_client is not installed.
        StoreError: Redis did not answer, or refused.
    """
    settings = Settings.from_app(app, service)
    _require("metrics")
    from prometheus_client import generate_latest

    reader = _ServiceReader(settings)
    try:
        stored = reader.read()
    finally:
        reader.close()
    families = _Families()
    _add_service(families, settings.service, stored)
    told = _Collected([each for each in families if each.samples])
    return generate_latest(cast(Any, told)).decode()


class _Collected(NamedTuple):
    """What was collected already, in the manner of a registry."""

    families: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.families


# ------------------------------------------------------------------ the server


def check(settings: Settings) -> None:
    """Refuse at start what could never serve.

    Raises:
        SettingsError: metrics are wanted, and prometheus_client is not installed.
    """
    if settings.metrics_port is not None:
        _require(f"dtimer_metrics_port={settings.metrics_port}")


def _require(what: str) -> None:
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise SettingsError(missing_extra(what, "metrics")) from None


class _Server:
    """Serves one port, in threads of its own, while it has instances to tell of."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._collector = Collector()
        self._stopped = threading.Event()
        self._http: Any = None
        self._thread = threading.Thread(target=self._run, name="dtimer-metrics", daemon=True)

    @property
    def port(self) -> int | None:
        """The port on which it listens, None while it does not."""
        return None if self._http is None else int(self._http.server_port)

    def add(self, source: Source) -> None:
        self._collector.add(source)
        if self._thread.ident is None:
            self._thread.start()

    def remove(self, source: Source) -> bool:
        """Tell no more of an instance; say whether there are others."""
        return self._collector.remove(source)

    def stop(self) -> None:
        """End, unless a call of the system's, to look a name up say, keeps it."""
        self._stopped.set()
        self._thread.join(_BIND_AGAIN)

    def forget(self) -> None:
        """Let go of the port, in a forked child, which has none of the threads."""
        if self._http is not None:
            with suppress(OSError):
                self._http.socket.close()

    def _run(self) -> None:
        try:
            self._http = self._bound()
            if self._http is not None:
                self._stopped.wait()
                self._http.shutdown()
                self._http.server_close()
        except Exception:
            logger.exception("Metrics are not served any more")
        finally:
            self._http = None

    def _bound(self) -> Any:
        """Return a server that runs; None when that is not wanted any more."""
        from prometheus_client import start_http_server

        has_said = False
        while not self._stopped.is_set():
            try:
                http, _ = start_http_server(self._port, self._host, self._registry())
            except OSError as exc:
                if not has_said:
                    where = f"{self._host}:{self._port}"
                    logger.error("Metrics can not be served on %s, trying again: %s", where, exc)
                has_said = True
                self._stopped.wait(_BIND_AGAIN)
            else:
                logger.info("Metrics are served on %s:%s", self._host, http.server_port)
                return http
        return None

    def _registry(self) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry, ProcessCollector

        registry = CollectorRegistry()
        registry.register(cast(Any, self._collector))
        ProcessCollector(registry=registry)
        return registry


class _Process:
    """The servers of this process: one for each address that its instances name."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.servers: dict[tuple[str, int], _Server] = {}

    def forget(self) -> None:
        """Start anew, in a forked child."""
        for server in self.servers.values():
            server.forget()
        self.lock, self.servers = threading.Lock(), {}


_process = _Process()
os.register_at_fork(after_in_child=_process.forget)


def serve(source: Source) -> Callable[[], None]:
    """Tell of an instance by HTTP, where its settings say; return what ends that."""
    host, port = source.settings.metrics_host, source.settings.metrics_port
    assert port is not None  # noqa: S101 - only then there are meters to tell of
    with _process.lock:
        server = _process.servers.setdefault((host, port), _Server(host, port))
        server.add(source)

    def end() -> None:
        with _process.lock:
            if server.remove(source):
                return
            del _process.servers[host, port]
        server.stop()

    return end


def port_of(settings: Settings) -> int | None:
    """Return the port on which this process serves what these settings ask for, None for none."""
    server = _process.servers.get((settings.metrics_host, settings.metrics_port or 0))
    return None if server is None else server.port
