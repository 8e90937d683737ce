"""What happens in the demo, in order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from example_project import shop
from example_project.celery import app, timers
from example_project.demo.processes import Child, Children, DemoError
from example_project.demo.screen import PlainScreen
from example_project.demo.verdict import merged, tally
from example_project.demo.watch import Watch

TIMEOUT = 3.0  # seconds without a heartbeat after which a beat counts as dead; the default is 30
_BEATS, _WORKERS = 3, 2
_PAY_WITHIN = timedelta(seconds=5)  # of a real shop: two weeks
_ORDER_EVERY = 1.5  # seconds between two orders
_PATIENCE = 30.0  # seconds in which what is waited for should happen
_PAID = 4  # each fourth order is paid in time: its reminder is deleted


class Story:
    """Beats and workers share timers; one beat is killed, another joins; then runs are counted."""

    def __init__(self, children: Children, screen: PlainScreen, seconds: float) -> None:
        """Prepare a demo whose beats run for so many seconds."""
        self._children, self._screen, self._seconds = children, screen, seconds
        self._watch = Watch(timers)
        self._env: dict[str, str] = {}
        self._beats: list[Child] = []
        self._workers: list[Child] = []
        self._orders: list[str] = []  # the ids of their reminders
        self._next_order = math.inf

    def run(self) -> bool:
        """Tell it all; return whether no run was lost or doubled.

        Raises:
            DemoError: Something does not start, or ends, or does not happen in time.
        """
        self._start_server()
        self._start_workers()
        self._start_beats()
        started = time.monotonic()
        self._open_the_shop()
        self._follow(started + 0.3 * self._seconds)
        self._kill_a_beat()
        self._follow(started + 0.65 * self._seconds)
        self._start_another_beat()
        last_reminder = 1.5 * _PAY_WITHIN.total_seconds()
        self._follow(started + self._seconds - last_reminder)
        self._next_order = math.inf
        self._follow(max(started + self._seconds, time.monotonic() + last_reminder))
        until = self._watch.now()
        self._stop()
        return self._judge(until)

    # -- what happens

    def _start_server(self) -> None:
        self._screen.say("Starting a Valkey server, which holds the timers and the messages.")
        server = self._children.start("server", ["celery_dtimer.embedded"], {})
        self._children.wait_until(lambda: "redis://" in server.log_text(), "the embedded server")
        url = server.log_text().split()[0]
        self._env = {"SHOP_REDIS_URL": url, "SHOP_INSTANCE_TIMEOUT": f"{TIMEOUT:g}"}
        app.conf.update(broker_url=url)
        self._watch.connect(url)

    def _start_workers(self) -> None:
        self._screen.say(f"Starting {_WORKERS} workers and {_BEATS} beats.")
        for number in range(1, _WORKERS + 1):
            arguments = ["worker", "--pool", "solo", "--without-gossip", "--without-mingle"]
            arguments += ["--include", "example_project.demo.recorder"]
            arguments += ["--hostname", f"worker {number}@%h", "--loglevel", "INFO"]
            self._workers.append(self._start_celery(f"worker {number}", arguments))

    def _start_beats(self) -> None:
        for _ in range(_BEATS):
            self._start_beat()
        self._wait_until(self._is_shared, "the beats to share the timers")
        self._wait_until(
            lambda: all(" ready." in worker.log_text() for worker in self._workers), "the workers"
        )

    def _open_the_shop(self) -> None:
        shop.offer_currencies()
        for warehouse in shop.WAREHOUSES:
            shop.open_warehouse(warehouse)
        self._next_order = time.monotonic()
        self._screen.say(
            "Each beat owns a share of the timers: those of the code, and those that the shop has "
            "just created. Customers place orders; an order is a one-shot timer, a reminder "
            f"{_PAY_WITHIN.total_seconds():g} s ahead, and paying deletes it."
        )
        self._screen.show_owners(self._watch.look())

    def _kill_a_beat(self) -> None:
        victim = max(self._beats, key=lambda beat: len(self._watch.owned_by(beat.pid)))
        self._screen.say(
            f"{victim.name} will be killed (kill -9), whatever it is doing: the script that notes "
            "a run also pushes its message, so that there is no moment between the two."
        )
        self._children.kill(victim)
        killed = time.monotonic()
        self._beats.remove(victim)
        self._watch.killed.add(victim.pid)
        self._screen.say(
            f"{victim.name} is killed. The others count it as dead {TIMEOUT:g} s after its last "
            "heartbeat (by default 30 s), and share its timers."
        )
        self._screen.show_owners(self._watch.look())
        self._wait_until(lambda: not self._watch.owned_by(victim.pid), "a takeover")
        self._screen.say(
            f"{victim.name}'s timers have new owners, {time.monotonic() - killed:.1f} s after the "
            "kill. Runs that fell due meanwhile come late; of several runs of one timer that were "
            "missed, one is sent for all, and the others count as skipped."
        )
        self._screen.show_owners(self._watch.look())

    def _start_another_beat(self) -> None:
        beat = self._start_beat()
        self._screen.say(f"{beat.name} joins.")
        self._wait_until(self._is_shared, "its share of the timers")
        self._screen.say(f"{beat.name} has got its share from the others.")
        self._screen.show_owners(self._watch.look())

    def _stop(self) -> None:
        self._screen.say("Time is up: the beats end (SIGTERM), the workers do what is left.")
        self._follow(time.monotonic() + 1)  # what was due at the last moment is sent
        self._children.stop(self._beats)
        self._children.wait_until(self._watch.is_queue_empty, "the workers to do what is left")
        self._children.stop(self._workers)
        self._screen.show(self._watch.look())

    def _judge(self, until: datetime) -> bool:
        tallies = tally(self._watch.accounts(until), self._watch.runs)
        reminders = [each for each in tallies if each.name.startswith("reminder")]
        others = [each for each in tallies if each not in reminders]
        total = merged("all", tallies)
        violations = timers.check_consistency()
        orders, paid = len(self._orders), sum(each.slots == 0 for each in reminders)
        self._screen.finish(
            [*others, merged(f"reminders: {orders} orders, {paid} paid", reminders)]
        )
        for violation in violations:
            self._screen.say(f"Inconsistent: {violation}")
        self._screen.say(
            f"{total.slots} times a timer was to run (slots): {total.ran} ran, and {total.skipped} "
            f"were skipped since a late run stood for them too. Lost: {total.lost}, doubled: "
            f"{total.doubled}, stray (at other times): {total.stray}."
        )
        is_well = all(each.is_clean for each in tallies) and total.ran > 0 and not violations
        self._screen.say(
            "No run was lost or doubled." if is_well else "THIS IS NOT AS IT SHOULD BE."
        )
        return is_well

    # -- how

    def _start_celery(self, name: str, arguments: list[str]) -> Child:
        arguments = ["celery", "-A", "example_project", *arguments]
        return self._children.start(name, arguments, self._env)

    def _start_beat(self) -> Child:
        name = f"beat {len(self._watch.beat_names) + 1}"
        arguments = ["beat", "--scheduler", "dtimer", "--pidfile", "", "--loglevel", "INFO"]
        beat = self._start_celery(name, arguments)
        self._beats.append(beat)
        self._watch.beat_names[beat.pid] = name
        return beat

    def _is_shared(self) -> bool:
        view = self._watch.look()
        shares = [len(beat.timers) for beat in view.beats if beat.state == "running"]
        everybody = len(shares) == len(self._beats) and not view.unowned
        return everybody and min(shares) > 0 and max(shares) - min(shares) <= 1

    def _follow(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            self._turn()
            time.sleep(min(left, self._screen.pause))

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        next_turn = 0.0
        while not condition():
            if time.monotonic() > deadline:
                raise DemoError(f"waited {_PATIENCE:g} s in vain for {what}")
            if time.monotonic() >= next_turn:
                self._turn()
                next_turn = time.monotonic() + self._screen.pause
            time.sleep(0.05)

    def _turn(self) -> None:
        self._children.check()
        if time.monotonic() >= self._next_order:
            self._next_order += _ORDER_EVERY
            self._take_an_order()
        self._screen.show(self._watch.look())

    def _take_an_order(self) -> None:
        number = len(self._orders)
        if number and number % _PAID == 0:
            shop.pay_order(number)
            self._watch.forget(self._orders[-1])
        self._orders.append(shop.place_order(number + 1, pay_within=_PAY_WITHIN))
