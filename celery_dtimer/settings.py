"""The settings of a service, read from the Celery app once and checked at construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from celery import Celery

from celery_dtimer import urls
from celery_dtimer.errors import SettingsError, is_number, shown
from celery_dtimer.masking import masked_url
from celery_dtimer.policy import LONGEST_GRACE_MS, MOST_CATCH_UP, SHORTEST_GRACE_MS, Defaults

#: What the broker's own options say of Sentinel, as Celery names it.
_SENTINEL_OPTIONS = ("master_name", "sentinel_kwargs", "min_other_sentinels")
_LONGEST_WAIT_FOR_REPLICAS = 1.0  # seconds

#: The shards that a service can have; each costs every instance three threads and connections.
MOST_SHARDS = 64

_MOST_TIMERS = 2**32 - 1  # members of a sorted set
_LAST_PORT = 65535

_DEFAULTS: dict[str, Any] = {
    "dtimer_redis_url": None,
    "dtimer_redis_options": {},
    "dtimer_service": None,
    "dtimer_key_prefix": "",
    "dtimer_heartbeat_interval": 5,
    "dtimer_check_interval": 1,
    "dtimer_failure_check_interval": 10,
    "dtimer_instance_timeout": 30,
    "dtimer_batch_size": 100,
    "dtimer_resolution": 0.005,
    "dtimer_lag_limit": 2,
    "dtimer_dispatch": "auto",
    "dtimer_shards": 1,
    "dtimer_keep_finished": timedelta(days=7),
    "dtimer_coalesce": True,
    "dtimer_misfire_grace_time": None,
    "dtimer_max_catch_up": 100,
    "dtimer_history": 10_000,
    "dtimer_track_runs": True,
    "dtimer_run_lease": 60,
    "dtimer_queued_lease": 3600,
    "dtimer_max_refusals": 100,
    "dtimer_eta_threshold": None,
    "dtimer_wait_replicas": 0,
    "dtimer_allowed_tasks": None,
    "dtimer_max_timers": 10_000_000,
    "dtimer_metrics_port": None,
    "dtimer_metrics_host": "127.0.0.1",
    "dtimer_send_events": False,
}


# They are times that instances judge each other by, or decide what becomes of a run.
_SHARED = (
    *("heartbeat_interval", "failure_check_interval", "instance_timeout", "lag_limit", "dispatch"),
    *("keep_finished", "history", "track_runs", "run_lease", "queued_lease", "max_refusals"),
)


def defaults() -> dict[str, Any]:
    """Return every setting's name with its default, as the README's table lists them."""
    return dict(_DEFAULTS)


@dataclass(frozen=True, slots=True)
class Settings:
    """How one service keeps and fires its timers; times in seconds."""

    service: str
    redis_url: str = field(repr=False)
    redis_options: Mapping[str, Any] = field(repr=False, default_factory=dict)
    key_prefix: str = ""
    heartbeat_interval: float = 5.0
    check_interval: float = 1.0
    failure_check_interval: float = 10.0
    instance_timeout: float = 30.0
    batch_size: int = 100
    resolution: float = 0.005
    lag_limit: float = 2.0
    dispatch: str = "auto"
    shards: int = 1
    keep_finished: float = 7 * 86400.0
    defaults: Defaults = field(default_factory=Defaults)
    history: int = 10_000
    track_runs: bool = True
    run_lease: float = 60.0
    queued_lease: float = 3600.0
    max_refusals: int = 100
    eta_threshold: float | None = None
    wait_replicas: int = 0
    allowed_tasks: tuple[str, ...] | None = None
    max_timers: int | None = 10_000_000
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    send_events: bool = False

    @classmethod
    def from_app(cls, app: Celery, service: str | None = None) -> Settings:
        """Return the settings of a Celery app.

        Args:
            app: the app whose configuration is read.
            service: a service to use in place of the app's own.

        Raises:
            SettingsError: a value cannot be used; the message names the setting and what is
                accepted.
        """
        _refuse_unknown(app)
        conf = {name: app.conf.get(name, default) for name, default in _DEFAULTS.items()}
        return cls(
            service=_service(app, service or conf["dtimer_service"]),
            redis_url=_redis_url(app, conf["dtimer_redis_url"]),
            redis_options=_options(app, conf),
            key_prefix=conf["dtimer_key_prefix"],
            heartbeat_interval=_seconds("dtimer_heartbeat_interval", conf),
            check_interval=_seconds("dtimer_check_interval", conf),
            failure_check_interval=_seconds("dtimer_failure_check_interval", conf),
            instance_timeout=_seconds("dtimer_instance_timeout", conf),
            batch_size=conf["dtimer_batch_size"],
            resolution=_seconds("dtimer_resolution", conf, zero=True),
            lag_limit=_seconds("dtimer_lag_limit", conf),
            dispatch=conf["dtimer_dispatch"],
            shards=check_shards("dtimer_shards", conf["dtimer_shards"]),
            keep_finished=_seconds("dtimer_keep_finished", conf, zero=True),
            defaults=_defaults(conf, app.conf.beat_cron_starting_deadline),
            history=_whole("dtimer_history", conf, 1_000_000),
            track_runs=_bool("dtimer_track_runs", conf),
            run_lease=_seconds("dtimer_run_lease", conf),
            queued_lease=_seconds("dtimer_queued_lease", conf),
            max_refusals=_whole("dtimer_max_refusals", conf, 1_000_000),
            eta_threshold=_threshold(conf["dtimer_eta_threshold"]),
            wait_replicas=_whole("dtimer_wait_replicas", conf, 100),
            allowed_tasks=_task_names(conf["dtimer_allowed_tasks"]),
            max_timers=_whole_or_none(
                *("dtimer_max_timers", conf, _MOST_TIMERS),
                f"a whole number from 0 to {_MOST_TIMERS}",
            ),
            metrics_port=_whole_or_none(
                *("dtimer_metrics_port", conf, _LAST_PORT),
                f"a port from 1 to {_LAST_PORT}, 0 for any that is free",
            ),
            metrics_host=conf["dtimer_metrics_host"],
            send_events=_bool("dtimer_send_events", conf),
        )

    def __post_init__(self) -> None:
        """Refuse combinations that cannot work."""
        if not isinstance(self.key_prefix, str) or set("{}") & set(self.key_prefix):
            raise _bad("dtimer_key_prefix", self.key_prefix, "a str without braces")
        size = self.batch_size
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 200:
            raise _bad("dtimer_batch_size", size, "a whole number from 1 to 200")
        if self.resolution > 1:
            raise _bad("dtimer_resolution", self.resolution, "seconds, at most 1")
        if self.dispatch not in ("auto", "atomic", "confirmed"):
            raise _bad("dtimer_dispatch", self.dispatch, '"auto", "atomic" or "confirmed"')
        if not isinstance(self.metrics_host, str) or not self.metrics_host:
            accepted = 'an address of this host, or "0.0.0.0" for all of them'
            raise _bad("dtimer_metrics_host", self.metrics_host, accepted)
        if self.run_lease < 1:
            raise _bad("dtimer_run_lease", self.run_lease, "seconds, 1 or more")
        if self.instance_timeout <= 2 * self.heartbeat_interval:
            raise SettingsError(
                f"dtimer_instance_timeout={self.instance_timeout:g} must be more than twice "
                f"dtimer_heartbeat_interval={self.heartbeat_interval:g}: a single late heartbeat "
                "would count as a death"
            )
        if self.check_interval > self.instance_timeout / 2:
            raise SettingsError(
                f"dtimer_check_interval={self.check_interval:g} must be at most half of "
                f"dtimer_instance_timeout={self.instance_timeout:g}: a loop that waits "
                "longer looks dead"
            )

    @property
    def shared(self) -> dict[str, Any]:
        """What all instances of the service should agree on, by name: numbers and words alone."""
        return {f"dtimer_{name}": getattr(self, name) for name in _SHARED} | self.defaults._asdict()

    @property
    def call_timeout(self) -> float:
        """The seconds that one call to Redis may take, and the loop without progress."""
        return self.instance_timeout / 3

    @property
    def replicas_timeout(self) -> float:
        """The seconds that a commit waits for its replicas."""
        return min(_LONGEST_WAIT_FOR_REPLICAS, self.call_timeout / 2)

    @property
    def give_up_after(self) -> float:
        """The seconds without a broker after which timers go to instances that have one."""
        return self.call_timeout

    @property
    def broker_timeout(self) -> float:
        """The seconds that one call to the broker may take: to connect takes two of them."""
        return self.instance_timeout / 8

    @property
    def masked_url(self) -> str:
        """The Redis URL without user, password and options, fit to be shown."""
        return masked_url(self.redis_url)

    @property
    def is_cluster(self) -> bool:
        """Say whether the timers are on a Redis Cluster."""
        return urls.is_cluster(self.redis_url)


def check_shards(name: str, count: object) -> int:
    """Return a number of shards.

    Raises:
        SettingsError: it is none; ``name`` names it.
    """
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_SHARDS:
        raise _bad(name, count, f"a whole number from 1 to {MOST_SHARDS}")
    return count


def eta_threshold(app: Celery) -> float | None:
    """Return the seconds of delay beyond which an app's calls are durable, None for no call.

    Raises:
        SettingsError: it is neither None nor seconds.
    """
    return _threshold(app.conf.get("dtimer_eta_threshold"))


def allowed_tasks(app: Celery) -> tuple[str, ...] | None:
    """Return the names, or patterns, of the tasks that an app's timers may send; None for all.

    Raises:
        SettingsError: it is no list of names.
    """
    return _task_names(app.conf.get("dtimer_allowed_tasks"))


def _task_names(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (None,)
    if not all(isinstance(name, str) and name for name in names):
        accepted = "a list of the names of tasks, in which * and ? stand for any text, or None"
        raise _bad("dtimer_allowed_tasks", value, accepted)
    return tuple(map(str, names))


def _whole_or_none(name: str, conf: Mapping[str, Any], most: int, accepted: str) -> int | None:
    try:
        return None if conf[name] is None else _whole(name, conf, most)
    except SettingsError:
        raise _bad(name, conf[name], f"{accepted}, or None") from None


def _threshold(value: object) -> float | None:
    name = "dtimer_eta_threshold"
    try:
        return None if value is None else _seconds(name, {name: value}, zero=True)
    except SettingsError:
        accepted = "seconds as a number, or a timedelta, 0 or more, or None"
        raise _bad(name, value, accepted) from None


def _refuse_unknown(app: Celery) -> None:
    """Refuse a setting that is misspelt, however the app's settings are prefixed."""
    for key in app.conf:
        name = str(key).lower()
        start = name.find("dtimer_")
        if start >= 0 and name[start:] not in _DEFAULTS and name[:start] in ("", _prefix(app)):
            known = ", ".join(_DEFAULTS)
            raise SettingsError(f"{key} is not a setting of celery_dtimer; there are {known}")


def _prefix(app: Celery) -> str:
    return str(getattr(app.conf, "prefix", "") or "").lower()


def _defaults(conf: Mapping[str, Any], deadline: object) -> Defaults:
    """Return what holds for timers that do not say otherwise; ``deadline`` is Celery's own."""
    return Defaults(
        coalesce=_bool("dtimer_coalesce", conf),
        grace_ms=_grace_ms("dtimer_misfire_grace_time", conf),
        cron_grace_ms=_deadline_ms(deadline),
        max_catch_up=_whole("dtimer_max_catch_up", conf, MOST_CATCH_UP),
    )


def _deadline_ms(deadline: object) -> int | None:
    """Return Celery's own grace of crontabs; even what is sent in time is some ms late."""
    if deadline is None:
        return None
    name = "beat_cron_starting_deadline"
    deadline_ms = round(_seconds(name, {name: deadline}, zero=True) * 1000)
    return min(max(deadline_ms, SHORTEST_GRACE_MS), LONGEST_GRACE_MS)


def _grace_ms(name: str, conf: Mapping[str, Any]) -> int | None:
    if conf[name] is None:
        return None
    grace_ms = round(_seconds(name, conf) * 1000)
    if not SHORTEST_GRACE_MS <= grace_ms <= LONGEST_GRACE_MS:
        raise _bad(name, conf[name], "seconds or a timedelta from 1 s to 1000 years, or None")
    return grace_ms


def _bool(name: str, conf: Mapping[str, Any]) -> bool:
    value = conf[name]
    if not isinstance(value, bool):
        raise _bad(name, value, "True or False")
    return value


def _whole(name: str, conf: Mapping[str, Any], most: int) -> int:
    value = conf[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise _bad(name, value, f"a whole number from 0 to {most}")
    return value


def _bad(name: str, value: object, accepted: str) -> SettingsError:
    return SettingsError(f"{name}={shown(value)} is not accepted; expected {accepted}")


def _seconds(name: str, conf: Mapping[str, Any], *, zero: bool = False) -> float:
    value = conf[name]
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not is_number(seconds) or not (0 if zero else 1e-9) <= seconds < float("inf"):
        raise _bad(
            name,
            value,
            "seconds as a number, or a timedelta, " + ("0 or more" if zero else "more than 0"),
        )
    return float(seconds)


def _options(app: Celery, conf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return redis-py's options: those of the broker first, where its URL is used."""
    value = conf["dtimer_redis_options"]
    if not isinstance(value, Mapping):
        raise SettingsError(
            f"dtimer_redis_options is a {type(value).__name__}; expected a dict of redis-py options"
        )
    url = _redis_url(app, conf["dtimer_redis_url"])
    options = {**_broker_options(app, url), **value}
    if urls.is_sentinel(url) and not _is_name(options.get("master_name")):
        raise SettingsError(
            f"master_name={shown(options.get('master_name'))} is not accepted: "
            "dtimer_redis_url leads to sentinels, which know servers by name; expected the name as "
            'dtimer_redis_options["master_name"], or as broker_transport_options["master_name"] '
            "where the broker's URL is used"
        )
    return options


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _broker_options(app: Celery, url: str) -> dict[str, Any]:
    """Return what Celery's own settings say of a server, if it is the broker's."""
    own = app.conf.get("dtimer_redis_url")
    if own and own not in (app.conf.broker_write_url, app.conf.broker_url):
        return {}
    found: dict[str, Any] = {}
    if urls.is_sentinel(url):
        options = app.conf.broker_transport_options or {}
        found = {name: options[name] for name in _SENTINEL_OPTIONS if name in options}
    if isinstance(app.conf.broker_use_ssl, Mapping):
        found.update({"ssl": True, **app.conf.broker_use_ssl})
    return found


def _service(app: Celery, name: object) -> str:
    name = name or (app.main if app.main != "__main__" else None)
    if not name:
        raise SettingsError(
            "dtimer_service is not set, and the Celery app has no main name to take: set "
            'dtimer_service to a name that all beats of this schedule share, such as "orders"'
        )
    if not isinstance(name, str):
        raise _bad("dtimer_service", name, "a str")
    return name


def _redis_url(app: Celery, url: object) -> str:
    name = "dtimer_redis_url" if url else "broker_url"
    url = url or app.conf.broker_write_url or app.conf.broker_url
    if isinstance(url, (list, tuple)) and all(isinstance(each, str) for each in url):
        url = ";".join(url)
    accepted = ", ".join(f"{scheme}://" for scheme in urls.SCHEMES)
    scheme = urls.scheme_of(url) or None if isinstance(url, str) else None
    if not isinstance(url, str) or scheme not in urls.SCHEMES:
        raise SettingsError(
            "dtimer_redis_url is not set, or not usable: the timers need a Redis server, and "
            f"{name} has {f'the scheme {shown(scheme)}' if scheme else 'no scheme'}; "
            f"expected one of {accepted}"
        )
    if name == "broker_url" and urls.is_cluster(url):
        raise SettingsError(
            f"broker_url has the scheme {shown(scheme)}, which Celery can not use as a broker: "
            "set dtimer_redis_url to it, and broker_url to a broker that Celery supports"
        )
    url = urls.used_part(url)
    problem = urls.problem(url)
    if problem:
        raise SettingsError(f"{name} can not be used as a URL; {problem}")
    return url
