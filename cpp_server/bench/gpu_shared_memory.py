"""The C++ server on a GPU with requests in shared memory: rising open-loop rates beside the same requests in messages.

    python cpp_server/bench/gpu_shared_memory.py --package MODEL.pt [--ids-per-bag 3,2,1,...] [--shares 0.7,0.8,0.9]

``--requests`` random requests of ``--samples`` samples are written to one POSIX shared memory object, which is registered
with the server; ``tessera-load`` then sends KServe requests whose inputs lie there, and in turn with them requests of the
same kind as messages, through the port and through a Unix socket.  Rates are shares of the best rate in-process (`in_process`, as in ``gpu_bench.py``), where each size
of a batch has the number of ``--sessions`` that is best for it, and each step also says what share it is of the
in-process rate at the server's own average batch, between the two sizes around it.
numpy, protobuf and this repository have to be importable, grpc need not be.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gpu_bench import in_process, load, parser, server

from tessera.serving.client import read_schema
from tessera.serving.package.schema import InputSchema
from tessera.serving.protocol import inference_pb2 as kserve

_HASHED_IDS = 1 << 31
METHOD = "/inference.GRPCInferenceService/ModelInfer"
REGION = "requests"


def drawn_tensors(
    schema: InputSchema, samples: int, ids_per_bag: Sequence[int], generator: np.random.Generator
) -> dict[str, tuple[str, npt.NDArray[np.generic]]]:
    """The inputs of one request, by name, with their datatypes: ids are int32 and uniform."""
    features = schema.group("id_list")
    bags = list(ids_per_bag) * (len(features) if len(ids_per_bag) == 1 else 1)
    most = [f.rows if f.hashing == "none" else _HASHED_IDS for f in features]
    ids = [
        generator.integers(0, min(rows, _HASHED_IDS), samples * count, dtype=np.int32)
        for rows, count in zip(most, bags, strict=True)
    ]
    dense = generator.standard_normal((samples, len(schema.dense_features)), dtype=np.float32)
    return {
        "float_features": ("FP32", dense),
        "id_list_features_lengths": ("INT32", np.repeat(np.asarray(bags, np.int32), samples)),
        "id_list_features_values": ("INT32", np.concatenate(ids)),
    }


@contextmanager
def registered_requests(
    args: argparse.Namespace, ids_per_bag: Sequence[int], http_port: int, folder: Path
) -> Iterator[Path]:
    """A file of requests for ``tessera-load`` whose inputs lie in an object that the server knows."""
    generator = np.random.default_rng(0)
    schema = read_schema(args.package)
    contents, messages, offset = [], [], 0
    for _ in range(args.requests):
        message = kserve.ModelInferRequest()
        tensors = drawn_tensors(schema, args.samples, ids_per_bag, generator)
        for name, (datatype, array) in tensors.items():
            given = message.inputs.add(name=name, datatype=datatype, shape=array.shape)
            given.parameters["shared_memory_region"].string_param = REGION
            given.parameters["shared_memory_byte_size"].int64_param = array.nbytes
            given.parameters["shared_memory_offset"].int64_param = offset
            contents.append(array.tobytes())
            offset += array.nbytes
        messages.append(message.SerializeToString())
    memory = SharedMemory(create=True, size=offset)
    try:
        assert memory.buf is not None  # until it is closed
        memory.buf[:offset] = b"".join(contents)
        body = json.dumps({"key": f"/{memory.name}", "offset": 0, "byte_size": offset}).encode()
        url = f"http://127.0.0.1:{http_port}/v2/systemsharedmemory/region/{REGION}/register"
        with urllib.request.urlopen(urllib.request.Request(url, body, method="POST")):
            pass
        print(f"{args.requests} requests, {offset / 2**20:.0f} MiB in shared memory")
        path = folder / "requests"
        path.write_bytes(b"".join(struct.pack("<I", len(one)) + one for one in messages))
        yield path
    finally:
        memory.close()
        memory.unlink()


def batches(http_port: int) -> tuple[float, float]:
    """Batches that the server has computed, and their samples."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    name = "tessera_batch_samples"
    count, total = (
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}_{what}"))
        for what in ("count", "sum")
    )
    return count, total


def rate_at(rows: dict[int, list[float]], batch: float) -> float:
    """Samples a second in-process at ``batch`` samples, on the line between the sizes around it."""
    sizes = sorted(rows)
    return float(np.interp(batch, sizes, [rows[size][2] for size in sizes]))


def best_rows(args: argparse.Namespace, counts: Sequence[int]) -> dict[int, list[float]]:
    """``in_process``'s rows, each of the number of sessions that has the highest rate at its batch size."""
    tried = [in_process(args, count) for count in counts]
    return {size: max((rows[size] for rows in tried), key=lambda row: row[2]) for size in tried[0]}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--sessions",
        default="2,3,4,5,6",
        help="numbers of sessions that are tried in-process (default: %(default)s)",
    )
    flags.add_argument("--requests", type=int, default=64, help="different ones (default: 64)")
    flags.add_argument("--shares", default="0.5,0.6,0.7,0.75,0.8,0.85,0.9", help="of the best rate")
    args = flags.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    ids_per_bag = [int(count) for count in args.ids_per_bag.split(",")]
    rows = best_rows(args, [int(count) for count in args.sessions.split(",")])
    best = max(row[2] for row in rows.values())
    for size, (median, _, rate) in rows.items():
        print(f"in-process, batch {size}: {median:.0f} us, {rate:.0f} samples/s")
    steps = []
    with tempfile.TemporaryDirectory() as name:
        socket = f"{name}/grpc"
        flags_of_server = ("--shared-memory", "--grpc-socket", socket)
        with (
            server(args, *flags_of_server) as (port, http_port),
            registered_requests(args, ids_per_bag, http_port, Path(name)) as requests,
        ):
            ways: dict[str, tuple[int | str, tuple[str, ...]]] = {
                "shared memory": (port, ("--requests", str(requests), "--method", METHOD)),
                "messages": (port, ()),
                "Unix socket": (f"unix:{socket}", ()),
            }
            print(
                "inputs in  offered/best  samples/s  /best  p50 ms  p99 ms  batch  /in-process at it"
                "  not answered"
            )
            for share in map(float, args.shares.split(",")):
                for way, (where, what) in ways.items():
                    before = batches(http_port)
                    row = load(
                        *(args, where, "--rate", f"{share * best / args.samples:.1f}"),
                        *("--connections", str(args.connections)),
                        *(() if what else ("--samples", str(args.samples))),
                        what=what,
                    )
                    count, total = (b - a for a, b in zip(before, batches(http_port), strict=True))
                    got, batch = row["requests_per_second"] * args.samples, total / max(count, 1)
                    beside = got / rate_at(rows, batch)
                    steps.append(
                        {"way": way, "share": share, **row, "batch": batch, "of_in_process": beside}
                    )
                    print(
                        f"{way:13} {share:8.2f} {got:10.0f} {got / best:6.2f} {row['p50_ms']:7.2f}"
                        f" {row['p99_ms']:7.2f} {batch:6.0f} {beside:6.2f} {row['failed']:6.0f}",
                        flush=True,
                    )
    if args.json:
        figures = {"in_process": rows, "best_in_process": best, "steps": steps}
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
