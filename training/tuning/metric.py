"""What a search looks for: a metric of the validation rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tessera.errors import UserError, unknown_name

Direction = Literal["maximize", "minimize"]

DIRECTIONS: dict[str, Direction] = {
    "auc": "maximize",
    "loss": "minimize",
    "log_loss": "minimize",
    "normalised_entropy": "minimize",
    "r_squared": "maximize",
    "mean_squared_error": "minimize",
    "root_mean_squared_error": "minimize",
    "mean_absolute_error": "minimize",
}
_LOSSES = ("loss", "log_loss", "mean_squared_error")
_COLUMNS = {
    **dict.fromkeys(_LOSSES, "loss"),
    "auc": "auc",
    "normalised_entropy": "normalised_entropy",
}
"""The columns of metrics.csv, by metric."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric of the validation rows, of one label or of all together.

    Attributes:
        name: one of `DIRECTIONS`.
        label: of which label; None: of the only one, or of all.
    """

    name: str
    label: str | None = None

    @property
    def text(self) -> str:
        """From which `parse_metric` makes it again."""
        return ".".join(filter(None, ("valid", self.label, self.name)))

    @property
    def direction(self) -> Direction:
        """Which values are better."""
        return DIRECTIONS[self.name]

    @property
    def is_logged(self) -> bool:
        """Whether metrics.csv has it after each evaluation."""
        return self.name in _COLUMNS

    @property
    def of_training(self) -> str | None:
        """The ``train.metric`` that chooses the best checkpoint by it; None: there is none."""
        if self.label is not None:
            return None
        return {"auc": "auc", "loss": "log_loss", "log_loss": "log_loss"}.get(self.name)

    def of_final(self, final: Mapping[str, Any]) -> float | None:
        """Its value in ``final.json``; None: it is not defined for the validation rows.

        Raises:
            UserError: it is not there, whatever the settings.
        """
        found = final["valid"]
        names = _LOSSES if self.name == "loss" else (self.name,)
        prefix = f"{self.label}." if self.label else ""
        key = next((prefix + name for name in names if prefix + name in found), None)
        if key is None:
            raise UserError(
                f"--metric {self.text}: the runs have no such metric; give one of"
                f" {', '.join(f'valid.{name}' for name in found)}"
            )
        return None if found[key] is None else float(found[key])

    def of_rows(self, rows: list[dict[str, str]]) -> list[float]:
        """Its value at each evaluation that metrics.csv has."""
        texts = [
            row[_COLUMNS[self.name]]
            for row in rows
            if row["split"] == "valid" and row["label"] == (self.label or "")
        ]
        return [float(text) if text else math.nan for text in texts]


def parse_metric(text: str) -> Metric:
    """The metric that ``--metric`` names: ``auc``, ``valid.auc`` or ``valid.LABEL.auc``.

    Raises:
        UserError: it is unknown, or of the test rows.
    """
    parts = text.split(".")
    if parts[0] == "test":
        raise UserError(
            f"--metric {text}: settings are never chosen by the test rows, which would then test"
            f" nothing; give valid.{'.'.join(parts[1:]) or 'auc'}"
        )
    parts = parts[1:] if parts[0] == "valid" else parts
    if not parts or parts[-1] not in DIRECTIONS:
        raise unknown_name("--metric", text, DIRECTIONS)
    return Metric(name=parts[-1], label=".".join(parts[:-1]) or None)
