"""Several trained runs as one model: the mean of their logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.serving.packaging.options import Origin
from tessera.serving.packaging.ranking import raw_columns
from tessera.training.models.inputs import SparseFeature
from tessera.training.models.ranking import RankingModel
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.trained import TrainedModel
from tessera.training.typed_config import differing_keys

_SAME_ROWS = ("cache_dir", "workers", "columns", "crosses", "target_statistics")
"""Settings of the data that do not change which rows are held out."""


class Ensemble(nn.Module):
    """Ranking models of the same inputs; the means of their logits, or of their values.

    Args:
        members: two or more, which `check_members` lets pass.
        weights: what each of them counts, above 0; their sum does not matter.

    Attributes:
        dense_names: see `RankingModel`.
        labels: see `RankingModel`.
        scores: see `RankingModel`.
    """

    def __init__(self, members: Sequence[RankingModel], weights: Sequence[float]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self._shares = [weight / sum(weights) for weight in weights]
        self._features = members[0].data_features()
        self.dense_names = members[0].dense_names
        self.labels = members[0].labels
        self.scores = members[0].scores

    def data_features(self) -> tuple[SparseFeature, ...]:
        """The sparse features that `forward` is given, as the first member has them."""
        return self._features

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Raw values and ids as a `RankingModel` takes them, to ``[B]`` or ``[B, L]`` float32."""
        outputs = [member(dense_features, sparse_features) for member in self.members]
        mean: Tensor = outputs[0] * self._shares[0]
        for output, share in zip(outputs[1:], self._shares[1:], strict=True):
            mean = torch.add(mean, output, alpha=share)
        return mean


def checked_weights(weights: Sequence[float] | None, members: int) -> list[float]:
    """What each member counts; all the same where nobody says anything.

    Raises:
        UserError: there are not as many as members, or one is not above 0.
    """
    if weights is None:
        return [1.0] * members
    shown = ",".join(f"{weight:g}" for weight in weights)
    if len(weights) != members:
        raise UserError(
            f"--weights {shown}: there are {members} runs; give one weight for each of several runs"
        )
    if not all(0 < weight < math.inf for weight in weights):
        raise UserError(f"--weights {shown}: give numbers above 0")
    return list(weights)


def member_names(members: Sequence[TrainedModel]) -> list[str]:
    """What members are called: a number, and the folder of the run."""
    folders = [trained.checkpoint_path.resolve().parent.parent.name for trained in members]
    return [f"member {number} ({folder})" for number, folder in enumerate(folders, start=1)]


def ensemble_origin(
    members: Sequence[TrainedModel], weights: Sequence[float], created: str
) -> Origin:
    """What the manifest says of where the members are from."""
    source, metrics = {}, {}
    for name, trained, weight in zip(member_names(members), members, weights, strict=True):
        file = trained.checkpoint_path.name
        source[name] = f"{file}, {trained.config.model.arch}, weight {weight:g}"
        for split, found in trained.metrics.items():
            metrics[f"{split}, {name}"] = found
    return Origin(source=source, metrics=metrics, created=created)


def check_members(members: Sequence[TrainedModel], *, same_rows: bool) -> None:
    """Check that all members take the first one's inputs and predict its labels.

    Their architectures, seeds, tables' sizes and fitted transforms may differ; with ``same_rows`` not
    the data that they were trained on and how rows of it were held out.

    Raises:
        UserError: a member differs; says which one, in what, and what to do.
    """
    names = member_names(members)
    for name, member in zip(names, members, strict=True):
        if member.model.scores != "logits":
            raise UserError(
                f"{name} has arch {member.config.model.arch}, whose scores only rank and have no mean"
                " with others; package it alone"
            )
    expected = _traits(members[0])
    for name, member in zip(names[1:], members[1:], strict=True):
        for what, value in _traits(member).items():
            if value != expected[what]:
                raise UserError(
                    f"{name} has other {what} than {names[0]}: {_difference(expected[what], value)};"
                    " package runs that were trained on the same columns"
                )
        _check_rules(members[0], member, names[0], name)
        if same_rows:
            keys = _other_rows(members[0], member)
            if keys:
                raise UserError(
                    f"{name} differs from {names[0]} in {', '.join(keys)}, so that validation rows of"
                    " one may be training rows of the other; package without measuring:"
                    " --no-evaluate"
                )


def _traits(trained: TrainedModel) -> dict[str, Mapping[str, object]]:
    """What members have in common: by trait and name, its value; orders of names count."""
    columns, model = trained.columns, trained.model
    where = raw_columns(columns)
    features = {feature.name: feature.group for feature in model.data_features()}
    return {
        "dense features": {name: where[name] for name in model.dense_names},
        "sparse features": {name: (group, where[name]) for name, group in features.items()},
        "labels": {label.name: label.task for label in columns.labels},
    }


def _difference(first: Mapping[str, object], other: Mapping[str, object]) -> str:
    for name in dict.fromkeys([*first, *other]):
        if name not in first or name not in other:
            return f"{name} is one of the {'first' if name in first else 'second'} alone"
        if first[name] != other[name]:
            return f"{name} is read or understood in another way"
    return "the order is another"


def _check_rules(first: TrainedModel, other: TrainedModel, one_name: str, name: str) -> None:
    """The lookups hash a request's ids once for all members, so the rules must be the same."""
    rules = {feature.name: feature for feature in first.model.features}
    for feature in other.model.features:
        rule = rules.get(feature.name)
        for trait in ("hashing", "out_of_range"):
            if rule is not None and getattr(rule, trait) != getattr(feature, trait):
                raise UserError(
                    f"{name} and {one_name} differ in {trait} of feature {feature.name}:"
                    f" {getattr(feature, trait)} and {getattr(rule, trait)}; train them with the same"
                )


def _other_rows(first: TrainedModel, other: TrainedModel) -> list[str]:
    plain = [trained.config.to_plain()["data"] for trained in (first, other)]
    return [f"data.{key}" for key in differing_keys(*plain) if key.split(".")[0] not in _SAME_ROWS]
