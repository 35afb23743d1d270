"""quantize_inference_model, shard_quant_model, package_model: both servers answer what it makes."""

import numpy as np
import pytest
import torch

from tessera.kernels.libraries import LibraryError, load_libraries
from tessera.serving import package_model
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.training.inference.modules import quantize_inference_model
from tests.conformance.conformance_harness import RunningServer, i32, i64, same_bits, scores_of
from tests.packaging.quantized_models import BATCH, DTYPES, Pooled, sharded

FEATURES = 3
SAMPLES = 40


def drawn(seed):
    """Lengths ``[F * B]`` and ids of bags of up to 6 ids, rows of every table."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 7, FEATURES * SAMPLES)
    return lengths, rng.integers(0, 7, lengths.sum())


def in_process(package, lengths, ids):
    none = torch.empty(0, dtype=torch.int64)
    batch = HostBatch(
        float_features=torch.empty(SAMPLES, 0),
        id_list_features_lengths=torch.from_numpy(lengths).int(),
        id_list_features_values=torch.from_numpy(ids),
        id_score_list_features_lengths=none.int(),
        id_score_list_features_values=none,
        id_score_list_features_weights=none.float(),
        batch_size=SAMPLES,
    )
    return package.runner.forward(batch)["default"].numpy().reshape(-1)


@pytest.mark.parametrize(
    ("dtype", "sharding", "devices"),
    [("int8", "table_wise", 2), ("int4", "row_wise", 2), ("fp16", "column_wise", 3)],
)
def test_both_servers_answer_the_chain_as_the_direct_way(kind, tmp_path, dtype, sharding, devices):
    try:
        load_libraries(["tessera_ops"])
    except LibraryError:
        pytest.skip("its library is not built (make build)")
    model = Pooled().eval()
    direct, chain = tmp_path / "direct.pt", tmp_path / "chain.pt"
    package_model(model, None, [BATCH], out=direct, dtype=dtype)
    quantized = quantize_inference_model(model, quantization_dtype=DTYPES[dtype])
    package_model(sharded(quantized, sharding, devices), None, [BATCH], out=chain)
    loaded = load_package(direct)
    with RunningServer(kind, "--model", chain, "--drain-propagation-ms", 0) as running:
        for seed in range(3):
            lengths, ids = drawn(seed)
            message = pb.PredictionRequest(
                batch_size=SAMPLES,
                id_list_features=pb.SparseFeatures(
                    num_features=FEATURES, lengths=i32(lengths), values_int64=i64(ids)
                ),
            )
            answer = scores_of(running.predict(message))
            assert same_bits(answer, in_process(loaded, lengths, ids))
