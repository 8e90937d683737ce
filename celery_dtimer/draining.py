"""Moving timers between instances because somebody asks for it: from any process.

An instance that is *drained* hands its timers over and stays, with its heartbeats and its
declaration, but is given none any more: not by placement, failover, rebalance or as help for one
that lags. That ends when it registers anew, which a restart does, or by `undrain`. While no other
instance is alive it gets timers all the same, rather than nobody; it gives them away again to the
first one that joins. What it may be publishing stays until that is over, so that no run is sent
twice.
"""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Callable, Sequence

from celery_dtimer.errors import (
    ConflictError,
    FencedError,
    InstanceNotFoundError,
    StoreUnavailableError,
    shown,
)
from celery_dtimer.model import Instance
from celery_dtimer.sharding import Shards
from celery_dtimer.store import Moved, Store

logger = logging.getLogger(__name__)

_PAUSE = 0.05  # seconds until what could not be moved is tried again
_PATIENCE = 2.0  # instance timeouts that what can not be moved is waited for
_FEW_TRIES = 5  # without a timer moved, after which the rest is left to the next check
_CLOSE = 5  # ids that an error names

#: Called now and then with how many timers have moved.
OnProgress = Callable[[int], None]


def drain(shards: Shards, instance: str, on_progress: OnProgress = lambda moved: None) -> int:
    """Hand an instance's timers over to the others; return how many moved.

    Raises:
        InstanceNotFoundError: no such instance is registered.
        ConflictError: no other live instance could take them; nothing was changed.
        StoreUnavailableError: some could not be moved in time.
    """
    found = _stores_with(shards, instance)
    drain = _Drain(instance, list(found), on_progress)
    try:
        drain.run(shards.settings.instance_timeout)
    except ConflictError:
        for store, each in found.items():
            if not each.is_draining:
                store.undrain(instance)
        raise
    logger.info("Instance %s is drained: %s timers moved", instance, drain.count)
    return drain.count


def undrain(shards: Shards, instance: str) -> bool:
    """Let an instance be given timers again; return False when it was not drained.

    Raises:
        InstanceNotFoundError: no such instance is registered.
    """
    return 1 in [store.undrain(instance) for store in _stores_with(shards, instance)]


def even_out(shards: Shards) -> int:
    """Give every live instance its share of the timers; return how many moved."""
    return sum(_even_out(store, _deadline(shards)) for store in shards.stores)


def _even_out(store: Store, until: float) -> int:
    moved_in_all = tries = 0
    while tries < _FEW_TRIES and time.monotonic() < until:
        moved = _rebalanced(store)
        moved_in_all += moved.count
        if moved.busy:
            time.sleep(_PAUSE)
        elif moved.count:
            tries = 0
        elif moved.more:  # what is due this very moment
            tries += 1
            time.sleep(_PAUSE)
        else:
            break
    return moved_in_all


def _rebalanced(store: Store) -> Moved:
    """Move a batch on behalf of any instance that is there."""
    for instance in store.instances():
        try:
            return store.rebalance(instance.id, instance.epoch)
        except FencedError:  # it has registered anew, or gone, since
            continue
    return Moved()


def _deadline(shards: Shards) -> float:
    return time.monotonic() + _PATIENCE * shards.settings.instance_timeout


def _stores_with(shards: Shards, instance: str) -> dict[Store, Instance]:
    """Return the stores of the shards that an instance is registered in, and how it is there.

    Raises:
        InstanceNotFoundError: it is in none.
    """
    ids: set[str] = set()
    found = {}
    for store in shards.stores:
        there = {each.id: each for each in store.instances()}
        ids |= there.keys()
        if instance in there:
            found[store] = there[instance]
    if not found:
        raise _not_found(instance, ids)
    return found


def _not_found(instance: str, ids: set[str]) -> InstanceNotFoundError:
    known = difflib.get_close_matches(instance, ids, _CLOSE, 0.3) or sorted(ids)[:_CLOSE]
    there = f"; there are: {', '.join(known)}" if known else "; none is registered"
    return InstanceNotFoundError(f"no instance has the id {shown(instance)}{there}")


class _Drain:
    """Moves the timers of one instance, and counts them."""

    def __init__(self, instance: str, stores: Sequence[Store], on_progress: OnProgress) -> None:
        self._instance = instance
        self._stores = stores
        self._on_progress = on_progress
        self.count = 0

    def run(self, instance_timeout: float) -> None:
        """Move all; what can not be moved is waited for, as long as others can."""
        before, until = -1, 0.0
        while waiting := sum(self._rest(store) for store in self._stores):
            if self.count > before:
                before, until = self.count, time.monotonic() + _PATIENCE * instance_timeout
            elif time.monotonic() > until:
                raise StoreUnavailableError(
                    f"{waiting} timers of instance {self._instance} can not be moved, since their "
                    "runs are being published, or others are moving timers; it is given no more: "
                    "drain it again"
                )
            time.sleep(_PAUSE)

    def _batch(self, store: Store) -> int:
        """Move a batch; return how many are left, 0 too when the instance has gone."""
        drained = store.drain(self._instance)
        if drained.is_alone:
            raise ConflictError(
                f"instance {self._instance} can not be drained: no other live instance with a "
                "working broker could take its timers"
            )
        if drained.count:
            self.count += drained.count
            self._on_progress(self.count)
        return drained.left

    def _rest(self, store: Store) -> int:
        """Move what can be moved now; return how many are left."""
        while True:
            before = self.count
            left = self._batch(store)
            if not left or self.count == before:
                return left
