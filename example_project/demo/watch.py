"""The demo's view of the service: its beats, their timers, and the runs that workers have ended."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import redis

from celery_dtimer import DistributedTimer, Instance, Timer
from example_project.demo.recorder import RUNS
from example_project.demo.verdict import Account, SeenRun


@dataclass(frozen=True)
class Beat:
    """A beat process of the demo, and what it owns now."""

    name: str
    pid: int
    state: str
    heartbeat_age: timedelta | None
    timers: tuple[str, ...]
    sent: int


@dataclass(frozen=True)
class View:
    """One look at the service."""

    beats: tuple[Beat, ...]
    unowned: tuple[str, ...]  #: active timers that no beat owns
    runs: tuple[SeenRun, ...]  #: all that have ended, in order


@dataclass
class Watch:
    """Looks at the service, and remembers what it saw."""

    timers: DistributedTimer
    beat_names: dict[int, str] = field(default_factory=dict)  #: by process id, in order
    killed: set[int] = field(default_factory=set)  #: process ids
    runs: list[SeenRun] = field(default_factory=list)
    _known: dict[str, Timer] = field(default_factory=dict)
    _deleted: set[str] = field(default_factory=set)
    _server: redis.Redis = field(default_factory=redis.Redis)

    def connect(self, url: str) -> None:
        """Look at this server from now on."""
        self._server = redis.Redis.from_url(url)

    def look(self) -> View:
        """Return what is to be seen now."""
        instances = {instance.port: instance for instance in self.timers.get_service_instances()}
        owned: dict[str | None, list[str]] = {}
        for timer in self.timers.get_timers(status="active"):
            self._known.setdefault(timer.id, timer)
            owned.setdefault(timer.instance, []).append(timer.name)
        self._read_runs()
        sent = Counter(_pid(run.instance) for run in self.runs)
        beats = [self._beat(pid, instances.get(pid), owned, sent[pid]) for pid in self.beat_names]
        nobodys = sorted(owned.get(None, ()))
        return View(tuple(beats), tuple(nobodys), tuple(self.runs))

    def now(self) -> datetime:
        """Return the server's time, the only clock that counts."""
        seconds, micros = self._server.time()
        moment = datetime.fromtimestamp(seconds, self.timers.app.timezone)
        return moment + timedelta(microseconds=micros)

    def owned_by(self, pid: int) -> list[Timer]:
        """Return the timers of the beat with a process id."""
        for instance in self.timers.get_service_instances():
            if instance.port == pid:
                return self.timers.get_timers(instance=instance.id)
        return []

    def is_queue_empty(self) -> bool:
        """Say whether no message waits for a worker."""
        queue = self.timers.app.conf.task_default_queue
        return not (self._server.llen(queue) or self._server.hlen("unacked"))

    def forget(self, timer_id: str) -> None:
        """Note that a timer was deleted: from now on none of its runs is expected."""
        self._deleted.add(timer_id)

    def accounts(self, until: datetime) -> list[Account]:
        """Return what each timer should have done until a moment, and what it counts as skipped."""
        found = {timer.id: timer for timer in self.timers.get_timers()}
        known = {**found, **self._known}
        return [
            Account(
                timer_id=id,
                name=timer.name,
                schedule=None if id in self._deleted else timer.schedule,
                created_at=timer.created_at,
                until=_until(found.get(id), until),
                skipped=found[id].skipped if id in found else 0,
            )
            for id, timer in known.items()
        ]

    def _read_runs(self) -> None:
        records = self._server.lrange(RUNS, len(self.runs), -1)
        self.runs += [SeenRun.from_record(json.loads(record)) for record in records]

    def _beat(
        self,
        pid: int,
        instance: Instance | None,
        owned: dict[str | None, list[str]],
        sent: int,
    ) -> Beat:
        state = "killed" if pid in self.killed else "running" if instance else "starting"
        age = self.now() - instance.heartbeat_at if instance else None
        timers = sorted(owned.get(instance.id, ())) if instance else ()
        return Beat(self.beat_names[pid], pid, state, age, tuple(timers), sent)


def _pid(instance: str) -> int:
    return int(instance.split(":")[1])


def _until(timer: Timer | None, until: datetime) -> datetime:
    """Return when the last slot to be counted has passed: what was sent beyond ``until`` counts."""
    if timer is None or timer.next_run_at is None:
        return until
    return max(until, timer.next_run_at)
