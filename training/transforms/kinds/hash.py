"""``hash``: any 64-bit id, to a row by the table's hashing rule; what ids without a transform do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tessera.training.transforms.transform import IdTransform, transform


@transform
@dataclass(frozen=True, kw_only=True)
class Hash(IdTransform):
    """Ids become rows by ``model.tables.NAME.hashing``, or else ``model.hashing``."""

    name: ClassVar[str] = "hash"
