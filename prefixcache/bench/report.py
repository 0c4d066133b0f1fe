"""Rows of measurements, as JSON and as a table: each figure beside its references, its ratios and its aim."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from prefixcache.bench.figures import Figure


@dataclass(slots=True)
class Row:
    """One measured thing, what it is compared with, and the aim if there is one.

    Attributes:
        references: What the same work takes elsewhere, in the same unit.
        aim: In words, with the figure it comes to in this run, and whether it was met.
    """

    name: str
    ours: Figure
    references: dict[str, Figure] = field(default_factory=dict)
    aim: tuple[str, bool] | None = None

    def ratio(self, reference: str) -> float:
        return self.ours.median / self.references[reference].median

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "prefixcache": self.ours.as_json(),
            "references": {name: figure.as_json() for name, figure in self.references.items()},
            "ratios": {name: round(self.ratio(name), 3) for name in self.references},
            "aim": None if self.aim is None else {"text": self.aim[0], "met": self.aim[1]},
        }


def table(rows: list[dict[str, Any]]) -> Table:
    """Lay out rows as `Row.as_json` gives them."""
    result = Table(title="medians of this run")
    for heading in ("what", "prefixcache", "compared with", "ratio", "aim"):
        result.add_column(heading, justify="right" if heading in {"prefixcache", "ratio"} else "left")
    for row in rows:
        ours, aim = row["prefixcache"], row["aim"]
        names = list(row["references"])
        result.add_row(
            row["name"],
            f"{ours['median']:,.1f} {ours['unit']}",
            "\n".join(f"{name} {row['references'][name]['median']:,.1f}" for name in names),
            "\n".join(f"{row['ratios'][name]:.2f}" for name in names),
            "" if aim is None else ("met: " if aim["met"] else "MISSED: ") + aim["text"],
        )
    return result
