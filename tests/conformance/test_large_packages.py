"""A package whose tables are hashed in chunks and read straight to where they stay."""

import hashlib
import re
from pathlib import Path

import pytest

from tessera.serving.client import Draw, RequestDrawer, encode_request
from tessera.serving.package.loading import load_package, open_checked
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.training.models.config import TableConfig
from tests.conformance.conformance_harness import RunningServer, cpp_program, same_bits
from tests.conformance.test_modules import expected
from tests.conformance.test_surface import refusal
from tests.package_factory import make_package

CHUNK_BYTES = 8 << 20
MIB = 1 << 20
FEATURES = {"user": TableConfig(rows=120_000), "item": TableConfig(rows=90_000)}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    path, _ = make_package(folder, name="large", features=FEATURES, dim=64)
    return path


@pytest.fixture(scope="module")
def tables(large):
    """The record that holds them."""
    entry = max(open_checked(large).records.entries, key=lambda entry: entry.bytes)
    assert entry.bytes > CHUNK_BYTES
    return entry


def test_its_answers_and_its_hash(kind, large):
    if kind == "given":
        pytest.skip("starts servers of its own")
    loaded = load_package(large)
    drawer = RequestDrawer(loaded.manifest.schema, Draw(ids="uniform"), seed=3)
    message = pb.PredictionRequest.FromString(encode_request(drawer.samples(50)))
    with RunningServer(kind, "--model", large, "--drain-propagation-ms", 0) as server:
        found = server.predict(message).predictions["default"].data
        assert same_bits(found, expected(loaded, message)["default"])

        def told():
            return [line for line in server.log if line["event"] == "file_hash"]

        server.wait_for(told)
        (line,) = told()
    sha256 = hashlib.sha256(large.read_bytes()).hexdigest()
    assert (line["model"], line["version"], line["sha256"]) == ("large", "1", sha256)


def test_a_changed_byte_in_the_second_chunk(kind, large, tables, tmp_path):
    content = bytearray(large.read_bytes())
    content[tables.content_offset + CHUNK_BYTES + 1] ^= 1
    path = tmp_path / "damaged.pt"
    path.write_bytes(content)
    chunk = content[tables.content_offset + CHUNK_BYTES : tables.end_offset][:CHUNK_BYTES]
    found = hashlib.sha256(chunk).hexdigest()
    end = min(2 * CHUNK_BYTES, tables.bytes)
    start = (
        f"record '{tables.name}' was changed: SHA-256 {found} of bytes {CHUNK_BYTES} to {end} of "
        f"{tables.bytes}, the manifest says "
    )
    assert refusal(kind, path).startswith(start)


TABLE_MIB = 200
MARGIN_MIB = 50
"""What loading may hold beside the tables: one thread's chunk is 8 MiB, a second copy is 200 MiB."""


def peak_bytes(kind, package):
    """The most that a server has had resident by the time at which it has told its file's hash."""
    with RunningServer(kind, "--model", package, "--drain-propagation-ms", 0) as server:
        server.wait_for(lambda: "file_hash" in [line["event"] for line in server.log])
        status = Path(f"/proc/{server.process.pid}/status").read_text()
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(peak) << 10


@pytest.fixture(scope="module")
def small_and_heavy(tmp_path_factory):
    """Packages of one model, whose tables are 1 MiB and `TABLE_MIB`."""
    folder, dim = tmp_path_factory.mktemp("heavy"), 64

    def path(table_mib):
        features = {"user": TableConfig(rows=table_mib * MIB // (4 * dim))}
        name = f"of{table_mib}mib"
        return make_package(folder, name=name, features=features, dim=dim, dtype="fp32")[0]

    return path(1), path(TABLE_MIB)


def test_loading_holds_its_tables_once(kind, small_and_heavy):
    if kind == "given":
        pytest.skip("starts servers of its own")
    if kind == "cpp" and b"__tsan_init" in cpp_program().read_bytes():
        pytest.skip("ThreadSanitizer keeps several bytes for each that is read")
    small, heavy = (peak_bytes(kind, path) for path in small_and_heavy)
    assert heavy - small < (TABLE_MIB + MARGIN_MIB) * MIB
