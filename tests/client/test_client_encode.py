"""The bytes on the wire, read back with struct and plain loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.serving.client.arrays import Bags, Shared
from tessera.serving.client.assemble import assemble
from tessera.serving.client.encode import encode_request
from tessera.serving.client.prediction import decode_response
from tessera.serving.protocol import predictor_pb2 as pb
from tests.client.fake_predictor import group_bags, unpack


def encoded(dense, sparse, **kwargs):
    shared = kwargs.pop("shared", None)
    arrays = assemble(dense, sparse, shared=shared)
    return pb.PredictionRequest.FromString(encode_request(arrays, **kwargs))


@given(data=st.data(), compact=st.booleans(), samples=st.integers(1, 5), features=st.integers(1, 4))
def test_a_server_reads_back_what_was_given(data, compact, samples, features):
    ids = data.draw(
        st.lists(
            st.lists(
                st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
                min_size=samples,
                max_size=samples,
            ),
            min_size=features,
            max_size=features,
        )
    )
    weights = [[[0.5 * i for i, _ in enumerate(bag)] for bag in bags] for bags in ids]
    dense = np.arange(samples * 3, dtype=np.float32).reshape(samples, 3)
    sparse = {f"f{i}": bags for i, bags in enumerate(ids)}
    sparse |= {f"w{i}": Bags.from_lists(ids[i], weights[i]) for i in range(features)}
    request = encoded(dense, sparse, compact_ids=compact)
    assert request.batch_size == samples
    assert request.float_features.num_features == 3
    assert unpack("f", request.float_features.values) == list(range(samples * 3))
    read = group_bags(request.id_list_features, samples)
    assert [[[value for value, _ in bag] for bag in bags] for bags in read] == ids
    read = group_bags(request.id_score_list_features, samples)
    assert [[[value for value, _ in bag] for bag in bags] for bags in read] == ids
    assert [[[weight for _, weight in bag] for bag in bags] for bags in read] == weights


@pytest.mark.parametrize(
    ("ids", "compact", "narrow"),
    [
        (np.array([1, 2], np.int32), False, True),
        (np.array([1, 2], np.int64), False, False),
        (np.array([1, 2], np.int64), True, True),
        (np.array([-(2**31), 2**31 - 1], np.int64), True, True),
        (np.array([1, 2**31], np.int64), True, False),
        (np.array([1, -(2**31) - 1], np.int64), True, False),
    ],
)
def test_ids_travel_as_int32_where_they_fit_and_it_is_asked(ids, compact, narrow):
    message = encoded(None, {"x": ids}, compact_ids=compact).id_list_features
    assert bool(message.values) is narrow
    assert bool(message.values_int64) is not narrow


def test_shared_features_travel_once():
    shared = Shared({"u": [[1, 2], [3]]}, np.array([1, 0, 1]))
    request = encoded(None, {"c": np.array([7, 8, 9])}, shared=shared, model="m", version="2")
    assert list(request.shared_features.names) == ["u"]
    assert request.shared_features.num_rows == 2
    assert group_bags(request.shared_features.features, 2) == [[[(1, 1), (2, 1)], [(3, 1)]]]
    assert unpack("i", request.shared_features.row_index) == [1, 0, 1]
    assert (request.model_name, request.model_version) == ("m", "2")


def test_a_plain_request_uses_only_torchrecs_fields():
    ids = np.array([1], dtype=np.int32)
    request = encoded(np.zeros((1, 1)), {"x": ids, "w": ([1], ids, [0.5])})
    numbers = {descriptor.number for descriptor, _ in request.ListFields()}
    assert numbers == {1, 2, 3, 4}
    assert all(d.number < 100 for d, _ in request.id_list_features.ListFields())


def response(**outputs):
    vectors = {name: pb.FloatVec(data=values) for name, values in outputs.items()}
    return pb.PredictionResponse(predictions=vectors).SerializeToString()


def test_outputs_are_shaped_by_the_batch():
    prediction = decode_response(response(a=[1, 2], b=[1, 2, 3, 4, 5, 6]), 2)
    assert prediction.outputs["a"].tolist() == [1, 2]
    assert prediction.outputs["a"].dtype == np.float32
    assert prediction.outputs["b"].tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("values", [[], [1], [1, 2, 3]])
def test_an_output_of_another_size_is_an_error(values):
    with pytest.raises(ValueError, match=f"output 'a' has {len(values)} values"):
        decode_response(response(a=values), 2)


def test_bytes_that_are_no_response_are_an_error():
    with pytest.raises(ValueError, match="cannot be read"):
        decode_response(b"\xff\xff\xff", 1)
