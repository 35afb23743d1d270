"""When an id gives up its row in a hash-based managed collision module.

An id has an hour, counted from 1970, before which it keeps its row: that in which it came last, and as many more as
its time to live (TTL).  After it, a new id that looks at the row may take it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.modules.hash_places import NO_ID, Hours, state_of
from tessera.training.sparse.jagged_tensor import JaggedTensor

_SECONDS_AN_HOUR = 3600
_NEVER = torch.iinfo(torch.int32).max
_PARTS = 32  # steps of which the rows are kept one by one


class HashZchEvictionPolicyName(Enum):
    """Which of the expired ids among those that a new one looks at gives up its row, and when ids expire.

    `SINGLE_TTL_EVICTION`: the first one; all features' ids live equally long.  `PER_FEATURE_TTL_EVICTION`: the first
    one; each feature has a time of its own.  `LRU_EVICTION`: the one that expired first, and only if no row is
    open; all features' ids live equally long.
    """

    SINGLE_TTL_EVICTION = "SINGLE_TTL_EVICTION"
    PER_FEATURE_TTL_EVICTION = "PER_FEATURE_TTL_EVICTION"
    LRU_EVICTION = "LRU_EVICTION"


@dataclass
class HashZchEvictionConfig:
    """The times to live.

    Attributes:
        features: those of the table, for ``per_feature_ttl``.
        single_ttl: hours, for all of them.
        per_feature_ttl: hours, for each of them.
    """

    features: list[str]
    single_ttl: int | None = None
    per_feature_ttl: list[int] | None = None


def get_kernel_from_policy(policy_name: HashZchEvictionPolicyName | None) -> int:
    """FBGEMM's number of a policy: 1 for `LRU_EVICTION`, 0 for the others."""
    return int(policy_name is HashZchEvictionPolicyName.LRU_EVICTION)


def current_hour() -> int:
    """Hours since 1970."""
    return int(time.time() / _SECONDS_AN_HOUR)


class HashZchEvictionScorer:
    """The hour until which each id of a batch keeps its row; of no policy in particular: none.

    Args:
        config: the times to live.
    """

    def __init__(self, config: HashZchEvictionConfig) -> None:
        self._config = config

    def gen_score(self, feature: JaggedTensor, device: torch.device) -> Tensor:
        """Hours ``[N]`` int32 of the ids of ``feature``, on ``device``."""
        del feature
        return torch.empty(0, device=device)

    def gen_threshold(self) -> int:
        """The hour before which an id has expired; -1: none has."""
        return -1

    def gen_scores(self, counts: list[int], device: torch.device) -> Tensor | int:
        """The hours of so many ids of each feature, in the order of the features: ``[N]`` int32, or one for all."""
        return torch.full((sum(counts),), -1, dtype=torch.int32, device=device)


class HashZchSingleTtlScorer(HashZchEvictionScorer):
    """Gives all ids the same time to live.

    Raises:
        UserError: ``config.single_ttl`` is missing or negative.
    """

    def __init__(self, config: HashZchEvictionConfig) -> None:
        super().__init__(config)
        self._ttl = _checked("single_ttl", config.single_ttl)

    def gen_score(self, feature: JaggedTensor, device: torch.device) -> Tensor:
        """Hours ``[N]`` int32 of the ids of ``feature``, on ``device``."""
        hour = self._ttl + current_hour()
        return torch.full_like(feature.values(), hour, dtype=torch.int32, device=device)

    def gen_scores(self, counts: list[int], device: torch.device) -> int:
        """The hour of all ids."""
        del counts, device
        return self._ttl + current_hour()

    def gen_threshold(self) -> int:
        """The hour of now."""
        return current_hour()


class HashZchPerFeatureTtlScorer(HashZchEvictionScorer):
    """Gives the ids of each feature a time to live of their own.

    The weights of a jagged tensor that is scored say how many of its ids are of each feature, in the order of
    ``config.features``.

    Raises:
        UserError: ``config.per_feature_ttl`` has not one number for each feature, or a negative one.
    """

    def __init__(self, config: HashZchEvictionConfig) -> None:
        super().__init__(config)
        hours = config.per_feature_ttl or []
        if len(hours) != len(config.features):
            raise UserError(
                f"per_feature_ttl has {len(hours)} numbers for {len(config.features)} features; give each one"
            )
        self._hours = [_checked("per_feature_ttl", ttl) for ttl in hours]
        self._ttl = torch.tensor(self._hours)

    def gen_score(self, feature: JaggedTensor, device: torch.device) -> Tensor:
        """Hours ``[N]`` int32 of the ids of ``feature``, on ``device``."""
        counts = feature.weights().long()
        hours = self._ttl.to(counts.device).repeat_interleave(counts) + current_hour()
        return hours.int().to(device)

    def gen_scores(self, counts: list[int], device: torch.device) -> Tensor:
        """The hours of so many ids of each feature, ``[N]`` int32; a GPU is not waited for."""
        now = current_hour()
        hours = [
            torch.full((count,), ttl + now, dtype=torch.int32, device=device)
            for count, ttl in zip(counts, self._hours, strict=True)
        ]
        return hours[0] if len(hours) == 1 else torch.cat(hours)

    def gen_threshold(self) -> int:
        """The hour of now."""
        return current_hour()


def _checked(name: str, hours: int | None) -> int:
    if hours is None or hours < 0:
        raise UserError(f"{name} of HashZchEvictionConfig is {hours}; give 0 hours or more")
    return hours


def get_eviction_scorer(
    policy_name: HashZchEvictionPolicyName, config: HashZchEvictionConfig
) -> HashZchEvictionScorer:
    """The scorer of a policy."""
    if policy_name is HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION:
        return HashZchPerFeatureTtlScorer(config)
    return HashZchSingleTtlScorer(config)


class HashZchThresholdEvictionModule(nn.Module):
    """A policy's scores and threshold in one call.

    Args:
        policy_name: which policy.
        config: the times to live.
    """

    def __init__(
        self, policy_name: HashZchEvictionPolicyName, config: HashZchEvictionConfig
    ) -> None:
        super().__init__()
        self._eviction_scorer = get_eviction_scorer(policy_name, config)

    def forward(self, feature: JaggedTensor, device: torch.device) -> tuple[Tensor, int]:
        """The hours ``[N]`` int32 until which ids keep their rows, and the hour before which they have expired."""
        scorer = self._eviction_scorer
        now = scorer.gen_threshold()  # first, so that no hour is before it
        return scorer.gen_score(feature, device), now

    def of_counts(self, counts: list[int], device: torch.device) -> tuple[Tensor | int, int]:
        """The hours of so many ids of each feature, one after another, and the hour before which they have expired."""
        now = self._eviction_scorer.gen_threshold()
        return self._eviction_scorer.gen_scores(counts, device), now


def get_eviction_module(
    policy_name: HashZchEvictionPolicyName, config: HashZchEvictionConfig | None
) -> HashZchThresholdEvictionModule:
    """The module of a policy.

    Raises:
        UserError: no ``config``, or one that does not fit.
    """
    if config is None:
        raise UserError(
            f"eviction_policy_name is {policy_name.value} and eviction_config is missing; give the times to live"
        )
    return HashZchThresholdEvictionModule(policy_name, config)


class HashZchEvictionModule(nn.Module):
    """A policy on a device.

    Args:
        policy_name: which policy.
        device: where scores lie.
        config: the times to live.

    Raises:
        UserError: see `get_eviction_module`.
    """

    def __init__(
        self,
        policy_name: HashZchEvictionPolicyName,
        device: torch.device,
        config: HashZchEvictionConfig | None,
    ) -> None:
        super().__init__()
        self._device = device
        per_feature = policy_name is HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION
        self._order = config.features if per_feature and config is not None else None
        self._eviction_module = get_eviction_module(policy_name, config)

    def forward(self, feature: JaggedTensor) -> tuple[Tensor | None, int]:
        """The hours ``[N]`` int32 until which ids keep their rows, and the hour before which they have expired."""
        found: tuple[Tensor | None, int] = self._eviction_module(feature, self._device)
        return found

    def order_of(self, ids: dict[str, Tensor]) -> list[str]:
        """The features in the order in which `of_features` gives their ids; some may not be in ``ids``.

        Raises:
            UserError: features have times to live of their own, and one of these has none.
        """
        order = [*ids] if self._order is None else self._order
        if unknown := sorted({*ids} - {*order}):
            raise UserError(
                f"feature {unknown[0]!r} has no time to live in eviction_config, which has {order}"
            )
        return order

    def of_features(self, ids: dict[str, Tensor]) -> tuple[Tensor, Tensor | int, int]:
        """The same of several features' ids.

        Args:
            ids: by feature, int64.

        Returns:
            The ids of all of them, ``[N]``, and what `forward` gives for those, or one hour in place of equal ones.

        Raises:
            UserError: features have times to live of their own, and one of these has none.
        """
        order = self.order_of(ids)
        counts = [ids[name].numel() if name in ids else 0 for name in order]
        parts = [ids[name] for name in order if name in ids]
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return values, *self._eviction_module.of_counts(counts, self._device)


class EvictedRows:
    """Rows that got another id, until they are asked for; a GPU is waited for only where an id may have expired.

    New ids have no hour before that of the step.  So the least hour of a table is known until something else writes to
    it, or an hour has passed, when it is looked for again.
    """

    def __init__(self) -> None:
        self._parts: list[Tensor] | None = None
        self._state: tuple[int, ...] = ()
        self._least: int | Tensor = -1  # hour of the table in `_state`; a tensor: not read yet
        self._looked_at = -1  # the hour in which `_least` was looked for

    def clear(self) -> None:
        """Forget all of them."""
        self._parts, self._state = None, ()

    def begin(self, identities: Tensor, hours: Hours) -> bool:
        """Whether an id of the table ``[Z, 1]`` may have expired, before a step."""
        if self._state != state_of(identities, hours.last):
            self._looked_at = -1
        if self._looked_at < 0 or isinstance(self._least, Tensor):
            return True
        return self._least < hours.now

    def add(self, rows: Tensor, identities: Tensor, hours: Hours, *, may_come: bool) -> None:
        """Note the rows of a step.

        Args:
            rows: ``[E]`` int64, each once; -1 is none.
            identities: ``[Z, 1]`` int64, after the step.
            hours: those of the step.
            may_come: what `begin` said before it.
        """
        parts = self._parts or []
        if may_come and rows.numel():
            parts.append(rows)
        self._parts = parts if len(parts) <= _PARTS else [self._different(parts)]
        if rows.device.type == "cpu":  # is not waited for
            return
        if not may_come:
            self._least = hours.now
        elif self._looked_at != hours.now:
            self._least = torch.where(identities == NO_ID, _NEVER, hours.last).min()
            self._looked_at = hours.now
        self._state = state_of(identities, hours.last)

    def take(self, device: torch.device) -> Tensor | None:
        """The rows since the last call, ``[E]`` ascending and each once, on ``device``; None: there was no step."""
        parts, self._parts = self._parts, None
        if parts is None:
            return None
        if not parts:
            return torch.empty(0, dtype=torch.int64, device=device)
        return self._different(parts)

    def _different(self, parts: list[Tensor]) -> Tensor:
        rows = torch.cat(parts).sort().values
        count = (rows >= 0).sum()
        if isinstance(self._least, Tensor):  # read at once, as the GPU is waited for
            number, least = torch.stack([count, self._least]).tolist()
            self._least = min(least, self._looked_at)
        else:
            number = int(count)
        rows = rows[rows.numel() - number :]
        return rows if len(parts) == 1 else torch.unique_consecutive(rows)
