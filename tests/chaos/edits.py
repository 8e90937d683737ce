"""Keys that somebody edits by hand, and what of it the product promises to put right.

An edit of where a timer is listed, or of who owns it, loses nothing: the timer is only late. One
that takes the timer itself, its hash or its definition, loses that timer, and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec

import redis

from celery_dtimer import TimerNotFoundError
from tests.chaos.faults import FAULTS, fault
from tests.chaos.ledger import now_ms
from tests.chaos.scene import SETTLE, Scene
from tests.chaos.workload import Planned

Edit = Callable[[redis.Redis, Scene, Planned], object]

_HOUR_MS = 3_600_000
_SCRUBBED = find_spec("celery_dtimer.scrubbing") is not None  # all lists, and keys of another type


def _victim(scene: Scene, *, static: bool = False) -> Planned:
    """Return a timer that nothing else is done to."""
    found = [timer for timer in scene.steady() if timer.is_static is static and timer.id]
    return scene.random.choice(found)


def _owner(client: redis.Redis, scene: Scene, timer: Planned) -> str:
    return client.hget(scene.deployment.key("timer", timer.id), "owner") or "unassigned"


def _harmless(name: str, edit: Edit) -> None:
    def inject(scene: Scene) -> None:
        """Edit something that is put right, and wait until it is."""
        with scene.deployment.connect() as client:
            for _ in range(3):
                edit(client, scene, _victim(scene))
        scene.wait(scene.is_consistent, "what was edited to be put right", SETTLE)

    fault(f"edited: {name}")(inject)


def _taking(name: str, edit: Edit) -> None:
    def inject(scene: Scene) -> None:
        """Edit something that takes a timer with it, and create that timer again."""
        with scene.workload.quiet():
            victim = _victim(scene)
            edited_ms = now_ms()
            with scene.deployment.connect() as client:
                edit(client, scene, victim)
            scene.hold(0.5, 1.5)
            with suppress(TimerNotFoundError):  # it was found to be gone
                scene.deployment.timers.delete_timer(victim.id)
            scene.workload.lose(victim, edited_ms, now_ms())

    fault(f"edited: {name}")(inject)


def _static(scene: Scene) -> None:
    """Delete a static timer by hand; the beats write it again."""
    with scene.workload.quiet(), scene.deployment.connect() as client:
        victim = _victim(scene, static=True)
        edited_ms = now_ms()
        client.delete(scene.deployment.key("timer", victim.id))
        scene.workload.lose(victim, edited_ms, now_ms())


def _in_queue(client: redis.Redis, scene: Scene, timer: Planned) -> None:
    moment_ms = now_ms() + scene.random.choice((-_HOUR_MS, _HOUR_MS))
    client.zadd(scene.deployment.key("timer_queue"), {timer.id: moment_ms}, xx=True)


def _at_owner(client: redis.Redis, scene: Scene, timer: Planned) -> None:
    moment_ms = now_ms() + scene.random.choice((-_HOUR_MS, _HOUR_MS))
    key = scene.deployment.key("instance_timers", _owner(client, scene, timer))
    client.zadd(key, {timer.id: moment_ms}, xx=True)


def _of_instance(kind: str, change: Callable[[redis.Redis, str], object]) -> Edit:
    def edit(client: redis.Redis, scene: Scene, timer: Planned) -> None:
        change(client, scene.deployment.key(kind, _owner(client, scene, timer)))

    return edit


def _of_service(kind: str, change: Callable[[redis.Redis, str], object]) -> Edit:
    return lambda client, scene, _: change(client, scene.deployment.key(kind))


def _of_timer(kind: str, change: Callable[[redis.Redis, str], object]) -> Edit:
    return lambda client, scene, timer: change(client, scene.deployment.key(kind, timer.id))


def _delete(client: redis.Redis, key: str) -> None:
    client.delete(key)


def _replace(client: redis.Redis, key: str) -> None:
    """Put a value of another type in place of a key, in one step."""
    with client.pipeline(transaction=True) as pipe:
        pipe.delete(key).set(key, "nonsense").execute()


_harmless(
    "not in the queue",
    lambda client, scene, timer: client.zrem(scene.deployment.key("timer_queue"), timer.id),
)
_harmless(
    "not at its owner",
    lambda client, scene, timer: client.zrem(
        scene.deployment.key("instance_timers", _owner(client, scene, timer)), timer.id
    ),
)
_harmless("another time at its owner", _at_owner)
_harmless(
    "an owner that does not exist",
    _of_timer("timer", lambda client, key: client.hset(key, "owner", "nobody:1:00000000")),
)
_harmless("hash of an instance gone", _of_instance("instance", _delete))
_harmless("timers of an instance gone", _of_instance("instance_timers", _delete))
_harmless("all instances gone", _of_service("service_instances", _delete))
_taking("hash of a timer gone", _of_timer("timer", _delete))
_taking("hash of a timer of another type", _of_timer("timer", _replace))
_taking("a definition gone", _of_timer("timer_definition", _delete))
_taking(
    "a definition that can not be read",
    _of_timer("timer_definition", lambda client, key: client.set(key, "{")),
)
fault("edited: hash of a static timer gone")(_static)
if _SCRUBBED:
    _harmless("another time in the queue", _in_queue)
    _harmless("the queue gone", _of_service("timer_queue", _delete))
    _harmless("the queue of another type", _of_service("timer_queue", _replace))
    _harmless("timers of an instance of another type", _of_instance("instance_timers", _replace))
    _harmless("hash of an instance of another type", _of_instance("instance", _replace))
    _harmless("all instances of another type", _of_service("service_instances", _replace))


__all__ = ["FAULTS"]
