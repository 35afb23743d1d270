"""The sparse types inside TorchScript, torch.fx and pytree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree

from tessera.training import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)
from tessera.training.sparse.jagged_tensor import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    jt_is_equal,
    kjt_is_equal,
)
from tests.training.jagged_strategies import bags_of, quick

ROWS = {"a": 9, "b": 5, "c": 30}


class Everything(nn.Module):
    """Every method that moves bags about, in one forward."""

    def forward(self, kjt: KeyedJaggedTensor) -> KeyedTensor:
        first, rest = kjt.permute([2, 0, 1]).split([1, 2])
        joined = KeyedJaggedTensor.concat([rest, first]).to(torch.device("cpu"))
        again = KeyedJaggedTensor.from_jt_dict(joined.to_dict()).flatten_lengths()
        columns = [
            again["a"].to_padded_dense(3, 7.0).float(),
            again["b"].to_padded_dense(2).float(),
            again.with_values(again.values() + 1)["c"].to_padded_dense(4).float(),
        ]
        padded = KeyedTensor.from_tensor_list(["a", "b", "c"], columns)
        groups = KeyedTensor.regroup([padded], [["c", "a"], ["b", "c"]])
        named = KeyedTensor.regroup_as_dict([padded], [["a", "b"]], ["ab"])
        values = torch.cat([groups[0], groups[1], named["ab"]], dim=1)
        return KeyedTensor(["ca", "bc", "ab"], [7, 6, 5], values)


class Shapes(nn.Module):
    """What a tensor says about itself."""

    def forward(self, kjt: KeyedJaggedTensor) -> list[int]:
        empty = KeyedJaggedTensor.empty_like(kjt)
        none = KeyedJaggedTensor.empty()
        synced = KeyedJaggedTensor.from_lengths_sync(kjt.keys(), kjt.values(), kjt.lengths())
        other = KeyedJaggedTensor.from_offsets_sync(kjt.keys(), kjt.values(), kjt.offsets())
        out = synced.length_per_key() + other.offset_per_key() + kjt.stride_per_key()
        out.extend([kjt.stride(), empty.stride(), none.stride(), kjt.index_per_key()["b"]])
        jagged = JaggedTensor.from_dense(kjt["a"].to_dense())
        out.extend([jagged.values().numel(), JaggedTensor.empty().lengths().numel()])
        return out


@pytest.fixture(scope="module")
def scripted():
    return torch.jit.script(Everything()), torch.jit.script(Shapes())


@quick
@given(bags=bags_of(ROWS, min_batch=1), weighted=st.booleans())
def test_scripted_code_gives_what_python_gives(scripted, bags, weighted):
    kjt = bags.kjt(weighted=weighted)
    out = scripted[0](kjt)
    assert isinstance(out, KeyedTensor)
    assert out.keys() == ["ca", "bc", "ab"]
    assert torch.equal(out.values(), Everything()(kjt).values())
    assert scripted[1](kjt) == Shapes()(kjt)


@quick
@given(bags=bags_of(ROWS, min_batch=1))
def test_padded_columns_are_what_the_lists_say(scripted, bags):
    columns = {"a": (3, 7.0, 0), "b": (2, 0.0, 0), "c": (4, 0.0, 1)}
    lists = {
        key: [([i + plus for i in bag] + [fill] * width)[:width] for bag in bags.ids[key]]
        for key, (width, fill, plus) in columns.items()
    }
    out = scripted[0](bags.kjt())
    for name in out.index_per_key():
        parts = zip(*(lists[key] for key in name), strict=True)
        assert out[name].tolist() == [[i for part in row for i in part] for row in parts]


def test_a_traced_model_takes_the_batch_as_an_argument_and_keeps_no_size_of_it():
    graph = torch.fx.symbolic_trace(Everything())
    again = torch.jit.script(graph)
    for lengths in ([1, 2, 0], [1, 0, 2, 3, 0, 0]):
        kjt = KeyedJaggedTensor(
            ["a", "b", "c"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths)
        )
        expected = Everything()(kjt).values()
        assert torch.equal(graph(kjt).values(), expected)
        assert torch.equal(again(kjt).values(), expected)


class FromTensors(nn.Module):
    """Builds its jagged tensor from flat inputs: a traced graph holds no such object."""

    def __init__(self):
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [EmbeddingBagConfig(9, 2, name="t", feature_names=["a", "b"])]
        )

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        kjt = KeyedJaggedTensor(["b", "a"], values, lengths=lengths)
        return self.tables(kjt.permute([1, 0])).values()


def test_a_tensor_made_and_used_inside_a_traced_model_is_traced_away():
    model = FromTensors()
    graph = torch.fx.symbolic_trace(model)
    assert "Keyed" not in graph.code
    again = torch.jit.script(graph)
    for lengths in ([1, 2], [1, 0, 2, 3]):
        flat = torch.arange(sum(lengths)) % 9, torch.tensor(lengths)
        assert torch.equal(again(*flat), model(*flat))


class Halves(nn.Module):
    def forward(self, bags: JaggedTensor):
        return JaggedTensor(bags.values() * 2, lengths=bags.lengths()), {"x": bags}


def test_a_traced_model_may_return_jagged_tensors():
    jagged = JaggedTensor(torch.tensor([1, 2]), lengths=torch.tensor([2, 0]))
    doubled, named = torch.fx.symbolic_trace(Halves())(jagged)
    assert [bag.tolist() for bag in doubled.to_dense()] == [[2, 4], []]
    assert named["x"] is jagged


def test_modules_take_apart_and_put_together():
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([0, 1, 1, 0]))
    for apart, together in (
        (ComputeKJTToJTDict(), ComputeJTDictToKJT()),
        (torch.jit.script(ComputeKJTToJTDict()), torch.jit.script(ComputeJTDictToKJT())),
    ):
        assert kjt_is_equal(together(apart(kjt)), kjt)
        assert jt_is_equal(apart(kjt)["b"], kjt["b"])
        assert not jt_is_equal(apart(kjt)["a"], kjt["b"])


@pytest.mark.parametrize(
    "sparse",
    [
        JaggedTensor(torch.tensor([1, 2]), lengths=torch.tensor([2, 0])),
        KeyedJaggedTensor(
            ["a"], torch.tensor([1]), weights=torch.ones(1), lengths=torch.tensor([1, 0])
        ),
        KeyedJaggedTensor(
            ["a", "b"],
            torch.tensor([1]),
            lengths=torch.tensor([1, 0, 0]),
            stride_per_key_per_rank=[[1], [2]],
            inverse_indices=(["a", "b"], torch.tensor([[0, 0], [0, 1]])),
        ),
        KeyedTensor(["a", "b"], [1, 2], torch.arange(3.0).view(1, 3)),
    ],
    ids=["jagged", "keyed jagged", "varying", "keyed"],
)
def test_their_tensors_are_leaves_of_a_tree(sparse):
    leaves, spec = _pytree.tree_flatten({"x": sparse})
    again = _pytree.tree_unflatten(leaves, spec)["x"]
    assert str(again) == str(sparse)
    assert type(again) is type(sparse)
    assert spec == _pytree.tree_structure({"x": again})
    plus = _pytree.tree_map(lambda t: t + 1 if isinstance(t, torch.Tensor) else t, sparse)
    assert torch.equal(plus.values(), sparse.values() + 1)
    if isinstance(sparse, KeyedJaggedTensor):
        assert again.stride() == sparse.stride()
        assert again.stride_per_key_per_rank() == sparse.stride_per_key_per_rank()


def test_gradients_flow_through_a_keyed_tensor_as_if_its_columns_were_apart():
    values = torch.randn(3, 6, requires_grad=True)
    kt = KeyedTensor(["a", "b", "c"], [1, 2, 3], values)
    left, right = KeyedTensor.regroup([kt], [["c", "a"], ["b", "c"]])
    (left.sum() + 2 * right.sum() + 3 * kt["b"].sum()).backward()
    assert values.grad.tolist() == [[1, 5, 5, 3, 3, 3]] * 3


def test_sizes_are_counted_in_bytes():
    kjt = KeyedJaggedTensor(
        ["a"], torch.tensor([1, 2]), weights=torch.ones(2), lengths=torch.tensor([2, 0])
    )
    assert kjt.size_in_bytes() == 2 * 8 + 2 * 4 + 2 * 8
    assert KeyedTensor(["a"], [2], torch.ones(3, 2)).size_in_bytes() == 24
