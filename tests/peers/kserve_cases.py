"""KServe's own Python client against a server: ``kserve_cases.py ADDRESS HTTP_ADDRESS CASE.json``.

CASE.json has the model's name, its inputs (name, datatype, shape, numbers) and the bytes of each output in hexadecimal
digits.  It needs the package kserve alone, and so runs in environments without this project.  The first case that
fails ends it.
"""

import asyncio
import importlib.metadata
import json
import pathlib
import sys

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig

DTYPES = {"FP32": "<f4", "INT32": "<i4", "INT64": "<i8"}
OTHER_MODEL = "no-such-model"


def expect(holds, *seen):
    if not holds:
        raise SystemExit(f"not as expected: {seen}")


def request_of(case, *, binary, name=None):
    inputs = []
    for given in case["inputs"]:
        numbers = np.array(given["numbers"], DTYPES[given["datatype"]]).reshape(given["shape"])
        inputs.append(InferInput(given["name"], given["shape"], given["datatype"]))
        inputs[-1].set_data_from_numpy(numbers, binary_data=binary)
    return InferRequest(model_name=name or case["model"], infer_inputs=inputs)


def check_answer(answer, case):
    found = {
        output.name: np.asarray(output.as_numpy(), "<f4").tobytes().hex()
        for output in answer.outputs
    }
    expect(found == case["outputs"], found)


async def refused(call):
    try:
        await call
    except grpc.RpcError as error:
        return error.code().name, error.details()
    except Exception as error:  # noqa: BLE001 - the client's own kinds of errors
        return "HTTP", str(error)
    return "OK", ""


async def over_rest(http_address, case):
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    base = f"http://{http_address}"
    expect(await client.is_server_live(base))
    expect(await client.is_server_ready(base))
    expect(await client.is_model_ready(base, case["model"]))
    expect(not await client.is_model_ready(base, OTHER_MODEL))
    for binary in (False, True):
        request = request_of(case, binary=binary)
        check_answer(await client.infer(base, request, model_name=case["model"]), case)
    request = request_of(case, binary=False)
    told = await refused(client.infer(base, request, model_name=OTHER_MODEL))
    expect(told[0] == "HTTP" and OTHER_MODEL in told[1], told)
    await client.close()
    return 7


async def over_grpc(address, case):
    client = InferenceGRPCClient(address)
    expect(await client.is_server_live())
    expect(await client.is_server_ready())
    expect(await client.is_model_ready(case["model"]))
    for binary in (False, True):
        check_answer(await client.infer(request_of(case, binary=binary)), case)
    told = await refused(client.infer(request_of(case, binary=True, name=OTHER_MODEL)))
    expect(told[0] == "NOT_FOUND" and OTHER_MODEL in told[1], told)
    await client.close()
    return 6


async def main(address, http_address, case):
    done = await over_rest(http_address, case) + await over_grpc(address, case)
    sys.stdout.write(f"kserve {importlib.metadata.version('kserve')}: {done} cases\n")


asyncio.run(main(*sys.argv[1:3], json.loads(pathlib.Path(sys.argv[3]).read_text(encoding="utf-8"))))
