"""The sparse types in torch.export, as trees with names, and in functions that a trace keeps whole."""

import pytest
import torch
from torch import nn
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree

from tessera.training import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from tessera.training.fx import symbolic_trace


def features(lengths, *, keys=("a", "b", "c"), weighted=False, by_offsets=False):
    lengths = torch.tensor(lengths)
    ids = torch.arange(int(lengths.sum())) % 7
    if by_offsets:
        bounds = {"offsets": nn.functional.pad(lengths.cumsum(0), [1, 0])}
    else:
        bounds = {"lengths": lengths}
    weights = torch.rand(len(ids)) if weighted else None
    return KeyedJaggedTensor(list(keys), ids, weights=weights, **bounds)


def pooled(*, weighted=False):
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(7, 4, name="t1", feature_names=["a", "b"]),
            EmbeddingBagConfig(7, 4, name="t2", feature_names=["c"], pooling=PoolingType.MEAN),
        ],
        is_weighted=weighted,
    )


class Columns(nn.Module):
    def __init__(self, collection):
        super().__init__()
        self.collection = collection

    def forward(self, kjt):
        found = self.collection(kjt)
        if isinstance(found, KeyedTensor):
            return found.values(), found["b"]
        return [part.values() for part in found.values()]


@pytest.mark.parametrize("case", ["pooled", "weighted", "offsets", "unpooled"])
def test_an_exported_collection_takes_batches_of_other_sizes(case):
    if case == "unpooled":
        tables = [EmbeddingConfig(7, 4, name="t1", feature_names=["a", "b"])]
        model = Columns(EmbeddingCollection(tables))
    else:
        model = Columns(pooled(weighted=case == "weighted"))
    kinds = {"weighted": case == "weighted", "by_offsets": case == "offsets"}
    first = features([1, 2, 0, 3, 1, 1], **kinds)
    leaves, _ = _pytree.tree_flatten(first)
    sizes = [None if leaf is None else {0: torch.export.Dim.DYNAMIC} for leaf in leaves]
    exported = torch.export.export(model, (first,), strict=False, dynamic_shapes=(sizes,))
    run = exported.module()
    for lengths in ([0, 0, 5, 1, 0, 2], [1, 0, 2, 1, 1, 1, 0, 0, 3]):
        batch = features(lengths, **kinds)
        for mine, expected in zip(run(batch), model(batch), strict=True):
            assert torch.equal(mine, expected)


def test_a_sparse_output_of_an_exported_model_is_built_again(tmp_path):
    model, batch = pooled(), features([1, 2, 0, 3, 1, 1])
    exported = torch.export.export(model, (batch,), strict=False)
    exported.example_inputs = None  # torch would not load them: they are not plain tensors
    torch.export.save(exported, tmp_path / "model.pt2")
    found = torch.export.load(tmp_path / "model.pt2").module()(batch)
    assert isinstance(found, KeyedTensor)
    assert found.to_dict().keys() == {"a", "b", "c"}
    assert torch.equal(found.values(), model(batch).values())


def named_leaves(sparse):
    pairs, spec = _pytree.tree_flatten_with_path(sparse)
    assert _pytree.tree_structure(sparse) == spec
    return {key.name.lstrip("_"): leaf for (key,), leaf in pairs}


def test_leaves_have_the_names_of_the_fields():
    jagged = JaggedTensor(torch.tensor([5]), lengths=torch.tensor([1]))
    assert list(named_leaves(jagged)) == ["values", "weights", "lengths", "offsets"]
    varying = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1]),
        lengths=torch.tensor([1, 0, 0]),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 0], [0, 1]])),
    )
    leaves = named_leaves(varying)
    assert list(leaves)[4:] == ["stride_per_key_per_rank", "inverse_indices"]
    assert leaves["stride_per_key_per_rank"].tolist() == [[1], [2]]
    assert leaves["inverse_indices"].tolist() == [[0, 0], [0, 1]]
    plain = named_leaves(features([1, 2, 0]))
    assert len(plain) == 6
    assert plain["stride_per_key_per_rank"] is None
    columns = KeyedTensor(["a"], [2], torch.ones(1, 2))
    assert list(named_leaves(columns)) == ["values"]
    # Leaves may be mapped to what is not a tensor.
    assert _pytree.tree_map(lambda _: None, columns).values() is None
    assert _pytree.tree_map(lambda _: 1, varying).values() == 1


def test_collections_have_the_fields_that_programs_for_torchrec_read():
    bags = pooled()
    assert bags._embedding_bag_configs == bags.embedding_bag_configs()
    assert (bags._is_weighted, bags._lengths_per_embedding) == (False, [4, 4, 4])
    vectors = EmbeddingCollection([EmbeddingConfig(7, 4, name="t1", feature_names=["a"])])
    assert vectors._embedding_configs == vectors.embedding_configs()
    assert vectors._embedding_dim == 4


def test_a_graph_takes_keys_in_another_order_and_more_of_them():
    values = torch.arange(6.0).view(2, 3)
    _, spec = _pytree.tree_flatten(KeyedTensor(["a", "b"], [1, 2], values))
    other = KeyedTensor(["b", "x", "a"], [2, 1, 1], values[:, [1, 2, 0, 0]])
    assert torch.equal(fx_pytree.tree_flatten_spec(other, spec)[0], values)
    with pytest.raises(KeyError, match="no key 'b', which the graph was made for"):
        fx_pytree.tree_flatten_spec(KeyedTensor(["a"], [1], values[:, :1]), spec)
    with pytest.raises(ValueError, match=r"made for .1, 2. along dimension 1"):
        fx_pytree.tree_flatten_spec(KeyedTensor(["a", "b"], [2, 1], values), spec)
    _, spec = _pytree.tree_flatten(features([1, 2, 3]))
    found = fx_pytree.tree_flatten_spec(features([1, 2, 3], keys=("b", "c", "a")), spec)
    assert [found[0].tolist(), found[2].tolist()] == [[3, 4, 5, 0, 1, 2], [3, 1, 2]]


@torch.fx.wrap
def doubled(bags: JaggedTensor) -> torch.Tensor:
    if bags.values().numel() == 0:  # a branch on values, which cannot be traced
        return bags.values()
    return bags.values() * 2


@torch.fx.wrap
def parts_of(kjt: KeyedJaggedTensor, other: list[JaggedTensor]) -> dict[str, JaggedTensor]:
    assert len(other) == 1
    return {key: kjt[key] for key in kjt.keys()}  # noqa: SIM118 - a list


class BuildsBags(nn.Module):
    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return doubled(JaggedTensor(values, lengths=lengths)) + 1


class BuildsKeyedBags(nn.Module):
    def forward(self, values: torch.Tensor, lengths: torch.Tensor):
        bags = JaggedTensor(values, lengths=lengths)
        return parts_of(KeyedJaggedTensor(["a", "b"], values, lengths=lengths), other=[bags])["b"]


def test_a_wrapped_function_is_one_step_also_of_bags_that_the_model_builds():
    values, lengths = torch.arange(4), torch.tensor([1, 3])
    graph = symbolic_trace(BuildsBags())
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"][1] is doubled
    assert torch.equal(graph(values, lengths), values * 2 + 1)
    assert torch.equal(graph(values[:0], lengths[:0]), values[:0] + 1)
    assert torch.equal(torch.jit.script(graph)(values, lengths), values * 2 + 1)
    assert symbolic_trace(BuildsKeyedBags())(values, lengths).values().tolist() == [1, 2, 3]
    # Outside of a trace they are ordinary functions again.
    assert doubled(JaggedTensor(values, lengths=lengths)).tolist() == [0, 2, 4, 6]


class HeadsOfRows(nn.Module):
    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return JaggedTensor.from_dense_lengths(values, lengths).values()


class LikeInput(nn.Module):
    def forward(self, kjt: KeyedJaggedTensor, bags: JaggedTensor):
        return KeyedJaggedTensor.empty_like(kjt), JaggedTensor.empty_like(bags)


def test_rows_heads_and_empty_tensors_are_traced():
    values, lengths = torch.arange(6).view(2, 3), torch.tensor([1, 2])
    assert symbolic_trace(HeadsOfRows())(values, lengths).tolist() == [0, 3, 4]
    kjt = features([1, 0, 2, 1, 0, 0])
    like, bags = symbolic_trace(LikeInput())(kjt, kjt["b"])
    assert (like.keys(), like.stride(), bags.values().numel()) == ([], 2, 0)
