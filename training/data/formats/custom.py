"""``factory: pkg.module:function``: data of the user's own, trained on as any other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.data.columns import FeatureColumns
from tessera.training.data.config import DataConfig, Split, data_format
from tessera.training.data.dataset import DatasetView, DataSplits
from tessera.training.data.malformed import MalformedReport
from tessera.training.data.splits import split_rows
from tessera.users_code import call_named, check_named


@data_format
@dataclass(frozen=True, kw_only=True)
class CustomConfig(DataConfig):
    """Rows that a function of the user's gives.

    Attributes:
        factory: ``pkg.module:function``, found as Python finds modules, the working directory
            included.  It is called with ``arguments`` and returns a `Dataset`, or a `DataSplits` if
            it knows which rows are held out.
        arguments: keyword arguments of the function.
        split: how the rows of a `Dataset` are cut.  ``random``: the held-out rows are drawn with
            ``split_seed``.  ``time``: they are the last ones, first validation, then test.
    """

    format: Literal["custom"] = "custom"
    factory: str
    arguments: dict[str, Any] = field(default_factory=dict)
    split: Split = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, "split", Split)
        check_named("factory", self.factory)

    def open(self, *, progress: bool) -> DataSplits:
        """See `DataConfig.open`; a `UserError` says in which line the function fails."""
        del progress
        made = call_named("factory", self.factory, **self.arguments)
        if isinstance(made, DataSplits):
            return made
        if not isinstance(getattr(made, "columns", None), FeatureColumns):
            raise UserError(
                f"factory {self.factory} returned a {type(made).__name__} without columns; return a"
                " tessera.training.data.Dataset, whose columns are FeatureColumns, or a DataSplits"
            )
        rows = split_rows(
            len(made),
            split=self.split,
            held_out=self.held_out(),
            seed=self.split_seed,
            prepared=None,
        )
        train, valid, test = (DatasetView(made, part) for part in rows)
        return DataSplits(train=train, valid=valid, test=test, malformed=MalformedReport())
