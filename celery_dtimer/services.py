"""Which services a Redis has: found by their keys, since no list of them is kept."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from celery_dtimer.model import Instance
from celery_dtimer.settings import Settings
from celery_dtimer.sharding import Shards
from celery_dtimer.store import Layout, Store, decode_name


@dataclass(frozen=True, slots=True)
class ServiceSummary:
    """What there is to a service at a glance."""

    name: str
    shards: int
    instances: int  #: that are alive
    active: int  #: timers that wait for their next run, pending triggers and calls counted
    inactive: int  #: timers that are paused, stopped or broken
    sent: int  #: runs, since it began to count


def find_services(settings: Settings) -> list[ServiceSummary]:
    """Return the services under a key prefix, by their names.

    Args:
        settings: of any service there.

    Raises:
        StoreError: Redis could not be reached, or refused.
    """
    store = Store(settings)
    try:
        tags = set(store.tags())
    finally:
        store.close()
    names = {decode_name(tag.partition(".")[0]) for tag in tags}  # behind a dot is a shard
    return [_summary(replace(settings, service=name), tags) for name in sorted(names)]


def _summary(settings: Settings, tags: set[str]) -> ServiceSummary:
    shards = Shards(settings)
    try:
        layout = shards.base.stored_layout() or _guessed(shards.base.keys.tag, tags)
        shards.take(layout)  # to read it here would decide it
        now_ms = shards.now_ms()
        return ServiceSummary(
            name=settings.service,
            shards=layout.shards,
            instances=sum(_is_alive(each, now_ms, settings) for each in shards.instances()),
            active=shards.pending_count(),
            inactive=shards.inactive_count(),
            sent=shards.counters().get("sent", 0),
        )
    finally:
        shards.close()


def _guessed(own: str, tags: set[str]) -> Layout:
    """Return the layout of a service that does not say it: it has the shards that were found."""
    found = [tag.rpartition(".")[2] for tag in tags if tag.startswith(f"{own}.")]
    count = max((int(number) + 1 for number in found if number.isdecimal()), default=1)
    return Layout(count, 0, 0, (count,))


def _is_alive(instance: Instance, now_ms: int, settings: Settings) -> bool:
    """Say whether an instance counts as alive, by its own timeout where it tells that."""
    try:
        seconds = float(json.loads(instance.settings)["dtimer_instance_timeout"])
    except (ValueError, TypeError, KeyError):
        seconds = settings.instance_timeout
    is_heard = instance.silence_ms(now_ms) <= seconds * 1000
    return is_heard and instance.status != "leaving"
