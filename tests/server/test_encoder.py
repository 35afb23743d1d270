import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.serving.package.schema import OutputSpec
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.request.decoded_request import Answer, PassTimings
from tessera.serving.server.request.encoder import ResponseEncoder


@given(
    st.dictionaries(st.text(min_size=1), st.integers(0, 5_000), max_size=3),
    st.text(),
    st.text(),
    st.integers(0, 10**7),
)
def test_bytes_are_what_protobuf_reads(sizes, name, version, microseconds):
    rng = np.random.default_rng(0)
    scores = {key: rng.standard_normal(size).astype("<f4") for key, size in sizes.items()}
    outputs = tuple(OutputSpec(name=key, width=1) for key in sizes)
    answer = Answer(
        outputs={key: numbers.tobytes() for key, numbers in scores.items()},
        queue_seconds=2 * microseconds / 1e6,
        timings=PassTimings(3e-6, 4e-6, 5e-6, 6e-6, requests=7, samples=8, ids=9),
    )
    encoder = ResponseEncoder(outputs, model_name=name, model_version=version)
    response = pb.PredictionResponse.FromString(encoder.encode(answer, microseconds / 1e6))
    assert response.model_name == name
    assert response.model_version == version
    assert set(response.predictions) == set(scores)
    for key, numbers in scores.items():
        got = np.array(response.predictions[key].data, "<f4")
        assert got.tobytes() == numbers.tobytes()
    assert response.timings == pb.StageTimings(
        decode_us=microseconds,
        queue_us=2 * microseconds,
        assemble_us=3,
        transfer_us=4,
        forward_us=5,
        split_us=6,
        batch_requests=7,
        batch_samples=8,
    )
