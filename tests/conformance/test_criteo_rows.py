"""The README's tour with Criteo's own rows: hex texts and numbers in, the package's bits out, every way there is."""

import csv
import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tessera.cli import main
from tessera.serving.client import PredictorClient, encode_request
from tessera.serving.client.assemble import assemble
from tessera.serving.client.row_files import CRITEO_COLUMNS, read_row_batches
from tessera.serving.client.rows import rows_to_parts
from tessera.serving.package.loading import load_package
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.training.data.criteo_format import COLUMN_NAMES
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data
from tessera.training.trained import load_trained
from tests.conformance.conformance_harness import RunningServer, same_bits, scores_of
from tests.conformance.test_answers import run_in_process
from tests.kserve_messages import infer, outputs_of
from tests.string_requests import infer_with_strings
from tests.trainer.tiny_runs import TINY

ROWS = 60
SHARED = os.environ.get("TESSERA_SHARED_DATA")
CASES = ["datagen", *(["real"] if SHARED else [])]


@pytest.fixture(scope="module", params=CASES)
def tour(request, tmp_path_factory):
    """A run, its packages, and a file of rows as Criteo writes them."""
    folder = tmp_path_factory.mktemp("tour")
    data = folder / "clicks.tsv"
    if request.param == "datagen":
        assert main(["datagen", "--rows", "600", "--out", str(data), "--seed", "7"]) == 0
    else:
        lines = Path(SHARED, "criteo_sample_14584.tsv").read_bytes().splitlines(keepends=True)
        data.write_bytes(b"".join(lines[:2000]))
    (folder / "tiny.yaml").write_text(TINY.replace("PATH", str(data)))
    run = folder / "run"
    config = ["--config", str(folder / "tiny.yaml"), "train.epochs=1"]
    assert main(["train", *config, "--out", str(run), "--quiet"]) == 0
    for dtype in ("fp32", "int8"):
        flags = ["--dtype", dtype, "--no-evaluate", "--out", str(folder / f"{dtype}.pt")]
        assert main(["package-model", str(run), *flags]) == 0
    rows = folder / "rows.tsv"
    rows.write_bytes(b"".join(data.read_bytes().splitlines(keepends=True)[:ROWS]))
    return folder


def cells(folder):
    """The rows as dictionaries of what stands in the file, empty cells left out."""
    with (folder / "rows.tsv").open(newline="") as file:
        rows = [
            dict(zip(COLUMN_NAMES, row, strict=True)) for row in csv.reader(file, delimiter="\t")
        ]
    return [{name: cell for name, cell in row.items() if cell} for row in rows]


def raw_rows(folder):
    """The rows as a program has them: numbers and hex texts."""
    return [
        {n: cell if n.startswith("C") else int(cell) for n, cell in row.items()}
        for row in cells(folder)
    ]


def request_of(folder, loaded):
    arrays = assemble(
        *rows_to_parts(raw_rows(folder), loaded.manifest.schema), schema=loaded.manifest.schema
    )
    return pb.PredictionRequest.FromString(encode_request(arrays))


def trained_rows(folder):
    """The same rows as the training reader gives them."""
    config = load_trained(folder / "run").config.data
    data = dataclasses.replace(
        config, path=str(folder / "rows.tsv"), valid_fraction=0.0, test_fraction=0.0
    )
    (batch,) = BatchLoader(
        open_data(data, progress=False).train, batch_size=ROWS, shuffle=False, seed=0
    ).epoch(0)
    return batch


def test_the_columns_are_those_that_training_reads():
    assert CRITEO_COLUMNS == COLUMN_NAMES


def test_a_file_reaches_the_model_as_in_training(tour):
    schema = load_package(tour / "int8.pt").manifest.schema
    batch = trained_rows(tour)
    (given,) = read_row_batches(tour / "rows.tsv", batch_size=ROWS, schema=schema)
    for rows in (given.rows, raw_rows(tour), cells_as_text(tour)):
        dense, sparse = rows_to_parts(rows, schema)
        assert dense.tobytes() == batch.dense_features.numpy().tobytes()
        for name, jagged in batch.sparse_features.to_dict().items():
            assert sparse[name].lengths.tolist() == jagged.lengths().tolist(), name
            assert sparse[name].values.tolist() == jagged.values().tolist(), name


def cells_as_text(folder):
    return [
        {
            n: row.get(n, "") if n.startswith("C") else row.get(n) and int(row[n])
            for n in COLUMN_NAMES
        }
        for row in cells(folder)
    ]


def files_of(folder):
    """The rows in every form that ``tessera predict`` takes."""
    rows, texts = raw_rows(folder), cells(folder)
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMN_NAMES, restval="")
        writer.writeheader()
        writer.writerows(texts)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kinds = [(n, pa.string() if n.startswith("C") else pa.int64()) for n in COLUMN_NAMES]
    table = {n: pa.array([row.get(n) for row in rows], kind) for n, kind in kinds}
    pq.write_table(pa.table(table), folder / "rows.parquet")
    without = [row.split("\t", 1)[1] for row in (folder / "rows.tsv").read_text().splitlines()]
    (folder / "unlabelled.tsv").write_text("\n".join(without) + "\n")
    names = ("rows.tsv", "unlabelled.tsv", "rows.csv", "rows.jsonl", "rows.parquet")
    return [folder / name for name in names]


def test_every_way_gives_the_packages_bits(tour, kind, capsys):
    path = tour / "int8.pt"
    loaded = load_package(path)
    request = request_of(tour, loaded)
    expected = run_in_process(loaded, request)
    assert np.std(expected) > 1e-4
    with RunningServer(kind, "--model", path, "--drain-propagation-ms", 0) as server:
        flags = ["--address", server.address, "--model-file", str(path), "--batch", "7"]
        for file in files_of(tour):
            capsys.readouterr()
            assert main(["predict", *flags, "--input", str(file)]) == 0
            answers = map(json.loads, capsys.readouterr().out.splitlines())
            assert same_bits([one["scores"]["default"] for one in answers], expected), file.name
        with PredictorClient(server.address, schema=loaded.manifest.schema) as client:
            rows = raw_rows(tour)
            assert same_bits(client.predict_rows(rows).outputs["default"], expected)
        strings = as_hex(request)
        assert same_bits(scores_of(server.predict(strings)), expected)
        for typed in (False, True):
            answer = infer(server, infer_with_strings(request, strings, typed=typed))
            assert same_bits(outputs_of(answer)["default"], expected)


def as_hex(request):
    """The request with hex texts, as Criteo writes them, in the place of ids."""
    strings = pb.PredictionRequest.FromString(request.SerializeToString())
    group = strings.id_list_features
    wide = np.frombuffer(group.values_int64, "<i8") if group.values_int64 else None
    ids = np.frombuffer(group.values, "<i4") if wide is None else wide
    group.values = group.values_int64 = b""
    group.values_bytes.extend(f"{number:08x}".encode() for number in ids.tolist())
    return strings


def test_texts_that_are_not_hex_are_refused_alike(tour, kind):
    path = tour / "int8.pt"
    request = as_hex(request_of(tour, load_package(path)))
    with RunningServer(kind, "--model", path, "--drain-propagation-ms", 0) as server:
        for text in (b"", b"123456789", b"0x12", b"-1", b"+1", b" 1", b"g", b"1_0"):
            request.id_list_features.values_bytes[0] = text
            says = f"a string of {len(text)} bytes is not 1 to 8 hexadecimal digits"
            with pytest.raises(Exception, match=says) as caught:
                server.predict(request)
            assert "feature 'C1', row 0" in caught.value.details()


def test_the_trained_model_gives_the_same_scores(tour):
    """float32: to rounding.  int8: within what the rows' scales can change at the first layer."""
    batch = trained_rows(tour)
    model = load_trained(tour / "run").model
    with torch.inference_mode():
        eager = torch.sigmoid(model(batch.dense_features, batch.sparse_features)).numpy()
    found = {}
    for dtype in ("fp32", "int8"):
        loaded = load_package(tour / f"{dtype}.pt")
        found[dtype] = run_in_process(loaded, request_of(tour, loaded))
    assert np.abs(found["fp32"] - eager).max() < 1e-6
    step = max(table.max_abs_error for table in loaded.manifest.tables)
    assert step > 0
    # Tables whose every element is off by the largest step, in random directions: no int8 rounding
    # may do more than the worst of these draws, and half as much again.
    moved = [np.abs(moved_scores(model, batch, step, seed) - eager).max() for seed in range(8)]
    assert 0 < np.abs(found["int8"] - eager).max() < 1.5 * max(moved)


def moved_scores(model, batch, step, seed):
    chance = torch.Generator().manual_seed(seed)
    tables = [
        module.weight for module in model.modules() if isinstance(module, torch.nn.EmbeddingBag)
    ]
    assert tables
    kept = [table.detach().clone() for table in tables]
    with torch.inference_mode():
        for table in tables:
            signs = torch.randint(0, 2, table.shape, generator=chance) * 2 - 1
            table.data = table.data + step * signs
        scores = torch.sigmoid(model(batch.dense_features, batch.sparse_features)).numpy()
        for table, own in zip(tables, kept, strict=True):
            table.data = own
    return scores
