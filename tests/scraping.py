"""Scrapes beats as Prometheus does, and reads what they tell."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families


class Scraped:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families: dict[str, Metric] = {
            family.name: family for family in text_string_to_metric_families(text)
        }
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def of(self, name: str, **labels: str) -> list[float]:
        """Return the values under a name whose labels include these."""
        wanted = labels.items()
        return [
            value for (found, its), value in self.samples.items() if found == name and wanted <= its
        ]

    def sum(self, name: str, **labels: str) -> float:
        """Return their sum; there must be some."""
        values = self.of(name, **labels)
        assert values, f"nothing is told of {name} {labels}"
        return sum(values)

    def has_one_sample_each(self) -> bool:
        """Say whether no sample is told twice, which Prometheus refuses."""
        lines = [line for line in self.text.splitlines() if line and not line.startswith("#")]
        return len({line.rpartition(" ")[0] for line in lines}) == len(lines)


def scrape(port: int, host: str = "127.0.0.1") -> Scraped:
    """Return what a port tells now."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        return Scraped(answer.read().decode())


def total(scrapes: Iterable[Scraped], name: str, **labels: str) -> float:
    """Return the sum over several beats."""
    return sum(each.sum(name, **labels) for each in scrapes)
