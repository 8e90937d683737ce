"""The faults: each breaks something, lets it be for a while, and mends it before it returns."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import redis

from celery_dtimer.faults import POINTS
from tests.chaos.deployment import Beat, Deployment, can_fake_clocks
from tests.chaos.ledger import RedisTaker, now_ms
from tests.chaos.scene import HANDOVER, SETTLE, TAKEOVER, TIMEOUT, Scene
from tests.chaos.verdict import Window
from tests.processes import Process
from tests.servers import RabbitMQ
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until

Inject = Callable[[Scene], None]
Fits = Callable[[Deployment], bool]


class Fault(NamedTuple):
    """A fault, and the deployments that it is for."""

    inject: Inject
    fits: Fits


FAULTS: dict[str, Fault] = {}


def fault(name: str, fits: Fits = lambda _: True) -> Callable[[Inject], Inject]:
    """Register a function as the fault of this name."""

    def register(inject: Inject) -> Inject:
        FAULTS[name] = Fault(inject, fits)
        return inject

    return register


def _is_plain(deployment: Deployment) -> bool:
    """Say whether the timers are on one server, that comes back with what it had."""
    return deployment.kind != "sentinel"


def _is_confirmed(deployment: Deployment) -> bool:
    return not deployment.is_atomic


def _is_second_redis(deployment: Deployment) -> bool:
    return deployment.kind == "confirmed"


def _is_sentinel(deployment: Deployment) -> bool:
    return deployment.kind == "sentinel"


# ------------------------------------------------------------------ deaths of beats

#: Points that are passed with confirmed dispatch only.
_CONFIRMED_POINTS = {"between_publish_and_commit"}


def _crash_at(label: str) -> Inject:
    def inject(scene: Scene) -> None:
        """Start a beat that dies at a labelled point, and wait for that."""
        doomed = scene.join(crash_at=f"{label}:{scene.random.randint(5, 60)}")
        deadline = time.monotonic() + 8
        while doomed.is_running() and time.monotonic() < deadline:
            time.sleep(0.01)
        doomed.process.kill()  # if nothing led it past its point

    return inject


for _label in POINTS:
    fault(f"kill -9 {_label.replace('_', ' ')}")(_crash_at(_label))


@fault("kill -9 at any moment")
def kill(scene: Scene) -> None:
    """Kill a beat."""
    victim = scene.victim()
    with scene.takeover("kill", victim, TAKEOVER):
        victim.process.kill()


@fault("SIGSTOP for longer than the timeout")
def freeze(scene: Scene) -> None:
    """Stop a beat for longer than it is trusted, and let it go on."""
    victim = scene.victim()
    with scene.takeover("freeze", victim, TAKEOVER):
        victim.process.freeze()
    scene.hold(0.2, 1.0)
    victim.process.thaw()


@fault("SIGSTOP for less than the timeout")
def stumble(scene: Scene) -> None:
    """Stop a beat for a moment."""
    victim = scene.victim()
    victim.process.freeze()
    scene.hold(0.2, 0.7 * TIMEOUT)
    victim.process.thaw()


@fault("SIGTERM")
def leave(scene: Scene) -> None:
    """Ask a beat to end."""
    _stop(scene, scene.victim())


def _stop(scene: Scene, beat: Beat) -> None:
    """Ask a beat to end, and look how long that takes, and its timers' next runs."""
    started = time.monotonic()
    with scene.takeover("SIGTERM", beat, HANDOVER):
        beat.process.send(signal.SIGTERM)
    beat.process.wait()
    took, stall = time.monotonic() - started, scene.monitor.stall_since(started)
    if beat.process.exit_code:
        scene.problem(f"a beat that was asked to end answered {beat.process.exit_code}")
    if took > TIMEOUT + 1 + stall:
        scene.problem(f"a beat took {took:.1f} s to end")


@fault("rolling restart with SIGTERM")
def roll(scene: Scene) -> None:
    """Replace beats one after the other, as a deployment does."""
    for beat in scene.victims()[:2]:
        scene.join()
        _wait_sending(scene, scene.beats[-1])
        _stop(scene, beat)


@fault("rolling restart with SIGKILL")
def roll_hard(scene: Scene) -> None:
    """Replace beats one after the other, without asking them."""
    for beat in scene.victims()[:2]:
        scene.join()
        beat.process.kill()
        _wait_sending(scene, scene.beats[-1])


def _wait_sending(scene: Scene, beat: Beat) -> None:
    scene.wait(lambda: scene.sends(beat), f"{beat.pid} to send", 15)


@fault("joining")
def join(scene: Scene) -> None:
    """Let one more beat join: only the surplus moves to it, and before it came nothing moves."""
    scene.wait(scene.is_consistent, "the state to be consistent", SETTLE)
    with scene.workload.quiet():
        scene.hold(0.7, 0.9)  # what users did before may have left loads that are evened out
        before = scene.owners()
        scene.hold(0.5, 0.7)
        still = scene.owners()
        moved = sum(still.get(name) != owner for name, owner in before.items())
        if moved and not _has_drifted(scene):
            scene.problem(f"{moved} timers moved though nobody had joined or left")
        newcomer = scene.join()
        _wait_sending(scene, newcomer)
        scene.hold(0.3, 0.5)
        after = scene.owners()
    moved = sum(after.get(name) != owner for name, owner in still.items())
    share = -(-len(still) // len(scene.live()))
    scene.most_moved = max(scene.most_moved, moved)
    surplus = sum(max(0, count - share) for count in _loads(still).values())
    if moved > max(share, surplus) * 1.25 + 2:  # timers that are not looked at here count in loads
        scene.problem(f"{moved} of {len(still)} timers moved to {len(scene.live())} beats")


def _loads(owners: dict[str, str]) -> dict[str, int]:
    loads: dict[str, int] = {}
    for owner in owners.values():
        loads[owner] = loads.get(owner, 0) + 1
    return loads


def _has_drifted(scene: Scene) -> bool:
    """Say whether a beat had reason to take timers from another: it lagged."""
    late_ms = max((run.lag_ms for run in scene.book.runs[-200:]), default=0)
    return late_ms > 500


@fault("joining and leaving at once")
def churn(scene: Scene) -> None:
    """Let beats come and go without waiting for any of them."""
    for _ in range(2):
        scene.join()
        victims = scene.victims()
        if len(victims) > 2:
            scene.random.choice(victims).process.send(signal.SIGTERM)
        scene.hold(0.2, 1.0)


# ------------------------------------------------------------------ clocks


def _has_fake_clocks(_: Deployment) -> bool:
    return can_fake_clocks()


@fault("clock an hour off, moved while it runs", _has_fake_clocks)
def skew(scene: Scene) -> None:
    """Move the clock of one beat, which notices nothing: the server's is the one that counts."""
    beat = scene.special(lambda beat: beat.clock is not None, clock=True)
    offsets = ["+1h", "-1h", "+37s", "-59m"]
    scene.random.shuffle(offsets)
    for offset in offsets[:3]:
        beat.set_clock(offset)
        scene.hold(0.5, 1.2)
    if not beat.is_running():
        scene.problem("a beat ended when its clock was moved")
    beat.set_clock(scene.random.choice(["+1h", "-1h"]))


# ------------------------------------------------------------------ networks


def _proxies(scene: Scene, beat: Beat) -> list[TcpProxy]:
    """Return the connections that are spoilt: to one server, or to all."""
    names = sorted(beat.proxies)
    return [
        beat.proxies[name] for name in scene.random.choice([*([name] for name in names), names])
    ]


def _spoil(name: str, spoil: Callable[[TcpProxy], None], mend: Callable[[TcpProxy], None]) -> None:
    def inject(scene: Scene) -> None:
        """Spoil a beat's connections for a while."""
        proxies = _proxies(scene, scene.proxied())
        for proxy in proxies:
            spoil(proxy)
        scene.hold(0.3, 2 * TIMEOUT)
        for proxy in proxies:
            mend(proxy)

    fault(name, _is_plain)(inject)


def _set(**values: Any) -> Callable[[TcpProxy], None]:
    def set_all(proxy: TcpProxy) -> None:
        for name, value in values.items():
            setattr(proxy, name, value)

    return set_all


_NOTHING = _set()
_spoil("network slow", _set(latency=0.08, jitter=0.1), _set(latency=0.0, jitter=0.0))
_spoil("network slower than the time limits", _set(latency=1.5), _set(latency=0.0))
_spoil("requests do not arrive", _set(deaf="requests"), _set(deaf=""))
_spoil("answers do not arrive", _set(deaf="replies"), _set(deaf=""))
_spoil("connections reset", TcpProxy.cut, TcpProxy.cut)
_spoil("connections half open", TcpProxy.sever, _NOTHING)
_spoil("an answer lost, then a reset", _set(drop_replies=3), _set(drop_replies=0))


@fault("network cut", _is_plain)
def cut_off(scene: Scene) -> None:
    """Cut a beat off from all servers for longer than it is trusted."""
    victim = scene.proxied()
    with scene.takeover("network cut", victim, TAKEOVER):
        for proxy in victim.proxies.values():
            proxy.refuse = True
            proxy.black_hole = True
    scene.hold(0.0, 1.0)
    for proxy in victim.proxies.values():
        proxy.refuse = proxy.black_hole = False
        proxy.cut()


# ------------------------------------------------------------------ the timers' Redis


@fault("CLIENT PAUSE", _is_plain)
def client_pause(scene: Scene) -> None:
    """Let the server answer nobody for a while."""
    seconds = scene.random.uniform(0.2, TIMEOUT + 1)
    with scene.deployment.connect() as client:
        client.client_pause(round(seconds * 1000))
    time.sleep(seconds)


@fault("CLIENT KILL")
def client_kill(scene: Scene) -> None:
    """Close all connections, several times."""
    with scene.deployment.connect() as client:
        for _ in range(scene.random.randint(1, 5)):
            client.client_kill_filter(_type="normal", skipme=True)
            scene.hold(0.05, 0.4)


@fault("SCRIPT FLUSH")
def script_flush(scene: Scene) -> None:
    """Let the server forget its scripts, several times."""
    with scene.deployment.connect() as client:
        for _ in range(5):
            client.script_flush()
            scene.hold(0.05, 0.2)


@fault("Redis frozen", _is_plain)
def freeze_store(scene: Scene) -> None:
    """Stop the server: connections stay open, and nothing answers."""
    scene.deployment.store.freeze()
    scene.hold(0.2, 2 * TIMEOUT)
    scene.deployment.store.thaw()


@fault("Redis restarted with its data", _is_plain)
def restart_store(scene: Scene) -> None:
    """Kill the server, and start it again after a while."""
    scene.deployment.store.kill()
    scene.hold(0.0, 2 * TIMEOUT)
    scene.deployment.store.start()


@fault("Redis a read-only replica", _is_plain)
def read_only(scene: Scene) -> None:
    """Let the server answer READONLY, as a replica in the master's place does."""
    with scene.deployment.connect() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        scene.hold(0.3, TIMEOUT + 1)
        client.execute_command("REPLICAOF", "NO", "ONE")


@fault("Redis full")
def full(scene: Scene) -> None:
    """Let the server refuse whatever needs memory."""
    with scene.deployment.connect() as client:
        _fill(scene, client)


def _fill(scene: Scene, client: redis.Redis) -> None:
    client.config_set("maxmemory", 1)
    scene.hold(0.3, TIMEOUT + 1)
    client.config_set("maxmemory", 0)


@fault("Redis restarted without its data", _is_plain)
def restart_empty(scene: Scene) -> None:
    """Kill the server, and start an empty one in its place."""
    with scene.workload.quiet():
        scene.history.read()
        lost_ms = now_ms()
        scene.deployment.store.restart(keep_data=False)
        scene.workload.lose_all(lost_ms, now_ms())


@fault("FLUSHALL")
def flush(scene: Scene) -> None:
    """Empty the server; what waits in its queue is seen in the same moment."""
    taker, history = scene.deployment.taker, scene.history
    key = scene.deployment.key("history")
    with scene.workload.quiet():
        history.read()
        lost_ms = now_ms()
        if scene.deployment.is_atomic and isinstance(taker, RedisTaker):
            entries, _ = taker.empty(lambda pipe: pipe.xrange(key, history.unread).flushall())
            history.enter([(id.decode(), _decoded(entry)) for id, entry in entries])
        else:
            with scene.deployment.connect() as client, client.pipeline(transaction=True) as pipe:
                pipe.xrange(key, history.unread).flushall()
                history.enter(pipe.execute()[0])
        scene.workload.lose_all(lost_ms, now_ms())


def _decoded(entry: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in entry.items()}


# ------------------------------------------------------------------ the broker


@fault("broker frozen", _is_confirmed)
def freeze_broker(scene: Scene) -> None:
    """Stop the broker for a while."""
    scene.deployment.broker.freeze()
    scene.hold(0.2, 2 * TIMEOUT)
    scene.deployment.broker.thaw()


@fault("broker down", _is_confirmed)
def kill_broker(scene: Scene) -> None:
    """Kill the broker, and start it again with what it has on its disk."""
    scene.deployment.broker.kill()
    scene.hold(0.0, 2 * TIMEOUT)
    scene.deployment.broker.start()


@fault("broker full", _is_confirmed)
def fill_broker(scene: Scene) -> None:
    """Let the broker refuse messages, or take none."""
    broker = scene.deployment.broker
    if isinstance(broker, RabbitMQ):
        broker.control("set_vm_memory_high_watermark", "absolute", "1MB")
        scene.hold(0.3, TIMEOUT + 1)
        broker.control("set_vm_memory_high_watermark", "0.6")
    else:
        _fill(scene, broker.client)


@fault("connections to the broker killed", _is_second_redis)
def kill_broker_clients(scene: Scene) -> None:
    """Close all connections to the broker."""
    for _ in range(scene.random.randint(1, 5)):
        scene.deployment.broker.client.client_kill_filter(_type="normal", skipme=True)
        scene.hold(0.05, 0.4)


@fault("broker emptied", _is_second_redis)
def empty_broker(scene: Scene) -> None:
    """Let the broker lose all it has, but nothing that nobody has seen."""
    taker = scene.deployment.taker
    assert isinstance(taker, RedisTaker), "a second Redis is the broker"
    taker.empty(lambda pipe: pipe.flushall())


# ------------------------------------------------------------------ workers


@fault("worker killed")
def kill_worker(scene: Scene) -> None:
    """Kill a worker and start another one."""
    worker = scene.random.choice(scene.deployment.workers)
    worker.kill()
    scene.deployment.workers.remove(worker)
    scene.hold(0.1, 0.5)
    scene.deployment.start_worker()


@fault("worker frozen")
def freeze_worker(scene: Scene) -> None:
    """Stop a worker for a while."""
    worker = scene.random.choice(scene.deployment.workers)
    worker.freeze()
    scene.hold(0.3, 2 * TIMEOUT)
    worker.thaw()


# ------------------------------------------------------------------ Sentinel


@contextmanager
def _failing_over(scene: Scene):
    """Wait until another node is the master, and measure how long nothing was sent."""
    servers, started_ms = scene.deployment.store, now_ms()
    old = servers.port
    yield
    scene.wait(lambda: _is_promoted(servers, old), "another master", 20)
    promoted_ms = now_ms()
    scene.wait(
        lambda: any(run.scheduled_ms >= promoted_ms for run in scene.book.runs[-50:]),
        "runs to go on",
        SETTLE,
    )
    scene.takeovers.append(("Sentinel failover", (now_ms() - started_ms) / 1000))
    scene.replays.append(Window("Sentinel failover", started_ms - 2000, now_ms()))


def _is_promoted(servers: Any, old: int) -> bool:
    try:
        port = servers.port
        return port != old and servers.node(port).info("replication")["role"] == "master"
    except (redis.RedisError, OSError):
        return False


@fault("Sentinel failover", _is_sentinel)
def fail_over(scene: Scene) -> None:
    """Kill the master; a replica takes its place."""
    servers = scene.deployment.store
    with scene.workload.quiet():  # what users were told is done stays done: that is theirs to check
        scene.hold(0.1, 0.2)
        with _failing_over(scene):
            old = servers.kill_master()
    _rejoin(scene, old)


@fault("Sentinel failover, last writes lost", _is_sentinel)
def fail_over_behind(scene: Scene) -> None:
    """Kill the master when the replicas have not followed for a while."""
    servers = scene.deployment.store
    with scene.workload.quiet(), _failing_over(scene):
        servers.cut_replication()
        scene.hold(0.3, 1.0)
        old = servers.kill_master()
        servers.mend_replication()
    _rejoin(scene, old)


@fault("Sentinel failover of a frozen master", _is_sentinel)
def fail_over_frozen(scene: Scene) -> None:
    """Stop the master until a replica has taken its place, and let it go on."""
    servers = scene.deployment.store
    with scene.workload.quiet():
        scene.hold(0.1, 0.2)
        with _failing_over(scene):
            servers.freeze()
        servers.thaw()
        wait_until(servers.is_whole, "the former master to follow the new one", 30)


def _rejoin(scene: Scene, old: int) -> None:
    servers = scene.deployment.store
    servers.start_node(old, servers.port)
    wait_until(servers.is_whole, "all nodes to follow the new master", 30)


# ------------------------------------------------------------------ helpers for the episode


def mend(scene: Scene) -> None:
    """Mend whatever a fault that failed half way may have left."""
    with ExitStack() as stack:
        for server in {
            id(s): s for s in (scene.deployment.store, scene.deployment.broker)
        }.values():
            stack.callback(server.thaw)
        for beat in scene.live():
            stack.callback(beat.process.thaw)
        for worker in scene.deployment.workers:
            stack.callback(_thaw, worker)


def _thaw(process: Process) -> None:
    if process.is_running():
        process.thaw()
