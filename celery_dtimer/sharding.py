"""The shards of a service, for whoever looks at its timers or changes them: like one store.

A service may be split into shards, each with keys, and so a slot, of its own. A timer belongs to
one of them by its id. How many there are is told by the service's *layout*, in the ``meta`` that
belongs to no shard. Who writes goes by the one that it knows: a shard that has heard of a newer one
refuses what goes by an older one. Who reads asks first whether it is still the same.

While a service is being given other shards, a timer that is asked for is moved to where it belongs
first: nobody has to know how far that has come.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, TypeVar

from celery_dtimer.errors import ConflictError, SettingsError
from celery_dtimer.model import Definition, Instance, Timer, TimerState, shard_of
from celery_dtimer.moving import move_all
from celery_dtimer.planning import Plan
from celery_dtimer.settings import Settings
from celery_dtimer.store import (
    Cancelled,
    Incoming,
    Layout,
    LayoutChangedError,
    OutRun,
    Store,
)

_FIRST = "0"  # a shard that every service with several has
_CHANGES = 5  # of the layout, in a row, that one call follows
_PAGE = 1000
_Answer = TypeVar("_Answer")


class Shards:
    """The timers of one service, wherever they are; methods are named like those of `Store`.

    Raises (every method):
        StoreUnavailableError: Redis could not be reached, or did not answer within the time limit.
        StoreError: Redis answered with an error.
        SettingsError: the service has another number of shards than ``dtimer_shards`` says.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        timeout: float | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """Prepare; nothing is contacted until it is used. The arguments are those of `Store`."""
        self.settings = settings
        self._timeout = timeout
        self._clock = clock
        self._lock = threading.RLock()
        self._layout: Layout | None = None
        self._stores: dict[str, Store] = {}

    # -- the layout

    @property
    def base(self) -> Store:
        """The store that has the service's layout; the only one of a service with one shard."""
        return self.store("")

    def store(self, shard: str) -> Store:
        """Return the store of a shard, by its number as it stands in keys."""
        with self._lock:
            found = self._stores.get(shard)
            if found is None:
                number = None if self._layout is None else self._layout.number
                found = self._stores[shard] = Store(
                    self.settings,
                    timeout=self._timeout,
                    clock=self._clock,
                    shard=shard,
                    layout=number,
                )
            return found

    @property
    def layout(self) -> Layout:
        """The layout of the service, read on first use and when it has changed."""
        layout = self._layout
        return self.read_layout() if layout is None else layout

    def read_layout(self) -> Layout:
        """Read the layout anew."""
        return self.take(self._asked(), is_first=self._layout is None)

    def _asked(self) -> Layout:
        """Return what the service says of its layout; when it has forgotten, what a shard knows."""
        layout = self.base.stored_layout()
        if layout is not None:
            return layout
        _, told = self.store(_FIRST).heard_of_layout()
        return self.base.read_layout(self.settings.shards, told)

    def read_after_refusal(self) -> Layout:
        """Read the layout anew, since a shard has refused what goes by the one that is known.

        A shard has not heard of a newer one than there is, but by a server that has lost its last
        writes, or by who edits: then the layout gets the number that the shard knows.
        """
        before = self._layout
        layout = self.read_layout()
        if before is None or layout.number != before.number:
            return layout
        heard = max(store.heard_of_layout()[0] for store in self._known)
        return self.take(self.base.read_layout(self.settings.shards, least=heard))

    def take(self, layout: Layout, *, is_first: bool = False) -> Layout:
        """Go by a layout from now on.

        Raises:
            SettingsError: it is the first, and not the one that is configured.
        """
        configured = self.settings.shards
        if is_first and configured not in (layout.shards, layout.wanted):
            raise SettingsError(
                f"dtimer_shards={configured} differs from what the service "
                f"{self.settings.service} has: {layout.wanted or layout.shards}. Set it to that, "
                f"or give the service other shards by DistributedTimer.reshard({configured}) or "
                f"celery dtimer reshard {configured}"
            )
        with self._lock:
            self._layout = layout
            for store in self._stores.values():
                store.layout = layout.number
        return layout

    def _look(self) -> Layout:
        """Return the layout, read anew if it has changed: nobody refuses what is only read."""
        known = self._layout
        if known is None or self.base.layout_number() != known.number:
            return self.read_layout()
        return known

    def _by_layout(self, call: Callable[[], _Answer]) -> _Answer:
        """Return what a call answers that goes by the layout, read anew when that has changed."""
        for _ in range(_CHANGES):
            try:
                return call()
            except LayoutChangedError:
                self.read_after_refusal()
        raise ConflictError(f"the shards of service {self.settings.service} keep changing")

    @property
    def stores(self) -> list[Store]:
        """The stores of all shards that may have timers."""
        layout = self._look()
        counts = {layout.shards, layout.wanted or layout.shards}
        return [self.store(shard) for shard in shards_of(*counts)]

    @property
    def _known(self) -> list[Store]:
        """The stores of all shards that there ever were: histories stay where they are."""
        return [self.store(shard) for shard in shards_of(*self._look().seen)]

    def home(self, id: str) -> Store:
        """Return the store of the shard that a timer belongs to, wherever it is."""
        layout = self.layout
        return self.store(shard_of(id, layout.wanted or layout.shards))

    def store_of(self, id: str) -> Store:
        """Return the store of the shard that has a timer, which is moved to where it belongs."""
        return self._gathered([id])[id]

    def _gathered(self, ids: Sequence[str]) -> dict[str, Store]:
        """Return the store of each timer; those that belong elsewhere are moved first."""
        layout = self.layout
        homes = {id: self.home(id) for id in ids}
        if layout.is_moving:
            pairs: dict[tuple[Store, Store], list[str]] = {}
            for id, home in homes.items():
                before = self.store(shard_of(id, layout.shards))
                if before is not home:
                    pairs.setdefault((before, home), []).append(id)
            for (before, home), moved in pairs.items():
                for page in _pages(moved, 100):
                    move_all(before, home, page, self.settings.call_timeout)
        return homes

    def _each(
        self, ids: Sequence[str], call: Callable[[Store, list[str]], Sequence[_Answer]]
    ) -> list[_Answer]:
        """Call for the timers of each shard; return the answers in the order of the ids."""
        gathered = self._gathered(ids)
        by_store: dict[Store, list[str]] = {}
        for id in ids:
            by_store.setdefault(gathered[id], []).append(id)
        if len(by_store) == 1:
            return list(call(*next(iter(by_store.items()))))
        found: dict[str, _Answer] = {}
        for store, its in by_store.items():
            found.update(zip(its, call(store, its), strict=True))
        return [found[id] for id in ids]

    def close(self) -> None:
        """Drop all connections; the next use opens new ones."""
        with self._lock:
            for store in self._stores.values():
                store.close()

    # -- timers

    def now_ms(self, id: str = "") -> int:
        """Return the time of the server that has a timer."""
        return self.home(id).now_ms()

    def save(self, definitions: Sequence[Definition]) -> int:
        """Create the timers, or update those that differ; return how many changed."""

        def save() -> int:
            homes = self._gathered([definition.id for definition in definitions])
            by_store: dict[Store, list[Definition]] = {}
            for definition in definitions:
                by_store.setdefault(homes[definition.id], []).append(definition)
            return sum(store.save(its) for store, its in by_store.items())

        return self._by_layout(save)

    def replace(self, state: TimerState, old: Definition, definition: Definition) -> bool:
        """Give a timer another definition; return False when it is not in this state any more."""
        return self._by_layout(lambda: self.store_of(state.id).replace(state, old, definition))

    def states(self, ids: Sequence[str]) -> list[TimerState | None]:
        """Return each timer's state; None for one that is not there."""
        self._look()
        return self._by_layout(lambda: self._each(ids, lambda store, its: store.states(its)[1]))

    def definitions(self, ids: Sequence[str]) -> list[str | None]:
        """Return the stored definition of each timer; None for one that is not there."""
        self._look()
        return self._by_layout(lambda: self._each(ids, lambda store, its: store.definitions(its)))

    def timers(self, ids: Sequence[str]) -> list[Timer]:
        """Return those of the timers that are there, in their order."""
        layout = self._look()
        if layout.shards == 1 and not layout.is_moving:
            return self.base.timers(ids)

        def read(store: Store, its: list[str]) -> list[Timer | None]:
            found = {timer.id: timer for timer in store.timers(its)}
            return [found.get(id) for id in its]

        found = self._by_layout(lambda: self._each(ids, read))
        return [timer for timer in found if timer is not None]

    def timer_ids(self, limit: int | None = None) -> list[str]:
        """Return every timer's id, triggers included: active ones by time, then the others."""
        active = self._merged("timer_queue", None, limit)
        left = None if limit is None else limit - len(active)
        others = self._merged("inactive_timers", None, left)
        return list(dict.fromkeys([*active, *others]))  # one may have been moved meanwhile

    def owned_ids(self, instance: str, limit: int | None = None) -> list[str]:
        """Return the ids of the timers that an instance owns, by their next time."""
        return self._merged("instance_timers", instance, limit)

    def _merged(self, what: str, id: str | None, limit: int | None) -> list[str]:
        stores = self.stores
        if len(stores) == 1:
            return [member for member, _ in stores[0].by_score(what, id, limit)]
        rows = [row for store in stores for row in store.by_score(what, id, limit)]
        rows.sort(key=lambda row: (row[1], row[0]))
        return list(dict.fromkeys(member for member, _ in rows))[:limit]

    def pending_count(self, instance: str | None = None) -> int:
        """Return how many active timers the service, or one instance, has."""
        return sum(store.pending_count(instance) for store in self.stores)

    def inactive_count(self) -> int:
        """Return how many timers there are that are paused, stopped or broken."""
        return sum(store.inactive_count() for store in self.stores)

    def queued(
        self, from_ms: int | None = None, until_ms: int | None = None
    ) -> Iterator[list[tuple[str, int]]]:
        """Yield active timers by when they are looked at, with that moment, a page at a time."""
        streams = [_flat(store.queued(from_ms, until_ms)) for store in self.stores]
        page: list[tuple[str, int]] = []
        for row in heapq.merge(*streams, key=itemgetter(1)):
            page.append(row)
            if len(page) == _PAGE:
                yield page
                page = []
        yield page

    def delete(self, id: str) -> bool:
        """Delete a timer; return whether it was there."""
        return self._by_layout(lambda: self.store_of(id).delete([id])[0])

    def pause(self, id: str) -> int:
        """Pause a timer; return the code of ``pause.lua``."""
        return self._by_layout(lambda: self.store_of(id).pause(id))

    def stop(self, id: str) -> int:
        """Stop a timer; return the code of ``stop.lua``."""
        return self._by_layout(lambda: self.store_of(id).stop(id))

    def resume(self, state: TimerState, plan: Plan) -> int:
        """Go on with a timer as planned for its state; return the code of ``resume.lua``."""
        return self._by_layout(lambda: self.store_of(state.id).resume(state, plan))

    def trigger(self, id: str, trigger_id: str) -> int:
        """Run a timer now; return the code of ``trigger.lua``."""
        return self._by_layout(lambda: self.store_of(id).trigger(id, trigger_id))

    def departing(self) -> list[str]:
        """Return the ids of timers that are on their way from shard to shard."""
        return [id for store in self.stores for id in store.departing()]

    def bring(
        self, rows: Sequence[Incoming], *, is_origin: bool = False
    ) -> list[int | TimerState | None]:
        """Write timers with their states, as `Store.bring` does."""
        by_id = {row.state.id: row for row in rows}

        def bring(store: Store, ids: list[str]) -> list[int | TimerState | None]:
            return store.bring([by_id[id] for id in ids], is_origin=is_origin)

        return self._by_layout(lambda: self._each(list(by_id), bring))

    # -- durable countdowns

    def hold(self, definition: Definition, **when: int) -> None:
        """Keep a durable countdown until it is due, as `Store.hold` does."""
        self._by_layout(lambda: self.store_of(definition.id).hold(definition, **when))

    def cancel(self, ids: Sequence[str]) -> list[Cancelled]:
        """Remove durable countdowns; return what became of each."""
        return self._by_layout(lambda: self._each(ids, lambda store, its: store.cancel(its)))

    # -- instances

    def instances(self) -> list[Instance]:
        """Return the registered instances, oldest first: each once, with what it does in all."""
        found: dict[str, Instance] = {}
        for store in self.stores:
            for instance in store.instances():
                known = found.get(instance.id)
                found[instance.id] = instance if known is None else _together(known, instance)
        return sorted(found.values(), key=lambda instance: (instance.started_at, instance.id))

    def counters(self) -> dict[str, int]:
        """Return how many runs the service has sent, and ``skipped_<reason>``."""
        total: dict[str, int] = {}
        for store in self._known:
            for name, count in store.counters().items():
                total[name] = total.get(name, 0) + count
        return total

    # -- runs

    @property
    def kept_entries(self) -> int:
        """How many entries the histories keep, about."""
        return sum(store.kept_entries for store in self._known)

    def history(self, from_ms: int) -> Iterator[Mapping[str, str]]:
        """Yield the entries of the history that were written since a moment, oldest first."""
        return heapq.merge(*(store.history(from_ms) for store in self._known), key=_moment)

    def history_begin(self) -> int | None:
        """Return the moment before which the history says nothing; None when all of it is there."""
        begins = [store.history_begin() for store in self._known]
        return max((each for each in begins if each is not None), default=None)

    def history_backwards(self) -> Iterator[Mapping[str, str]]:
        """Yield the entries of the history, newest first."""
        return self._backwards(store.history_backwards() for store in self._known)

    def run_history(self) -> Iterator[Mapping[str, str]]:
        """Yield what workers have noted of runs, newest first."""
        return self._backwards(store.run_history() for store in self._known)

    @staticmethod
    def _backwards(streams: Iterable[Iterator[Mapping[str, str]]]) -> Iterator[Mapping[str, str]]:
        return heapq.merge(*streams, key=_moment, reverse=True)

    def run_started(self, run: OutRun, **how: Any) -> int:
        """Note that a worker has started a run; return the code of ``run_started.lua``."""
        return self._by_layout(lambda: self.store_of(run.timer_id).run_started(run, **how))

    def run_ended(self, run: OutRun, state: str, **how: Any) -> bool:
        """Note what became of a run; return False when it is not known, or another message runs."""
        if not run.timer_id:
            return any(store.run_ended(run, state, **how) for store in self.stores)

        def end() -> bool:
            store = self.store_of(run.timer_id)
            for other in self._before(run.timer_id):  # its lease may be there still
                other.drop_leases([run.task_id])
            return store.run_ended(run, state, **how)

        return self._by_layout(end)

    def renew_runs(self, runs: Sequence[tuple[str, str, str]], lease_ms: int) -> int:
        """Renew leases of runs, given as task id, message and timer; return how many it were."""

        def renew() -> int:
            by_store: dict[Store, list[tuple[str, str]]] = {}
            for task_id, message, timer in runs:
                for store in (self.home(timer), *self._before(timer)):
                    by_store.setdefault(store, []).append((task_id, message))
            return sum(store.renew_runs(its, lease_ms) for store, its in by_store.items())

        return self._by_layout(renew)

    def _before(self, id: str) -> list[Store]:
        """Return the shard that a timer belonged to before, while timers are being moved."""
        layout = self.layout
        before = self.store(shard_of(id, layout.shards))
        return [before] if layout.is_moving and before is not self.home(id) else []

    def out_run(self, task_id: str) -> OutRun | None:
        """Return a run that is out, as far as that is stored; None when it is not out."""
        found = (store.out_run(task_id) for store in self.stores)
        return next((run for run in found if run is not None), None)

    def revoked_runs(self) -> list[str]:
        """Return the task ids of the runs that were revoked of late."""
        return [task_id for store in self._known for task_id in store.revoked_runs()]

    def claim_run(self, task_id: str, token: str, keep_ms: int, timer: str) -> str | None:
        """Claim a timer's run for a message; return the token that has claimed it, else None."""
        home = self.home(timer)
        for shards in self.layout.seen:  # most have seen one
            before = self.store(shard_of(timer, shards))
            if before is not home and (holder := before.claim_of(task_id)) is not None:
                return holder
        return home.claim_run(task_id, token, keep_ms)

    # -- dead letters

    def dead_letters(
        self, offset: int = 0, limit: int | None = None
    ) -> list[tuple[str, Mapping[str, str]]]:
        """Return dead letters, newest first: their ids, and their fields with ``at``."""
        stores = self.stores
        if len(stores) == 1:
            return stores[0].dead_letters(offset, limit)
        end = None if limit is None else offset + limit
        found = dict(row for store in stores for row in store.dead_letters(0, end))
        rows = sorted(found.items(), key=lambda row: (int(row[1]["at"]), row[0]), reverse=True)
        return rows[offset:end]

    def dead_letter(self, id: str) -> Mapping[str, str] | None:
        """Return the fields of a dead letter, None when there is none."""
        found = (store.dead_letter(id) for store in self.stores)
        return next((row for row in found if row is not None), None)

    def requeue(self, letter: str, timer: str, *arguments: Any, **more: Any) -> bool:
        """Send what a letter of a timer holds, as `Store.requeue` does.

        Raises:
            ConflictError: the service is being given other shards, and the letter has not moved.
        """

        def requeue() -> bool:
            store = self.store_of(timer)
            if store.requeue(letter, *arguments, **more):
                return True
            if self.layout.is_moving and self.dead_letter(letter) is not None:
                raise ConflictError(
                    f"the service {self.settings.service} is being given other shards: its dead "
                    "letters can be requeued when that is done"
                )
            return False

        return self._by_layout(requeue)

    def purge_dead(self, until_ms: int | None) -> int:
        """Remove a batch of dead letters up to a moment; return how many."""
        return sum(store.purge_dead(until_ms) for store in self.stores)


def shards_of(*counts: int) -> list[str]:
    """Return the shards that services with so many of them have, each once."""
    return sorted(
        {str(index) if count > 1 else "" for count in counts for index in range(count)},
        key=lambda shard: (len(shard), shard),
    )


def _together(one: Instance, other: Instance) -> Instance:
    """Return an instance as it is in two shards."""
    return replace(
        one,
        started_at=min(one.started_at, other.started_at),
        heartbeat_at=min(one.heartbeat_at, other.heartbeat_at),
        status=one.status if one.status != "active" else other.status,
        epoch=max(one.epoch, other.epoch),
        dispatch=one.dispatch or other.dispatch,
        dispatch_reason=one.dispatch_reason or other.dispatch_reason,
        broker="down" if "down" in (one.broker, other.broker) else one.broker or other.broker,
        timers=one.timers + other.timers,
        sent=one.sent + other.sent,
        skipped=one.skipped + other.skipped,
        refused=one.refused + other.refused,
    )


def _moment(entry: Mapping[str, str]) -> int:
    return int(entry["at"])


def _flat(pages: Iterable[list[tuple[str, int]]]) -> Iterator[tuple[str, int]]:
    for page in pages:
        yield from page


def _pages(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (items[start : start + size] for start in range(0, len(items), size))
