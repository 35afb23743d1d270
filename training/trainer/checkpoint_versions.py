"""Checkpoints of older versions, given what today's hold.

Version 1 was written by trainers whose readers transformed the dense values of Criteo and MovieLens;
its checkpoints hold no columns.  The transforms of these formats are now a part of the model
and give the same bits as those readers did, so the formats' own columns stand in.

Versions 1 and 2 do not know between which values the training rows' dense columns lie, and had no
averages of weights.
"""

from __future__ import annotations

from typing import Any

from tessera.training.data.columns import FeatureColumns
from tessera.training.data.criteo_format import COLUMNS as CRITEO
from tessera.training.data.movielens import COLUMNS as MOVIELENS
from tessera.training.transforms.preprocessor import FittedSizes

VERSION = 3
"""What is written."""

_FIRST_FORMATS: dict[str, FeatureColumns] = {"criteo": CRITEO, "movielens": MOVIELENS}


def is_first(content: dict[str, Any]) -> bool:
    """Whether the fields are those of version 1, which a folder's do not say themselves."""
    return isinstance(content.get("dense_transform"), str) and "columns" not in content


def upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of a checkpoint as today's have them; unchanged where nothing is to be done.

    Raises:
        ValueError: it is of version 1 and of data that no format of that version has.
    """
    content = {"average": {}, "ranges": [], **content}
    if not is_first(content):
        return content
    data = content["config"].get("data") if isinstance(content.get("config"), dict) else None
    name = data.get("format") if isinstance(data, dict) else None
    columns = _FIRST_FORMATS.get(str(name))
    if columns is None:
        raise ValueError(f"it is of version 1, which has no data format {name!r}")
    kept = {key: value for key, value in content.items() if key != "dense_transform"}
    return {**kept, "columns": columns.to_json(), "fitted": FittedSizes().to_json()}
