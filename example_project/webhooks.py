"""Webhooks: a partner's server is told of something each time a timer says so.

A delivery that may yet succeed is tried again, each time later than the last: the partner cannot be
reached, takes too long, or answers 5xx. Any other refusal is final. All tries of one run carry the
same ``Idempotency-Key``, the task id, so that a partner who has heard it before can tell. What has
failed for good becomes a dead letter, and the shop's staff is told.

Addresses of webhooks hold passwords: nothing here logs more of one than its host.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from celery import current_task
from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.log import get_task_logger

from celery_dtimer import CallbackTimer, DeadLetter
from example_project.celery import timers

logger = get_task_logger(__name__)

ALERT_URL = os.environ.get("SHOP_ALERT_URL")
SOCKET_TIMEOUT = 10.0  # seconds that the other side may be silent

#: What may pass by itself. An URLError, a timeout and a broken connection are all OSErrors.
TEMPORARY = (OSError, HTTPException, SoftTimeLimitExceeded)


class WebhookRefusedError(Exception):
    """The other side has understood, and does not want it: there is no use in asking again."""


@timers.callback(
    autoretry_for=TEMPORARY,
    max_retries=5,
    retry_backoff=2,  # seconds before the first retry, twice as many before the next, and so on
    retry_backoff_max=600,
    retry_jitter=True,  # else all that a partner has missed comes at the same time
    timeout=30,  # a server that sends a byte now and then never meets the socket's timeout
)
def post_webhook(timer: CallbackTimer, url: str, event: str, payload: Any) -> None:
    """Tell a partner of an event."""
    body = {"event": event, "scheduled_at": timer.scheduled_at.isoformat(), "payload": payload}
    post_json(url, body, {"Idempotency-Key": str(current_task.request.id)})
    logger.info("%s: %s was delivered", timer.name, event)


@timers.on_failure
def tell_staff(letter: DeadLetter) -> None:
    """Tell the staff of any run of the shop's timers that has failed for good."""
    moment = letter.scheduled_at.isoformat() if letter.scheduled_at else None
    logger.error("%s, scheduled at %s, has failed: %s", letter.name, moment, letter.error)
    if ALERT_URL:
        alert = {"timer": letter.name, "scheduled_at": moment, "error": letter.error}
        post_json(ALERT_URL, alert, {})


def post_json(url: str, body: Any, headers: dict[str, str]) -> None:
    """POST a document; a user and a password in the URL are sent as HTTP's basic ones.

    Raises:
        WebhookRefusedError: the answer is a redirect or a 4xx.
        URLError: the answer is a 5xx, or there is no connection.
    """
    parts = urlsplit(url)
    credentials, _, host = parts.netloc.rpartition("@")
    headers = {"Content-Type": "application/json", **headers}
    if credentials:
        headers["Authorization"] = f"Basic {b64encode(unquote(credentials).encode()).decode()}"
    address = parts._replace(netloc=host).geturl()
    request = Request(address, json.dumps(body).encode(), headers, method="POST")  # noqa: S310 - the shop checks the scheme
    try:
        _opener.open(request, timeout=SOCKET_TIMEOUT).close()
    except HTTPError as error:
        error.close()
        kind = URLError if error.code >= 500 else WebhookRefusedError
        raise kind(f"{host} answered {error.code} {error.reason}") from None


class _NoRedirects(HTTPRedirectHandler):
    """Leaves a redirect to be an error: urllib would follow it with a GET, without the body."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request to follow it with."""


_opener = build_opener(_NoRedirects)
