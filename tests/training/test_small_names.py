"""Small functions under TorchRec's paths that open code bases import."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tessera.training import DataType, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tessera.training.distributed.embedding import pad_vbe_kjt_lengths
from tessera.training.distributed.planner.enumerators import (
    calculate_shard_sizes_and_offsets,
    get_partition_by_type,
)
from tessera.training.distributed.tables.table_shards import EmbeddingComputeKernel, kernel_named
from tessera.training.distributed.types import CacheParams, KeyValueParams, ParameterSharding
from tessera.training.distributed.utils import (
    CopyableMixin,
    add_params_from_parameter_sharding,
    convert_to_fbgemm_types,
    merge_fused_params,
)
from tessera.training.fx import symbolic_trace
from tessera.training.fx.utils import assert_fx_safe
from tessera.training.inference.modules import (
    BatchingMetadata,
    PredictFactory,
    PredictModule,
    QualNameMetadata,
    quantize_dense,
)
from tessera.training.pt2 import checks
from tessera.training.sparse.tensor_dict import maybe_td_to_kjt


def test_settings_of_a_table_go_over_those_of_all() -> None:
    shared = {"learning_rate": 0.1, "eps": 1e-8}
    assert merge_fused_params(shared, {"lr": 0.5}) == {"learning_rate": 0.5, "eps": 1e-8}
    assert shared["learning_rate"] == 0.1
    assert merge_fused_params() == {}
    where = ParameterSharding(
        cache_params=CacheParams(load_factor=0.5, prefetch_pipeline=True), enforce_hbm=True
    )
    given: dict[str, Any] = {"cache_load_factor": 0.1}
    assert add_params_from_parameter_sharding(given, where) is given
    assert given == {"cache_load_factor": 0.5, "prefetch_pipeline": True, "enforce_hbm": True}
    assert add_params_from_parameter_sharding(None, ParameterSharding()) == {}


def test_types_become_fbgemms() -> None:
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    params = {"output_dtype": DataType.FP16, "cache_precision": DataType.INT8, "eps": 1}
    assert convert_to_fbgemm_types(params) is params
    assert params["output_dtype"] is configs.SparseType.FP16
    assert params["cache_precision"] is configs.SparseType.INT8


def test_kernels_that_are_names_alone_are_refused() -> None:
    assert kernel_named("t", "fused") is EmbeddingComputeKernel.FUSED
    for name in ("key_value", "fused_triton", "nothing"):
        with pytest.raises(ValueError, match=f"table 't': compute_kernel '{name}' is not here"):
            kernel_named("t", name)
    assert len({KeyValueParams(), KeyValueParams(l2_cache_size=1)}) == 2


def test_shards_of_a_table_are_those_of_the_strategy() -> None:
    tensor = torch.empty(10, 64, device="meta")
    sizes, offsets = calculate_shard_sizes_and_offsets(tensor, 4, 2, "row_wise")
    assert sizes == [[3, 64], [3, 64], [3, 64], [1, 64]]
    assert offsets == [[0, 0], [3, 0], [6, 0], [9, 0]]
    sizes, offsets = calculate_shard_sizes_and_offsets(tensor, 4, 2, "column_wise", 16)
    assert (sizes, offsets) == ([[10, 16]] * 4, [[0, 0], [0, 16], [0, 32], [0, 48]])
    kinds = ("table_wise", "table_row_wise", "row_wise", "grid_shard")
    assert [get_partition_by_type(kind) for kind in kinds] == [
        "device",
        "host",
        "uniform",
        "multi_host",
    ]


def test_empty_bags_make_keys_alike() -> None:
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(6),
        lengths=torch.tensor([1, 2, 0, 3]),
        stride_per_key_per_rank=[[3], [1]],
    )
    padded = pad_vbe_kjt_lengths(kjt)
    assert padded.stride() == 3
    assert not padded.variable_stride_per_key()
    assert padded.lengths().tolist() == [1, 2, 0, 3, 0, 0]
    assert padded["b"].values().tolist() == [3, 4, 5]


def test_a_dictionary_of_nested_tensors_becomes_a_batch() -> None:
    library = pytest.importorskip("tensordict")
    rows = [torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)]
    ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    content = library.TensorDict({"b": ragged, "a": ragged}, batch_size=[2])
    kjt = maybe_td_to_kjt(content, ["a", "b"])
    assert kjt.keys() == ["a", "b"]
    assert kjt.values().tolist() == [1, 2, 1, 2]
    assert kjt.lengths().tolist() == [2, 0, 2, 0]
    with pytest.raises(ValueError, match="feature 'a' is a Tensor"):
        maybe_td_to_kjt(library.TensorDict({"a": torch.ones(2)}, batch_size=[2]))


def test_what_is_no_dictionary_of_tensors_stays() -> None:
    kjt = KeyedJaggedTensor.empty()
    assert maybe_td_to_kjt(kjt) is kjt


def test_a_condition_holds_where_code_runs() -> None:
    class Checked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert_fx_safe(x.size(0) == 2, "two rows")
            return x + 1

    assert torch.equal(symbolic_trace(Checked())(torch.zeros(3)), torch.ones(3))
    with pytest.raises(AssertionError, match="two rows"):
        Checked()(torch.zeros(3))


def test_hints_for_the_compiler_do_nothing_where_code_runs_or_is_scripted() -> None:
    def hinted(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        checks.pt2_checks_tensor_slice(x, 0, 5)
        sizes = checks.pt2_checks_all_is_size(sizes)
        x = checks.pt2_check_size_nonzero(x)
        return x[: sizes[0]] * 2

    x = torch.arange(3)
    for function in (hinted, torch.jit.script(hinted)):
        assert function(x, [2]).tolist() == [0, 2]
    assert not checks.is_pt2_compiling()
    assert not checks.is_torchdynamo_compiling()
    assert not checks.is_non_strict_exporting()
    assert checks.pt2_guard_or_true(True)
    assert not checks.pt2_guard_or_false(False)

    seen = []

    def sees(x: torch.Tensor) -> torch.Tensor:
        if checks.is_pt2_compiling():
            x = x + 1
        return x

    compiled = torch.compile(sees, backend=lambda graph, _: seen.append(graph) or graph)
    assert compiled(torch.zeros(2)).tolist() == [1, 1]
    assert len(seen) == 1


class Doubled(PredictModule):
    """Scores are twice the model's."""

    def predict_forward(self, batch: dict[str, torch.Tensor]) -> Any:
        assert torch.is_inference_mode_enabled()
        return {"default": 2 * self.predict_module.dense(batch["x"])}


def serving_model() -> nn.Module:
    """A layer and a table."""
    table = EmbeddingBagConfig(name="t", num_embeddings=3, embedding_dim=2, feature_names=["f"])
    return nn.ModuleDict({"dense": nn.Linear(2, 1), "ebc": EmbeddingBagCollection(tables=[table])})


def test_a_model_of_named_tensors() -> None:
    model = serving_model()
    served = Doubled(model, "cpu")
    assert not model.training
    assert list(served.state_dict()) == list(model.state_dict())
    x = torch.ones(4, 2)
    torch.testing.assert_close(served({"x": x})["default"], 2 * model["dense"](x))
    with pytest.raises(NotImplementedError, match=r"torch\.half"):
        quantize_dense(served, torch.int8)
    assert quantize_dense(served, torch.half) is served
    assert served({"x": x})["default"].dtype is torch.float16
    assert model["ebc"].state_dict()["embedding_bags.t.weight"].dtype is torch.float32


def test_a_factory_says_what_a_server_has_to_know() -> None:
    class Factory(PredictFactory):
        def create_predict_module(self) -> nn.Module:
            return Doubled(serving_model(), "cpu")

        def batching_metadata(self) -> dict[str, BatchingMetadata]:
            return {"x": BatchingMetadata(type="dense", device="cpu", pinned=[""])}

        def result_metadata(self) -> str:
            return "dict_of_tensor"

        def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
            return predict_module

        def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
            return predict_module

        def qualname_metadata(self) -> dict[str, QualNameMetadata]:
            return {"forward": QualNameMetadata(need_preproc=True)}

    made = Factory()
    assert (
        made.batching_metadata_json() == '{"x": {"type": "dense", "device": "cpu", "pinned": [""]}}'
    )
    assert made.qualname_metadata_json() == '{"forward": {"need_preproc": true}}'
    assert made.model_inputs_data() == {}
    with pytest.raises(TypeError, match="abstract"):
        PredictFactory()  # type: ignore[abstract]


def test_a_module_is_copied_as_a_whole() -> None:
    class Copied(CopyableMixin):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

    module = Copied()
    copy = module.copy(torch.device("meta"))
    assert copy.linear.weight.is_meta
    assert not module.linear.weight.is_meta
