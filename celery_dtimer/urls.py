"""The addresses of Redis as users write them: one server, a set of sentinels, or a cluster.

Sentinels stand in a list of URLs, as Celery and kombu write them, cluster nodes in one URL::

    sentinel://:secret@one:26379/2;sentinel://two:26379;three:26379
    redis+cluster://user:secret@one:7000,two:7000

Of a list of other brokers only the first is used.
"""

from __future__ import annotations

from urllib.parse import urlsplit

#: The URL schemes that ``dtimer_redis_url`` accepts.
SCHEMES = (
    *("redis", "rediss", "redis+socket", "unix", "embedded"),
    *("sentinel", "redis+cluster", "rediss+cluster"),
)

_SENTINEL = "sentinel"
_CLUSTERS = ("redis+cluster", "rediss+cluster")
_WITH_DATABASES = ("redis", "rediss", _SENTINEL)


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, "" when it has none."""
    scheme, separator, _ = url.partition("://")
    return scheme if separator else ""


def is_sentinel(url: str) -> bool:
    """Say whether a URL leads to sentinels, which know the server."""
    return scheme_of(url) == _SENTINEL


def is_cluster(url: str) -> bool:
    """Say whether a URL leads to a cluster."""
    return scheme_of(url) in _CLUSTERS


def is_embedded(url: str) -> bool:
    """Say whether a URL names a server that may have to be started."""
    return scheme_of(url) == "embedded"


def used_part(url: str) -> str:
    """Return what is used of a list: all sentinels, else the first."""
    return url if is_sentinel(url) else url.split(";")[0]


def members(url: str) -> list[str]:
    """Return a URL for each address that a URL names: of a sentinel, of a node, of the server."""
    scheme = scheme_of(url)
    if scheme == _SENTINEL:
        parts = [part for part in url.split(";") if part]
        return [part if "://" in part else f"{scheme}://{part}" for part in parts]
    if scheme in _CLUSTERS:
        parts_of = urlsplit(url)
        secrets, at, places = parts_of.netloc.rpartition("@")
        return [
            parts_of._replace(netloc=f"{secrets}{at}{place}").geturl()
            for place in places.split(",")
            if place
        ]
    return [url]


def problem(url: str) -> str | None:
    """Return what is wrong with a URL of a known scheme, None when nothing is."""
    found = members(url)
    if not found:
        return "expected at least one address"
    if not all(map(_is_readable, found)):
        return "expected user name and password percent-encoded, and numbers as port and database"
    schemes = {scheme_of(each) for each in found}
    if len(schemes) > 1:
        return f"expected sentinels alone, not {' and '.join(sorted(schemes))}"
    if is_cluster(url) and urlsplit(found[0]).path.strip("/") not in ("", "0"):
        return "a cluster has database 0 alone"
    return None


def _is_readable(url: str) -> bool:
    """Say whether the parts of a URL are what they seem: a raw ``#`` or ``?`` moves them."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises when it is no number
    except ValueError:
        return False
    database = parts.path.strip("/")
    is_number = not database or database.isdigit() or parts.scheme not in _WITH_DATABASES
    return not parts.fragment and is_number
