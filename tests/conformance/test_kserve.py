"""The KServe v2 protocol with Triton's extensions: ModelInfer."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tessera.serving.package.loading import load_package
from tessera.serving.protocol import inference_pb2 as ipb
from tests.conformance.conformance_harness import (
    TIMEOUT_S,
    RunningServer,
    f32,
    i32,
    i64,
    same_bits,
    scores_of,
)
from tests.conformance.tasks_module import POISON, draw, expected, package_tasks
from tests.kserve_messages import infer, infer_request, outputs_of, raw_infer, stub_of

A_MINUTE_US = 60_000_000
SIZES = [1, 2, 3, 8, 17, 100, 512]


def outcome(server, request):
    """Status name and details of a ModelInfer; details are empty for OK."""
    content = request if isinstance(request, bytes) else request.SerializeToString()
    try:
        raw_infer(server)(content, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "tasks.pt"
    package_tasks(path)
    return path


@pytest.fixture(scope="module")
def loaded_tasks(tasks):
    return load_package(tasks)


@pytest.fixture(scope="module")
def tasks_server(kind, tasks):
    """A model with several outputs and ids with weights."""
    flags = ["--model", tasks, "--workers", 1, "--drain-propagation-ms", 0]
    with RunningServer(kind, *flags) as running:
        yield running


@pytest.mark.parametrize("typed", [False, True], ids=["raw", "typed"])
def test_scores_are_those_of_predict(server, draw_with, typed):
    for size in SIZES:
        message = draw_with(seed=size).samples(size)
        wanted = scores_of(server.predict(message))
        response = infer(server, infer_request(message, typed=typed, id=f"request {size}"))
        assert same_bits(outputs_of(response)["default"], wanted), size
        assert response.id == f"request {size}"
        assert (response.model_name, response.model_version) == ("ranker", "3")
        (output,) = response.outputs
        assert (output.name, output.datatype, list(output.shape)) == ("default", "FP32", [size])
        assert not output.HasField("contents")


@pytest.mark.parametrize("typed", [False, True], ids=["raw", "typed"])
def test_ids_of_both_widths_and_empty_bags(server, drawn, typed):
    message = drawn.samples(3)
    small = np.frombuffer(message.id_list_features.values_int64, "<i8") % 10
    message.id_list_features.values_int64 = i64(small)
    wide = outputs_of(infer(server, infer_request(message, typed=typed)))["default"]
    message.id_list_features.values_int64 = b""
    message.id_list_features.values = i32(small)
    narrow = outputs_of(infer(server, infer_request(message, typed=typed)))["default"]
    wanted = scores_of(server.predict(message))
    assert same_bits(wide, wanted)
    assert same_bits(narrow, wanted)
    message.id_list_features.values = b""
    message.id_list_features.lengths = i32([0] * 21)
    empty = outputs_of(infer(server, infer_request(message, typed=typed)))["default"]
    assert same_bits(empty, scores_of(server.predict(message)))


def test_neighbours_of_both_protocols_share_batches(kind, package, drawn):
    flags = ["--model", package, "--workers", 1, "--max-delay-us", 20_000]
    messages = [drawn.samples(1 + at % 5) for at in range(60)]
    with RunningServer(kind, *flags, "--drain-propagation-ms", 0) as server:
        with ThreadPoolExecutor(16) as pool:
            first = [pool.submit(server.predict, message) for message in messages]
            second = [pool.submit(infer, server, infer_request(m)) for m in messages]
        for one, two in zip(first, second, strict=True):
            assert same_bits(outputs_of(two.result())["default"], scores_of(one.result()))
        assert server.value("tessera_batches_total") < 120


def test_every_group_and_several_outputs(tasks_server, loaded_tasks):
    for size in (1, 2, 7, 100):
        message = draw(loaded_tasks, size, seed=size)
        wanted = expected(loaded_tasks, message)
        for typed in (False, True):
            response = infer(tasks_server, infer_request(message, typed=typed))
            found = outputs_of(response)
            order = [output.name for output in loaded_tasks.manifest.schema.outputs]
            assert list(found) == order
            assert [list(output.shape) for output in response.outputs] == [
                [size, 3] if name == "logits" else [size] for name in order
            ]
            for name, scores in wanted.items():
                assert same_bits(found[name], scores), (size, name)


def test_asked_outputs_come_in_the_order_asked(tasks_server, loaded_tasks):
    message = draw(loaded_tasks, 2)
    wanted = expected(loaded_tasks, message)
    for asked in (["score"], ["logits"], ["score", "logits"], ["logits", "score"]):
        request = infer_request(message)
        for name in asked:
            request.outputs.add(name=name).parameters["anything"].bool_param = True
        found = outputs_of(infer(tasks_server, request))
        assert list(found) == asked
        assert all(same_bits(found[name], wanted[name]) for name in asked)


def test_empty_tensors_of_a_group_that_the_model_has_not(server, drawn):
    message = drawn.samples(2)
    request = infer_request(message)
    request.inputs.add(name="id_score_list_features_lengths", datatype="INT32", shape=[0])
    request.inputs.add(name="id_score_list_features_values", datatype="INT64", shape=[0])
    request.inputs.add(name="id_score_list_features_weights", datatype="FP32", shape=[0])
    request.raw_input_contents.extend([b"", b"", b""])
    found = outputs_of(infer(server, request))["default"]
    assert same_bits(found, scores_of(server.predict(message)))


def test_order_of_inputs_and_unknown_parameters_do_not_matter(server, drawn):
    message = drawn.samples(2)
    request = infer_request(message)
    turned = infer_request(message)
    del turned.inputs[:], turned.raw_input_contents[:]
    turned.inputs.extend(reversed(request.inputs))
    turned.raw_input_contents.extend(reversed(request.raw_input_contents))
    turned.parameters["anything"].string_param = "x"
    turned.parameters["sequence_id"].int64_param = 0
    turned.parameters["timeout"].int64_param = 0
    turned.inputs[0].parameters["binary_data_size"].int64_param = 3
    found = outputs_of(infer(server, turned))["default"]
    assert same_bits(found, scores_of(server.predict(message)))


def tensor(request, name):
    return next(one for one in request.inputs if one.name == name)


def put(request, name, content, shape=None):
    """Other raw contents for an input."""
    at = [one.name for one in request.inputs].index(name)
    request.raw_input_contents[at] = content
    if shape is not None:
        request.inputs[at].shape[:] = shape


def edit_missing(request):
    del request.inputs[1], request.raw_input_contents[1]


def edit_twice(request):
    request.inputs.append(request.inputs[0])
    request.raw_input_contents.append(request.raw_input_contents[0])


def edit_unknown(request):
    request.inputs[0].name = "dense"


def edit_datatype(request):
    tensor(request, "float_features").datatype = "FP64"


def edit_datatype_of_values(request):
    tensor(request, "id_list_features_values").datatype = "UINT64"


def edit_rank(request):
    tensor(request, "float_features").shape[:] = [4]


def edit_no_shape(request):
    del tensor(request, "id_list_features_lengths").shape[:]


def edit_negative_dimension(request):
    tensor(request, "float_features").shape[:] = [-1, 4]


def edit_huge_dimensions(request):
    tensor(request, "float_features").shape[:] = [2**62, 2**62]


def edit_large_dimensions(request):
    tensor(request, "float_features").shape[:] = [2**31 - 1, 2**31 - 1]


def edit_bytes(request):
    put(request, "float_features", b"123")


def edit_too_few_raw(request):
    del request.raw_input_contents[2]


def edit_mixture(request):
    tensor(request, "float_features").contents.fp32_contents.extend([1, 2, 3, 4])


def edit_width(request):
    put(request, "float_features", f32([1, 2, 3]), [1, 3])


def edit_lengths(request):
    put(request, "id_list_features_lengths", i32([0] * 8), [8])


def edit_samples_differ(request):
    put(request, "float_features", f32([0] * 8), [2, 4])


def edit_negative(request):
    put(request, "id_list_features_lengths", i32([-1] + [0] * 6))


def edit_sum(request):
    put(request, "id_list_features_lengths", i32([9] * 7))
    put(request, "id_list_features_values", i64([1]), [1])


def edit_samples(request):
    put(request, "float_features", f32([0] * 4004), [1001, 4])
    put(request, "id_list_features_lengths", i32([0] * 7007), [7007])


def edit_no_samples(request):
    put(request, "float_features", b"", [0, 4])
    put(request, "id_list_features_lengths", b"", [0])
    put(request, "id_list_features_values", b"", [0])


def edit_ids(request):
    put(request, "id_list_features_lengths", i32([100_001] + [0] * 6))
    put(request, "id_list_features_values", i64([1] * 100_001), [100_001])


def edit_reject(request):
    put(request, "id_list_features_lengths", i32([0, 0, 0, 2, 0, 0, 0]))
    put(request, "id_list_features_values", i64([18, 19]), [2])


def edit_infinite(request):
    put(request, "float_features", f32([0, float("inf"), 0, 0]))


def edit_foreign_group(request):
    request.inputs.add(name="id_score_list_features_values", datatype="INT64", shape=[2])
    request.raw_input_contents.append(i64([1, 2]))


def edit_output(request):
    request.outputs.add(name="scores")


def edit_output_twice(request):
    request.outputs.add(name="default")
    request.outputs.add(name="default")


def edit_classification(request):
    request.outputs.add(name="default").parameters["classification"].int64_param = 3


def edit_shared_memory_input(request):
    parameters = tensor(request, "float_features").parameters
    parameters["shared_memory_region"].string_param = "x"
    parameters["shared_memory_byte_size"].int64_param = 3


def edit_shared_memory_output(request):
    request.outputs.add(name="default").parameters["shared_memory_region"].string_param = "x"


def edit_sequence(request):
    request.parameters["sequence_id"].int64_param = 5


def edit_named_sequence(request):
    request.parameters["sequence_id"].string_param = "five"


def edit_timeout_kind(request):
    request.parameters["timeout"].string_param = "5"


def edit_negative_timeout(request):
    request.parameters["timeout"].int64_param = -5


def edit_priority_kind(request):
    request.parameters["priority"].double_param = 5


def edit_unset_priority(request):
    request.parameters["priority"].SetInParent()


def edit_priority(request):
    request.parameters["priority"].uint64_param = 2**31 - 1


INPUTS = "'float_features', 'id_list_features_lengths', 'id_list_features_values'"
INVALID = [
    (edit_missing, "input 'id_list_features_lengths' is missing"),
    (edit_twice, "input 'float_features' is given twice"),
    (edit_unknown, f"input 'dense' is unknown; this model has {INPUTS}"),
    (edit_datatype, "float_features has datatype 'FP64', expected FP32"),
    (edit_datatype_of_values, ("id_list_features_values has datatype 'UINT64', expected INT64 or "
     "INT32 or BYTES")),
    (edit_rank, "float_features.shape has 1 dimensions, expected 2"),
    (edit_no_shape, "id_list_features_lengths.shape has 0 dimensions, expected 1"),
    (edit_negative_dimension, "float_features.shape[0] is -1, expected 0 to 2147483647"),
    (edit_huge_dimensions, ("float_features.shape[0] is 4611686018427387904, expected 0 to "
     "2147483647")),
    (edit_large_dimensions, ("float_features has 16 bytes, expected 18446744056529682436 (its "
     "shape has 4611686014132420609 FP32 elements)")),
    (edit_bytes, ("float_features has 3 bytes, expected 16 (its shape has 4 FP32 elements)")),
    (edit_too_few_raw, "raw_input_contents has 2 entries, expected 3: one for each input"),
    (edit_mixture, ("float_features has typed contents beside raw_input_contents, expected only "
     "one of the two")),
    (edit_width, "float_features.shape[1] is 3, the model has 4 dense features"),
    (edit_lengths, ("id_list_features_lengths has 8 elements, expected 7 (7 features of 1 "
     "samples)")),
    (edit_samples_differ, ("id_list_features_lengths has 7 elements, expected 14 (7 features of 2 "
     "samples)")),
    (edit_negative, "id_list_features_lengths[0] is -1, expected >= 0"),
    (edit_sum, ("id_list_features_values has 8 bytes, expected 504 (sum(lengths) = 63 int64 "
     "numbers)")),
    (edit_samples, "batch_size is 1001, the limit is 1000 samples"),
    (edit_no_samples, "batch_size is 0, expected at least 1"),
    (edit_ids, "the request has 100001 ids, the limit is 100000"),
    (edit_reject, "id_list_features_values: feature 'genre', row 0: id 19 is outside [0, 19)"),
    (edit_infinite, ("float_features: feature 'dense_1', row 0 is inf, expected only NaN (missing) "
     "or a finite number")),
    (edit_foreign_group, ("id_score_list_features_values has 2 elements, expected 0: the model has "
     "no id_score_list_features")),
    (edit_output, "output 'scores' is unknown; this model has 'default'"),
    (edit_output_twice, "output 'default' is asked for twice"),
    (edit_classification, "parameter 'classification' of output 'default' is not supported"),
    (edit_shared_memory_input, ("parameter 'shared_memory_byte_size' of input 'float_features' is "
     "not supported")),
    (edit_shared_memory_output, ("parameter 'shared_memory_region' of output 'default' is not "
     "supported")),
    (edit_sequence, ("parameter 'sequence_id' is not supported: models keep no state between "
     "requests")),
    (edit_named_sequence, ("parameter 'sequence_id' is not supported: models keep no state between "
     "requests")),
    (edit_timeout_kind, "parameter 'timeout' is neither an int64_param nor a uint64_param"),
    (edit_negative_timeout, "parameter 'timeout' is -5, expected 0 to 9223372036854775807"),
    (edit_priority_kind, "parameter 'priority' is neither an int64_param nor a uint64_param"),
    (edit_unset_priority, "parameter 'priority' is neither an int64_param nor a uint64_param"),
    (edit_priority, "parameter 'priority' is 2147483647, expected 0 to 2147483646"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "text"), INVALID, ids=[edit.__name__ for edit, _ in INVALID])
def test_invalid_argument_names_the_tensor_and_both_numbers(server, drawn, edit, text):
    request = infer_request(drawn.samples(1))
    edit(request)
    before = server.value("tessera_rejected_total", model="ranker", reason="invalid")
    assert outcome(server, request) == ("INVALID_ARGUMENT", text)
    after = server.value("tessera_rejected_total", model="ranker", reason="invalid")
    assert after == before + 1


def edit_typed_kind(request):
    tensor(request, "float_features").contents.int_contents.append(1)


def edit_typed_count(request):
    tensor(request, "id_list_features_lengths").contents.int_contents.append(0)


def edit_typed_none(request):
    tensor(request, "float_features").ClearField("contents")


def edit_one_raw(request):
    request.raw_input_contents.append(b"1234")


INVALID_TYPED = [
    (edit_typed_kind, "float_features has contents in int_contents, expected only fp32_contents"),
    (edit_typed_count, "id_list_features_lengths has 8 elements, its shape has 7"),
    (edit_typed_none, "float_features has 0 elements, its shape has 4"),
    (edit_one_raw, "raw_input_contents has 1 entries, expected 3: one for each input"),
]


@pytest.mark.parametrize(
    ("edit", "text"), INVALID_TYPED, ids=[edit.__name__ for edit, _ in INVALID_TYPED]
)
def test_typed_contents_that_do_not_fit(server, drawn, edit, text):
    request = infer_request(drawn.samples(1), typed=True)
    edit(request)
    assert outcome(server, request) == ("INVALID_ARGUMENT", text)


def edit_weights(request):
    put(request, "id_score_list_features_weights", f32([1]), [1])
    put(request, "id_score_list_features_lengths", i32([2]))
    put(request, "id_score_list_features_values", i64([1, 2]), [2])


def edit_nan_weight(request):
    put(request, "id_score_list_features_weights", f32([1, float("nan")]), [2])
    put(request, "id_score_list_features_lengths", i32([2]))
    put(request, "id_score_list_features_values", i64([1, 2]), [2])


def edit_scored_lengths(request):
    put(request, "id_score_list_features_lengths", i32([0, 0]), [2])


INVALID_WEIGHTED = [
    (edit_weights, ("id_score_list_features_weights has 4 bytes, expected 8 (sum(lengths) = 2 "
     "float32 numbers)")),
    (edit_nan_weight, "id_score_list_features_weights[1] is nan, expected a finite number"),
    (edit_scored_lengths, ("id_score_list_features_lengths has 2 elements, expected 1 (1 features "
     "of 1 samples)")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "text"), INVALID_WEIGHTED, ids=[edit.__name__ for edit, _ in INVALID_WEIGHTED]
)
def test_weighted_ids_that_do_not_fit(tasks_server, loaded_tasks, edit, text):
    request = infer_request(draw(loaded_tasks, 1))
    edit(request)
    assert outcome(tasks_server, request) == ("INVALID_ARGUMENT", text)


def test_bytes_that_are_no_message(server):
    before = server.value("tessera_requests_total", code="INVALID_ARGUMENT", model="")
    code, text = outcome(server, b"\xff" * 7)
    assert code == "INVALID_ARGUMENT"
    assert text.startswith("the message (7 bytes) is not a valid ModelInferRequest")
    after = server.value("tessera_requests_total", code="INVALID_ARGUMENT", model="")
    assert after == before + 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model": "nobody"}, "model_name 'nobody' is unknown; this server has 'ranker', 'second'"),
        (
            {"version": "9"},
            "model_version '9' of model 'ranker' is not loaded; version '3' is",
        ),
    ],
)
def test_unknown_model_or_version(server, drawn, fields, text):
    request = infer_request(drawn.samples(1, **fields))
    assert outcome(server, request) == ("NOT_FOUND", text)


def test_models_answer_by_name(server, drawn):
    message = drawn.samples(1, model="second", version="1")
    response = infer(server, infer_request(message))
    assert (response.model_name, response.model_version) == ("second", "1")
    assert same_bits(outputs_of(response)["default"], scores_of(server.predict(message)))


def test_what_a_call_counts(server, drawn):
    stages = ("decode", "queue", "assemble", "forward", "split", "encode")
    counts = [
        ("tessera_requests_total", {"code": "OK"}),
        ("tessera_request_duration_seconds_count", {}),
        ("tessera_batches_total", {"reason": "idle"}),
        ("tessera_batch_requests_sum", {}),
        *(("tessera_stage_duration_seconds_count", {"stage": stage}) for stage in stages),
    ]

    def read():
        return [server.value(name, model="second", **labels) for name, labels in counts]

    server.settle()
    before = read()
    samples = server.value("tessera_batch_samples_sum", model="second")
    infer(server, infer_request(drawn.samples(5, model="second")))
    server.settle()
    assert server.value("tessera_batch_samples_sum", model="second") == samples + 5
    assert read() == [value + 1 for value in before]


def waiting_server(kind, package, *flags):
    return RunningServer(
        kind,
        *("--model", package, "--workers", 1, "--max-delay-us", A_MINUTE_US),
        *("--drain-propagation-ms", 0, *flags),
    )


def queued(server, count):
    return lambda: server.value("tessera_queue_requests") == count


def test_a_full_queue_refuses(kind, package, drawn):
    flags = ["--max-queue-requests", 2, "--max-batch-samples", 100]
    with waiting_server(kind, package, *flags) as server:
        call = stub_of(server).ModelInfer
        waiting = [call.future(infer_request(drawn.samples(3))) for _ in range(2)]
        server.wait_for(queued(server, 2))
        code, text = outcome(server, infer_request(drawn.samples(4)))
        assert code == "RESOURCE_EXHAUSTED"
        assert text.startswith("the queue is full: 2 requests with 6 samples wait")
        assert server.value("tessera_rejected_total", reason="queue_full") == 1
        server.signal()
        assert [call.result(TIMEOUT_S) for call in waiting]


@pytest.mark.parametrize("field", ["int64_param", "uint64_param"])
def test_a_timeout_that_passes_in_the_queue_is_not_computed(kind, package, drawn, field):
    with waiting_server(kind, package) as server:
        request = infer_request(drawn.samples(1))
        setattr(request.parameters["timeout"], field, 300_000)
        code, text = outcome(server, request)
        assert code == "DEADLINE_EXCEEDED"
        assert text == "the deadline passed while the request waited for a worker"
        server.wait_for(lambda: server.value("tessera_rejected_total", reason="deadline") == 1)
        server.wait_for(
            lambda: server.value("tessera_requests_total", code="DEADLINE_EXCEEDED") == 1
        )
        assert server.value("tessera_batch_samples_count") == 0
        server.wait_for(queued(server, 0))


def test_lower_numbers_of_priority_come_first_and_none_last(kind, package, drawn):
    with waiting_server(kind, package, "--max-batch-samples", 4) as server:
        call = stub_of(server).ModelInfer

        def start(size, priority):
            request = infer_request(drawn.samples(size))
            if priority is not None:
                request.parameters["priority"].int64_param = priority
            return call.future(request)

        none = [start(1, None), start(1, 0)]
        server.wait_for(queued(server, 2))
        later = start(1, 2**31 - 2)
        server.wait_for(queued(server, 3))
        # Full now: the batch is the first one alone, the others go on waiting.
        assert start(4, 1).result(TIMEOUT_S)
        server.wait_for(queued(server, 3))
        # Now there is one in front, with three samples: the batch is it and the one that follows.
        assert start(3, 5).result(TIMEOUT_S)
        assert later.result(TIMEOUT_S)
        server.wait_for(queued(server, 2))
        assert not any(call.done() for call in none)
        server.signal()
        assert all(call.result(TIMEOUT_S) for call in none)


def test_a_cancelled_call_is_dropped_before_assembly(kind, package, drawn):
    with waiting_server(kind, package, "--max-batch-samples", 8) as server:
        cancelled = stub_of(server).ModelInfer.future(infer_request(drawn.samples(1)))
        server.wait_for(queued(server, 1))
        cancelled.cancel()
        server.wait_for(
            lambda: (
                outcome(server, infer_request(drawn.samples(8)))[0] == "OK"
                and server.value("tessera_rejected_total", reason="cancelled") == 1
            )
        )
        server.wait_for(lambda: server.value("tessera_requests_total", code="CANCELLED") == 1)
        assert server.value("tessera_batch_samples_sum") % 8 == 0


def test_draining_answers_what_was_accepted_and_refuses_the_rest(kind, package, drawn):
    with waiting_server(kind, package) as server:
        call = stub_of(server).ModelInfer
        accepted = [call.future(infer_request(drawn.samples(2))) for _ in range(20)]
        server.wait_for(queued(server, 20))
        server.signal()
        assert all(call.result(TIMEOUT_S) for call in accepted)
        assert server.exit_status() == 0
        assert outcome(server, infer_request(drawn.samples(1)))[0] == "UNAVAILABLE"


def test_a_bug_is_internal_with_an_id_that_is_in_the_log(tasks_server, loaded_tasks):
    message = draw(loaded_tasks, 2, seed=9)
    message.float_features.values = f32([0.5, 0.5, POISON, 0.5])
    code, text = outcome(tasks_server, infer_request(message))
    assert code == "INTERNAL"
    error_id = text.split()[3]
    tasks_server.wait_for(
        lambda: any(entry.get("error_id") == error_id for entry in tasks_server.log)
    )
    good = draw(loaded_tasks, 3)
    found = outputs_of(infer(tasks_server, infer_request(good)))
    assert same_bits(found["score"], expected(loaded_tasks, good)["score"])


def test_reflection_lists_and_describes_the_service(server):
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    name = "inference.GRPCInferenceService"
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=name),
    ]
    names, described = list(stub.ServerReflectionInfo(iter(asked), timeout=TIMEOUT_S))
    assert name in {service.name for service in names.list_services_response.service}
    assert b"ModelInferRequest" in described.file_descriptor_response.file_descriptor_proto[0]


def test_the_response_repeats_an_id_of_any_length(server, drawn):
    message = drawn.samples(1)
    for name in ("", "é" * 1000):
        assert infer(server, infer_request(message, id=name)).id == name


def test_messages_without_inputs(server):
    assert outcome(server, ipb.ModelInferRequest()) == (
        "INVALID_ARGUMENT",
        "input 'float_features' is missing",
    )
