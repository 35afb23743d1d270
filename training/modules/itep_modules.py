"""Addresses of the ids of pruned tables (in-training embedding pruning, `tessera.training.modules.id_pruning`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.modules import id_pruning
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

ADDRESS, USE = "_itp_address_lookup", "_itp_row_util"


@dataclass(frozen=True)
class PrunedRows:
    """Rows of a table that some of its ids share.

    Attributes:
        table: its name.
        features: whose ids they are.
        weights: ``[E, D]``, live.
        states: of an optimizer that works in the backward pass, ``[E]`` or ``[E, D]`` each, live.
        ids: ``U``, ids that have these rows alone; they are counted from the first of them.
        first_row: which row of the whole table the first one here is; addresses are rows of the whole table.
        flush, purge: write cached rows back, and forget them.
    """

    table: str
    features: tuple[str, ...]
    weights: Tensor
    ids: int
    states: tuple[Tensor, ...] = ()
    first_row: int = 0
    flush: Callable[[], Any] = tuple
    purge: Callable[[], Any] = tuple


class _Shard(Protocol):
    name: str
    feature_names: list[str]
    num_embeddings: int


class _Kernel(Protocol):
    @property
    def tables(self) -> Sequence[Any]: ...

    def split_embedding_weights(self) -> list[Tensor]: ...

    def states_by_table(self) -> list[list[Tensor]]: ...

    def flush(self) -> None: ...

    def purge(self) -> None: ...


def rows_of_kernels(
    kernels: Iterable[_Kernel], span: Callable[[Any], tuple[int, int] | None]
) -> list[PrunedRows]:
    """The pruned rows that the kernels of a sharded collection hold.

    Args:
        kernels: of this rank.
        span: gives of a shard its first row and how many ids share its rows; None of one that is not pruned.
    """
    found = []
    for kernel in kernels:
        held = zip(
            kernel.tables, kernel.split_embedding_weights(), kernel.states_by_table(), strict=True
        )
        for shard, weights, states in held:
            place = span(shard)
            if place is not None:
                first_row, ids = place
                found.append(
                    PrunedRows(
                        shard.name,
                        tuple(shard.feature_names),
                        weights,
                        ids,
                        tuple(states),
                        first_row,
                        kernel.flush,
                        kernel.purge,
                    )
                )
    return found


class GenericITEPModule(nn.Module):
    """Turns the ids of pruned tables into rows, and decides which ids have rows of their own.

    Its state dict has for each pruned table ``<table>_itp_address_lookup`` ``[U]`` int64 and
    ``<table>_itp_row_util`` ``[U]`` float32: the rows and uses of its ids.

    Args:
        table_name_to_unpruned_hash_sizes: how many ids each pruned table has; tables that are not named, or have
            a row for each id, are not pruned.
        lookups: the lookups of a sharded collection whose tables are whole here, or not cut by rows; None: the
            collection that this module is put before (`ITEPEmbeddingBagCollection`) says which tables there are.
        enable_pruning: False: ids are left as they are.
        pruning_interval: steps between two prunings, once training is under way.

    Raises:
        UserError: an interval below 1, or fewer ids than rows.
    """

    def __init__(
        self,
        table_name_to_unpruned_hash_sizes: dict[str, int],
        lookups: list[nn.Module] | None = None,
        enable_pruning: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        pruning_interval: int = 1001,
    ) -> None:
        super().__init__()
        if pruning_interval < 1:
            raise UserError(f"pruning_interval is {pruning_interval}; give 1 step or more")
        self.table_name_to_unpruned_hash_sizes = dict(table_name_to_unpruned_hash_sizes)
        self.enable_pruning, self.pruning_interval = enable_pruning, pruning_interval
        self.last_pruned_iter = -1
        self._held: list[PrunedRows] = []
        self._names: list[str] = []
        self._pruned_states: list[tuple[int, int]] = []
        self.register_load_state_dict_pre_hook(_of_one_column)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.register_load_state_dict_post_hook(lambda *_: self.purge())  # type: ignore[no-untyped-call] # as above
        for lookup in lookups or []:
            while isinstance(lookup, nn.parallel.DistributedDataParallel):
                lookup = lookup.module  # noqa: PLW2901 - unwrapped step by step
            kernels: Any = lookup.kernels
            self.hold(rows_of_kernels(kernels, self._whole))

    def _whole(self, shard: _Shard) -> tuple[int, int] | None:
        ids = self.ids_of(shard.name, shard.num_embeddings)
        return None if ids is None else (0, ids)

    def ids_of(self, table: str, rows: int) -> int | None:
        """How many ids a table of ``rows`` rows has; None: it is not pruned.

        Raises:
            UserError: fewer than rows.
        """
        ids = self.table_name_to_unpruned_hash_sizes.get(table, rows)
        if ids < rows:
            raise UserError(
                f"table {table!r} has {rows} rows for {ids} ids in table_name_to_unpruned_hash_sizes; give it as "
                "many ids as rows or more"
            )
        return ids if ids > rows and self.enable_pruning else None

    def hold(self, rows: Sequence[PrunedRows]) -> None:
        """Take more rows to prune, with new addresses.

        Raises:
            UserError: there are ids without any row.
        """
        for own in rows:
            if not own.weights.size(0):
                raise UserError(
                    f"table {own.table!r} has no row here for {own.ids} ids; give it more rows, or fewer ranks"
                )
            again = sum(other.table == own.table for other in self._held)
            name = own.table + (f"_{again}" if again else "")
            device = own.weights.device
            self.register_buffer(
                name + ADDRESS, torch.empty(own.ids, dtype=torch.int64, device=device)
            )
            self.register_buffer(name + USE, torch.empty(own.ids, device=device))
            self._held.append(own)
            self._names.append(name)
        self.reset_parameters()

    @property
    def held(self) -> list[tuple[PrunedRows, Tensor, Tensor]]:
        """The pruned rows here, the addresses of their ids, and their uses; live."""
        # `get_buffer` takes its time, twice for each table and step.
        buffers: dict[str, Any] = self._buffers
        return [
            (own, buffers[name + ADDRESS], buffers[name + USE])
            for own, name in zip(self._held, self._names, strict=True)
        ]

    @property
    def buffer_names(self) -> list[str]:
        """What the buffers' names begin with, as in `held`."""
        return list(self._names)

    def reset_parameters(self) -> None:
        """Begin anew: the first ids have rows, and nothing was used."""
        for own, address, use in self.held:
            if not address.is_meta:
                first = id_pruning.first_addresses(own.ids, own.weights.size(0), address.device)
                address.copy_(first + own.first_row)
                use.zero_()
        self._pruned_states = self._address_states()

    def _address_states(self) -> list[tuple[int, int]]:
        """Tells whether addresses were written since it was asked last: where they lie, and how often they were."""
        return [
            (0, 0) if address.is_meta else (address.data_ptr(), address._version)  # noqa: SLF001 - torch has no public name
            for _, address, _ in self.held
        ]

    def is_new(self) -> bool:
        """Whether nothing was used yet."""
        return all(use.is_meta or not bool(use.any()) for _, _, use in self.held)

    def purge(self) -> None:
        """Look at addresses that were loaded.

        Raises:
            UserError: an address is not a row here: the state was saved on ranks with other blocks of rows.
        """
        for own, address, _ in self.held:
            if address.is_meta:
                continue
            local = address - own.first_row
            if bool(((local < 0) | (local >= own.weights.size(0))).any()):
                raise UserError(
                    f"table {own.table!r} was saved with ids on rows of other ranks; load it on as many ranks as "
                    "it was saved on, or in one process"
                )

    def forward(self, sparse_features: KeyedJaggedTensor, cur_iter: int) -> KeyedJaggedTensor:
        """The rows of the ids; in training their uses are counted, and at some steps rows change their ids first.

        Args:
            sparse_features: features of any tables; those of tables that are not pruned stay as they are.
            cur_iter: the step, from 0.

        Raises:
            IndexError: an id is not one of its table's (on the CPU).
            ValueError: the values are not int32 or int64.
        """
        by_feature: dict[str, list[int]] = {}
        for place, own in enumerate(self._held):
            for feature in own.features:
                by_feature.setdefault(feature, []).append(place)
        seen: dict[str, int] = {}
        places: list[int | None] = []
        for key in sparse_features.keys():  # noqa: SIM118 - a KeyedJaggedTensor is not a dict
            serving = by_feature.get(key)
            turn = seen.get(key, 0)
            seen[key] = turn + 1
            places.append(None if serving is None else serving[min(turn, len(serving) - 1)])
        if self.training:
            self.prune(cur_iter)
        return self.remap(sparse_features, places, cur_iter)

    @torch.no_grad()
    def prune(self, cur_iter: int) -> None:
        """Let rows change their ids, if the step is one of those and it was not done at this step."""
        if not id_pruning.prunes(cur_iter, self.pruning_interval):
            return
        if self.last_pruned_iter == cur_iter:
            return
        self.last_pruned_iter = cur_iter
        if self._address_states() != self._pruned_states:
            self._give_up_second_addresses()
        for device in {own.weights.device for own in self._held}:
            self._prune_on(device, cur_iter)
        self._pruned_states = self._address_states()

    def _give_up_second_addresses(self) -> None:
        """Let all ids of a row that ids share have the first one.

        Of a state that several ranks saved each had a row that ids share; one process has one such row.
        """
        for own, address, _ in self.held:
            local = address - own.first_row
            sharing = torch.bincount(local, minlength=own.weights.size(0))[local] > 1
            address[sharing] = own.first_row

    def _prune_on(self, device: torch.device, cur_iter: int) -> None:
        held = [each for each in self.held if each[0].weights.device == device]
        local = [address - own.first_row if own.first_row else address for own, address, _ in held]
        rows = [own.weights.size(0) for own, _, _ in held]
        uses = [use for _, _, use in held]
        moved = id_pruning.prune(local, uses, rows, cur_iter, self.pruning_interval)
        for (own, address, _), new in zip(held, local, strict=True):
            if own.first_row:
                torch.add(new, own.first_row, out=address)
        if cur_iter <= self.pruning_interval:
            return
        # A row that belongs to another id begins anew.
        anew = [(own, fresh) for (own, _, _), fresh in zip(held, moved, strict=True) if len(fresh)]
        for flush in dict.fromkeys(own.flush for own, _ in anew):
            flush()
        for own, fresh in anew:
            for tensor in (own.weights, *own.states):
                tensor.data.index_fill_(0, fresh.to(tensor.device), 0)
        for purge in dict.fromkeys(own.purge for own, _ in anew):
            purge()

    @torch.no_grad()
    def remap(
        self, features: KeyedJaggedTensor, places: Sequence[int | None], cur_iter: int
    ) -> KeyedJaggedTensor:
        """The rows, counted from the first one here, of the ids of ``features``.

        Args:
            features: ids.
            places: for each key which of `held` its ids have; None: they stay as they are.
            cur_iter: the step.
        """
        if all(place is None for place in places):
            return features
        values = features.values()
        if values.dtype not in {torch.int32, torch.int64}:
            raise ValueError(f"ids are {values.dtype}; give int32 or int64")
        counted = self.training and id_pruning.counts_use(cur_iter)
        times = _times(features) if counted else {}
        held, counts = self.held, features.length_per_key()
        rows = torch.empty_like(values, dtype=torch.int64)
        parts = zip(values.split_with_sizes(counts), rows.split_with_sizes(counts), strict=True)
        for number, (place, (ids, found)) in enumerate(zip(places, parts, strict=True)):
            if place is None:
                found.copy_(ids)
                continue
            own, address, use = held[place]
            if not counts[number]:
                continue
            if ids.device.type == "cpu" and (int(ids.min()) < 0 or int(ids.max()) >= own.ids):
                wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
                raise IndexError(
                    f"id {wrong} of feature {features.keys()[number]!r} is not one of the {own.ids} ids of table "
                    f"{own.table!r}"
                )
            if counted:
                id_pruning.count_use(use, ids, times.get(number))
            torch.index_select(address, 0, ids, out=found)
            if own.first_row:
                found.sub_(own.first_row)
        return features.with_values(rows.to(values.dtype))


def _of_one_column(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the first of the columns that a table in column shards has; they are alike."""
    for name, _own in module.named_buffers(recurse=False):
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.dim() == 2:
            state_dict[prefix + name] = value[:, 0]


def _times(features: KeyedJaggedTensor) -> Mapping[int, Tensor]:
    """How often the bag of each id is there in the whole batch, by the key's place, ``[n]`` each.

    A batch that varies per key and has inverse indices has each bag once; otherwise there is nothing to say.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is None or not features.variable_stride_per_key():
        return {}
    names, bags_FB = inverse
    lengths = features.lengths().split_with_sizes(features.stride_per_key())
    found = {}
    for number, key in enumerate(features.keys()):
        uses = torch.bincount(bags_FB[names.index(key)].long(), minlength=len(lengths[number]))
        found[number] = uses.repeat_interleave(lengths[number].long())
    return found
