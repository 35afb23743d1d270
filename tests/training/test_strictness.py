"""``strict(False)``: what does not fit is let in where it is built and refused where it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

import tessera.training
from tessera.training import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)

Kjt = KeyedJaggedTensor


@pytest.fixture
def lenient() -> Iterator[None]:
    """Run a test without checks where tensors are built."""
    before = tessera.training.strict(False)
    yield
    assert tessera.training.strict(before) is False


def unfit() -> list[Kjt]:
    """Keyed tensors whose fields do not fit each other, in one way each."""
    ids = torch.arange(5)
    return [
        Kjt(["a", "b"], ids, lengths=torch.tensor([3, 3, 2, 1])),
        Kjt(["a", "b"], ids, lengths=torch.tensor([1, 2, 1])),
        Kjt(["a", "b"], ids, offsets=torch.tensor([1, 5])),
        Kjt(["a", "b"], ids, lengths=torch.tensor([1.0, 4.0])),
        Kjt(["a", "b"], ids, lengths=torch.tensor([6, -1])),
    ]


def lookup(features: Kjt) -> object:
    """Look the features up in two tables."""
    tables = [
        EmbeddingBagConfig(name=key, num_embeddings=9, embedding_dim=4, feature_names=[key])
        for key in ("a", "b")
    ]
    return EmbeddingBagCollection(tables=tables)(features)


USES: list[Callable[[Kjt], object]] = [
    lambda kjt: kjt["a"],
    lambda kjt: kjt.to_dict(),
    lambda kjt: kjt.split([1, 1]),
    lambda kjt: kjt.permute([1, 0]),
    lambda kjt: kjt.dist_tensors(),
    lookup,
]


def test_fields_are_checked_where_they_are_built_at_first() -> None:
    with pytest.raises(ValueError, match="lengths add up to 9 but there are 5 values"):
        Kjt(["a", "b"], torch.arange(5), lengths=torch.tensor([3, 3, 2, 1]))
    with pytest.raises(ValueError, match="lengths add up to 3 but there are 4 values"):
        JaggedTensor(torch.arange(4), lengths=torch.tensor([3]))


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("use", range(len(USES)))
def test_what_does_not_fit_is_refused_where_it_is_used(place: int, use: int) -> None:
    with pytest.raises(ValueError, match=r"lengths|offsets"):
        USES[use](unfit()[place])


@pytest.mark.usefixtures("lenient")
def test_what_fits_is_used_as_before() -> None:
    kjt = Kjt(["a", "b"], torch.arange(5), lengths=torch.tensor([1, 1, 3, 0]))
    assert [part.values().tolist() for part in kjt.to_dict().values()] == [[0, 1], [2, 3, 4]]


@pytest.mark.usefixtures("lenient")
def test_values_behind_the_last_bag_are_left_alone() -> None:
    jagged = JaggedTensor(
        torch.arange(1, 6), lengths=torch.tensor([2, 0, 1]), weights=torch.ones(5)
    )
    assert [bag.tolist() for bag in jagged.to_dense()] == [[1, 2], [], [3]]
    assert jagged.to_padded_dense().tolist() == [[1, 2], [0, 0], [3, 0]]
    weights = jagged.to_padded_dense_weights(3)
    assert weights is not None
    assert weights.sum(dim=1).tolist() == [2, 0, 1]
    with pytest.raises(ValueError, match="lengths add up to 9 but there are 5 values"):
        JaggedTensor(torch.arange(5), lengths=torch.tensor([9])).to_dense()


def test_the_environment_sets_it_and_a_wrong_word_is_refused() -> None:
    program = "from tessera.training.sparse.strictness import is_strict; print(is_strict())"

    def run(word: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TESSERA_STRICT": word},
            capture_output=True,
            text=True,
            check=False,
        )

    assert run("0").stdout.strip() == "False"
    assert "TESSERA_STRICT is 'maybe'; give one of 1, true, 0, false" in run("maybe").stderr


def test_tensors_without_memory_have_ids_spread_over_the_keys() -> None:
    ids = torch.arange(11, device="meta")
    offsets = torch.tensor([0, 2, 2, 3, 4, 8, 11], device="meta")
    kjt = Kjt.from_offsets_sync(["a", "b", "c"], ids, offsets)
    assert kjt.length_per_key() == [5, 3, 3]
    assert kjt.offset_per_key() == [0, 5, 8, 11]
    parts = kjt.to_dict()
    assert [part.values().shape[0] for part in parts.values()] == [5, 3, 3]
    assert Kjt.from_jt_dict(parts).keys() == ["a", "b", "c"]
    assert Kjt.from_lengths_sync([], ids[:0], ids[:0]).length_per_key() == []
