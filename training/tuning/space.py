"""The keys that are searched, and between which values.

A YAML file says ``KEY: VALUES``, nested or dotted, and ``--over KEY=VALUES`` a single one.  VALUES is a
list of choices (``[8, 16, 32]``, each any YAML), or one of

* ``uniform(LOW, HIGH)``, ``log_uniform(LOW, HIGH)``: numbers, evenly or on a logarithmic scale;
* ``int(LOW, HIGH)``, ``log_int(LOW, HIGH)``: integers, both ends included.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tessera.bounded_yaml import bounded_node, plain_value
from tessera.errors import UserError
from tessera.training.config_source import read_yaml

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Value = float | int | str
"""What Optuna gives for a key: a number, or the YAML text of a choice."""

KINDS = ("uniform", "log_uniform", "int", "log_int")
_CALL = re.compile(r"^\s*(\w+)\s*\((.*)\)\s*$")
_FORMS = "a list of choices, or uniform(LOW, HIGH), log_uniform(...), int(...) or log_int(...)"


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One key that is searched.

    Attributes:
        key: dotted.
        kind: one of `KINDS`, or ``choices``.
        bounds: lowest and highest value; of choices ``(0, 0)``.
        choices: the YAML text of each choice.
    """

    key: str
    kind: str
    bounds: tuple[float, float] = (0, 0)
    choices: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """From which `parse_dimension` makes it again."""
        if self.kind == "choices":
            return f"[{', '.join(self.choices)}]"
        return f"{self.kind}({self.bounds[0]!r}, {self.bounds[1]!r})"

    @property
    def is_log(self) -> bool:
        """Whether its values lie on a logarithmic scale."""
        return self.kind.startswith("log_")

    @property
    def ends(self) -> tuple[Value, ...]:
        """Its lowest and highest value, or every choice."""
        return self.choices or self.bounds

    def distribution(self) -> BaseDistribution:
        """Optuna's name for it."""
        from optuna import distributions  # noqa: PLC0415 - an extra

        if self.choices:
            return distributions.CategoricalDistribution(self.choices)
        low, high = self.bounds
        if self.kind.endswith("int"):
            return distributions.IntDistribution(int(low), int(high), log=self.is_log)
        return distributions.FloatDistribution(low, high, log=self.is_log)

    def override(self, value: Value) -> str:
        """The ``KEY=VALUE`` that sets a value."""
        return f"{self.key}={value if isinstance(value, str) else repr(value)}"

    def value_in(self, config: Mapping[str, str]) -> Value | None:
        """The config's own value, if the dimension holds it; ``config`` is that of `typed_config.leaves`."""
        text = config.get(self.key)
        if text is None:
            return None
        if self.choices:
            plain = yaml.safe_load(text)
            return next((own for own in self.choices if yaml.safe_load(own) == plain), None)
        value = yaml.safe_load(text)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return value if self.bounds[0] <= value <= self.bounds[1] else None


def parse_dimension(key: str, values: Any, place: str) -> Dimension:
    """A dimension from what YAML says of it.

    Args:
        key: dotted.
        values: a list, or the text of a range.
        place: for messages.

    Raises:
        UserError: it is neither, or its bounds cannot be.
    """
    if isinstance(values, list):
        texts = tuple(_flow(value) for value in values)
        if len(texts) < 2 or len(set(texts)) != len(texts):
            raise UserError(f"{place}: {key}={values}: give two or more different choices")
        return Dimension(key=key, kind="choices", choices=texts)
    match = _CALL.match(values) if isinstance(values, str) else None
    if match is None or match[1] not in KINDS:
        raise UserError(f"{place}: {key}={values!r}: give {_FORMS}")
    parts = [part.strip() for part in match[2].split(",")]
    try:
        low, high = (float(part) for part in parts)
    except ValueError:
        raise UserError(f"{place}: {key}={values!r}: give two numbers, low and high") from None
    whole = match[1].endswith("int")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"{place}: {key}={values!r}: the first number must be below the second")
    if match[1].startswith("log_") and low <= 0:
        raise UserError(f"{place}: {key}={values!r}: a logarithmic scale begins above 0")
    if whole and not (low.is_integer() and high.is_integer()):
        raise UserError(f"{place}: {key}={values!r}: give two integers")
    bounds = (int(low), int(high)) if whole else (low, high)
    return Dimension(key=key, kind=match[1], bounds=bounds)


def _flow(value: Any) -> str:
    """YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.strip().removesuffix("...").strip()


def read_space(path: Path | None, over: Sequence[str]) -> list[Dimension]:
    """The dimensions of a file, and of every ``--over``, which win.

    Raises:
        UserError: a line is wrong, or there is none.
    """
    found: dict[str, Dimension] = {}
    if path is not None:
        for key, values in _flattened(read_yaml(path).values, ()):
            found[key] = parse_dimension(key, values, str(path))
    for item in over:
        key, equals, text = item.partition("=")
        place = f"--over '{item}'"
        if not equals or not key.strip():
            raise UserError(
                f"{place}: give KEY=VALUES, such as 'model.dropout=uniform(0, 0.5)', VALUES being"
                f" {_FORMS}"
            )
        try:
            node = bounded_node(text)
            values = None if node is None else plain_value(node)
        except yaml.YAMLError as error:
            raise UserError(f"{place}: {' '.join(str(error).split())}; give {_FORMS}") from error
        found[key.strip()] = parse_dimension(key.strip(), values, place)
    if not found:
        raise UserError("--space or --over is missing; name a key and the values to search")
    return list(found.values())


def _flattened(tree: Mapping[str, Any], prefix: tuple[str, ...]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = (*prefix, str(name))
        if isinstance(value, dict):
            pairs += _flattened(value, key)
        else:
            pairs.append((".".join(key), value))
    return pairs
