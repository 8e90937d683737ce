"""Canvases as callbacks: chains, groups, chords, chunks and maps, and what one run of them sends.

A definition stores a canvas as Celery's own dict does: the name of its kind as the task, its parts
in ``kwargs``. For each run `send` builds it anew, gives every task in it an id that follows from
the run, and the run's headers, and lets Celery's canvas classes apply it. So a run that is built
twice has the same ids in every message, also in those that workers send later; and each of its
tasks knows the timer.

Celery makes ids of its own where a canvas lets it, and sends some messages past the producer that
it was given. What is handed to it leaves room for neither:

- it is in the form in which Celery would run it: chains in chains are one chain, what follows a
  group in a chain is the body of a chord, chunks are a group of starmaps;
- every task and group has an id, and a chord keeps its header's when it is copied;
- its app is a stand-in that sends through the publisher, and does not wait for results.

Chords: what Celery writes into the result backend when a chord is applied (the size of its header,
the saved result of its group) is written while the messages are built, thus before its tasks can
run. A run that is built again writes the same, and on Redis forgets how many of the header's
results there were: should that happen while the tasks of another copy run, as after a hand-over at
the wrong moment, the chord's body may not be sent. Where the backend joins no chords by itself, the
``chord_unlock`` task of the chords that come first goes the way of the other messages; that of
later ones is sent by the worker that gets there. A backend class with an ``apply_chord`` of its own
that sends messages does that through the app's own connection.

Not promised: the ids of tasks in ``link_error``, which one failing task or many may lead to, and of
whatever tasks send themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from celery import Celery, chord, group
from celery.backends.base import Backend
from celery.canvas import Signature

from celery_dtimer.errors import invalid
from celery_dtimer.model import Run
from celery_dtimer.options import CANVAS_KINDS, LINKS, plain_signature

Plain = dict[str, Any]  # a signature as JSON data


class Publish(Protocol):
    """Sends one message of a canvas."""

    def __call__(self, task: Any, args: Any, kwargs: Any, options: dict[str, Any]) -> None:
        """Publish; ``task`` is the app's task, or the name of one that it does not know."""


class ResultBackendError(Exception):
    """The result backend did not take what it needs to know of a chord."""


def is_canvas(task: str) -> bool:
    """Say whether a definition's task stands for a canvas."""
    return task in CANVAS_KINDS


def parts_of(
    signature: Mapping[str, Any], app: Celery
) -> tuple[str, list[Any], dict[str, Any], dict[str, Any]]:
    """Return the task, args, kwargs and options that a definition stores of a canvas.

    Ids that were set on its signatures are left out: every run has its own.

    Args:
        signature: a canvas, or a mapping with the ``task``, ``args``, ``kwargs`` and ``options`` of
            one, as ``add_periodic_task`` keeps it.
        app: whose result backend chords need.

    Raises:
        InvalidTimerError: it cannot run.
    """
    plain = plain_signature("callback", signature)
    if not is_canvas(plain["task"]):
        raise invalid("callback", signature, "a chain, group, chord, chunks, map or starmap")
    if _has_chord(_folded(plain)):
        try:
            app.backend.ensure_chords_allowed()
        except NotImplementedError as exc:
            accepted = (
                "a canvas without chords (what follows a group in a chain makes one), or an app "
                "with a result_backend that supports them"
            )
            raise invalid("callback", signature, accepted) from exc
    return plain["task"], plain["args"], plain["kwargs"], plain["options"]


def send(
    run: Run, args: Sequence[Any], kwargs: Mapping[str, Any], app: Celery, publish: Publish
) -> None:
    """Send the first messages of a run's canvas, in Celery's order.

    Args:
        run: whose definition is a canvas.
        args: of the definition, with what is lazy evaluated, and so are
        kwargs: the parts of the canvas, and arguments for its first tasks.
        app: whose tasks, settings and result backend are used.
        publish: sends each message.

    Raises:
        ResultBackendError: the result backend failed, for whatever reason.
    """
    definition = run.definition
    own = _PARTS[CANVAS_KINDS[definition.task]]
    parts = {key: value for key, value in kwargs.items() if key in own}
    given = {key: value for key, value in kwargs.items() if key not in own}
    plain = plain_signature(
        "callback", {"task": definition.task, "kwargs": parts, "options": definition.options}
    )
    options = plain.pop("options")
    marks = _Marks(run)
    with_headers = bool(app.conf.task_allow_error_cb_on_chord_header)
    folded = _folded({**plain, "options": {}}, with_headers)
    if folded["subtask_type"] != "group":  # which takes no links: Celery says so
        for name in LINKS:
            folded = _linked(folded, name, options.pop(name, None), with_headers)
    if options.get("headers"):
        options["headers"] = {**options["headers"], **marks.headers}
    through: Any = _Through(app, run, publish)
    _made(marks.on(folded), through).apply_async(tuple(args), given, **options)


_PARTS = {
    "chain": ("tasks",),
    "group": ("tasks",),
    "chord": ("header", "body", "kwargs"),
    "chunks": ("task", "it", "n"),
    "xmap": ("task", "it"),
    "xstarmap": ("task", "it"),
}


# ------------------------------------------------------------------ the form in which it runs


def _folded(plain: Plain, with_headers: bool = False) -> Plain:
    """Return a canvas in the form in which Celery runs it: tasks, chains, groups and chords alone.

    No chain is in a chain, no group in a group; only the last step of a chain is a group or chord.

    Args:
        plain: the canvas.
        with_headers: what is called when a chord fails is also called by its header's tasks.
    """
    kind, kwargs = plain["subtask_type"], plain["kwargs"]

    def each(tasks: Sequence[Plain]) -> list[Plain]:
        return [_folded(task, with_headers) for task in tasks]

    if kind == "chain":
        return _in_a_row(_steps(each(kwargs["tasks"]), with_headers), plain["options"])
    if kind == "group":
        return _with_parts(plain, tasks=_ungrouped(each(kwargs["tasks"])))
    if kind == "chord":
        body = _folded(kwargs["body"], with_headers)
        return _with_parts(plain, header=_ungrouped(each(kwargs["header"])), body=body)
    if kind in ("xmap", "xstarmap"):
        return _map_task(plain["task"], kwargs["task"], kwargs["it"], plain["options"])
    if kind == "chunks":
        items, size = kwargs["it"], kwargs["n"]
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        tasks = [_map_task("celery.starmap", kwargs["task"], part, {}) for part in parts]
        return _canvas("celery.group", plain["options"], tasks=tasks)
    return plain


def _canvas(task: str, options: Plain, **kwargs: Any) -> Plain:
    return {
        "task": task,
        "args": [],
        "kwargs": kwargs,
        "options": options,
        "subtask_type": CANVAS_KINDS[task],
        "immutable": False,
    }


def _with_parts(plain: Plain, **parts: Any) -> Plain:
    return {**plain, "kwargs": {**plain["kwargs"], **parts}}


def _map_task(name: str, task: Plain, items: list[Any], options: Plain) -> Plain:
    """Return a map as a plain task: some versions of Celery's own class lose its options."""
    return {
        "task": name,
        "args": [],
        "kwargs": {"task": task, "it": items},
        "options": {"route_name": task["task"], **options},
        "subtask_type": None,
        "immutable": True,
    }


def _steps(tasks: Sequence[Plain], with_headers: bool) -> list[Plain]:
    """Return the tasks of a chain, with those of chains in it and no group of one task."""
    found: list[Plain] = []
    for task in tasks:
        inner = task["kwargs"].get("tasks", ())
        if task["subtask_type"] == "group" and len(inner) == 1:
            found += _steps(inner, with_headers)
        elif task["subtask_type"] == "chain":
            for name in LINKS:  # Celery drops what other options a chain in a chain has
                task = _linked(task, name, task["options"].get(name), with_headers)
            found += task["kwargs"]["tasks"]
        else:
            found.append(task)
    return found


def _in_a_row(steps: Sequence[Plain], options: Plain) -> Plain:
    """Return a canvas that runs steps in order; ``options`` are those of their chain.

    What follows a group or a chord is done by the body of a chord.
    """
    rest: list[Plain] = []
    for step in reversed(steps):
        parts = step["kwargs"]
        if rest and step["subtask_type"] == "group":
            body = _in_a_row(rest, {})
            rest = [_canvas("celery.chord", {}, kwargs={}, header=parts["tasks"], body=body)]
        elif rest and step["subtask_type"] == "chord":
            body = _in_a_row([*_steps([parts["body"]], False), *rest], {})
            rest = [_with_parts(step, body=body)]
        else:
            rest = [step, *rest]
    if len(rest) == 1 and not options:
        return rest[0]
    return _canvas("celery.chain", options, tasks=rest)


def _ungrouped(tasks: Sequence[Plain]) -> list[Plain]:
    """Return the tasks of a group, with those of groups in it."""
    found: list[Plain] = []
    for task in tasks:
        found += task["kwargs"]["tasks"] if task["subtask_type"] == "group" else [task]
    return found


def _linked(plain: Plain, name: str, links: Any, with_headers: bool) -> Plain:
    """Return a canvas with links added where Celery's ``link`` and ``link_error`` put them.

    Args:
        plain: the canvas, folded.
        name: one of `LINKS`.
        links: a signature, a list of them, or None.
        with_headers: as `_folded` takes it.
    """
    if not links:
        return plain
    links = _as_list(links)
    kind, kwargs = plain["subtask_type"], plain["kwargs"]
    unchanging = [{**link, "immutable": True} for link in links]

    def linked(task: Plain, links: list[Any] = links) -> Plain:
        return _linked(task, name, links, with_headers)

    if kind == "chord":
        header = kwargs["header"]
        if name == "link_error" and with_headers:
            header = [linked(task, unchanging) for task in header]
        return _with_parts(plain, header=header, body=linked(kwargs["body"]))
    if kind in ("chain", "group"):
        tasks = list(kwargs["tasks"])
        if name == "link_error":
            tasks = [linked(task) for task in tasks]
        elif kind == "chain":
            tasks[-1] = linked(tasks[-1])
        else:
            tasks[0] = linked(tasks[0], unchanging)
        return _with_parts(plain, tasks=tasks)
    own = _as_list(plain["options"].get(name) or [])
    more = [link for link in links if link not in own]
    return {**plain, "options": {**plain["options"], name: [*own, *more]}}


def _as_list(links: Any) -> list[Any]:
    return list(links) if isinstance(links, (list, tuple)) else [links]


def _has_chord(folded: Plain) -> bool:
    """Say whether applying a canvas, or going on with it, makes a chord."""
    kind = folded["subtask_type"]
    inner = folded["kwargs"]["tasks"] if kind in ("chain", "group") else ()
    return kind == "chord" or any(map(_has_chord, inner))


# ------------------------------------------------------------------ what a run puts into it


class _Marks:
    """Gives the tasks of a canvas the ids and the headers of a run."""

    def __init__(self, run: Run) -> None:
        self.headers = {"celery_beat_task": True, "dtimer": run.header}
        self._run = run
        self._has_named = False

    def on(self, folded: Plain, path: str = "", *, names: bool = True) -> Plain:
        """Return a canvas with ids and headers; nothing that was given is written to.

        Args:
            folded: the canvas.
            path: leads to it from the outermost one, "" for that.
            names: whether ids are given, and not only headers.
        """
        kind, options = folded["subtask_type"], dict(folded["options"])
        if kind not in _SETS or options.get("headers"):
            options["headers"] = {**(options.get("headers") or {}), **self.headers}
        if names and kind != "chain":
            options["task_id"] = self._id(kind, path)
        for name in LINKS:
            if options.get(name):
                links = [_folded(link) for link in _as_list(options[name])]
                named = names and name == "link"
                options[name] = self._each(links, f"{path}/{name}", named)
        parts: Plain = {}
        if kind in ("chain", "group"):
            parts["tasks"] = self._each(folded["kwargs"]["tasks"], path, names)
        elif kind == "chord":
            parts["header"] = self._each(folded["kwargs"]["header"], path, names)
            parts["body"] = self.on(folded["kwargs"]["body"], f"{path}/body", names=names)
        return _with_parts({**folded, "options": options}, **parts)

    def _each(self, tasks: Sequence[Plain], path: str, names: bool) -> list[Plain]:
        return [self.on(task, f"{path}/{i}", names=names) for i, task in enumerate(tasks)]

    def _id(self, kind: str | None, path: str) -> str:
        """Return the id of a task or group; the first task has the run's."""
        if kind in _SETS:
            return self._run.id_of(f"{path}/{kind}".lstrip("/"))
        is_first, self._has_named = not self._has_named, True
        return self._run.task_id if is_first else self._run.id_of(path.lstrip("/"))


_SETS = ("chain", "group", "chord")


def _made(marked: Plain, app: Any) -> Signature[Any]:
    """Return the signature of a canvas that has its ids."""
    kind, kwargs = marked["subtask_type"], marked["kwargs"]
    if kind in ("chain", "group"):
        marked = _with_parts(marked, tasks=[_made(task, app) for task in kwargs["tasks"]])
    elif kind == "chord":
        header = [_made(task, app) for task in kwargs["header"]]
        marked = _with_parts(marked, header=header, body=_made(kwargs["body"], app))
        return _Chord.from_dict(marked, app=app)
    return Signature.from_dict(marked, app=app)


class _Chord(chord):
    """A chord whose header keeps its id when it is copied and frozen: that of the chord itself.

    Celery's makes a new one. To the worker, which gets it as a dict, it is Celery's.
    """

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy of the same class."""
        copy = super().clone(*args, **kwargs)
        copy.__class__ = _Chord
        return copy

    def freeze(self, *args: Any, **kwargs: Any) -> Any:
        """Fix the ids of what is sent."""
        if not isinstance(self.tasks, group):
            header = group(self.tasks, app=self.app, task_id=self.options["task_id"])
            self["kwargs"]["header"] = header
        return super().freeze(*args, **kwargs)


# ------------------------------------------------------------------ where it is sent


class _Through:
    """Stands in for the app that canvases find tasks, producers and the result backend in."""

    def __init__(self, app: Celery, run: Run, publish: Publish) -> None:
        self._app = app
        self._run = run
        self._publish = publish
        self._unnamed = 0
        self.tasks = _Tasks(app, self)
        self.backend: Any = _Backend(app.backend, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    def producer_or_acquire(self, producer: Any = None) -> Any:
        """Return what a canvas passes on, and the publisher replaces."""
        return contextlib.nullcontext(producer)

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Send a task that the app does not know."""
        return self.publish(name, args, kwargs, options)

    def publish(self, task: Any, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        """Publish a message; return its result, which nobody waits for."""
        if "task_id" not in options:  # Celery's own: chord_unlock
            self._unnamed += 1
            options = {**options, "task_id": self._run.id_of(f"celery/{self._unnamed}")}
        self._publish(task, args, kwargs, options)
        return self.AsyncResult(options["task_id"])

    def AsyncResult(self, id: str, **kwargs: Any) -> Any:  # noqa: N802 - Celery's name
        """Return a result that does not ask the backend to tell when it is there."""
        return self._app.AsyncResult(id, **{**kwargs, "backend": self.backend})


class _Tasks:
    """The app's tasks, each with a way of its own to be sent."""

    def __init__(self, app: Celery, through: _Through) -> None:
        self._app = app
        self._through = through

    def __getitem__(self, name: str) -> _Task:
        return _Task(self._app.tasks[name], self._through)


class _Task:
    """Stands in for a task."""

    def __init__(self, task: Any, through: _Through) -> None:
        self._task = task
        self._through = through
        self.AsyncResult = through.AsyncResult

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Publish it."""
        return self._through.publish(self._task, args, kwargs, options)


class _Backend:
    """Stands in for the result backend."""

    def __init__(self, backend: Any, through: _Through) -> None:
        self._backend = backend
        self.app = through

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def add_pending_result(self, result: Any, *_: Any, **__: Any) -> Any:
        """Do not subscribe to a result: that would last as long as the process."""
        return result

    def remove_pending_result(self, result: Any) -> Any:
        """There is nothing to be undone."""
        return result

    def set_chord_size(self, *args: Any) -> None:
        """Tell the backend after how many results the body of a chord is sent."""
        with _told():
            self._backend.set_chord_size(*args)

    def apply_chord(self, *args: Any, **kwargs: Any) -> None:
        """Let the backend get ready for a chord; what it sends for that is published."""
        apply: Any = self._backend.apply_chord
        if getattr(apply, "__func__", None) is Backend.apply_chord:
            apply.__func__(self, *args, **kwargs)
        else:
            with _told():
                apply(*args, **kwargs)

    def fallback_chord_unlock(self, *args: Any, **kwargs: Any) -> None:
        """Send the task that looks whether a chord's header is done."""
        self._backend.fallback_chord_unlock.__func__(self, *args, **kwargs)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Tell failures of the result backend from the broker's and the message's."""
    try:
        yield
    except NotImplementedError:  # it has no chords at all
        raise
    except Exception as exc:
        raise ResultBackendError(f"the result backend: {type(exc).__name__}: {exc}") from exc
