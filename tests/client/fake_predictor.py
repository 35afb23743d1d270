"""A small servicer that reads requests with struct and plain loops and answers with sums.

It knows nothing of the client's code, so what it receives is what any server would.
"""

import struct
import threading
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.protocol import predictor_pb2_grpc


def unpack(letter, data):
    size = struct.calcsize(f"<{letter}")
    assert len(data) % size == 0
    return list(struct.unpack(f"<{len(data) // size}{letter}", data))


def group_bags(message, rows):
    """[F][rows] lists of (id, weight) of a SparseFeatures message."""
    lengths = unpack("i", message.lengths)
    assert len(lengths) == message.num_features * rows
    values = unpack("q", message.values_int64) or unpack("i", message.values)
    assert not (message.values_int64 and message.values)
    weights = unpack("f", message.weights) or [1.0] * len(values)
    assert len(values) == len(weights) == sum(lengths)
    flat = iter(zip(values, weights, strict=True))
    return [
        [[next(flat) for _ in range(lengths[f * rows + b])] for b in range(rows)]
        for f in range(message.num_features)
    ]


def reference_scores(request):
    """Per sample: sum of dense, plus (position of the feature + 1) * weight * id modulo 1000."""
    size = request.batch_size
    scores = [0.0] * size
    dense = unpack("f", request.float_features.values)
    width = request.float_features.num_features
    assert len(dense) == size * width
    for b in range(size):
        scores[b] += sum(dense[b * width : (b + 1) * width])
    groups = [group_bags(request.id_list_features, size)]
    groups.append(group_bags(request.id_score_list_features, size))
    if request.HasField("shared_features"):
        shared = request.shared_features
        index = unpack("i", shared.row_index)
        assert len(index) == size
        assert len(shared.names) == shared.features.num_features
        by_row = group_bags(shared.features, shared.num_rows)
        groups.append([[bags[row] for row in index] for bags in by_row])
    for bags in groups:
        for f, feature in enumerate(bags):
            for b, bag in enumerate(feature):
                scores[b] += sum((f + 1) * weight * (value % 1000) for value, weight in bag)
    return scores


@dataclass
class FakeServer(predictor_pb2_grpc.PredictorServicer):
    """Answers with `reference_scores`, unless told what to fail with."""

    failures: list = field(default_factory=list)  # (code, message), used up one per call
    requests: list = field(default_factory=list)
    metadata: list = field(default_factory=list)  # of each call, as a dictionary
    width: int = 1
    address: str = ""
    release: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    hold: bool = False
    saw_cancel: bool = False

    def Predict(self, request, context):  # noqa: N802 - gRPC's name
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.arrived.set()
        if self.hold:
            # The callback runs when the call ends at the client's wish, too.
            context.add_callback(self.release.set)
            assert self.release.wait(20)
            self.saw_cancel = not context.is_active()
            self.done.set()
        if self.failures:
            context.abort(*self.failures.pop(0))
        scores = [x for score in reference_scores(request) for x in [score] * self.width]
        return pb.PredictionResponse(
            predictions={"default": pb.FloatVec(data=scores)},
            model_name=request.model_name or "only",
            model_version=request.model_version or "1",
            timings=pb.StageTimings(queue_us=3, forward_us=70, batch_requests=2, batch_samples=9),
        )


@contextmanager
def running(fake):
    """`fake` behind a real port; sets its address."""
    grpc_server = grpc.server(
        futures.ThreadPoolExecutor(8),
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)],
    )
    predictor_pb2_grpc.add_PredictorServicer_to_server(fake, grpc_server)
    fake.address = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    grpc_server.start()
    try:
        yield fake
    finally:
        fake.release.set()
        grpc_server.stop(grace=None).wait()
