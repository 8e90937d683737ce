"""The doctor: what is so in a service, what is wrong with it, and what to do about that.

Every check says something, also when all is well. What the server does not let its user see is said
to be so, and nothing else: it is no fault. Nothing is changed, and no secret is shown.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

from celery import Celery

from celery_dtimer import consistency
from celery_dtimer.allowed import tasks_of
from celery_dtimer.errors import (
    DistributedTimerError,
    InvalidTimerError,
    StoreError,
    StoreUnavailableError,
    shown,
)
from celery_dtimer.model import (
    SCHEMA,
    UNASSIGNED,
    Instance,
    Timer,
    TimerState,
    decode_definition,
)
from celery_dtimer.precautions import PARAMETERS, risks
from celery_dtimer.publisher import Publisher
from celery_dtimer.sharding import Shards
from celery_dtimer.store import Store

Severity = Literal["ok", "warning", "error"]

_NAMED = 5  # timers, or other things, that a finding names; the others are counted
_PAGE = 500  # timers that are read at once
_OFFSET = 1.0  # seconds by which a host's clock may be off
_NOT_ALLOWED = "not allowed to look"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found."""

    check: str  #: its name
    severity: Severity
    found: str  #: what is so
    advice: str = ""  #: what to do about it, "" for nothing

    def as_dict(self) -> dict[str, str]:
        """Return it as JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        """Return it as a line."""
        advice = f" -> {self.advice}" if self.advice else ""
        return f"{self.severity:7} {self.check}: {self.found}{advice}"


@dataclass
class Census:
    """What a look at all timers of a store has found."""

    total: int = 0
    broken: list[tuple[str, str]] = field(default_factory=list)  #: name, reason
    damaged: list[str] = field(default_factory=list)  #: active, and not to be read
    overdue: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  #: by why
    tasks: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  #: their timers


class _Situation(NamedTuple):
    """What the overdue are judged by."""

    now_ms: int
    lag_ms: int
    timeout_ms: int
    instances: Mapping[str, Instance]


def examine(shards: Shards, app: Celery, *, seconds: float = 1.0) -> list[Finding]:
    """Return what all checks find in a service, and of the app's broker and workers.

    Args:
        shards: of the service; what several of them have to say alike is said once.
        app: whose broker and workers are asked.
        seconds: that workers have to answer; 0 to ask none.
    """
    findings: dict[Finding, None] = {}
    tasks: dict[str, list[str]] = defaultdict(list)
    for store in _stores(shards):
        found, census = examine_store(store)
        for each in found:
            is_shards_own = store.keys.shard and each.severity != "ok"
            text = f"shard {store.keys.shard}: {each.found}" if is_shards_own else each.found
            findings[replace(each, found=text)] = None
        for task, timers in ({} if census is None else census.tasks).items():
            tasks[task] += timers
    broker = examine_broker(app, tasks, shards.settings.broker_timeout, seconds)
    return [*findings, *broker]


def _stores(shards: Shards) -> list[Store]:
    """Return the stores of a service; the one that cannot tell of shards when it is not reached."""
    try:
        return shards.stores
    except StoreError:
        return [shards.base]


def examine_store(store: Store) -> tuple[list[Finding], Census | None]:
    """Return what the checks of a store find, and the timers; None when it can not be read."""
    place = store.settings.masked_url
    try:
        store.now_ms()
        findings = [Finding("store", "ok", f"Redis at {place} answers")]
        findings += _server(store)
        instances = store.instances()
        findings += [*_schema(store), *_instances(store, instances)]
        census = take_census(store, instances)
        findings += [*_invariants(store), *_timers(store, census, instances)]
    except StoreUnavailableError as exc:
        return [Finding("store", "error", str(exc), "see that it runs and can be reached")], None
    except StoreError as exc:
        return [Finding("store", "error", str(exc), "see what Redis lets its user do")], None
    return findings, census


# ------------------------------------------------------------------ the server


def _server(store: Store) -> Iterator[Finding]:
    known = store.information("server", "replication")
    version = known.get("valkey_version") or known.get("redis_version")
    if version is None:
        yield Finding("server", "ok", f"{_NOT_ALLOWED} (INFO)")
    else:
        product = "Valkey" if "valkey_version" in known else "Redis"
        yield Finding("server", "ok", f"{product} {version}")
        yield from _replication(known)
    is_embedded = store.settings.redis_url.startswith("embedded:")
    configuration = store.configuration(PARAMETERS)
    if not configuration:
        yield Finding("persistence", "ok", f"{_NOT_ALLOWED} (CONFIG)")
        yield Finding("eviction", "ok", f"{_NOT_ALLOWED} (CONFIG)")
        return
    found = {risk.check: risk for risk in risks(configuration, is_embedded=is_embedded)}
    fine = {
        "persistence": "nothing is kept, nor expected to be (embedded)"
        if is_embedded
        else "what is written is kept",
        "eviction": "no timer is evicted",
    }
    for check, text in fine.items():
        risk = found.get(check)
        if risk is None:
            yield Finding(check, "ok", text)
        else:
            severity: Severity = "warning" if risk.level >= logging.WARNING else "ok"
            yield Finding(check, severity, risk.problem, risk.advice)


def _replication(known: Mapping[str, Any]) -> Iterator[Finding]:
    if known.get("role") not in (None, "master"):
        advice = "give the address of its master, or of the Sentinels"
        yield Finding("replicas", "error", "the server is a replica", advice)
    else:
        yield Finding("replicas", "ok", f"{known.get('connected_slaves', 0)} replicas")


def _schema(store: Store) -> Iterator[Finding]:
    stored = store.stored_schema()
    if stored > SCHEMA:
        found = f"the service is kept in schema {stored}, and this version knows up to {SCHEMA}"
        yield Finding("schema", "error", found, "use a newer version of celery_dtimer here")
    else:
        yield Finding("schema", "ok", f"schema {stored}, of up to {SCHEMA} that are known here")


# ------------------------------------------------------------------ the instances


def _instances(store: Store, instances: Sequence[Instance]) -> Iterator[Finding]:
    if not instances:
        pending = store.pending_count()
        if pending:
            yield Finding("instances", "error", f"{pending} timers wait, and no beat runs", _START)
        else:
            yield Finding("instances", "ok", "no beat runs, and no timer waits")
        return
    now_ms, timeout = store.now_ms(), store.settings.instance_timeout
    ages = {each.id: each.silence_ms(now_ms) / 1000 for each in instances}
    silent = [f"{id} for {age:.0f} s" for id, age in ages.items() if age > timeout]
    if silent:
        advice = "if they are stopped on purpose, wait; else look at their logs"
        yield Finding("instances", "warning", f"silent: {_listed(silent)}", advice)
    else:
        count = Counter(each.dispatch or "not known yet" for each in instances)
        modes = ", ".join(f"{number} {mode}" for mode, number in sorted(count.items()))
        yield Finding("instances", "ok", f"{len(instances)} live (dispatch: {modes})")
    down = [each.id for each in instances if each.broker == "down"]
    if down:
        advice = "see that they reach the broker; meanwhile others have their timers"
        yield Finding("instances", "error", f"without a broker: {_listed(down)}", advice)
    yield from _clocks(instances)
    yield from _agreement(instances)
    waiting = store.pending_count(UNASSIGNED)
    if waiting:
        advice = "wait for the next failure check; if that does not help, look at the beats' logs"
        yield Finding("unassigned", "warning", f"{waiting} timers have no beat", advice)


def _clocks(instances: Sequence[Instance]) -> Iterator[Finding]:
    known = [each for each in instances if each.clock_offset is not None]
    off = [each for each in known if abs(each.clock_offset or 0) > _OFFSET]
    if off:
        rows = [f"{each.id} by {each.clock_offset:+.1f} s" for each in off]
        found = f"off from the server's: {_listed(rows)}"
        advice = (
            "set them (NTP): timers go by the server's clock, but logs and the expires of messages "
            "do not"
        )
        yield Finding("clocks", "warning", found, advice)
    else:
        found = f"{len(known)} of {len(instances)} compared, none off by more than {_OFFSET:g} s"
        yield Finding("clocks", "ok", found)


def _agreement(instances: Sequence[Instance]) -> Iterator[Finding]:
    versions = Counter(each.version for each in instances)
    schemas = Counter(each.schema for each in instances)
    text = ", ".join(f"{count} x {version}" for version, count in sorted(versions.items()))
    if len(versions) > 1 or len(schemas) > 1:
        yield Finding("versions", "warning", f"mixed: {text}", "finish the upgrade")
    else:
        yield Finding("versions", "ok", text)
    differing = dict(_differing(instances))
    if differing:
        rows = [f"{name} ({', '.join(values)})" for name, values in differing.items()]
        advice = "give all beats of the service the same settings"
        yield Finding("settings", "warning", f"they differ: {_listed(rows)}", advice)
    else:
        yield Finding("settings", "ok", "all beats have the same")


def _differing(instances: Sequence[Instance]) -> Iterator[tuple[str, list[str]]]:
    """Yield the settings that not all instances have the same, with their values."""
    stored = [found for each in instances if (found := _decoded(each.settings)) is not None]
    for name in sorted({name for settings in stored for name in settings}):
        values = {json.dumps(settings[name]) for settings in stored if name in settings}
        if len(values) > 1:
            yield name, sorted(values)


def _decoded(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


# ------------------------------------------------------------------ the timers


def _invariants(store: Store) -> Iterator[Finding]:
    found = consistency.check(store)
    if found:
        advice = "a live beat repairs it within a few failure checks; see its log"
        yield Finding("invariants", "error", _listed(list(map(str, found))), advice)
    else:
        yield Finding("invariants", "ok", "all hold")


def take_census(store: Store, instances: Sequence[Instance]) -> Census:
    """Look at all timers of a store, a page at a time."""
    census = Census()
    settings = store.settings
    known = {each.id: each for each in instances}
    ids = store.timer_ids()
    for start in range(0, len(ids), _PAGE):
        page = ids[start : start + _PAGE]
        now_ms, states = store.states(page)
        lag_ms, timeout_ms = settings.lag_limit * 1000, settings.instance_timeout * 1000
        situation = _Situation(now_ms, round(lag_ms), round(timeout_ms), known)
        for state, blob in zip(states, store.definitions(page), strict=True):
            if state is not None:
                _count(census, state, blob, situation)
    return census


def _tasks(blob: str | None) -> set[str]:
    """Return what a definition sends, or has workers send; nothing if it can not be read."""
    try:
        return set(tasks_of(decode_definition(blob))) if blob else set()
    except InvalidTimerError:
        return set()


def _count(census: Census, state: TimerState, blob: str | None, situation: _Situation) -> None:
    timer = Timer.from_stored(state, blob)
    name = timer.name or state.id
    census.total += 1
    if state.status == "broken":
        census.broken.append((name, state.reason))
    elif state.status == "active":
        why = _why_overdue(state, timer, situation)
        if why is not None:
            census.overdue[why].append(name)
        elif timer.status == "broken":
            census.damaged.append(name)
    for task in _tasks(blob):
        census.tasks[task].append(name)


def _why_overdue(state: TimerState, timer: Timer, situation: _Situation) -> str | None:
    """Say why a timer has not run that is due for longer than it should; None if it is not."""
    now_ms, at_ms = situation.now_ms, state.at_ms
    is_put_off = state.attempts > 0 or state.waits
    looked_at_ms = state.due_ms if is_put_off or at_ms is None else at_ms
    if looked_at_ms is None or looked_at_ms >= now_ms - situation.lag_ms:
        return None
    if state.waits:
        return "they wait for the end of an earlier run (overlap)"
    owner = situation.instances.get(state.owner)
    if owner is None:
        return "no beat has them"
    if owner.silence_ms(now_ms) > situation.timeout_ms:
        return "their beat is silent, and others take them over"
    if owner.broker == "down":
        return "their beat does not reach the broker"
    if timer.schedule is None and timer.status == "active":
        return "they are of a newer version, which no beat can read"
    if state.attempts:
        return "the broker has refused them, or no beat has their code; they are tried again"
    return "their beat lags behind"


_START = "start one: celery beat -S dtimer"
_ADVICE = {
    "they wait for the end of an earlier run (overlap)": "see that workers run, and end their runs",
    "no beat has them": _START,
    "their beat is silent, and others take them over": "wait; look at that beat's log",
    "their beat does not reach the broker": "see that the broker runs",
    "they are of a newer version, which no beat can read": "start a beat of that version",
    "their beat lags behind": "start more beats, or see what slows this one down",
}


def _timers(store: Store, census: Census, instances: Sequence[Instance]) -> Iterator[Finding]:
    yield Finding("timers", "ok", f"{census.total} in all")
    for why, names in sorted(census.overdue.items()):
        severity: Severity = "warning" if instances else "error"
        advice = _ADVICE.get(why, "see the beats' logs, and the dead letters")
        found = f"{len(names)} are overdue since {why}: {_listed(names)}"
        yield Finding("overdue", severity, found, advice)
    if not census.overdue:
        yield Finding("overdue", "ok", f"none by more than {store.settings.lag_limit:g} s")
    if census.broken:
        rows = [f"{name} ({reason})" for name, reason in census.broken]
        advice = "mend what the reasons say, and create them again, or resume them"
        yield Finding("broken", "error", f"{len(rows)} timers do not run: {_listed(rows)}", advice)
    else:
        yield Finding("broken", "ok", "none")
    if census.damaged:
        found = f"{len(census.damaged)} can not be read: {_listed(census.damaged)}"
        advice = "create them again; what code declares comes back by itself"
        yield Finding("definitions", "error", found, advice)
    yield from _letters(store)


def _letters(store: Store) -> Iterator[Finding]:
    count = store.dead_count()
    if not count:
        yield Finding("dead letters", "ok", "none")
        return
    newest = Counter(row.get("reason") or "?" for _, row in store.dead_letters(0, 100))
    reasons = ", ".join(f"{number} {reason}" for reason, number in newest.most_common())
    advice = "look at them (celery dtimer dead list); requeue or purge them"
    yield Finding("dead letters", "warning", f"{count}; of the newest: {reasons}", advice)


# ------------------------------------------------------------------ broker and workers


def examine_broker(
    app: Celery, tasks: Mapping[str, Sequence[str]], timeout: float, seconds: float
) -> list[Finding]:
    """Return what is found of an app's broker, and of the workers behind it.

    Args:
        app: whose broker it is.
        tasks: what timers send, with the names of the timers.
        timeout: seconds that a call to the broker may take.
        seconds: that workers have to answer; 0 to ask none.
    """
    publisher = Publisher(app, timeout=timeout)
    try:
        down = publisher.connect()
        if down is not None:
            advice = "see that it runs and can be reached; runs wait meanwhile"
            return [Finding("broker", "error", str(down), advice)]
        found = Finding("broker", "ok", f"{app.connection_for_write().as_uri()} answers")
        return [found, *_workers(publisher, tasks, seconds)]
    except DistributedTimerError as exc:
        return [Finding("broker", "error", str(exc), "see the broker's settings")]
    finally:
        publisher.close()


def _workers(
    publisher: Publisher, tasks: Mapping[str, Sequence[str]], seconds: float
) -> Iterator[Finding]:
    if not seconds:
        yield Finding("tasks", "ok", "the workers were not asked")
        return
    try:
        answers = publisher.registered(seconds)
    except Exception as exc:  # whatever the client of the broker raises: not all can be asked
        yield Finding("tasks", "ok", f"the workers can not be asked: {exc!r}")
        return
    if answers is None:
        yield Finding("tasks", "ok", f"no worker has answered within {seconds:g} s")
        return
    known = {task.partition(" ")[0] for worker in answers.values() for task in worker}
    unknown = {
        task: names
        for task, names in tasks.items()
        if task not in known and not task.startswith("celery.")
    }
    if unknown:
        rows = [f"{shown(task)} ({_listed(names)})" for task, names in sorted(unknown.items())]
        found = f"none of the {len(answers)} workers knows {_listed(rows)}"
        advice = "start workers that import them, or mend the names"
        yield Finding("tasks", "warning", found, advice)
    else:
        yield Finding("tasks", "ok", f"{len(answers)} workers know what the timers send")


def _listed(names: Iterable[str]) -> str:
    """Return the first names, and how many others there are."""
    names = list(names)
    others = len(names) - _NAMED
    first = ", ".join(islice(names, _NAMED))
    return f"{first} and {others} more" if others > 0 else first
