"""A collection whose tables are spread over ranks: its lookups and distributions."""

from __future__ import annotations

from typing import Generic

import torch
from torch import nn

from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.plan.sharded_module import (
    CompIn,
    DistOut,
    Out,
    ShardedModule,
    ShrdCtx,
)
from tessera.training.distributed.sharding.interfaces import ModuleShardingMixIn
from tessera.training.distributed.travel.kjt_list import KJTList


class ShardedEmbeddingModule(
    ShardedModule[CompIn, DistOut, Out, ShrdCtx],
    ModuleShardingMixIn,
    Generic[CompIn, DistOut, Out, ShrdCtx],
):
    """A collection whose tables are spread over ranks.

    Inputs and outputs are each rank's own samples.  Its lookups and distributions live in plain
    lists: their parameters appear once, under the unsharded names.
    """

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__(qcomm_codecs_registry)
        self._input_dists: list[nn.Module] = []
        self._lookups: list[nn.Module] = []
        self._output_dists: list[nn.Module] = []

    def prefetch(self, dist_input: KJTList, forward_stream: torch.Stream | None = None) -> None:
        """Bring the rows of a later batch into the caches of the tables that have one."""
        for lookup, features in zip(self._lookups, dist_input, strict=True):
            while isinstance(lookup, nn.parallel.DistributedDataParallel):
                lookup = lookup.module  # noqa: PLW2901 - unwrapped step by step
            prefetch = getattr(lookup, "prefetch", None)
            if prefetch is not None:
                prefetch(sparse_features=features, forward_stream=forward_stream)

    def extra_repr(self) -> str:
        """The lookups and distributions, which the module's own print would leave out."""
        parts = (
            ("lookups", self._lookups),
            ("_input_dists", self._input_dists),
            ("_output_dists", self._output_dists),
        )
        return "\n".join(
            "\n ".join([f"({name}): ", *[str(m).replace("\n", "\n ") for m in modules]])
            for name, modules in parts
            if modules
        )
