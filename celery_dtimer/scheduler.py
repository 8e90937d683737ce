"""The ``celery.beat`` scheduler: wires the parts together and runs them.

Three threads work for an instance in each shard of its service: the loop dispatches, the membership
keeps the lease, and the listener hears wake-ups. One more follows the layout of the shards. `tick`,
in the thread that Celery's beat gives us, only waits: Celery's signal handler may interrupt that
thread at any point, and must not find it in the middle of a request to Redis or to the broker.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from celery import Celery, beat, signals
from celery.beat import Scheduler
from celery.utils.nodenames import gethostname, nodename

from celery_dtimer import events, metrics, planning, urls
from celery_dtimer.allowed import AllowedTasks
from celery_dtimer.atomic import ATOMIC, ON_A_CLUSTER, Atomic, obstacle, refusal
from celery_dtimer.declarations import Declaration, StaticSchedule, declaration_of, declared
from celery_dtimer.dispatcher import Dispatcher, Pass, StaleServerError
from celery_dtimer.errors import (
    DamagedError,
    DistributedTimerError,
    FencedError,
    SettingsError,
    StoreUnavailableError,
)
from celery_dtimer.keywords import source_of
from celery_dtimer.masking import masked
from celery_dtimer.membership import Identity, Membership, MembershipThread, leave, local_host
from celery_dtimer.meters import Meters
from celery_dtimer.model import Lease, new_instance_id, process_instance_id
from celery_dtimer.publisher import Publisher
from celery_dtimer.settings import Settings
from celery_dtimer.sharding import Shards, shards_of
from celery_dtimer.signals import instance_left
from celery_dtimer.store import Layout, LayoutChangedError, Store
from celery_dtimer.version import __version__

logger = logging.getLogger(__name__)

_HELD_BACK = 0.00025  # seconds that runs wait for others, for each run that the last pass sent
_LONGEST_WAIT = 1.0  # seconds that a turn of the loop, or a tick, waits at most
_FAILURES_UNTIL_SAID = 3  # in a row, of calls to a Redis that answers the membership
_RECONCILE_AGAIN = 5.0  # seconds until a static schedule that could not be stored is tried again
_LAYOUT_AGAIN = 0.5  # and when another layout was not read yet
_LEAVE_WITHIN = 1.5  # seconds that an instance takes to go, whatever state its servers are in
_LEAVE_AT_LAST = 1.6  # seconds after which nobody waits for it any more
_GLANCE = 0.005  # seconds between two looks whether it has gone
_LAST_EVENTS_WITHIN = 0.3  # seconds that events have to go out
_SHORTEST_FAREWELL = 0.1  # seconds that Celery's remote control has to end


class Loop:
    """The dispatch loop of one instance; `step` is one turn."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        membership: Membership,
        static: StaticSchedule,
        *,
        longest_wait: float,
        resolution: float = 0.0,
        reaches_broker: Callable[[], bool] = lambda: True,
        on_layout: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare a loop.

        Args:
            dispatcher: fires what is due.
            membership: has the lease.
            static: brings the static schedule up to date.
            longest_wait: bounds the seconds that `step` waits for timers.
            resolution: bounds the seconds that runs are held back to go out together.
            reaches_broker: asked after an outage while no run is due that would tell.
            on_layout: called when the service is found to be given other shards.
            clock: monotonic seconds.
        """
        self._dispatcher = dispatcher
        self._reaches_broker = reaches_broker
        self._membership = membership
        self._static = static
        self._longest_wait = longest_wait
        self._resolution = resolution
        self._on_layout = on_layout
        self._reconciled: tuple[int, int] | None = None
        self._clock = clock
        self._not_before = 0.0
        self._reconcile_after = 0.0
        self._broker_failures = 0
        self._store_failures = 0
        self._has_said_waiting = False
        self._sent = 0
        self._say_sent_at = 0.0

    def step(self) -> float:
        """Dispatch what is due; return the seconds to wait unless a wake-up comes first."""
        lease = self._membership.lease
        pause = self._not_before - self._clock()
        if lease is None or pause > 0:
            return self._waiting(self._longest_wait if lease is None else pause)
        try:
            has_more = self._reconcile(lease)
            done = self._dispatcher.step(lease)
        except FencedError:
            logger.warning("Epoch %s is over: dropping what it held", lease.epoch)
            self._membership.report_fenced(lease.epoch)
            return self._waiting(self._longest_wait)
        except SettingsError:
            raise
        except DistributedTimerError as exc:
            if isinstance(exc, StaleServerError):
                self._membership.report_stale()
            self._store_failures += 1
            self._say_waiting(exc)
            if isinstance(exc, DamagedError):
                self._membership.report_damage()
            return self._backing_off(self._store_failures)
        self._store_failures, self._has_said_waiting = 0, False
        self._say_sent(lease, done.sent)
        return self._after(replace(done, more=True) if has_more else done)

    def look_ahead(self, seconds: float) -> bool:
        """Use spare time for timers that come due soon; say whether there is more to do."""
        lease = self._membership.lease
        if lease is None or self._store_failures or self._broker_failures:
            return False
        until = self._clock() + seconds
        try:
            return self._dispatcher.look_ahead(lease, seconds)
        except DistributedTimerError as exc:  # the next turn meets it too, if it lasts
            logger.debug("No look at what comes due soon: %s", exc)
            return False
        finally:  # a call that took all of its time is followed by another one
            self._waiting(max(0.0, until - self._clock()))

    def settle(self, lease: Lease) -> None:
        """Commit what was published and not committed yet."""
        self._dispatcher.settle(lease)

    def reconcile_again(self) -> None:
        """Bring the static schedule up to date in the next step, though the lease is as it was."""
        self._reconciled, self._reconcile_after = None, 0.0

    def _reconcile(self, lease: Lease) -> bool:
        """Bring the static schedule up to date; when that alone fails, dispatch goes on.

        Returns:
            whether a part of that is still to be done.
        """
        seen = (lease.epoch, lease.members)
        if self._clock() < self._reconcile_after:
            return False
        try:
            if seen != self._reconciled:
                self._static.reconcile(lease)
                self._reconciled = seen
            return self._static.step(lease)
        except (FencedError, StoreUnavailableError):
            raise
        except LayoutChangedError:
            self._on_layout()
            self._reconciled, self._reconcile_after = None, self._clock() + _LAYOUT_AGAIN
        except DistributedTimerError as exc:
            logger.error("The static schedule could not be stored, trying again: %s", exc)
            self._reconciled, self._reconcile_after = None, self._clock() + _RECONCILE_AGAIN
        return False

    def _say_waiting(self, exc: DistributedTimerError) -> None:
        """Log once that dispatch waits, unless the membership says why: Redis does not answer.

        It is asked to look. What only one connection, or one call, has met is soon over.
        """
        if isinstance(exc, StoreUnavailableError):
            self._membership.attention.set()
            if self._membership.is_cut_off or self._store_failures < _FAILURES_UNTIL_SAID:
                return
        if not self._has_said_waiting:
            self._has_said_waiting = True
            logger.warning("Dispatch waits: %s", exc)

    def _say_sent(self, lease: Lease, sent: int) -> None:
        """Log what was dispatched, once a second at most."""
        self._sent += sent
        now = self._clock()
        if self._sent and now >= self._say_sent_at:
            logger.info("Instance %s dispatched %s runs", lease.instance, self._sent)
            self._sent, self._say_sent_at = 0, now + 1.0

    def _after(self, done: Pass) -> float:
        is_heard = bool(done.sent or done.postponed)
        if done.broker_down or not (
            is_heard or not self._broker_failures or self._reaches_broker()
        ):
            self._broker_failures += 1
            if self._broker_failures == 1:
                logger.error("The broker does not answer: runs wait for it")
                self._membership.report_broker(False)
            return self._backing_off(self._broker_failures)
        if self._broker_failures:
            logger.info("The broker answers again")
        if self._broker_failures or is_heard:
            self._membership.report_broker(True)
        self._broker_failures = 0
        if done.more:
            return self._waiting(0.0)
        next_in = self._longest_wait if done.next_in is None else done.next_in
        # The more runs come, the longer they wait for each other: round trips stay bounded.
        together = min(self._resolution, done.sent * _HELD_BACK)
        self._not_before = self._clock() + together
        return self._waiting(min(max(next_in, together), self._longest_wait))

    def _backing_off(self, failures: int) -> float:
        """Wait whatever wakes the loop meanwhile."""
        delay = planning.retry_delay(failures)
        self._not_before = self._clock() + delay
        return self._waiting(delay)

    def _waiting(self, seconds: float) -> float:
        self._membership.report_progress(seconds)
        return seconds


class Runtime:
    """The running parts of one instance in one shard.

    `start` runs them, `stop` hands over and ends them.
    """

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        declaration: Declaration,
        instance: str,
        *,
        max_interval: float,
        shard: str = "",
        meters: Meters | None = None,
        on_layout: Callable[[], None] = lambda: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the parts; nothing is contacted before `start`.

        Args:
            app: whose broker is used.
            settings: of the service.
            declaration: what the code declares, for all shards.
            instance: the id of the instance.
            max_interval: bounds the seconds that the loop waits.
            shard: of the service, as it stands in keys.
            meters: count what the instance does, in all shards; None when nobody reads them.
            on_layout: called when the service is found to be given other shards.
            on_failure: called when the loop has failed.
        """
        self.settings = settings
        self.instance = instance
        self._shard = shard
        self._on_failure = on_failure
        identity = Identity(instance, local_host(), os.getpid(), __version__)
        self._woken = threading.Event()
        self._stopped = threading.Event()
        new_store = partial(Store, settings, shard=shard)
        if meters is not None:
            new_store = partial(new_store, on_call=meters.observe_call)
        self.membership = Membership(new_store(), identity, on_lease=self._woken.set, meters=meters)
        self._store = new_store()
        self._listening_store = Store(settings, shard=shard)
        self._publisher = Publisher(
            app, timeout=settings.broker_timeout, on_progress=self.membership.report_progress
        )
        dispatcher = Dispatcher(
            self._store,
            self._publisher,
            bound=declaration.bound,
            may_send=self.membership.may_act,
            mode=Atomic(
                app,
                self._store,
                self._publisher,
                instance=instance,
                on_mode=self.membership.report_dispatch,
                on_broker=self.membership.report_broker,
            ),
            allowed=AllowedTasks(settings.allowed_tasks, declaration.definitions.values()),
            on_progress=self.membership.report_progress,
            on_commit=self.membership.report_commit,
            meters=meters,
        )
        self._static = StaticSchedule(self._store, declaration, self.membership.report_progress)
        self._loop = Loop(
            dispatcher,
            self.membership,
            self._static,
            longest_wait=min(_LONGEST_WAIT, settings.check_interval, max_interval),
            resolution=settings.resolution,
            reaches_broker=lambda: self._publisher.connect() is None,
            on_layout=on_layout,
        )
        self._membership_thread = MembershipThread(self.membership)
        self._threads = [
            threading.Thread(target=self._run_loop, name="dtimer-loop", daemon=True),
            threading.Thread(target=self._run_listener, name="dtimer-listener", daemon=True),
        ]
        self.failure: BaseException | None = None

    def take(self, layout: Layout) -> None:
        """Go by a layout: it says what the shard has of the static schedule."""
        self._store.layout = layout.number
        self.membership.looks_for_lost = not layout.is_moving
        self._static.take(None if layout.is_moving else (self._shard, layout.shards))
        self._loop.reconcile_again()
        self._woken.set()

    def start(self) -> None:
        """Start the threads."""
        self._membership_thread.start()
        for thread in self._threads:
            thread.start()

    @property
    def is_stalled(self) -> bool:
        """Say whether the loop makes no progress: its timers go to others then."""
        return self.membership.is_stalled and not self._stopped.is_set()

    @property
    def may_dispatch(self) -> bool:
        """Say whether it is registered, and has a lease that is valid now."""
        return self.membership.lease is not None

    def stop(self) -> None:
        """Commit what was published and hand the timers over, in `_LEAVE_WITHIN` seconds."""
        until = time.monotonic() + _LEAVE_WITHIN
        lease = self.membership.lease  # it may run out while the loop ends
        self._stopped.set()
        self._woken.set()
        if self._threads[0].is_alive():  # a signal may have come while they were started
            self._threads[0].join(_LEAVE_WITHIN / 2)
        self._membership_thread.stop(max(0.0, until - time.monotonic()) / 3)
        lease = self.membership.lease or lease
        if lease is not None:
            self._leave(lease, until)
        if not self._threads[0].is_alive():
            self._publisher.close()

    def _leave(self, lease: Lease, until: float) -> None:
        # Its own connection: the others may be in the middle of a reply.
        store = Store(
            self.settings, shard=self._shard, timeout=max(0.1, (until - time.monotonic()) * 0.8)
        )
        try:
            moved = leave(store, lease, until=until)
            logger.info("Instance %s has left: %s timers handed over", lease.instance, moved)
            # From here: the thread that sends signals ends with the process.
            instance_left.send(sender=self.settings.service, instance=lease.instance, is_dead=False)
        except FencedError:
            logger.info("Instance %s had lost its registration before it left", lease.instance)
        except DistributedTimerError as exc:
            logger.warning(
                "Instance %s could not hand its timers over, the failure check will: %s",
                lease.instance,
                exc,
            )
        finally:
            store.close()

    def _run_loop(self) -> None:
        try:
            while not self._stopped.is_set():
                self._woken.clear()
                until = time.monotonic() + self._loop.step()
                while not self._woken.is_set():
                    spare = until - time.monotonic()
                    if spare <= 0 or not self._loop.look_ahead(spare):
                        break
                self._woken.wait(max(0.0, until - time.monotonic()))
            lease = self.membership.lease
            if lease is not None:
                self._loop.settle(lease)
        except DistributedTimerError as exc:
            logger.warning("The last commit failed: %s", exc)
        except BaseException as exc:
            logger.exception("The dispatch loop has failed")
            self.failure = exc
            self._stopped.set()
            self._on_failure()
        finally:
            self._store.close()

    def _run_listener(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                self._listening_store.listen(self.instance, self._woken.set, self._stopped)
                failures = 0
            except DistributedTimerError as exc:
                failures += 1
                logger.debug("The listener for wake-ups reconnects: %s", exc)
                self._stopped.wait(planning.retry_delay(failures))


class Runtimes:
    """The running parts of one instance in all shards of its service.

    A thread reads the layout of the shards, and again when that is found to have changed.
    """

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        declaration: Declaration,
        instance: str,
        *,
        max_interval: float,
    ) -> None:
        """Prepare; nothing is contacted before `start`. The arguments are those of `Runtime`."""
        self._settings = settings
        self.meters = None if settings.metrics_port is None else Meters()
        self._new_runtime = partial(
            Runtime,
            app,
            settings,
            declaration,
            instance,
            max_interval=max_interval,
            meters=self.meters,
            on_layout=self._on_layout,
            on_failure=self._on_failure,
        )
        self._shards = Shards(settings)
        self._runtimes: dict[str, Runtime] = {}
        self._following = threading.Lock()
        self._followed: Layout | None = None
        self._was_refused = False
        self._attention = threading.Event()
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dtimer-layout", daemon=True)

    def start(self) -> None:
        """Start the thread, which starts the others."""
        self._thread.start()

    def wait(self, timeout: float) -> None:
        """Wait until they stop, or for ``timeout`` seconds.

        Raises:
            BaseException: what ended one of them, if it failed.
        """
        self._stopped.wait(timeout)
        if self.failure is not None:
            raise self.failure

    @property
    def failure(self) -> BaseException | None:
        """What has ended one of them."""
        failures = [runtime.failure for runtime in list(self._runtimes.values())]
        return next((each for each in (self._failure, *failures) if each is not None), None)

    @property
    def memberships(self) -> list[Membership]:
        """Those of the shards that the instance takes part in now."""
        return [runtime.membership for runtime in list(self._runtimes.values())]

    @property
    def is_stalled(self) -> bool:
        """Say whether one of the loops makes no progress, or none of them may dispatch.

        One without a lease is no reason while others have theirs: its server is away, and to start
        the others again would not bring it back.
        """
        runtimes = list(self._runtimes.values())
        if self._stopped.is_set():
            return False
        return any(runtime.is_stalled for runtime in runtimes) or not any(
            runtime.may_dispatch for runtime in runtimes
        )

    def stop(self) -> None:
        """Commit what was published and hand the timers over, in `_LEAVE_WITHIN` seconds."""
        until = time.monotonic() + _LEAVE_WITHIN
        self._stopped.set()
        self._attention.set()
        with self._following:
            runtimes = list(self._runtimes.values())
        _stop_all(runtimes)
        if self._thread.is_alive():
            self._thread.join(max(0.0, until - time.monotonic()))

    def _on_layout(self) -> None:
        self._was_refused = True
        self._attention.set()

    def _layout(self) -> Layout:
        was_refused, self._was_refused = self._was_refused, False
        return self._shards.read_after_refusal() if was_refused else self._shards.read_layout()

    def _on_failure(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        failures = 0
        try:
            while not self._stopped.is_set():
                self._attention.clear()
                try:
                    self._follow(self._layout())
                    wait, failures = self._settings.failure_check_interval, 0
                except SettingsError:
                    raise
                except DistributedTimerError as exc:
                    failures += 1
                    if failures == 1 and not self._runtimes:  # else the membership says so
                        logger.error("Start: %s; trying again until it answers", exc)
                    wait = planning.retry_delay(failures)
                self._attention.wait(wait)
        except BaseException as exc:
            logger.error("The shards of the service can not be followed: %s", exc)
            self._failure = exc
            self._stopped.set()
        finally:
            self._shards.close()

    def _follow(self, layout: Layout) -> None:
        """Take part in the shards of a layout, and in no others."""
        if layout == self._followed:
            return
        active = shards_of(layout.shards, layout.wanted or layout.shards)
        with self._following:
            gone = [shard for shard in self._runtimes if shard not in active]
            leaving = [self._runtimes.pop(shard) for shard in gone]
            for shard in active:
                if self._stopped.is_set():
                    break
                known = self._runtimes.get(shard)
                if known is None:
                    runtime = self._runtimes[shard] = self._new_runtime(shard=shard)
                    runtime.take(layout)
                    runtime.start()
                else:
                    known.take(layout)
        self._followed = layout
        _stop_all(leaving)


def _stop_all(runtimes: list[Runtime]) -> None:
    """Stop several at once."""
    threads = [
        threading.Thread(target=runtime.stop, name="dtimer-leave-shard", daemon=True)
        for runtime in runtimes[1:]
    ]
    for thread in threads:
        thread.start()
    for runtime in runtimes[:1]:
        runtime.stop()
    for thread in threads:
        thread.join()


class DistributedScheduler(Scheduler):
    """A scheduler for ``celery beat`` of which any number of instances share one schedule.

    ``beat_scheduler = "celery_dtimer:DistributedScheduler"``, or ``celery beat -S dtimer``.
    """

    def __init__(
        self,
        app: Celery,
        *args: Any,
        lazy: bool = False,
        embedded: bool = False,
        service: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Read the settings and the static schedule; Redis is contacted by the first `tick`.

        Args:
            app: the Celery app.
            *args: as `celery.beat.Scheduler` takes them.
            lazy: set by Celery when it only wants `info` for its banner.
            embedded: the instance gets an id of its own, since one process may run several.
            service: a service to use in place of the app's own.
            **kwargs: as `celery.beat.Scheduler` takes them; ``schedule_filename`` is accepted and
                ignored.

        Raises:
            SettingsError: a setting cannot be used.
        """
        self.settings = Settings.from_app(app, service)
        self.instance = new_instance_id() if embedded else process_instance_id()
        self._owns_process = not embedded
        self._declaration = Declaration(source_of(app))
        self._runtime: Runtimes | None = None
        self._end_metrics: Callable[[], None] = lambda: None
        self._in_tick = False
        self._leaving = threading.Lock()
        self._closed = self._has_left = self._is_over = False
        self._hostname = _node_name(None)
        if not lazy:
            _check_connections(app, self.settings)
            metrics.check(self.settings)
            uid = f"{__name__}.{id(self)}"
            signals.beat_init.connect(self._on_beat_init, dispatch_uid=uid)
        super().__init__(app, *args, lazy=lazy, **kwargs)  # type: ignore[misc]

    def _on_beat_init(self, sender: Any = None, **_: Any) -> None:
        if sender.scheduler is self:
            self._hostname = _node_name(getattr(sender, "hostname", None))

    def setup_schedule(self) -> None:
        """Read the static schedule from the app, with Celery's own default entries."""
        entries = declared(self.app)
        self.install_default_entries(entries)
        entries.update(
            (name, entry) for name, entry in self.schedule.items() if name not in entries
        )
        self._declaration = declaration_of(self.app, self._declaration.source, entries)

    def tick(self, *_: Any, **__: Any) -> float:
        """Wait while the loop works; return 0, since all waiting is done here.

        While the loop hangs, or nothing may be dispatched for lack of a lease, it does not return:
        then Celery's remote control sees that this beat does not tick, and leaves pings unanswered.
        (A thread that Celery wants to end would wait for it; the main thread is told by a signal.)
        """
        self._in_tick = True
        try:
            if not self._closed:
                self.start()
                runtime = self._runtime
                assert runtime is not None  # noqa: S101 - start() has made it
                runtime.wait(min(_LONGEST_WAIT, self.max_interval or _LONGEST_WAIT))
                while runtime.is_stalled and _is_main_thread():
                    runtime.wait(_LONGEST_WAIT)
        finally:
            self._in_tick = False
        return 0.0

    def start(self) -> None:
        """Start to dispatch, unless that has been done."""
        if self._runtime is None:
            runtime = self._runtime = Runtimes(
                self.app,
                self.settings,
                self._declaration,
                self.instance,
                max_interval=self.max_interval or _LONGEST_WAIT,
            )
            if self.settings.send_events:
                events.stream_of(self.app).connect(self.settings, self._hostname)
            if self._owns_process:
                _calm_garbage_collector()
                _end_when_hung_up()
            runtime.start()
            if runtime.meters is not None:
                self._end_metrics = metrics.serve(
                    metrics.Source(
                        self.settings, self.instance, runtime.meters, lambda: runtime.memberships
                    )
                )

    def close(self) -> None:
        """Hand the timers over and end; safe to be called again.

        Celery calls it inside its signal handler, where nothing may be waited for, and again
        afterwards.
        """
        if self._in_tick or self._closed:
            return
        until = time.monotonic() + _LEAVE_AT_LAST
        if self._runtime is not None:
            # In a thread of its own: a second signal does not cut it short, and no call that
            # nothing bounds, to look a name up say, keeps the process alive.
            threading.Thread(target=self._leave, name="dtimer-leave", daemon=True).start()
            _wait_whatever_comes(lambda: self._is_over, until)
            if not self._has_left:
                logger.warning(
                    "Instance %s could not hand its timers over in time, the failure check will",
                    self.instance,
                )
        if self.settings.send_events and self._runtime is not None:
            left = until - time.monotonic()
            within = max(0.0, min(_LAST_EVENTS_WITHIN, left))
            events.stream_of(self.app).close(self.settings.service, within)
        if self._owns_process:
            _hurry_remote_control(until - time.monotonic())
        self._closed = True  # only now: a signal on the way here leaves it to the next call
        super().close()

    def _leave(self) -> None:
        assert self._runtime is not None  # noqa: S101 - `close` has looked
        if not self._leaving.acquire(blocking=False):
            return  # a signal has come in between: the call before is at it
        self._runtime.stop()
        self._has_left = True
        self._end_metrics()
        self._is_over = True

    @property
    def is_running(self) -> bool:
        """Say whether it has been started, and neither closed nor ended by a failure."""
        return self._runtime is not None and not self._closed and self._runtime.failure is None

    @property
    def info(self) -> str:
        """The banner's lines: service, instance, Redis without secrets, dispatch."""
        lines: Mapping[str, str] = {
            "service": self.settings.service,
            "instance": self.instance,
            "timers": self.settings.masked_url,
            "dispatch": self.settings.dispatch,
        }
        return "\n".join(f"    . {name} -> {value}" for name, value in lines.items())


def _calm_garbage_collector() -> None:
    """Spare the runs the pauses of full collections, in a process that only dispatches.

    All that was imported, and the definitions that are kept, stay anyway: to look through them
    takes 20 ms and more at a time, and makes everything that long late. What is young is collected
    as always, and the rest a hundred times more rarely.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1_000)


def _node_name(hostname: str | None) -> str:
    """Return the name of a beat's node, as Celery's remote control has it since 5.7."""
    named: Callable[[str | None], str] | None = getattr(beat, "beat_nodename", None)
    return nodename("celerybeat", gethostname()) if named is None else named(hostname)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _end_when_hung_up() -> None:
    """Have a beat whose terminal goes hand over as at SIGTERM, unless that was decided."""
    end = signal.getsignal(signal.SIGTERM)
    if _is_main_thread() and callable(end) and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, end)


def _hurry_remote_control(seconds: float) -> None:
    """Have Celery's remote control of a beat, which ends next, wait no longer for its broker."""
    control: Any = getattr(beat, "BeatPidbox", None)  # since Celery 5.7
    if control is not None:
        control.join_timeout = min(control.join_timeout, max(_SHORTEST_FAREWELL, seconds))


def _wait_whatever_comes(is_over: Callable[[], bool], until: float) -> None:
    """Wait for something, until then; what interrupts the wait is raised afterwards.

    By looking again and again: a wait for a thread or an event that a signal's handler has
    interrupted, and waits in itself, takes the thread for ended, or holds itself up (before 3.13).
    """
    interruption: BaseException | None = None
    while not is_over() and time.monotonic() < until:
        try:
            time.sleep(_GLANCE)
        except BaseException as exc:
            interruption = exc
    if interruption is not None:
        raise interruption


def _check_connections(app: Celery, settings: Settings) -> None:
    """Refuse at start, without a connection, what could never connect.

    Raises:
        SettingsError: the broker's transport is unknown, or redis-py does not take the options.
    """
    try:
        app.connection_for_write().get_transport_cls()
    except (KeyError, ImportError, AttributeError) as exc:
        raise SettingsError(
            f"broker_url has a transport that can not be used: {masked(exc)}"
        ) from None
    reason = ON_A_CLUSTER if settings.is_cluster else obstacle(app)
    if settings.dispatch == ATOMIC and reason:
        raise refusal(reason)
    if not urls.is_embedded(settings.redis_url):  # that one has a server to start
        Store(settings).client  # noqa: B018 - made, so that a wrong option shows
