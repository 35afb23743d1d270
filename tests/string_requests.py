"""Requests whose values are strings, beside the same requests with ids."""

import numpy as np

from tessera.kernels.string_ids import string_ids
from tessera.serving.protocol import predictor_pb2 as pb
from tests.kserve_messages import infer_request

GROUPS = ("id_list_features", "id_score_list_features")


def in_both_forms(message, schema):
    """``message`` with other ids for the features with strings; the same with strings instead of ids."""
    ids, strings = pb.PredictionRequest(), pb.PredictionRequest()
    ids.CopyFrom(message)
    strings.CopyFrom(message)
    shared = list(message.shared_features.names)
    by_name = {feature.name: feature for feature in schema.features}
    own = [feature for feature in schema.group("id_list") if feature.name not in shared]
    parts = [
        (lambda m: m.id_list_features, own),
        (lambda m: m.id_score_list_features, schema.group("id_score_list")),
        (lambda m: m.shared_features.features, [by_name[name] for name in shared]),
    ]
    for part, features in parts:
        if features and (part is not parts[2][0] or shared):
            _convert(part(ids), part(strings), features)
    return ids, strings


def _convert(ids, strings, features):
    lengths = np.frombuffer(ids.lengths, "<i4")
    given = np.frombuffer(ids.values_int64 or b"", "<i8")
    if ids.values:
        given = np.frombuffer(ids.values, "<i4").astype("<i8")
    per_feature = lengths.reshape(len(features), -1).sum(axis=1)
    owners = np.repeat(np.arange(len(features)), per_feature)
    texts = [
        (b"name %d" if features[owner].strings else b"%d") % number
        for owner, number in zip(owners, given.tolist(), strict=True)
    ]
    hashed = string_ids(texts)
    with_strings = np.array([features[owner].strings for owner in owners], bool)
    ids.values = b""
    ids.values_int64 = np.where(with_strings, hashed, given).astype("<i8").tobytes()
    strings.values = strings.values_int64 = b""
    strings.values_bytes.extend(texts)


def infer_with_strings(ids, strings, *, typed=False, **fields):
    """``strings`` as a ModelInferRequest with tensors of BYTES; ``ids`` is the same request with ids."""
    request = infer_request(ids, typed=typed, **fields)
    for at, tensor in enumerate(request.inputs):
        group, _, what = tensor.name.rpartition("_")
        if what != "values":
            continue
        texts = getattr(strings, group).values_bytes
        tensor.datatype = "BYTES"
        tensor.shape[0] = len(texts)
        tensor.ClearField("contents")
        if typed:
            tensor.contents.bytes_contents.extend(texts)
        else:
            raw = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
            request.raw_input_contents[at] = raw
    return request
