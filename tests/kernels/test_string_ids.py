"""Ids of strings: the operator, the header and the torch-free function are one published hash."""

from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from tessera.errors import UserError
from tessera.kernels.string_ids import EXAMPLES, string_ids

# From the specification and from the documentation of implementations.
PUBLISHED = {
    b"": 0xEF46DB3751D8E999,
    b"a": 0xD24EC4F1A98C6E5B,
    b"abc": 0x44BC2CF5AD770999,
    b"abcdefghijklmnopqrstuvwxyz": 0xCFE1F278FA89835C,
    b"Nobody inspects the spammish repetition": 0xFBCEA83C8A378BF1,
}


def hashed(strings, offsets_dtype=torch.int64):
    """The operator's ids of a list of bytes, as unsigned numbers."""
    content = np.frombuffer(b"".join(strings) or b"", np.uint8).copy()
    offsets = np.cumsum([0, *map(len, strings)])
    given = torch.from_numpy(offsets).to(offsets_dtype)
    ids = torch.ops.tessera.xxh64(torch.from_numpy(content), given)
    assert ids.dtype == torch.int64
    return ids.numpy().view(np.uint64).tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_operator_gives_the_published_values(dtype):
    assert hashed(list(PUBLISHED), dtype) == list(PUBLISHED.values())


def test_the_function_without_torch_gives_the_published_values():
    assert string_ids(PUBLISHED).view(np.uint64).tolist() == list(PUBLISHED.values())


def test_every_length_and_alignment_equals_the_peer():
    rng = np.random.default_rng(3)
    strings = [rng.bytes(size) for size in range(140)]
    assert hashed(strings) == [xxhash.xxh64_intdigest(string) for string in strings]


def test_threads_change_nothing():
    strings = [f"user {i}".encode() for i in range(50_000)]
    expected = string_ids(strings).view(np.uint64).tolist()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    assert hashed(strings) == expected
    torch.set_num_threads(before)


def test_strings_between_the_offsets_are_hashed_and_nothing_else():
    content = torch.arange(10, dtype=torch.uint8)
    ids = torch.ops.tessera.xxh64(content, torch.tensor([2, 5, 5, 9]))
    assert ids.tolist() == string_ids([bytes([2, 3, 4]), b"", bytes([5, 6, 7, 8])]).tolist()
    assert torch.ops.tessera.xxh64(content, torch.tensor([4])).tolist() == []


def test_the_examples_are_what_the_hash_gives():
    assert string_ids(list(EXAMPLES)).tolist() == list(EXAMPLES.values())
    assert hashed([text.encode() for text in EXAMPLES]) == [i % 2**64 for i in EXAMPLES.values()]


def test_the_table_of_examples_in_the_docs_is_right():
    table = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
    for text, number in EXAMPLES.items():
        assert f"| {f'`{text}`' if text else 'the empty text'} | {number} |" in table


@pytest.mark.parametrize(
    ("content", "offsets", "says"),
    [
        (torch.zeros(3, dtype=torch.int8), torch.tensor([0, 3]), "bytes: a contiguous uint8"),
        (torch.zeros(3, dtype=torch.uint8), torch.tensor([0.0, 3.0]), "offsets: a contiguous int"),
        (torch.zeros(3, dtype=torch.uint8), torch.tensor([], dtype=torch.int64), "at least one"),
        (torch.zeros(3, dtype=torch.uint8), torch.tensor([0, 4]), "entry 1 is 4, expected 0 to 3"),
        (torch.zeros(3, dtype=torch.uint8), torch.tensor([2, 1]), "entry 1 is 1, expected 2 to 3"),
        (torch.zeros(3, dtype=torch.uint8), torch.tensor([-1, 3]), "entry 0 is -1"),
    ],
)
def test_sizes_that_disagree_are_refused(content, offsets, says):
    with pytest.raises(RuntimeError, match=says):
        torch.ops.tessera.xxh64(content, offsets)


@pytest.mark.parametrize("wrong", [3, None, "\ud800"])
def test_what_is_not_a_string_has_no_id(wrong):
    with pytest.raises(UserError, match="a string cannot be made an id"):
        string_ids(["good", wrong])


def test_tracing_knows_the_shape():
    with torch.device("meta"):
        offsets = torch.empty(8, dtype=torch.int64)
        ids = torch.ops.tessera.xxh64(torch.empty(3, dtype=torch.uint8), offsets)
    assert (ids.shape, ids.dtype) == ((7,), torch.int64)
