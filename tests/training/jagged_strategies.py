"""Random jagged batches, and their slow, obvious form: nested lists."""

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st

from tessera.training import KeyedJaggedTensor

quick = settings(max_examples=25)


@dataclass
class Bags:
    """``ids[key][sample]`` is a list of ids, ``weights`` likewise."""

    ids: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]]
    batch_size: int

    def kjt(self, *, weighted=False, values_dtype=torch.int64, lengths_dtype=torch.int32):
        flat = [i for bags in self.ids.values() for bag in bags for i in bag]
        weights = [w for bags in self.weights.values() for bag in bags for w in bag]
        lengths = [len(bag) for bags in self.ids.values() for bag in bags]
        return KeyedJaggedTensor(
            list(self.ids),
            torch.tensor(flat, dtype=values_dtype),
            weights=torch.tensor(weights, dtype=torch.float32) if weighted else None,
            lengths=torch.tensor(lengths, dtype=lengths_dtype),
        )


@st.composite
def bags_of(draw, rows, *, min_batch=0, max_batch=6, max_length=5):
    """``rows``: key to number of rows; ids are rows.  Empty bags and empty batches occur."""
    batch_size = draw(st.integers(min_batch, max_batch))
    ids, weights = {}, {}
    for key, count in rows.items():
        bag = st.lists(st.integers(0, count - 1), max_size=max_length)
        ids[key] = draw(st.lists(bag, min_size=batch_size, max_size=batch_size))
        weights[key] = [
            [draw(st.sampled_from([-1.5, 0.0, 0.25, 2.0])) for _ in b] for b in ids[key]
        ]
    return Bags(ids, weights, batch_size)
