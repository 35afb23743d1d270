"""Tables that URLs name, from a server on this machine that speaks S3, and through fsspec."""

from __future__ import annotations

import csv
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import moto.settings
import pyarrow.fs as pa_fs
import pytest
from moto.server import ThreadedMotoServer

from tessera.cli import main
from tessera.errors import UserError
from tessera.training.config import load_config
from tessera.training.data import BatchLoader
from tessera.training.data.table import parquet as parquet_module
from tessera.training.data.table.files import find_files
from tessera.training.data.table.parquet import TableFile
from tessera.training.trainer.run import train
from tests.data import clicks
from tests.data.test_table import (
    WHOLE,
    batch_rows,
    config,
    expected_rows,
    opened,
    write,
)

BUCKET = "bucket"
NAMES = ("a.parquet", "a.csv", "a.csv.gz", "a.jsonl", "a.feather", "a.arrow")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server that speaks S3."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An empty bucket's file system; the environment leads to its server."""
    for name, value in (
        ("AWS_ENDPOINT_URL", server),
        ("AWS_ACCESS_KEY_ID", "id"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("XDG_CACHE_HOME", str(tmp_path / "home")),
    ):
        monkeypatch.setenv(name, value)
    asked = urllib.request.Request(f"{server}/moto-api/reset", method="POST")
    urllib.request.urlopen(asked).close()
    system, _ = pa_fs.FileSystem.from_uri(f"s3://{BUCKET}?allow_bucket_creation=true")
    system.create_dir(BUCKET)
    return system


def put(system: Any, file: Path, name: str) -> str:
    """Copy a local file into the bucket; its URL."""
    with system.open_output_stream(f"{BUCKET}/{name}", compression=None) as out:
        out.write(file.read_bytes())
    return f"s3://{BUCKET}/{name}"


@pytest.mark.parametrize("name", NAMES)
def test_every_format_is_read_from_a_url(bucket: Any, tmp_path: Path, name: str) -> None:
    content = clicks.rows(200)
    url = put(bucket, write(tmp_path / name, content), f"some folder/{name}")
    splits = opened(url, **WHOLE)
    assert batch_rows(splits.train) == expected_rows(content)
    shuffled = batch_rows(splits.train, shuffle=True)
    assert shuffled == batch_rows(opened(tmp_path / name, **WHOLE).train, shuffle=True)
    assert (tmp_path / "home" / "tessera" / "data").is_dir()


def test_folders_patterns_lists_and_partitions_are_those_of_local_files(
    bucket: Any, tmp_path: Path
) -> None:
    for day in (1, 2, 10):
        for half in "ab":
            file = tmp_path / "t" / f"day={day}" / f"{half}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            put(bucket, write(file, clicks.rows(20, seed=day)), f"t/day={day}/{half}.parquet")
    hidden = tmp_path / "t" / "_hidden.parquet"
    put(bucket, write(hidden, clicks.rows(5)), "t/_hidden.parquet")

    for tail in ("", "/day=1*/*.parquet", "/**/a.parquet", "/day=2/a.parquet", "/day=[12]/b.*"):
        found = find_files((f"s3://{BUCKET}/t{tail}",), "path")
        local = find_files((f"{tmp_path}/t{tail}",), "path")
        assert [(f.path.name, f.format, f.partitions) for f in found] == [
            (f.path.name, f.format, f.partitions) for f in local
        ]
        assert str(found[0].path) == str(local[0].path).replace(str(tmp_path), f"s3://{BUCKET}")
    listed = [f"s3://{BUCKET}/t/day=10", f"s3://{BUCKET}/t/day=2/b.parquet?region=us-east-1"]
    rows = batch_rows(opened(listed, **WHOLE).train)
    assert len(rows) == 60
    assert find_files((f"file://{tmp_path}/t/day=2",), "path") == find_files(
        (f"{tmp_path}/t/day=2",), "path"
    )


def losses(out: Path) -> list[tuple[str, ...]]:
    with (out / "metrics.csv").open() as file:
        return [(r["step"], r["split"], r["loss"], r["auc"]) for r in csv.DictReader(file)]


def test_a_run_from_a_url_is_that_from_the_local_copy(
    bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t").mkdir()
    for part in range(2):
        file = tmp_path / "t" / f"{part}.parquet"
        put(bucket, write(file, clicks.rows(300, seed=part)), f"t/{part}.parquet")
    yaml = tmp_path / "data.yaml"
    url = f"s3://{BUCKET}/t/*.parquet"
    assert main(["schema", url, "--out", str(yaml)]) == 0
    assert "600 of about 600 rows" in capsys.readouterr().out
    small = [
        *("train.epochs=1", "train.batch_size=60", "train.threads=1", "model.rows=100"),
        *("run.report=false", "run.tensorboard=false"),
    ]
    there = load_config(yaml, small)
    assert there.data.paths() == (url,)
    here = load_config(yaml, [*small, f"data.path={tmp_path}/t/*.parquet"])
    for name, one in (("there", there), ("here", here)):
        assert train(one, tmp_path / name, progress=False).status == "finished"
    assert losses(tmp_path / "there") == losses(tmp_path / "here")
    assert f"path: {url}" in (tmp_path / "there" / "config.yaml").read_text()


def test_a_changed_text_file_is_converted_anew(bucket: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    url = put(bucket, write(path, clicks.rows(50)), "a.csv")
    assert len(opened(url, **WHOLE).train) == 50
    cache = tmp_path / "home" / "tessera" / "data"
    before = sorted(cache.iterdir())
    assert len(opened(url, **WHOLE).train) == 50
    assert sorted(cache.iterdir()) == before  # nothing was made anew
    put(bucket, write(path, clicks.rows(70)), "a.csv")
    assert len(opened(url, **WHOLE).train) == 70


def refusal(url: str, **fields: Any) -> str:
    with pytest.raises(UserError) as caught:
        batch_rows(opened(url, **WHOLE, **fields).train)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def test_what_cannot_be_read_is_one_line(
    bucket: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = put(bucket, write(tmp_path / "a.parquet", clicks.rows(200)), "t/a.parquet")
    assert "no such bucket" in refusal("s3://nothing/t/*.parquet")
    assert "no such" in refusal("s3://nothing/t/a.parquet")
    assert "no such file" in refusal(f"s3://{BUCKET}/u/a.parquet")
    assert "no file has such a name" in refusal(f"s3://{BUCKET}/t/*.csv")
    assert "cannot stand for the bucket" in refusal("s3://*/a.parquet")
    assert "cannot be read" in refusal("nosuch://a/b.parquet")
    damaged = tmp_path / "b.parquet"
    damaged.write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    assert "cannot be read" in refusal(put(bucket, damaged, "b.parquet"))
    message = refusal("s3://id:geheim@bucket/t/a.parquet")
    assert "password" in message
    assert "geheim" not in message
    with pytest.raises(UserError, match="prepared files are local"):
        config(tmp_path / "a.parquet", cache_dir="s3://bucket/cache")
    assert main(["schema", "s3://nothing/a.csv", "--out", str(tmp_path / "x.yaml")]) == 2

    # Gone, or another, after it was found.
    splits = opened(url, **WHOLE)
    put(bucket, write(tmp_path / "a.parquet", clicks.rows(300)), "t/a.parquet")
    with pytest.raises(UserError, match="when it was found"):
        batch_rows(splits.train)
    bucket.delete_file(f"{BUCKET}/t/a.parquet")
    with pytest.raises(UserError, match=r"t/a\.parquet: is not there"):
        batch_rows(splits.train)

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    message = refusal(url)
    assert "its server cannot be reached" in message
    assert "AWS_ENDPOINT_URL" in message


def test_without_permission(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = put(bucket, write(tmp_path / "a.parquet", clicks.rows(20)), "a.parquet")
    # From now on the server asks who is there, and "id" is nobody that it knows.
    monkeypatch.setattr(moto.settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    assert "gives no permission" in refusal(url)
    assert "gives no permission" in refusal(f"s3://{BUCKET}/*.parquet")


def test_fsspec_reads_what_pyarrow_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    content = clicks.rows(100)
    system = fsspec.filesystem("memory")
    for name in ("a.parquet", "b.csv"):
        system.pipe(f"/t/{name}", write(tmp_path / name, content).read_bytes())
    try:
        for tail in ("a.parquet", "*.parquet", "b.csv"):
            rows = batch_rows(opened(f"memory://t/{tail}", **WHOLE).train)
            assert rows == expected_rows(content)
        assert "no such file" in refusal("memory://t/c.parquet")
    finally:
        system.rm("/t", recursive=True)


def test_row_groups_are_read_in_place(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beginning late in an epoch asks the server for the last row groups alone."""
    path = write(tmp_path / "a.parquet", clicks.rows(2000))
    url = put(bucket, path, "a.parquet")
    monkeypatch.setattr(parquet_module, "UNIT_ROWS", 100)
    view = opened(url, **WHOLE).train
    groups: list[int] = []
    read = TableFile.read

    def counting(self: TableFile, numbers: Any, names: Any) -> Any:
        groups.extend(numbers)
        return read(self, numbers, names)

    monkeypatch.setattr(TableFile, "read", counting)
    list(BatchLoader(view, batch_size=100, shuffle=False, seed=0).epoch(0, 18))
    assert min(groups) >= 1800 // 70 - 1
    assert max(groups) == 1999 // 70
