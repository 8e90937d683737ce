"""Says at the end of a long run how many bad inputs were tried."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.amount import TRIED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts, by what the inputs were given to."""
    if TRIED and "DTIMER_FUZZ_INPUTS" in os.environ:
        terminalreporter.write_sep("=", "bad inputs tried")
        for what, count in sorted(TRIED.items()):
            terminalreporter.write_line(f"{count:>9,}  {what}")
        terminalreporter.write_line(f"{sum(TRIED.values()):>9,}  in all")
