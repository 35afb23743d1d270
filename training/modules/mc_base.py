"""What every managed collision module offers: the ids of one table in, rows of that table out.

Shapes: ``Z`` rows of the table, ``N`` ids of a batch.
"""

# Annotations are not postponed here: torch.fx hands them on to TorchScript, which needs types.

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from tessera.training.sparse.jagged_tensor import JaggedTensor

MAX_SEGMENTS = 1024
"""As many parts of a table, one of each rank that trained it, can be told apart in a saved state."""

Features = dict[str, JaggedTensor]


class ManagedCollisionModule(nn.Module, ABC):
    """The ids of one table to its rows, for one or more features.

    Args:
        device: where the map lies.
        output_segments: the row at which each part of the table begins that one rank trained, and the
            end; ``[0, rows]`` of a whole table.
        skip_state_validation: whether the module's state is without the bounds of these parts and the number of
            steps, and a loaded one is taken without `validate_state`.

    Raises:
        ValueError: more parts than a state can tell apart.
    """

    def __init__(
        self,
        device: torch.device,
        output_segments: list[int],
        skip_state_validation: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    ) -> None:
        super().__init__()
        self._output_segments = list(output_segments)
        if skip_state_validation:
            return
        if len(output_segments) > MAX_SEGMENTS + 1:
            raise ValueError(
                f"output_segments has {len(output_segments) - 1} parts; a state tells "
                f"{MAX_SEGMENTS} apart"
            )
        self.register_buffer("_output_segments_tensor", _padded(output_segments, device))
        self.register_buffer(
            "_current_iter_tensor", torch.zeros(1, dtype=torch.int64, device=device)
        )
        self._output_segments_tensor: Tensor
        self._current_iter_tensor: Tensor

    @property
    def device(self) -> torch.device:
        """Where the map lies."""
        return self._current_iter_tensor.device

    @abstractmethod
    def preprocess(self, features: Features) -> Features:
        """The ids as the map knows them, by feature."""

    @abstractmethod
    def profile(self, features: Features) -> Features:
        """Count preprocessed ids while the module trains, and change the map where it is time to.

        Returns:
            ``features``.
        """

    @abstractmethod
    def remap(self, features: Features, mutate_miss_lengths: bool = True) -> Features:  # noqa: FBT001, FBT002 - as above
        """The row of each preprocessed id, in the same bags."""

    def profile_and_remap(
        self,
        features: Features,
        mutate_miss_lengths: bool = True,  # noqa: FBT001, FBT002 - as above
    ) -> Features:
        """`profile` and `remap` in turn, of preprocessed ids."""
        return self.remap(self.profile(features), mutate_miss_lengths)

    @abstractmethod
    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:  # noqa: FBT001, FBT002 - as above
        """`preprocess`, `profile` and `remap` in turn."""

    @abstractmethod
    def evict(self) -> Tensor | None:
        """The rows that got another id since the last call, ``[E]``; None: the map was not changed."""

    @abstractmethod
    def output_size(self) -> int:
        """``Z``, the rows of the table."""

    @abstractmethod
    def input_size(self) -> int:
        """Ids are in ``[0, input size)``: ranks divide that range among them."""

    @abstractmethod
    def buckets(self) -> int:
        """Into how many buckets the ids are divided."""

    @abstractmethod
    def validate_state(self) -> None:
        """Refuse a loaded state that does not fit.

        Raises:
            UserError: it was saved of parts that do not make up this one.
        """

    @abstractmethod
    def open_slots(self) -> Tensor:
        """How many rows have no id yet, ``[1]`` int64."""

    def holds_ids(self) -> bool:
        """Whether an id has a row of its own."""
        free = self.open_slots()
        return not free.is_meta and int(free) != self.output_size() - 1

    def range_key(self, ids: Tensor) -> Tensor:
        """The number by which each preprocessed id ``[N]`` is sent to a rank: the id, unless a module says otherwise."""
        return ids

    def range_bounds(self, row_bounds: list[int]) -> list[int]:
        """Where the numbers of `range_key` of each rank begin, and the end.

        Args:
            row_bounds: the first row of each rank's part of the table, and the end.
        """
        ranks, size = len(row_bounds) - 1, self.input_size()
        block = -(-size // ranks)
        return [min(block * rank, size) for rank in range(ranks + 1)]

    @abstractmethod
    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> "ManagedCollisionModule":
        """A new module, with an empty map, for some of the table's rows.

        Args:
            output_id_range: the first row, and the one behind the last.
            output_segments: as of the constructor, of the whole table.
            device: None: as this one.
        """


def with_values(bag: JaggedTensor, values: Tensor) -> JaggedTensor:
    """``values`` in the same bags."""
    return JaggedTensor(
        values, bag.weights_or_none(), bag.lengths_or_none(), bag.offsets_or_none(), False
    )


def _padded(output_segments: list[int], device: torch.device) -> Tensor:
    """The bounds in a tensor of one length for all modules, ``[MAX_SEGMENTS + 1]``, filled up with -1."""
    padded = output_segments + [-1] * (MAX_SEGMENTS + 1 - len(output_segments))
    return torch.tensor(padded, dtype=torch.int64, device=device)
