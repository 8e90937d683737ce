"""What the shop does in the background: plain Celery tasks, and callbacks that get their timer."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.schedules import crontab
from celery.utils.log import get_task_logger

from celery_dtimer import CallbackTimer
from example_project.celery import app, timers

logger = get_task_logger(__name__)


@timers.callback(
    "daily sales report",
    schedule=crontab(hour=7, minute=0),
    timezone="Europe/Paris",
    kwargs={"format": "pdf"},
    description="goes to the owners before the shop opens",
)
def send_sales_report(timer: CallbackTimer, *, format: str) -> None:
    """Report the sales of the day before the moment that the timer stands for."""
    logger.info("Sales until %s, as %s", timer.scheduled_at.isoformat(), format)


@timers.callback
def refresh_rate(timer: CallbackTimer, currency: str) -> None:
    """Fetch what a euro costs in a currency."""
    logger.info("Rate of %s fetched, for the %s. time", currency, timer.run)


@timers.callback
def remind_to_pay(timer: CallbackTimer, order: int) -> None:
    """Write to a customer who has not paid."""
    logger.info("Order %s: a reminder is sent (%s)", order, timer.name)


@app.task
def count_stock(warehouse: str) -> None:
    """Compare what is on the shelves with the books."""
    logger.info("Stock of %s counted", warehouse)


@app.task
def count_visitors() -> None:
    """Sum up who came within the last minute."""
    logger.info("Visitors counted")


@app.task
def remove_old_carts() -> None:
    """Forget the carts that nobody came back for."""
    logger.info("Old carts removed")


@app.on_after_finalize.connect
def add_clean_up(sender: Celery, **_: Any) -> None:
    """Add the clean-up, as any Celery app does."""
    sender.add_periodic_task(10.0, remove_old_carts.s(), name="remove old carts")
