"""Quantized collections: their rows are FBGEMM's, their vectors the dequantized rows'."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.ao import quantization

from tessera.kernels.row_types import INT8
from tessera.training import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from tessera.training.fbgemm import import_inference_tables
from tessera.training.fx import Tracer, symbolic_trace
from tessera.training.modules.embedding_configs import QuantConfig
from tessera.training.quant.embedding_modules import EmbeddingBagCollection as QuantBags
from tessera.training.quant.embedding_modules import EmbeddingCollection as QuantCollection
from tessera.training.quant.rows import (
    STORED_TYPES,
    aligned_row_bytes,
    quantize_rows,
    store_rows,
)
from tests.training.jagged_strategies import bags_of, quick
from tests.training.references import pooled_reference

ROWS = {"x": 7, "y": 7, "z": 5}
DTYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.INT8: torch.qint8,
    DataType.INT4: torch.quint4x2,
    DataType.INT2: torch.quint2x4,
}


def config(weight=torch.int8, output=torch.float32, single=None):
    observer = quantization.PlaceholderObserver
    return QuantConfig(
        activation=observer.with_args(dtype=output),
        weight=observer.with_args(dtype=weight),
        per_table_weight_dtype=single,
    )


def bags(*, weighted=False, mean=True):
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(7, 8, name="shared", feature_names=["y", "x"]),
            EmbeddingBagConfig(
                5,
                16,
                name="own",
                feature_names=["z"],
                pooling=PoolingType.MEAN if mean else PoolingType.SUM,
            ),
        ],
        is_weighted=weighted,
    )


def quantized(module, **options):
    """As ``quantize_dynamic`` does it, for a collection that is itself the model's root."""
    module.qconfig = config(**options)
    kind = QuantBags if isinstance(module, EmbeddingBagCollection) else QuantCollection
    return kind.from_float(module)


def decoded(module, table):
    """The table's rows as its lookups see them, in plain arithmetic."""
    index = [part.name for part in module.rows.parts()].index(table)
    part = module.rows.parts()[index]
    return STORED_TYPES[part.data_type].decode(module.rows.tables()[index], part.dim)


def fbgemms_numbers(weights, sparse_type):
    """Numbers and scales by FBGEMM's own functions.

    ``quantize_embs`` makes int8 numbers with the exact scale and bias and rounds both to float16
    afterwards; its operator for rows with float16 scales, as of the narrower types, before.
    """
    from fbgemm_gpu.tbe.utils.quantize import quantize_embs

    if sparse_type.value != "int8":
        return quantize_embs(weights, sparse_type)
    rows = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weights, 8)
    return rows[:, :-4], rows[:, -4:]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # FBGEMM's own
@pytest.mark.parametrize(
    ("kind", "dim"),
    [
        (kind, dim)
        for kind in STORED_TYPES
        for dim in (4, 8, 20, 64)
        if STORED_TYPES[kind].bits >= 8 or dim * STORED_TYPES[kind].bits % 16 == 0
    ],
)
def test_rows_are_bit_for_bit_fbgemms(kind, dim):
    fbgemm = import_inference_tables()
    sparse_type = fbgemm.SparseType(kind.value.lower())
    weights = torch.randn(9, dim) * 3
    peer = fbgemm.IntNBitTableBatchedEmbeddingBagsCodegen(
        [("t", 9, dim, sparse_type, fbgemm.EmbeddingLocation.HOST)],
        device="cpu",
        row_alignment=16,
    )
    peer.initialize_weights()
    peer.fill_random_weights()
    body, scales = fbgemms_numbers(weights, sparse_type)
    kind_bytes = dim * STORED_TYPES[kind].bits // 8
    ((own_body, own_scales),) = peer.split_embedding_weights(split_scale_shifts=True)
    own_body.zero_()
    own_body[:, :kind_bytes] = body[:, :kind_bytes]
    if own_scales is not None:
        own_scales.copy_(scales)
    ((whole, _),) = peer.split_embedding_weights(split_scale_shifts=False)
    stored = torch.zeros_like(whole)
    store_rows(weights, kind, stored)
    assert torch.equal(stored, whole)
    numbers, own = quantize_rows(weights, kind)
    assert numbers.shape == (9, kind_bytes)
    assert (own is None) == (scales is None)


@pytest.mark.parametrize("dim", [1, 6, 7])
def test_int8_rows_of_any_width_are_within_half_a_step(dim):
    weights = torch.randn(50, dim) * 3
    stored = torch.zeros(50, aligned_row_bytes(INT8, dim, 16), dtype=torch.uint8)
    store_rows(weights, DataType.INT8, stored)
    step = (weights.amax(1) - weights.amin(1)) / 255
    error = (INT8.decode(stored, dim) - weights).abs().amax(1)
    # Half a step, and the rounding of scale (times 255 steps) and bias to float16.
    bound = 0.5 * step + (255 * step + weights.abs().amax(1)) * 2**-11 + 1e-6
    assert bool((error <= bound).all())


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # FBGEMM's own
def test_int8_numbers_are_within_a_step_of_torchrecs_and_closer_to_the_table():
    import_inference_tables()
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.tbe.utils.quantize import quantize_embs

    weights = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    theirs, their_scales = quantize_embs(weights, SparseType.INT8)
    ours, our_scales = quantize_rows(weights, DataType.INT8)
    steps = (ours.int() - theirs.int()).abs()
    assert int(steps.max()) == 1
    assert 0 < int(steps.sum()) < 0.05 * steps.numel()
    own, their = (
        (INT8.decode(torch.cat(rows, dim=1), 64) - weights).square().mean()
        for rows in ((our_scales, ours), (their_scales, theirs))
    )
    assert float(own) < float(their)


@quick
@given(
    batch=bags_of(ROWS),
    weighted=st.booleans(),
    mean=st.booleans(),
    kinds=st.tuples(*[st.sampled_from(list(DTYPES))] * 2),
)
def test_lookups_equal_a_plain_loop_over_the_decoded_rows(batch, weighted, mean, kinds):
    single = {"shared": DTYPES[kinds[0]], "own": DTYPES[kinds[1]]}
    module = quantized(bags(weighted=weighted, mean=mean), single=single)
    out = module(batch.kjt(weighted=weighted))
    assert out.keys() == ["y", "x", "z"]
    for key in out.keys():  # noqa: SIM118 - a list
        expected = pooled_reference(
            decoded(module, "own" if key == "z" else "shared"),
            batch.ids[key],
            mean=mean and key == "z",
            weights=batch.weights[key] if weighted else None,
        )
        # At most 5 fused multiply-adds of numbers below 4, in another order.
        torch.testing.assert_close(out[key], expected, rtol=0, atol=2e-5)


@quick
@given(batch=bags_of(ROWS), need_indices=st.booleans(), kind=st.sampled_from(list(DTYPES)))
def test_unpooled_lookups_give_the_decoded_rows(batch, need_indices, kind):
    module = quantized(
        EmbeddingCollection(
            [
                EmbeddingConfig(7, 8, name="a", feature_names=["x", "y"]),
                EmbeddingConfig(5, 8, name="b", feature_names=["z"]),
            ],
            need_indices=need_indices,
        ),
        weight=DTYPES[kind],
    )
    out = module(batch.kjt())
    assert list(out) == ["x", "y", "z"]
    for key, jagged in out.items():
        rows = decoded(module, "b" if key == "z" else "a")
        flat = [i for bag in batch.ids[key] for i in bag]
        # One fused multiply-add against a multiplication and an addition.
        torch.testing.assert_close(jagged.values(), rows[flat], rtol=1e-6, atol=1e-6)
        assert jagged.lengths().tolist() == [len(bag) for bag in batch.ids[key]]
        if need_indices:
            assert jagged.weights().tolist() == flat
    assert module.need_indices() == need_indices
    assert module.embedding_dim() == 8


class Model(nn.Module):
    """A model whose argument's type is the text "KeyedJaggedTensor" where annotations are postponed."""

    def __init__(self, tables):
        super().__init__()
        self.tables = tables

    def forward(self, kjt: KeyedJaggedTensor):
        return self.tables(kjt)


def as_torch_quantizes(*, weighted=False):
    return quantization.quantize_dynamic(
        Model(bags(weighted=weighted)),
        qconfig_spec={EmbeddingBagCollection: config()},
        mapping={EmbeddingBagCollection: QuantBags},
        inplace=False,
    )


def test_torch_swaps_collections_for_quantized_ones_under_the_same_names():
    model = as_torch_quantizes()
    assert {name: tuple(b.shape) for name, b in model.named_buffers()} == {
        # 8 and 16 numbers after 4 bytes of scale and bias, in multiples of 16 bytes.
        "tables.embedding_bags.shared.weight": (7, 16),
        "tables.embedding_bags.own.weight": (5, 32),
    }
    assert all(b.dtype == torch.uint8 for b in model.buffers())
    assert list(model.parameters()) == []
    assert "QuantizedEmbeddingBagCollection" in str(model)


@quick
@given(batch=bags_of(ROWS, min_batch=1), weighted=st.booleans())
def test_a_traced_and_scripted_model_looks_up_alike(batch, weighted):
    if not hasattr(test_a_traced_and_scripted_model_looks_up_alike, "made"):
        made = {}
        for flag in (False, True):
            model = as_torch_quantizes(weighted=flag)
            graph = torch.fx.GraphModule(model, Tracer(leaf_modules=["Unknown"]).trace(model))
            graph.graph.eliminate_dead_code()
            graph.recompile()
            made[flag] = model, torch.jit.script(graph)
        test_a_traced_and_scripted_model_looks_up_alike.made = made
    model, scripted = test_a_traced_and_scripted_model_looks_up_alike.made[weighted]
    kjt = batch.kjt(weighted=weighted)
    expected = model(kjt)
    out = scripted(kjt.permute([2, 0, 1]))
    assert out.keys() == expected.keys()
    assert torch.equal(out.values(), expected.values())


def test_a_graph_reads_row_0_for_an_id_that_is_no_row_and_leaves_the_callers_ids_alone(capfd):
    model = as_torch_quantizes()
    scripted = torch.jit.script(symbolic_trace(model))
    lengths = torch.tensor([1, 1, 1])
    wrong = KeyedJaggedTensor(["x", "y", "z"], torch.tensor([7, -5, 99]), lengths=lengths)
    right = KeyedJaggedTensor(["x", "y", "z"], torch.tensor([0, 0, 0]), lengths=lengths)
    assert torch.equal(scripted(wrong).values(), model(right).values())
    assert wrong.values().tolist() == [7, -5, 99]
    with pytest.raises(IndexError, match="feature 'y' has id -5"):
        model(wrong)
    with pytest.raises(KeyError, match="feature 'z' is missing"):
        model(right.split([2, 1])[0])
    with pytest.raises(torch.jit.Error, match="feature 'z' is missing"):
        scripted(right.split([2, 1])[0])


def test_copies_states_and_moves_keep_one_memory():
    module = quantized(bags())
    kjt = KeyedJaggedTensor(
        ["x", "y", "z"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1])
    )
    before = module(kjt).values()
    other = copy.deepcopy(module)
    other.load_state_dict({name: torch.zeros_like(t) for name, t in module.state_dict().items()})
    assert float(other(kjt).values().abs().max()) == 0
    assert torch.equal(module(kjt).values(), before)
    meta = copy.deepcopy(module).to("meta")
    assert meta.device.type == "meta"
    empty = meta.to_empty(device="cpu")
    empty.load_state_dict(module.state_dict())
    assert torch.equal(empty(kjt).values(), before)


def test_a_collection_may_be_built_from_quantized_weights():
    module = quantized(bags())
    weights = {
        name: quantize_rows(table.weight, DataType.INT8)
        for name, table in bags().embedding_bags.items()
    }
    again = QuantBags(
        module.embedding_bag_configs(),
        False,
        "cpu",
        torch.float16,
        weights,
    )
    assert again.output_dtype() is torch.float16
    assert again.device.type == "cpu"
    assert not again.is_weighted()
    assert torch.equal(again.rows.tables()[0][:, :4], weights["shared"][1])
    kjt = KeyedJaggedTensor(["x", "y", "z"], torch.tensor([1]), lengths=torch.tensor([1, 0, 0]))
    out = again(kjt)
    assert out.values().dtype == torch.float16
    torch.testing.assert_close(
        out["x"].float(), decoded(again, "shared")[1:2], rtol=2**-10, atol=2**-12
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": torch.complex64}, "weight dtype is torch.complex64"),
        ({"output": torch.int8}, "output dtype is torch.int8"),
    ],
)
def test_types_that_are_not_stored_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        quantized(bags(), **options)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="has no qconfig"):
        QuantBags.from_float(bags())
    narrow = EmbeddingBagCollection([EmbeddingBagConfig(7, 6, name="a", feature_names=["x"])])
    with pytest.raises(ValueError, match="6 columns; INT4 needs a multiple of 4"):
        quantized(narrow, weight=torch.quint4x2)
    table = EmbeddingBagConfig(7, 8, name="a", feature_names=["x"], data_type=DataType.INT64)
    with pytest.raises(ValueError, match="data_type is 'INT64'; give one of FP32"):
        QuantBags([table], False, "cpu")
