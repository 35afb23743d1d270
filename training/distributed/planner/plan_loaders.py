"""Plans of earlier runs, so that a planner need not search again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tessera.errors import UserError
from tessera.training.distributed.planner.types import (
    PlanLoader,
    PlannerError,
    Shard,
    ShardingOption,
)

FORMAT = "tessera placed options 1"


def extract_plan(
    search_space: Iterable[ShardingOption], loaded_sharding_options: Mapping[int, ShardingOption]
) -> list[ShardingOption]:
    """The options of a search space that were loaded, on the ranks that they were loaded with.

    Args:
        search_space: every way of every table.
        loaded_sharding_options: placed options by `ShardingOption.storage_hash`.

    Raises:
        PlannerError: a table of the search space has no loaded option, or a loaded option is not in it.
    """
    plan: list[ShardingOption] = []
    tables: dict[str, bool] = {}
    for option in search_space:
        tables.setdefault(option.fqn, False)
        loaded = loaded_sharding_options.get(option.storage_hash())
        if loaded is not None:
            tables[option.fqn] = True
            plan.append(option.placed([shard.place for shard in loaded.shards]))
    missing = [table for table, found in tables.items() if not found]
    if missing or len(plan) != len(loaded_sharding_options):
        rest = f"table {missing[0]!r} is not in it" if missing else "it has options of other tables"
        raise PlannerError(
            f"the loaded plan is not of this model, these sharders and this topology: {rest}; leave "
            "plan_loader out to make a plan"
        )
    return plan


class PlanFile(PlanLoader):
    """A plan in a JSON file, written by `save`; where there is no file, there is no plan.

        loader = PlanFile("plan.options.json")
        planner = EmbeddingShardingPlanner(topology=topology, plan_loader=loader)
        plan = planner.plan(model, sharders)
        loader.save(planner.report.best, planner.hash_planner_context_inputs_str())

    Args:
        path: the file.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def save(self, options: Iterable[ShardingOption], context_hash: str) -> None:
        """Write placed options, and for which inputs of a planner they were chosen."""
        content = {
            "format": FORMAT,
            "context": context_hash,
            "options": [
                {
                    "path": option.path,
                    "name": option.name,
                    "sharding_type": option.sharding_type,
                    "compute_kernel": option.compute_kernel,
                    "shards": [
                        {"offset": shard.offset, "size": shard.size, "rank": shard.place}
                        for shard in option.shards
                    ],
                }
                for option in options
            ],
        }
        self._path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _read(self) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise UserError(
                    f"{self._path}: the format is {content['format']!r}; expected {FORMAT!r}"
                )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self._path} does not hold placed options: {error!r}") from error
        return content

    def load(self) -> dict[int, ShardingOption] | None:
        """Placed options by `ShardingOption.storage_hash`; None: there is no file.

        Raises:
            UserError: the file holds something else.
        """
        content = self._read()
        if content is None:
            return None
        try:
            options = [_option(entry) for entry in content["options"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self._path} does not hold placed options: {error!r}") from error
        return {option.storage_hash(): option for option in options}

    def plan_context_hash(self) -> str | None:
        """Return the hash that `save` was given; None: there is no file."""
        content = self._read()
        return None if content is None else str(content.get("context"))


def _option(entry: dict[str, Any]) -> ShardingOption:
    shards = [
        Shard(
            size=[int(number) for number in shard["size"]],
            offset=[int(number) for number in shard["offset"]],
            rank=int(shard["rank"]),
        )
        for shard in entry["shards"]
    ]
    ends = [
        [first + length for first, length in zip(shard.offset, shard.size, strict=True)]
        for shard in shards
    ]
    return ShardingOption(
        name=str(entry["name"]),
        tensor=torch.empty([max(sizes) for sizes in zip(*ends, strict=True)], device="meta"),
        module=(str(entry["path"]), nn.Module()),
        input_lengths=[],
        batch_size=1,
        sharding_type=str(entry["sharding_type"]),
        compute_kernel=str(entry["compute_kernel"]),
        shards=shards,
    )
