"""Mistakes that a type checker finds, each in a line that says so."""

from shop.app import bare, timers

from celery_dtimer import DistributedTimers  # mistake
from celery_dtimer import Timer

timers.create_timer("a", [], bare)  # mistake
timers.create_timer("a", 10, bare, overlap="never")  # mistake
timers.create_timer("a", 10, bare, dst="sometimes")  # mistake
number: int = timers.create_timer("a", 10, bare)  # mistake
timers.get_timers(limits=3)  # mistake
timers.pause_timer(3)  # mistake


def name_of(timer: Timer) -> str:
    return timer.nme  # mistake
