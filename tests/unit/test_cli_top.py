"""What the live view does with Ctrl-C, wherever it comes."""

from __future__ import annotations

import signal

import pytest

from celery_dtimer.cli.top import _interrupts


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_comes_while_an_object_is_deleted_is_noted() -> None:
    class Deleted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with _interrupts() as interrupted:
        Deleted()
        assert interrupted.is_set()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_ends_what_is_being_done_at_once() -> None:
    with _interrupts() as interrupted, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert interrupted.is_set()
