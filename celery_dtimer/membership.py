"""Membership: may this instance dispatch, and until when; failover when others are gone.

States of an instance::

    (nothing) --register--> active --leave--> leaving --last timer handed over--> (gone)
                              |
                              +-- no heartbeat for the timeout --> dead --last timer moved--> (gone)

A registration has an epoch; whoever acts for an instance names it, and is *fenced* once it is over.
Only `Membership` registers, from its own thread and on its own connection. The lease that it keeps
says what the dispatch loop may rely on; any doubt (an exception, a time-out) means "not owner".

The heartbeat is tied to the progress of the loop: it is sent only while the loop has reported
progress lately. So an instance that hangs silently loses its timers, and one with a slow broker
does not.

Not promised: that an instance which lost its timers knows it at once. That is what the epoch and
the commit's comparison are for.

The loop also reports how it dispatches and whether its broker works; the instance's hash says so.
An instance without a broker keeps its heartbeats and its timers, until its broker has been down for
`Settings.give_up_after` and another instance says that its own works: then it gives its timers up,
stays registered, and gets its share again once its broker is back.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from celery.utils.dispatch import Signal

from celery_dtimer.errors import (
    DamagedError,
    DistributedTimerError,
    FencedError,
    SchemaError,
    StoreError,
    StoreUnavailableError,
)
from celery_dtimer.faults import point
from celery_dtimer.meters import Meters
from celery_dtimer.model import Lease, to_datetime
from celery_dtimer.precautions import PARAMETERS, Risk, risks
from celery_dtimer.runs import LostRuns
from celery_dtimer.scrubbing import PARTS, Scrubber
from celery_dtimer.settings import Settings
from celery_dtimer.signals import failover, instance_joined, instance_left, tell
from celery_dtimer.store import BATCH, Heartbeat, Moved, Replay, Store

logger = logging.getLogger(__name__)

#: Percent of a share that loads may drift apart without a timer being moved.
DRIFT = 10

_MARGIN = 0.9  # of the timeout: local trust ends before the server's does
_FIRST_RETRY, _LAST_RETRY = 0.1, 2.0  # seconds between two tries to reach Redis
_CLOCK_ID = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_QUICK = 0.1  # seconds that a call may take from which the server's time is told
_DRIFT_MS = 250  # by which a clock may drift before that is written again
_SLACK = 0.005  # seconds after another's expiry at which it is looked at


def clock() -> float:
    """Return seconds of a clock that counts suspension where there is one."""
    return time.clock_gettime(_CLOCK_ID)


@dataclass(frozen=True, slots=True)
class Identity:
    """What an instance says of itself when it registers."""

    instance: str
    host: str
    port: int
    version: str
    dispatch: str = ""  #: the mode in force, when it is known before the loop reports it

    def fields(self, service: str) -> dict[str, str | int]:
        """Return the fields of the instance's hash."""
        return {
            "service": service,
            "host": self.host,
            "port": self.port,
            "version": self.version,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What the loop of an instance says of its dispatch and its broker."""

    dispatch: str = ""
    dispatch_reason: str = ""
    broker: str = ""  #: up, down, or "" before it is known
    clock_offset_ms: int | None = None  #: of this host's clock, ahead of the server's
    down_since: float | None = None  #: by the membership's clock
    unreplicated: int = 0  #: commits that have reached too few replicas

    def with_broker(self, is_up: bool, now: float) -> Report:
        """Return the report with what is known of the broker; an outage keeps its start."""
        broker = "up" if is_up else "down"
        if broker == self.broker:
            return self
        return replace(self, broker=broker, down_since=None if is_up else now)

    def fields(self) -> dict[str, str]:
        """Return the fields of the instance's hash."""
        return {
            "dispatch": self.dispatch,
            "dispatch_reason": self.dispatch_reason,
            "broker": self.broker,
            "unreplicated": str(self.unreplicated),
            "clock_offset_ms": "" if self.clock_offset_ms is None else str(self.clock_offset_ms),
        }


def local_host() -> str:
    """Return the name of this host."""
    return socket.gethostname()


class Membership:
    """Registers one instance, keeps its lease, and takes over from the dead, a `step` at a time."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        clock: Callable[[], float] = clock,
        wall_clock: Callable[[], float] = time.time,
        on_lease: Callable[[], None] = lambda: None,
        meters: Meters | None = None,
    ) -> None:
        """Prepare a membership; nothing is registered before the first `step`.

        Args:
            store: on a connection of its own.
            identity: who registers.
            clock: seconds of a clock that counts suspension.
            wall_clock: what this host shows, in seconds since the epoch; it decides nothing.
            on_lease: called when the lease is new, or the membership of the service changed.
            meters: count failovers and what goes wrong.
        """
        self._store = store
        self._settings: Settings = store.settings
        self._identity = identity
        self._clock = clock
        self._wall_clock = wall_clock
        self._on_lease = on_lease
        self._lease: Lease | None = None
        self._epoch = 0  # of the last registration
        self._refused_epoch = 0
        self._registered = -math.inf  # when that was last,
        self._register_after = 0.0  # and when it may be again
        self._stalled_after = clock() + self._settings.call_timeout
        self._next_check = 0.0
        self._scrubber = Scrubber(store)
        self._can_scrub = True
        self._said: list[Risk] = []
        self._meters = meters or Meters()
        self._lost = LostRuns(store, lambda: self._meters.count("failed", label="lost"))
        self._committed = 0, 0  # the epoch and the number of the last commit that was confirmed
        self._is_short = False  # that one had too few replicas
        self._replays = 0  # spans of this registration that were told
        self._heard = 0.0, 0  # when the last heartbeat was sent, and the server's time then
        self._look_for_lost_after = 0.0
        self._must_rebalance = False
        self._reporting = threading.Lock()
        self._report = self._stored_report = Report(identity.dispatch)
        #: Whether lost runs are looked for: not while timers are moved to other shards.
        self.looks_for_lost = True
        #: Set when a step is due before its time.
        self.attention = threading.Event()
        #: Says whether the last step has failed: an outage is logged already.
        self.is_cut_off = False

    # -- what the loop sees

    @property
    def lease(self) -> Lease | None:
        """The lease that is valid now, or None: then nothing may be dispatched."""
        lease = self._unrefused
        return lease if lease is not None and lease.is_valid(self._clock()) else None

    @property
    def _unrefused(self) -> Lease | None:
        """The lease of a registration that no server has refused; its time may be over."""
        lease = self._lease
        return None if lease is None or lease.epoch <= self._refused_epoch else lease

    @property
    def told(self) -> Report:
        """What the loop has said last of its dispatch and its broker."""
        return self._report

    @property
    def silence(self) -> float | None:
        """The seconds since the last heartbeat that was answered; None before the first."""
        heard, heard_ms = self._heard
        return self._clock() - heard if heard_ms else None

    def may_act(self, lease: Lease) -> bool:
        """Say whether a lease may still be acted on: its epoch is current and trusted."""
        current = self.lease
        return current is not None and current.epoch == lease.epoch

    @property
    def is_stalled(self) -> bool:
        """Say whether the loop has made no progress for longer than it may."""
        return self._clock() > self._stalled_after

    def report_progress(self, wait: float = 0.0) -> None:
        """Note that the loop is alive, and may be silent for ``wait`` seconds and one call."""
        self._stalled_after = self._clock() + wait + self._settings.call_timeout

    def report_fenced(self, epoch: int) -> None:
        """Note that an epoch is over: a newer registration is needed."""
        self._note_fenced(epoch)
        self.attention.set()

    def _note_fenced(self, epoch: int) -> None:
        with self._reporting:  # the loop and the thread may both find out
            if epoch > self._refused_epoch:
                self._refused_epoch = epoch
                self._meters.count("fenced")

    def report_stale(self) -> None:
        """Note that the loop has met a server that lacks a heartbeat: the next one is to tell."""
        self.attention.set()

    def report_commit(self, epoch: int, sequence: int, is_short: bool) -> None:
        """Note the last commit that was confirmed, and whether too few replicas have it."""
        self._committed = epoch, sequence
        if is_short:
            self._meters.count("unreplicated_commits")
            with self._reporting:  # the next heartbeat tells it
                report = self._report
                self._report = replace(report, unreplicated=report.unreplicated + 1)
        if is_short and not self._is_short:
            logger.warning(
                "Instance %s: a commit has not reached dtimer_wait_replicas=%s replicas in time; "
                "it stays, and is not sent again",
                self._identity.instance,
                self._settings.wait_replicas,
            )
        elif self._is_short and not is_short:
            logger.info("Instance %s: commits reach their replicas again", self._identity.instance)
        self._is_short = is_short

    def report_damage(self) -> None:
        """Note that a key is of another type: it is looked for at once."""
        self._next_check = 0.0
        self.attention.set()

    def report_dispatch(self, mode: str, reason: str) -> None:
        """Note the mode of dispatch that is in force, and why."""
        with self._reporting:
            self._keep_report(replace(self._report, dispatch=mode, dispatch_reason=reason))

    def report_broker(self, is_up: bool) -> None:
        """Note whether the broker works."""
        with self._reporting:
            if not is_up and self._report.broker != "down":
                self._meters.count("broker_outages")
            self._keep_report(self._report.with_broker(is_up, self._clock()))

    def _keep_report(self, report: Report) -> None:
        if report != self._report:
            self._report = report
            self.attention.set()

    # -- what the thread does

    def step(self) -> float:
        """Register or send a heartbeat, then look for the dead; return the seconds to wait.

        Raises:
            SchemaError: what is stored is of a newer version; this instance does nothing.
            StoreError: Redis did not answer, or refused; the lease runs out by itself.
        """
        try:
            return self._step()
        except DamagedError:
            if not self._scrubber.mend():
                raise
            self._next_check = 0.0
            return 0.0
        except SchemaError:
            self._lease = None  # a newer version has taken over: nothing is to be touched
            raise

    def _step(self) -> float:
        if self._gives_up_stalled():
            return self._settings.heartbeat_interval / 4
        until_registration = self._register_after - self._clock()
        if until_registration > 0 and self._unrefused is None:
            return until_registration
        heartbeat = self._renew()
        if heartbeat is None:
            return 0.0
        point("in_the_heartbeat")
        self._store_report()
        until_give_up = self._give_up()
        started = self._clock()
        until_expiry = self._seconds_until(heartbeat)
        if started >= self._next_check or until_expiry <= 0 or self._must_rebalance:
            until_expiry = self._check_others()
        now = self._clock()
        until_check = max(0.0, self._next_check - now)
        until_heartbeat = max(0.0, self._heard[0] + self._settings.heartbeat_interval - now)
        waits = [until_heartbeat, until_check, max(until_expiry, _SLACK)]
        waits.append(until_give_up)
        if self._must_rebalance:
            waits.append(self._settings.heartbeat_interval / 4)
        return min(waits)

    def _gives_up_stalled(self) -> bool:
        """Say whether the loop is stalled; then there is no lease any more."""
        stalled = self.is_stalled
        if stalled and self._lease is not None:
            logger.error(
                "Instance %s: the dispatch loop makes no progress; its timers go to others",
                self._identity.instance,
            )
            self._lease = None
        return stalled

    def _renew(self) -> Heartbeat | None:
        """Return the answer to a heartbeat, or None when there is no registration to renew."""
        started = self._clock()
        lease = self._unrefused
        if lease is None:
            lease = self._register(started)
        epoch, sequence = self._committed
        try:
            heartbeat = self._store.heartbeat(
                lease.instance,
                lease.epoch,
                heartbeat_ms=lease.heartbeat_ms,
                sequence=sequence if epoch == lease.epoch else None,
            )
        except FencedError:
            logger.warning(
                "Instance %s: epoch %s is over; registering anew", lease.instance, lease.epoch
            )
            self._note_fenced(lease.epoch)
            self._lease = None
            return None
        self._tell_replay(heartbeat.replay)
        self._look_at_clocks(started, heartbeat.now_ms)
        self._compare_clocks(started, heartbeat.now_ms)
        changed = heartbeat.members != lease.members or self._lease is not lease
        self._lease = replace(
            lease,
            trusted_until=started + _MARGIN * self._settings.instance_timeout,
            heartbeat_ms=heartbeat.now_ms,
            members=heartbeat.members,
        )
        if changed:
            self._on_lease()
        return heartbeat

    def _tell_replay(self, replay: Replay) -> None:
        """Log it, once, when Redis has lost what it had confirmed."""
        if replay.times > self._replays:
            self._meters.count("replays", replay.times - self._replays)
            logger.warning(
                "Instance %s: Redis has lost what it confirmed from %s until %s (a failover, or a "
                "restart): runs that were sent then may be sent again",
                self._identity.instance,
                to_datetime(replay.from_ms).isoformat(timespec="milliseconds"),
                to_datetime(replay.until_ms).isoformat(timespec="milliseconds"),
            )
        self._replays = replay.times

    def _look_at_clocks(self, started: float, now_ms: int) -> None:
        """Give workers time to renew their runs' leases after an outage, or a jump of the clock."""
        heard, heard_ms = self._heard
        lease, passed = self._settings.run_lease, started - heard
        jump = abs((now_ms - heard_ms) / 1000 - passed)
        if max(passed - self._settings.heartbeat_interval, jump) > lease / 3:  # at the start too
            self._look_for_lost_after = started + lease / 2
        self._heard = started, now_ms

    def _compare_clocks(self, started: float, now_ms: int) -> None:
        """Note by how much this host's clock is ahead of the server's, for people to see."""
        took = self._clock() - started
        offset_ms = round((self._wall_clock() - took / 2) * 1000) - now_ms
        with self._reporting:
            known_ms = self._report.clock_offset_ms
            if took < _QUICK and (known_ms is None or abs(offset_ms - known_ms) > _DRIFT_MS):
                self._report = replace(self._report, clock_offset_ms=offset_ms)

    def _register(self, started: float) -> Lease:
        identity, report = self._identity, self._report
        fields = {**identity.fields(self._settings.service), **report.fields()}
        fields["settings"] = json.dumps(self._settings.shared)
        answer = self._store.register(identity.instance, fields, former=self._epoch)
        if self._epoch and not answer.last_epoch:
            logger.warning(
                "Redis knows nothing of service %s any more: its data are lost",
                self._settings.service,
            )
        self._epoch, self._replays = answer.epoch, 0
        # Refused again and again, the loop and this speak to two servers: that takes its time.
        now, interval = self._clock(), self._settings.heartbeat_interval
        self._register_after = now + interval / 4 if now - self._registered < interval else 0.0
        self._registered = now
        self._stored_report = report
        self._must_rebalance = True
        self._next_check = 0.0
        logger.info(
            "Instance %s: registered with service %s, epoch %s",
            identity.instance,
            self._settings.service,
            answer.epoch,
        )
        self._tell(instance_joined, instance=identity.instance, epoch=answer.epoch)
        if self._store.keys.shard in ("", "0"):  # said once, of how many shards ever
            self._say_risks()
        trusted_until = started + _MARGIN * self._settings.instance_timeout
        return Lease(identity.instance, answer.epoch, trusted_until, answer.now_ms, answer.members)

    def _say_risks(self) -> None:
        """Say what the server's configuration may cost, unless that has been said of it."""
        is_embedded = self._settings.redis_url.startswith("embedded:")
        found = risks(self._store.configuration(PARAMETERS), is_embedded=is_embedded)
        if found != self._said:
            for risk in found:
                logger.log(risk.level, "%s", risk)
        self._said = found

    def _store_report(self) -> None:
        """Write what the loop has reported since the last step."""
        lease, stored, report = self._lease, self._stored_report.fields(), self._report
        changed = {name: value for name, value in report.fields().items() if value != stored[name]}
        if lease is None or not changed:
            return
        self._store.report(lease.instance, lease.epoch, changed)
        self._stored_report = report
        if stored["broker"] == "down" and report.broker == "up":
            self._must_rebalance = True  # it was left out meanwhile

    def _give_up(self) -> float:
        """Give the timers up when the broker is down for long; return the seconds until a try."""
        interval, down_since = self._settings.heartbeat_interval, self._report.down_since
        if down_since is None:
            return interval
        remaining = down_since + self._settings.give_up_after - self._clock()
        if remaining > 0:
            return remaining
        count, is_busy = self._give_up_batches(down_since)
        if count:
            logger.warning(
                "Instance %s: broker unreachable for %.0f s here while other instances reach it: "
                "%s timers given up",
                self._identity.instance,
                self._clock() - down_since,
                count,
            )
        return interval / 4 if is_busy else interval

    def _give_up_batches(self, down_since: float) -> tuple[int, bool]:
        """Return how many timers were given up, and whether another mover stopped it."""
        lease, given_up = self._lease, 0
        while lease is not None and self._report.down_since == down_since:
            moved = self._store.give_up(lease.instance, lease.epoch)
            given_up += moved.count
            if moved.busy or not moved.more:
                return given_up, moved.busy
            lease = self._kept_lease()
        return given_up, False

    def _seconds_until(self, heartbeat: Heartbeat | Moved) -> float:
        """Return the seconds until another is dead; the server's clock is compared with itself."""
        expiry_ms = heartbeat.next_expiry_ms
        if expiry_ms is None or self._lease is None:
            return self._settings.instance_timeout
        now_ms = heartbeat.now_ms if isinstance(heartbeat, Heartbeat) else self._lease.heartbeat_ms
        return (expiry_ms - now_ms) / 1000 + _SLACK if expiry_ms else 0.0

    def _check_others(self) -> float:
        """Take over from the dead and even out; return the seconds until the next death."""
        self._next_check = self._clock() + self._settings.failure_check_interval
        until_expiry = self._fail_over()
        self._kept_lease()  # where Redis is slow, a heartbeat is due in between
        self._rebalance()
        self._kept_lease()
        self._tidy()
        return until_expiry

    def _fail_over(self) -> float:
        lease = self._lease
        moved_in_all = 0
        reaped: list[str] = []
        while lease is not None:
            moved = self._store.reap(lease.instance, lease.epoch)
            moved_in_all += moved.count
            reaped += moved.reaped
            for silent_ms in moved.silent_ms:
                self._meters.observe_failover(silent_ms / 1000)
            for dead in moved.reaped:
                logger.warning("Failover: instance %s is dead; its timers have moved", dead)
                self._tell(instance_left, instance=dead, is_dead=True)
            if moved.busy or not moved.more:
                break
            lease = self._kept_lease()
        if moved_in_all:
            self._meters.count("failover_timers", moved_in_all)
            logger.info("Failover: %s timers moved to live instances", moved_in_all)
        if moved_in_all or reaped:
            own = self._identity.instance
            self._tell(failover, instance=own, dead=tuple(reaped), timers=moved_in_all)
        if moved.busy:
            return self._settings.heartbeat_interval / 4
        until_expiry = self._seconds_until(moved)
        return until_expiry if until_expiry > 0 else self._settings.heartbeat_interval / 4

    def _rebalance(self) -> None:
        lease, joined, moved_in_all = self._lease, self._must_rebalance, 0
        while lease is not None:
            moved = self._store.rebalance(lease.instance, lease.epoch, 0 if joined else DRIFT)
            moved_in_all += moved.count
            if not moved.count:
                self._must_rebalance = joined and (moved.busy or moved.more)
                break
            lease = self._kept_lease()
        if moved_in_all:
            logger.info("Rebalance: %s timers moved", moved_in_all)

    def _tell(self, signal: Signal, **arguments: object) -> None:
        """Send a signal: from another thread, since heartbeats wait for nobody."""
        tell(signal, self._settings.service, **arguments)

    def _kept_lease(self) -> Lease | None:
        """Return the lease after many batches: a heartbeat comes first when one is due."""
        lease = self._lease
        trusted_for = 0.0 if lease is None else lease.trusted_until - self._clock()
        if (
            trusted_for
            < _MARGIN * self._settings.instance_timeout - self._settings.heartbeat_interval
        ):
            self._renew()
        return self._lease

    def _tidy(self) -> None:
        """Look for lost runs, repair a window of the queue, remove one-shots that ran long ago."""
        lease = self._kept_lease()
        if lease is None:
            return
        lease = self._scrub(lease) and self._kept_lease()
        self._store.purge()
        lease = self._kept_lease()
        if self._clock() < self._look_for_lost_after or not self.looks_for_lost:
            return
        try:
            while lease is not None and self._lost.step(lease) >= BATCH:
                lease = self._kept_lease()
        except StoreUnavailableError:
            raise
        except StoreError as exc:  # edited by hand: nothing else is to wait for it
            logger.error("Lost runs can not be looked for: %s", exc)

    def _scrub(self, lease: Lease) -> Lease | None:
        """Look at a part of what is stored, at all of it where something is wrong."""
        current: Lease | None = lease
        is_damaged = False
        try:
            for _ in range(PARTS):
                if current is not None:
                    is_damaged = self._scrubber.step(current) or is_damaged
                if current is None or not is_damaged or self._scrubber.is_through:
                    break
                current = self._kept_lease()
        except StoreUnavailableError:
            raise
        except StoreError as exc:  # for lack of a permission, say: nothing else is to wait for it
            if self._can_scrub:
                logger.error("What is stored can not be looked through: %s", exc)
            self._can_scrub = False
        else:
            self._can_scrub = True
        if is_damaged:
            self.attention.set()  # what has no owner by now is to get one
        return current


class MembershipThread(threading.Thread):
    """Calls `Membership.step` when it is time, and logs an outage once."""

    def __init__(self, membership: Membership, name: str = "dtimer-membership") -> None:
        """Prepare the thread; `start` runs it."""
        super().__init__(name=name, daemon=True)
        self._membership = membership
        self._stopped = threading.Event()

    def run(self) -> None:
        """Step until stopped; failures are retried with growing waits."""
        failures = 0
        while not self._stopped.is_set():
            try:
                wait = self._membership.step()
                self._membership.is_cut_off = False
                if failures:
                    logger.info("Membership: Redis answers again")
                failures = 0
            except FencedError:
                wait = 0.0
            except DistributedTimerError as exc:
                failures += 1
                if failures == 1:
                    logger.error("Membership: %s; trying again until it answers", exc)
                self._membership.is_cut_off = True
                wait = min(_LAST_RETRY, _FIRST_RETRY * 2 ** min(failures, 8))
            except Exception:
                failures += 1
                logger.exception("Membership: unexpected failure; trying again")
                wait = _LAST_RETRY
            self._membership.attention.wait(wait)
            self._membership.attention.clear()

    def stop(self, timeout: float) -> None:
        """End the thread, waiting at most ``timeout`` seconds for a call in flight."""
        self._stopped.set()
        self._membership.attention.set()
        if self.is_alive():
            self.join(timeout)


def leave(store: Store, lease: Lease, *, until: float) -> int:
    """Hand over an instance's timers and end its registration; return how many moved.

    Args:
        store: on a connection that nobody else has used.
        lease: the instance and its epoch.
        until: when to give up, by `time.monotonic`: what is left then is taken by the failure
            check.
    """
    moved_in_all = 0
    while time.monotonic() < until:
        moved = store.leave(lease.instance, lease.epoch)
        moved_in_all += moved.count
        if not moved.more:
            break
    return moved_in_all
