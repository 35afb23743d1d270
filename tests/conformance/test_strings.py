"""Values given as strings: the bits of the same request with ids, and one refusal on both servers."""

import argparse
import asyncio
import json

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tessera.errors import UserError
from tessera.serving.client import AsyncPredictorClient, PredictorClient, encode_request
from tessera.serving.client.assemble import assemble
from tessera.serving.client.rows import rows_to_parts
from tessera.serving.commands import predict
from tessera.serving.package.loading import load_package
from tessera.serving.package.manifest import FORMAT_VERSION
from tessera.serving.protocol import predictor_pb2 as pb
from tests.conformance.conformance_harness import i32, same_bits, scores_of
from tests.conformance.test_answers import run_in_process
from tests.kserve_messages import infer, infer_request, outputs_of, raw_infer
from tests.patience import PATIENCE_S
from tests.string_requests import in_both_forms, infer_with_strings

TOO_LONG = b"x" * 65_537


@pytest.fixture
def schema(in_process):
    return in_process.manifest.schema


@pytest.mark.parametrize("batch", [1, 9])
def test_strings_give_the_bits_of_their_ids(server, drawn, schema, batch):
    ids, strings = in_both_forms(drawn.samples(batch), schema)
    assert strings.id_list_features.values_bytes
    expected = scores_of(server.predict(ids))
    assert same_bits(scores_of(server.predict(strings)), expected)
    for typed in (False, True):
        request = infer_with_strings(ids, strings, typed=typed)
        assert same_bits(outputs_of(infer(server, request))["default"], expected)
        assert same_bits(outputs_of(infer(server, infer_request(ids)))["default"], expected)


def test_shared_features_may_be_strings(server, drawn, schema):
    ids, strings = in_both_forms(drawn.ranking(6), schema)
    assert strings.shared_features.features.values_bytes
    expected = scores_of(server.predict(ids))
    assert same_bits(scores_of(server.predict(strings)), expected)
    # The shared ones as strings and the others as ids, and the other way round.
    ids.shared_features.CopyFrom(strings.shared_features)
    assert same_bits(scores_of(server.predict(ids)), expected)


def test_strings_are_counted_as_ids(server, drawn, schema):
    _, strings = in_both_forms(drawn.samples(5), schema)
    count = len(strings.id_list_features.values_bytes)
    server.settle()
    before = server.value("tessera_ids_total", model="ranker")
    server.predict(strings)
    server.settle()
    assert server.value("tessera_ids_total", model="ranker") == before + count


def raw_row(number):
    """A row of the default package's features, of which some are texts."""
    return {
        **{f"dense_{index}": number / 7 + index for index in range(4 - number % 2)},
        "user": f"user {number}",
        "item": [number, 2**62 + number],
        "history": [f"film {place}" for place in range(number % 6)],
        "genre": number % 19,
        "tag": [],
        "bucket": None if number % 3 else ["b", "Zürich"],
    }


def test_rows_give_the_bits_of_the_package_in_process(server, schema, in_process, tmp_path, capsys):
    rows = [raw_row(number) for number in range(9)]
    arrays = assemble(*rows_to_parts(rows, schema), schema=schema)
    message = pb.PredictionRequest.FromString(encode_request(arrays))
    expected = run_in_process(in_process, message)
    with PredictorClient(server.address, schema=schema) as client:
        assert same_bits(client.predict_rows(rows).outputs["default"], expected)
        table = pa.Table.from_pylist(rows)
        assert same_bits(client.predict_rows(table).outputs["default"], expected)
    asyncio.run(predicted_by_asyncio(server.address, schema, rows, expected))
    path, lacking = tmp_path / "rows.parquet", tmp_path / "lacking.parquet"
    pq.write_table(table, lacking)
    pq.write_table(table.append_column("region", pa.nulls(9, pa.list_(pa.int64()))), path)
    parser = argparse.ArgumentParser()
    predict.add_arguments(parser)
    flags = ["--address", server.address, "--model-file", str(in_process.path), "--batch", "4"]
    with pytest.raises(
        UserError, match=r"lacking\.parquet: has no column 'region'; it has dense_0"
    ):
        predict.run(parser.parse_args([*flags, "--input", str(lacking)]))
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(json.dumps({**row, "clicked": 1}) for row in rows))
    for name in (path, lines):
        args = parser.parse_args([*flags, "--input", str(name), "--ignore", "clicked"])
        assert predict.run(args) == 0
        answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert same_bits([answer["scores"]["default"] for answer in answers], expected)


async def predicted_by_asyncio(address, schema, rows, expected):
    async with AsyncPredictorClient(address, schema=schema) as client:
        prediction = await client.predict_rows(rows)
    assert same_bits(prediction.outputs["default"], expected)


def test_a_package_of_an_older_version_is_served_as_it_was(server, drawn, other_package):
    # No feature of it has strings, so that each is a number.
    loaded = load_package(other_package)
    assert loaded.manifest.format_version in {3, FORMAT_VERSION}
    ids, strings = in_both_forms(drawn.samples(7, model="second"), loaded.manifest.schema)
    expected = run_in_process(loaded, ids)
    assert same_bits(scores_of(server.predict(ids)), expected)
    assert same_bits(scores_of(server.predict(strings)), expected)


def one_less(group):
    del group.values_bytes[-1]


def both(group):
    group.values_int64 = b"12345678"


def setting(at, text):
    def edit(group):
        group.values_bytes[at] = text

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (one_less, "id_list_features.values_bytes has 6 strings, expected 7 (sum(lengths))"),
        (
            both,
            (
                "id_list_features has 7 values_bytes and 8 bytes of values or values_int64, expected "
                "only one of the three"
            ),
        ),
        (
            setting(0, TOO_LONG),
            (
                "id_list_features.values_bytes: feature 'user', row 0: a string has 65537 bytes, the "
                "limit is 65536"
            ),
        ),
        (
            setting(1, b"abc"),
            (
                "id_list_features.values_bytes: feature 'item', row 0: a string of 3 bytes is not a "
                "whole number of 64 bits in decimal digits, and the feature's ids are numbers"
            ),
        ),
        (
            setting(3, b"19"),
            "id_list_features: feature 'genre', row 0: id 19 is outside [0, 19)",
        ),
    ],
)
def test_what_is_refused(server, drawn, schema, edit, says):
    message = drawn.samples(1)
    group = message.id_list_features
    group.lengths = i32([1] * 7)
    group.values = b""
    group.values_int64 = b"\0" * 56
    _, strings = in_both_forms(message, schema)
    assert server.outcome(strings.SerializeToString()) == ("OK", "")
    edit(strings.id_list_features)
    assert server.outcome(strings.SerializeToString()) == ("INVALID_ARGUMENT", says)


def infer_details(server, request):
    with pytest.raises(grpc.RpcError) as caught:
        raw_infer(server)(request.SerializeToString(), timeout=PATIENCE_S)
    return caught.value.code().name, caught.value.details()


def test_what_kserve_refuses(server, drawn, schema):
    message = drawn.samples(1)
    group = message.id_list_features
    group.lengths = i32([1] * 7)
    group.values = b""
    group.values_int64 = b"\0" * 56
    forms = in_both_forms(message, schema)
    name = "id_list_features_values"
    raw = infer_with_strings(*forms)
    at = [tensor.name for tensor in raw.inputs].index(name)
    bytes_there = len(raw.raw_input_contents[at])
    raw.raw_input_contents[at] += b"\0"
    says = f"{name} has {bytes_there + 1} bytes, which are not 7 strings, each after its size in 4 bytes"
    assert infer_details(server, raw) == ("INVALID_ARGUMENT", says)
    typed = infer_with_strings(*forms, typed=True)
    del typed.inputs[at].contents.bytes_contents[0]
    says = f"{name} has 6 elements, its shape has 7"
    assert infer_details(server, typed) == ("INVALID_ARGUMENT", says)
    typed.inputs[at].shape[0] = 6
    says = f"{name} has 6 strings, expected 7 (sum(lengths))"
    assert infer_details(server, typed) == ("INVALID_ARGUMENT", says)
    typed.inputs[at].shape[0] = 100_001
    says = "the request has 100001 ids, the limit is 100000"
    assert infer_details(server, typed) == ("INVALID_ARGUMENT", says)
    lengths = infer_with_strings(*forms)
    lengths.inputs[at - 1].datatype = "BYTES"
    says = "id_list_features_lengths has datatype 'BYTES', expected INT32"
    assert infer_details(server, lengths) == ("INVALID_ARGUMENT", says)
