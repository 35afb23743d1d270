"""Speaks to a server with NVIDIA's own client, in a process of its own.

    python triton_client.py HOST:PORT < TENSORS.json

It stands apart from Tessera's own messages, as a user of that client does.  TENSORS.json
has [name, datatype, shape, hexadecimal bytes] for each input.  Prints what the client was told, as JSON.

    python triton_client.py --http HOST:PORT < TENSORS.json

does the same over HTTP.

    python triton_client.py --shared-memory HOST:PORT HTTP_HOST:PORT < TENSORS.json

has the tensors and the scores in shared memory, over both.

    python triton_client.py --repository HOST:PORT MODEL

loads and unloads MODEL instead, which serves version 1 and has version 2 in its folder.

    python triton_client.py --fields

prints the numbers and types of the protocol's fields instead, as the client knows them.
"""

import json
import os
import queue
import sys
import time

import numpy as np
from google.protobuf import descriptor_pb2

DTYPES = {"FP32": "<f4", "INT32": "<i4", "INT64": "<i8"}


def of_enum(enum, prefix):
    for value in enum.value:
        yield f"{prefix}.{enum.name}.{value.name}", value.number


def of_message(message, prefix):
    name = f"{prefix}.{message.name}"
    for field in message.field:
        yield f"{name}.{field.name}", [field.number, field.type, field.label, field.type_name]
    for enum in message.enum_type:
        yield from of_enum(enum, name)
    for nested in message.nested_type:
        yield from of_message(nested, name)


def of_file(file):
    described = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(described)
    for message in described.message_type:
        yield from of_message(message, described.package)
    for enum in described.enum_type:
        yield from of_enum(enum, described.package)
    for service in described.service:
        for method in service.method:
            yield f"{service.name}/{method.name}", [method.input_type, method.output_type]


def fields_of(files):
    """Every field's [number, type, label], enum value's number and method's types, by full name."""
    return {name: about for file in files for name, about in of_file(file)}


def speak(address, tensors):
    import tritonclient.grpc as triton

    client = triton.InferenceServerClient(address)
    inputs = []
    for name, datatype, shape, content in tensors:
        tensor = triton.InferInput(name, shape, datatype)
        numbers = np.frombuffer(bytes.fromhex(content), DTYPES[datatype])
        tensor.set_data_from_numpy(numbers.reshape(shape))
        inputs.append(tensor)
    told = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready("ranker"),
        "version_ready": client.is_model_ready("ranker", "3"),
        "server": client.get_server_metadata(as_json=True),
        "metadata": client.get_model_metadata("ranker", as_json=True),
        "config": client.get_model_config("ranker", as_json=True),
        "index": client.get_model_repository_index(as_json=True),
    }
    result = client.infer(
        "ranker",
        inputs,
        model_version="3",
        outputs=[triton.InferRequestedOutput("default")],
        request_id="an id",
        priority=7,
        timeout=60_000_000,
        parameters={"anything": 5},
    )
    told["response"] = result.get_response(as_json=True)
    told["response"].pop("raw_output_contents")
    told["scores"] = result.as_numpy("default").tobytes().hex()
    told["all_outputs"] = client.infer("ranker", inputs).as_numpy("default").tobytes().hex()
    answers = queue.SimpleQueue()
    client.async_infer("ranker", inputs, lambda result, error: answers.put((result, error)))
    result, error = answers.get()
    told["async"] = result.as_numpy("default").tobytes().hex() if error is None else str(error)
    told["statistics"] = client.get_inference_statistics("ranker", as_json=True)
    told["all_statistics"] = len(client.get_inference_statistics().model_stats)
    try:
        client.infer("nobody", inputs)
    except triton.InferenceServerException as error:
        told["refusal"] = [error.status(), error.message()]
    try:
        client.get_trace_settings()
    except triton.InferenceServerException as error:
        told["unknown_call"] = error.status()
    client.close()
    return told


def speak_http(address, tensors):
    import tritonclient.http as triton

    client = triton.InferenceServerClient(address, concurrency=2)

    def made(*, binary):
        for name, datatype, shape, content in tensors:
            tensor = triton.InferInput(name, shape, datatype)
            numbers = np.frombuffer(bytes.fromhex(content), DTYPES[datatype]).reshape(shape)
            # Its JSON has the word NaN, which is not JSON's.
            as_binary = binary or bool(np.isnan(numbers).any())
            yield tensor.set_data_from_numpy(numbers, binary_data=as_binary)

    told = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready("ranker"),
        "version_ready": client.is_model_ready("ranker", "3"),
        "nobody_ready": client.is_model_ready("nobody"),
        "server": client.get_server_metadata(),
        "metadata": client.get_model_metadata("ranker", "3"),
        "config": client.get_model_config("ranker"),
        "index": client.get_model_repository_index(),
        "scores": [],
    }
    options = {"request_id": "an id", "priority": 7, "timeout": 60_000_000}
    for binary in (True, False):
        inputs = list(made(binary=binary))
        for outputs in (None, [triton.InferRequestedOutput("default", binary_data=binary)]):
            for packed in (None, "gzip", "deflate"):
                result = client.infer(
                    "ranker",
                    inputs,
                    model_version="3",
                    outputs=outputs,
                    request_compression_algorithm=packed,
                    response_compression_algorithm=packed,
                    parameters={"anything": 5},
                    **options,
                )
                told["scores"].append(result.as_numpy("default").astype("<f4").tobytes().hex())
    told["response"] = result.get_response()
    told["response"]["outputs"][0].pop("data")
    calls = [client.async_infer("ranker", inputs) for _ in range(4)]
    told["scores"] += [call.get_result().as_numpy("default").tobytes().hex() for call in calls]
    told["statistics"] = client.get_inference_statistics("ranker")
    told["all_statistics"] = len(client.get_inference_statistics()["model_stats"])
    try:
        client.infer("nobody", inputs)
    except triton.InferenceServerException as error:
        told["refusal"] = [error.status(), error.message()]
    try:
        client.get_trace_settings()
    except triton.InferenceServerException as error:
        told["unknown_call"] = error.status()
    client.close()
    return told


def share(address, http_address, tensors):
    """Triton's shared memory, as its users have it: one region of inputs and one of outputs."""
    import tritonclient.grpc
    import tritonclient.http
    import tritonclient.utils.shared_memory as shm

    arrays = [
        np.frombuffer(bytes.fromhex(content), DTYPES[datatype]).reshape(shape)
        for _, datatype, shape, content in tensors
    ]
    size, B = sum(array.nbytes for array in arrays), arrays[0].shape[0]
    key = f"/tessera-test-{os.getpid()}"
    given = shm.create_shared_memory_region("given", f"{key}-given", size)
    made = shm.create_shared_memory_region("made", f"{key}-made", 4 * B)
    told = {}
    try:
        shm.set_shared_memory_region(given, arrays)
        for triton, at in ((tritonclient.grpc, address), (tritonclient.http, http_address)):
            client = triton.InferenceServerClient(at)
            client.register_system_shared_memory("given", f"{key}-given", size)
            client.register_system_shared_memory("made", f"{key}-made", 4 * B)
            inputs, offset = [], 0
            for (name, datatype, shape, _), array in zip(tensors, arrays, strict=True):
                tensor = triton.InferInput(name, shape, datatype)
                tensor.set_shared_memory("given", array.nbytes, offset=offset)
                inputs.append(tensor)
                offset += array.nbytes
            output = triton.InferRequestedOutput("default")
            output.set_shared_memory("made", 4 * B)
            result = client.infer("ranker", inputs, outputs=[output])
            scores = shm.get_contents_as_numpy(made, np.float32, [B]).tobytes().hex()
            shm.set_shared_memory_region(made, [np.zeros(B, np.float32)])
            status = client.get_system_shared_memory_status()
            regions = status if isinstance(status, list) else status.regions
            told[triton.__name__] = [result.get_output("default") is not None, scores, len(regions)]
            client.unregister_system_shared_memory("given")
            client.unregister_system_shared_memory()
            client.close()
    finally:
        for region in (given, made):
            shm.destroy_shared_memory_region(region)
    return told


def change(address, model):
    """Triton's calls for its repository, as its users make them."""
    import tritonclient.grpc as triton

    client = triton.InferenceServerClient(address)

    def states():
        rows = client.get_model_repository_index(as_json=True)["models"]
        return {row["version"]: row["state"] for row in rows if row["name"] == model}

    told = {"before": states()}
    client.load_model(model)
    told["loaded"] = client.is_model_ready(model) and client.is_model_ready(model, "2")
    deadline = time.monotonic() + 60
    while states()["1"] != "UNAVAILABLE" and time.monotonic() < deadline:
        time.sleep(0.02)
    told["after"] = states()
    client.unload_model(model)
    told["unloaded"] = not client.is_model_ready(model)
    client.load_model(model)
    told["again"] = client.is_model_ready(model)
    try:
        client.load_model("nobody")
    except triton.InferenceServerException as error:
        told["refused"] = error.status()
    client.close()
    return told


def main():
    if sys.argv[1] == "--repository":
        print(json.dumps(change(*sys.argv[2:])))
    elif sys.argv[1] == "--shared-memory":
        print(json.dumps(share(*sys.argv[2:], json.load(sys.stdin))))
    elif sys.argv[1] == "--http":
        print(json.dumps(speak_http(sys.argv[2], json.load(sys.stdin))))
    elif sys.argv[1] == "--fields":
        from tritonclient.grpc import model_config_pb2, service_pb2

        print(json.dumps(fields_of([service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR])))
    else:
        print(json.dumps(speak(sys.argv[1], json.load(sys.stdin))))


if __name__ == "__main__":
    main()
