"""Giving a service another number of shards while it runs.

First every shard is told of the new layout: from then on nobody writes by the old one. Then all
timers that belong elsewhere are moved, some at a time (`celery_dtimer.moving`); each is fired by
the shard that it is in. Then the leases of runs and the dead letters follow, and the new layout
holds. Until then no static schedule is brought up to date, and no run counts as lost.

Whatever ends it, beginning again goes on with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from celery_dtimer.errors import ConflictError, StoreUnavailableError
from celery_dtimer.moving import belonging, move
from celery_dtimer.sharding import Shards, shards_of
from celery_dtimer.store import Layout, LayoutChangedError, Store

logger = logging.getLogger(__name__)

_BATCH = 100  # timers that are moved at once
_PAUSE = 0.05  # seconds until what could not be moved is tried again
_PATIENCE = 2.0  # instance timeouts that what can not be moved is waited for


def reshard(
    shards: Shards, count: int, on_progress: Callable[[int], None] = lambda moved: None
) -> int:
    """Give a service so many shards; return how many timers have moved.

    Args:
        shards: of the service.
        count: how many it is to have.
        on_progress: called after each batch with how many timers have moved so far.

    Raises:
        ConflictError: it is being given another number of shards: that has to be completed first;
            or another call has given it others meanwhile.
        StoreError: Redis did not answer, or refused; calling again goes on.
    """
    layout = shards.base.begin_resharding(count)
    shards.take(layout)
    if layout.wanted not in (0, count):
        raise ConflictError(
            f"the service {shards.settings.service} is being given {layout.wanted} shards: that "
            f"has to be completed first, by reshard({layout.wanted})"
        )
    if layout.is_moving:
        logger.info(
            "Service %s: from %s to %s shards",
            *(shards.settings.service, layout.shards, layout.wanted),
        )
    for store in shards.stores:
        store.mark_layout(layout)
    if not layout.is_moving:
        return 0
    _wait_for_instances(shards, layout)
    _keep_drained(shards, layout)
    mover = _Move(shards, on_progress)
    try:
        mover.run()
        ended = shards.base.end_resharding(layout.number)
    except LayoutChangedError:  # another call of this has completed it, if it goes on
        ended = shards.read_layout()
        if ended.number == layout.number:
            raise
    layout = shards.take(ended)
    for store in (shards.store(shard) for shard in shards_of(*layout.seen)):
        store.mark_layout(layout)
    if (layout.shards, layout.wanted) != (count, 0):
        raise ConflictError(
            f"the service {shards.settings.service} is being given "
            f"{layout.wanted or layout.shards} shards by another call meanwhile"
        )
    logger.info(
        "Service %s has %s shards: %s timers moved",
        *(shards.settings.service, layout.shards, mover.moved),
    )
    return mover.moved


def _wait_for_instances(shards: Shards, layout: Layout) -> None:
    """Wait until the instances take part in the new shards, so that timers need not wait there."""
    settings = shards.settings
    until = time.monotonic() + settings.instance_timeout
    before = [shards.store(shard) for shard in shards_of(layout.shards)]
    new = [shards.store(shard) for shard in shards_of(layout.wanted)]
    while time.monotonic() < until:
        alive = {instance.id for store in before for instance in store.instances()}
        there = [{instance.id for instance in store.instances()} for store in new]
        if all(alive <= ids for ids in there):
            return
        time.sleep(_PAUSE)
    logger.warning(
        "Not all instances of service %s take part in its new shards: timers that go there wait "
        "for the others",
        settings.service,
    )


def _keep_drained(shards: Shards, layout: Layout) -> None:
    """Have instances that are drained be given no timers in the new shards either."""
    before = [shards.store(shard) for shard in shards_of(layout.shards)]
    drained = {each.id for store in before for each in store.instances() if each.is_draining}
    for shard in shards_of(layout.wanted):
        for instance in drained:
            shards.store(shard).drain(instance)


class _Move:
    """Moves all that belongs elsewhere."""

    def __init__(self, shards: Shards, on_progress: Callable[[int], None]) -> None:
        self._shards = shards
        self._on_progress = on_progress
        self.moved = 0  #: timers so far

    def run(self) -> None:
        """Move all; it ends when nothing is left."""
        sources = self._shards.stores
        until = None
        while True:
            before = self.moved
            waiting = sum(self._pass(store) for store in sources)
            if not waiting:
                break
            if self.moved > before or until is None:
                until = time.monotonic() + _PATIENCE * self._shards.settings.instance_timeout
            elif time.monotonic() > until:
                raise StoreUnavailableError(
                    f"{waiting} timers can not be moved, since their runs are being published; "
                    "the service goes on, call reshard again"
                )
            time.sleep(_PAUSE)
        for store in sources:
            self._move_leases(store)
            self._move_letters(store)

    def _pass(self, source: Store) -> int:
        """Move what a shard has of others; return how many timers can not be moved now."""
        waiting = 0
        ids = [*source.departing(), *source.timer_ids()]
        for start in range(0, len(ids), _BATCH):
            away = belonging(source, ids[start : start + _BATCH], self._shards.home)
            for target, its in away.items():
                busy = move(source, target, its)
                waiting += len(busy)
                self.moved += len(its) - len(busy)
                self._on_progress(self.moved)
        return waiting

    def _move_leases(self, source: Store) -> None:
        for page in source.leases():
            away: dict[Store, list[tuple[str, str]]] = {}
            for task_id, text in page:
                home = self._shards.home(text.partition(" ")[0])
                if home is not source:
                    away.setdefault(home, []).append((task_id, text))
            for target, its in away.items():
                source.move_leases(its, target)

    def _move_letters(self, source: Store) -> None:
        letters = source.dead_letters()
        for start in range(0, len(letters), _BATCH):
            away: dict[Store, list[tuple[str, Mapping[str, str]]]] = {}
            for id, row in letters[start : start + _BATCH]:
                home = self._shards.home(row.get("timer", ""))
                if home is not source:
                    away.setdefault(home, []).append((id, row))
            for target, its in away.items():
                source.move_letters(its, target)
