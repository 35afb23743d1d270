"""The dense columns' lists of transforms as few steps over all columns."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.training.transforms.description import RawDense
from tessera.training.transforms.transform import DenseStage, DenseTransform


def dense_stages(columns: Sequence[RawDense]) -> list[DenseStage]:
    """Stages that apply each column's transforms in their order.

    Columns whose lists are the same or overlap share stages: among the transforms that some
    column needs next, one is taken that no column needs later, and of these the one that
    most columns need.
    """
    names = [column.name for column in columns]
    left: list[list[DenseTransform]] = [list(column.chain) for column in columns]
    stages = []
    while any(left):
        heads = [own[0] for own in left if own]
        later = [type(step) for own in left for step in own[1:]]
        kinds = list(dict.fromkeys(type(head) for head in heads))
        counts = {kind: sum(type(head) is kind for head in heads) for kind in kinds}
        kind = min(kinds, key=lambda kind: (later.count(kind), -counts[kind]))
        settings = [own.pop(0) if own and type(own[0]) is kind else None for own in left]
        stages.append(kind.stage(settings, names))
    return stages
