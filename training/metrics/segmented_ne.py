"""Normalised entropy of groups of examples, each with a value of its own.

Shapes: predictions (probabilities), labels in [0, 1] and weights ``[T, B]``, groups ``[B]`` or ``[T, B]``; sums
``[T, G]`` of G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.training.metrics.metrics_namespace import (
    MetricName,
    MetricNameBase,
    MetricNamespace,
)
from tessera.training.metrics.ne import ETA, compute_cross_entropy, compute_logloss
from tessera.training.metrics.ne import compute_ne as ne_of_sums
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.states import RecMetricException
from tessera.training.metrics.sums import Sums, SumsComputation
from tessera.training.metrics.task_inputs import REQUIRED_INPUTS

__all__ = [
    "GroupingKeyConfig",
    "SegmentedNEMetric",
    "SegmentedNEMetricComputation",
    "compute_cross_entropy",
    "compute_logloss",
    "compute_ne",
    "compute_ne_fused",
    "get_segemented_ne_states",
    "get_segemented_ne_states_fused",
]

DEFAULT_KEY = "grouping_keys"
_STATES = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")


@dataclass
class GroupingKeyConfig:
    """A tensor that puts examples into groups.

    Attributes:
        name: its key in ``required_inputs``; integers from 0 below ``num_groups``.
        num_groups: ``G``.
        cast_keys_to_int: whether it may be floating-point numbers.
    """

    name: str
    num_groups: int = 1
    cast_keys_to_int: bool = False


GroupingKeys = str | Sequence[str | dict[str, Any] | GroupingKeyConfig]


def grouping_configs(
    grouping_keys: GroupingKeys, *, num_groups: int, cast_keys_to_int: bool
) -> list[GroupingKeyConfig]:
    """The configs of one key, of several, or of dictionaries with a config's fields.

    Raises:
        ValueError: an item is of another type.
    """
    given = [grouping_keys] if isinstance(grouping_keys, str) else grouping_keys
    defaults = {"num_groups": num_groups, "cast_keys_to_int": cast_keys_to_int}
    configs = []
    for item in given:
        if isinstance(item, GroupingKeyConfig):
            configs.append(item)
        elif isinstance(item, str | dict):
            own = {"name": item} if isinstance(item, str) else item
            configs.append(GroupingKeyConfig(**{**defaults, **own}))
        else:
            raise ValueError(  # noqa: TRY004 - the error of a wrong argument everywhere here
                f"grouping_keys has a {type(item).__name__}; give names, dictionaries or GroupingKeyConfig"
            )
    return configs


def get_segemented_ne_states_fused(  # noqa: PLR0917 - the signature TorchRec users know
    labels: Tensor,
    predictions: Tensor,
    weights: Tensor,
    grouping_keys: Tensor,
    eta: float,
    num_groups: int,
    n_tasks: int,
) -> dict[str, Tensor]:
    """What a batch ``[T, B]`` adds to the sums ``[T, G]``; ``grouping_keys`` int64 ``[B]`` or ``[T, B]``."""
    groups = grouping_keys.expand(n_tasks, labels.shape[-1])
    w, y = weights.double(), labels.double()
    values = (
        compute_cross_entropy(labels, predictions, weights, eta),
        w.expand_as(y),
        w * y,
        w * (1.0 - y),
    )
    none = torch.zeros(n_tasks, num_groups, dtype=torch.double, device=labels.device)
    return {
        name: none.scatter_add(1, groups, value)
        for name, value in zip(_STATES, values, strict=True)
    }


def get_segemented_ne_states(  # noqa: PLR0917 - the signature TorchRec users know
    labels: Tensor,
    predictions: Tensor,
    weights: Tensor,
    grouping_keys: Tensor,
    eta: float,
    num_groups: int,
) -> dict[str, Tensor]:
    """What a batch of one task, ``[B]`` or ``[1, B]``, adds to the sums ``[G]``."""
    y, p, w, groups = (
        each.reshape(1, -1) for each in (labels, predictions, weights, grouping_keys)
    )
    states = get_segemented_ne_states_fused(y, p, w, groups, eta, num_groups, n_tasks=1)
    return {name: state[0] for name, state in states.items()}


def compute_ne_fused(  # noqa: PLR0917 - the signature TorchRec users know
    ce_sum: Tensor,
    weighted_num_samples: Tensor,
    pos_labels: Tensor,
    neg_labels: Tensor,
    num_groups: int,  # noqa: ARG001
    n_tasks: int,  # noqa: ARG001
    eta: float,
) -> Tensor:
    """The NE ``[T, G]`` of sums; NaN of a group without weights."""
    return ne_of_sums(ce_sum, weighted_num_samples, pos_labels, neg_labels, eta)


def compute_ne(  # noqa: PLR0917 - the signature TorchRec users know
    ce_sum: Tensor,
    weighted_num_samples: Tensor,
    pos_labels: Tensor,
    neg_labels: Tensor,
    num_groups: int,  # noqa: ARG001
    eta: float,
) -> Tensor:
    """The NE ``[G]`` of one task's sums; NaN of a group without weights."""
    return ne_of_sums(ce_sum, weighted_num_samples, pos_labels, neg_labels, eta)


class SegmentedNEMetricComputation(SumsComputation):
    """The sums of `SegmentedNEMetric`.

    Args:
        include_logloss: whether the mean cross entropy, in bits, is reported, too.
        num_groups: ``G``, where a key does not say its own.
        grouping_keys: the tensors with the groups; the names of several are part of the keys of values.
        cast_keys_to_int: whether groups may be floating-point numbers, where a key does not say it.
    """

    def __init__(
        self,
        *args: Any,
        include_logloss: bool = False,
        num_groups: int = 1,
        grouping_keys: GroupingKeys = DEFAULT_KEY,
        cast_keys_to_int: bool = False,
        **kwargs: Any,
    ) -> None:
        configs = grouping_configs(
            grouping_keys, num_groups=num_groups, cast_keys_to_int=cast_keys_to_int
        )
        alone = isinstance(grouping_keys, str) or [each.name for each in configs] == [DEFAULT_KEY]
        # Of one key the names of states and values are those without it.
        self._configs = {"" if alone else f"{config.name}_": config for config in configs}
        self._include_logloss = include_logloss
        self._sums = tuple(f"{prefix}{name}" for prefix in self._configs for name in _STATES)
        self.eta = ETA
        super().__init__(*args, **kwargs)

    def _width(self, name: str, /) -> tuple[int, ...]:
        prefix = next(name.removesuffix(state) for state in _STATES if name.endswith(state))
        return (self._configs[prefix].num_groups,)

    def _of_batch(
        self, predictions: Tensor, labels: Tensor, weights: Tensor, **kwargs: Any
    ) -> Sums:
        inputs, sums = kwargs.get(REQUIRED_INPUTS, {}), {}
        for prefix, config in self._configs.items():
            states = get_segemented_ne_states_fused(
                labels,
                predictions,
                weights,
                _groups(inputs, config),
                eta=self.eta,
                num_groups=config.num_groups,
                n_tasks=self._n_tasks,
            )
            sums.update({f"{prefix}{name}": state for name, state in states.items()})
        return sums

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        return [(name, value) for name, _, value in self._described(sums)]

    def _described(self, sums: Sums) -> list[tuple[MetricNameBase, str | None, Tensor]]:
        values: list[tuple[MetricNameBase, str | None, Tensor]] = []
        for prefix, config in self._configs.items():
            entropy, samples, positives, negatives = (sums[f"{prefix}{name}"] for name in _STATES)
            by_name: dict[MetricNameBase, Tensor] = {
                MetricName.SEGMENTED_NE: ne_of_sums(
                    entropy, samples, positives, negatives, self.eta
                )
            }
            if self._include_logloss:
                by_name[MetricName.LOG_LOSS] = compute_logloss(
                    entropy, positives, negatives, self.eta
                )
            suffix = f"@{config.name}" if prefix else ""
            for name, of_groups in by_name.items():
                values += [
                    (name, f"_{group}{suffix}", of_groups[:, group])
                    for group in range(config.num_groups)
                ]
        return values


def _groups(inputs: dict[str, Tensor], config: GroupingKeyConfig) -> Tensor:
    """The groups of a batch's examples, int64.

    Raises:
        RecMetricException: they are missing, not integers, or not below ``num_groups``.
    """
    groups = inputs.get(config.name)
    if groups is None:
        raise RecMetricException(
            f"required_inputs has no {config.name!r}; give the group of each example"
        )
    if groups.dtype != torch.int64 and not (config.cast_keys_to_int and groups.is_floating_point()):
        raise RecMetricException(
            f"{config.name!r} is {groups.dtype}; give torch.int64, or floats with cast_keys_to_int=True"
        )
    groups = groups.to(torch.int64)
    if groups.numel() and not (0 <= int(groups.min()) <= int(groups.max()) < config.num_groups):
        raise RecMetricException(
            f"{config.name!r} has groups from {int(groups.min())} to {int(groups.max())}; num_groups is "
            f"{config.num_groups}"
        )
    return groups


class SegmentedNEMetric(RecMetric):
    """Normalised entropy of each group; keys end in ``_0``, ``_1``, ..., and ``@name`` of several keys."""

    _namespace = MetricNamespace.SEGMENTED_NE
    _computation_class = SegmentedNEMetricComputation

    def __init__(
        self,
        *args: Any,
        grouping_keys: GroupingKeys = DEFAULT_KEY,
        num_groups: int = 1,
        cast_keys_to_int: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            *args,
            grouping_keys=grouping_keys,
            num_groups=num_groups,
            cast_keys_to_int=cast_keys_to_int,
            **kwargs,
        )
        configs = grouping_configs(
            grouping_keys, num_groups=num_groups, cast_keys_to_int=cast_keys_to_int
        )
        self._required_inputs.update(config.name for config in configs)
