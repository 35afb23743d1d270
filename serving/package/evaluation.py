"""What the manifest says of a model's quality, before and after it was packaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from tessera.serving.package.fields import Count, NotNegative, OneOf
from tessera.serving.package.schema import RANGES_SINCE

_BY_LABEL = {"since": RANGES_SINCE}


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Metrics of one model over the validation set; null where one is not defined."""

    auc: float | None
    normalised_entropy: float | None
    log_loss: float | None
    calibration: float | None


@dataclass(frozen=True, kw_only=True)
class LabelQuality:
    """Metrics of one label over the rows in which it is known, by their names; null: not defined.

    Attributes:
        task: what the label is.
        rows: the validation rows in which it is known.
        fp32: metrics of the trained model: of a binary label ``auc``, ``normalised_entropy``,
            ``log_loss`` and ``calibration`` (``auc`` alone where scores only rank), of one of the task regression
            ``root_mean_squared_error``, ``mean_absolute_error``, ``r_squared`` and ``calibration``.
        packaged: the same of the scripted, quantized model.
    """

    task: Annotated[str, OneOf(("binary", "regression"))]
    rows: Count
    fp32: Mapping[str, float | None]
    packaged: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The float32 model and the packaged one over the same rows.

    Attributes:
        rows: validation rows that both models scored.
        fp32: metrics of the trained model, of its first binary label.
        packaged: the same of the scripted, quantized model.
        max_abs_score_error: largest difference of one score.
        labels: by label, the metrics of each.
        members: of an ensemble, by member and label, the metrics of that float32 member alone, named
            as in `LabelQuality`.
    """

    rows: Count
    fp32: Quality
    packaged: Quality
    max_abs_score_error: NotNegative
    labels: Mapping[str, LabelQuality] = field(default_factory=dict, metadata=_BY_LABEL)
    members: Mapping[str, Mapping[str, Mapping[str, float | None]]] = field(
        default_factory=dict, metadata=_BY_LABEL
    )
