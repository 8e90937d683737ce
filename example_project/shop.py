"""What the shop's own code does at run time: timers follow what customers and staff do."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import urlsplit

from example_project.celery import timers
from example_project.tasks import count_stock
from example_project.webhooks import TEMPORARY, post_webhook

CURRENCIES = ("CHF", "CNY", "GBP", "JPY", "NOK", "SEK", "TRY", "USD")
WAREHOUSES = ("Ghent", "Lyon", "Porto", "Riga", "Turin", "Vigo")

#: Partners' servers may be down for a while: their webhooks wait longer than the callback says.
PATIENCE = {
    "autoretry_for": TEMPORARY,
    "max_retries": 8,
    "retry_backoff": 10,
    "retry_backoff_max": 1800,
    "timeout": 20,
}


def offer_currencies(currencies: Iterable[str] = CURRENCIES) -> None:
    """Keep the rates of these currencies fresh: a timer each, all created at once."""
    timers.create_timers(
        {
            "name": f"rate of {currency}",
            "schedule": timedelta(seconds=2),
            "callback": "refresh_rate",
            "args": [currency],
            "expires": 60,
        }
        for currency in currencies
    )


def open_warehouse(warehouse: str) -> str:
    """Count a warehouse's stock from now on; return the timer's id."""
    return timers.create_timer(f"stock of {warehouse}", 5, count_stock.s(warehouse))


def place_order(order: int, *, pay_within: timedelta = timedelta(days=14)) -> str:
    """Note an order, with a reminder for the case that it is not paid; return the reminder's id."""
    moment = datetime.now(timezone.utc) + pay_within
    return timers.create_timer(_reminder(order), moment, "remind_to_pay", args=[order])


def pay_order(order: int) -> None:
    """Note that an order is paid: nobody needs to be reminded."""
    timers.delete_timer(_reminder(order))


def subscribe_webhook(
    partner: str, url: str, *, every: timedelta = timedelta(hours=1), **options: Any
) -> str:
    """Tell a partner's server regularly that there are new prices; return the timer's id.

    Args:
        partner: its name.
        url: of its server; it may hold a user and a password.
        every: the time from one delivery to the next.
        **options: of this partner's timer, where they differ from `PATIENCE`.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("the URL of a webhook starts with http:// or https://")
    return timers.create_timer(
        f"webhook of {partner}",
        every,
        post_webhook.s(url, "prices", {"partner": partner}),
        overlap="skip",  # while one is tried again, the next is not needed
        **{**PATIENCE, **options},
    )


def _reminder(order: int) -> str:
    return f"reminder for order {order}"
