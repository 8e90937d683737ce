"""Keeps passwords out of what is logged, raised, shown and stored.

A URL is shown without its user, its password and its options. What looks like neither host nor port
is taken for a part of a password that was not percent-encoded, and is hidden with all that follows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import parse_qsl, unquote

#: What stands for a secret.
MASK = "**"

_HOST = r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/@\[\]?#,;]*)(?::\d+)?"
_PLACE = re.compile(rf"{_HOST}(?:,{_HOST})*(?:/[^?#]*)?")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
_NAMES = "password passwd passphrase pwd secret token ssl_password credentials".split()
_NAMED = re.compile(
    rf"(?i)\b((?:\w*_)?(?:{'|'.join(_NAMES)})['\"]?\s*[=:]\s*['\"]?)[^\s'\"&;,)}}]+"
)
_SHORTEST = 4  # characters of a secret that is looked for in a text as it is


def masked_url(url: str) -> str:
    """Return a URL, or a list of them with ``;`` in between, fit to be shown."""
    return ";".join(map(_masked_part, url.split(";")))


def _masked_part(url: str) -> str:
    scheme, colon, rest = url.partition("://")
    if not colon:
        scheme, rest = "", url
    rest, _, options = rest.partition("?")
    secrets, at, place = rest.rpartition("@")
    if "@" in options or not _PLACE.fullmatch(place):
        return f"{scheme}{colon}{MASK}"
    return f"{scheme}{colon}{MASK if secrets else ''}{at}{place}"


def masked(text: object, secrets: Collection[str] = ()) -> str:
    """Return a text without passwords: of URLs in it, those with a name, and some that are known.

    Args:
        text: an exception's, say.
        secrets: that are known, from `secrets_in`.
    """
    found = str(text)
    for secret in sorted(secrets, key=len, reverse=True):
        found = found.replace(secret, MASK)
    found = _URL.sub(lambda match: masked_url(match[0]), found)
    return _NAMED.sub(rf"\1{MASK}", found)


def secrets_in(*sources: Any) -> frozenset[str]:
    """Return the passwords in URLs, in lists of URLs, and in dicts of options.

    Those that are too short to be told from other text are left out.
    """
    return frozenset(
        each for source in sources for each in _secrets(source) if len(each) >= _SHORTEST
    )


def _secrets(source: Any) -> Iterator[str]:
    if isinstance(source, dict):
        for name, value in source.items():
            if isinstance(value, dict):
                yield from _secrets(value)
            elif isinstance(value, str) and any(part in str(name).lower() for part in _NAMES):
                yield value
    elif isinstance(source, (list, tuple)):
        for each in source:
            yield from _secrets(each)
    elif isinstance(source, str):
        for url in source.split(";"):
            rest = url.partition("://")[2]
            password = rest.rpartition("@")[0].partition(":")[2]
            yield from (password, unquote(password))
            for name, value in parse_qsl(rest.partition("?")[2]):
                if any(part in name.lower() for part in _NAMES):
                    yield value


_MASKED = "dtimer_masked"  # the attribute of an app whose report is masked


def mask_report(app: Any) -> None:
    """Keep passwords out of what ``celery report`` prints of an app's settings.

    Celery hides those of its own settings alone.
    """
    if _MASKED not in app.__dict__:
        app.__dict__[_MASKED] = True
        report = app.bugreport
        app.bugreport = lambda: masked(report())
