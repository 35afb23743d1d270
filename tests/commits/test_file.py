"""Commits are written as FORMAT.md says, and read only where every byte is as it was written."""

import dataclasses
import json
import mmap
import random

import numpy as np
import pytest
import torch

from tessera.serving.bench.commits import SyntheticPublisher
from tessera.serving.commits.file import CommitError, CommitRecords, read_commit, write_commit
from tessera.serving.commits.patching import apply_commit
from tessera.serving.commits.state import VersionState
from tessera.serving.package.commit import COMMIT_RECORD, Commit
from tessera.serving.package.golden import replay_golden
from tessera.serving.package.layout import ArchiveWriter
from tessera.serving.package.loading import load_package
from tessera.serving.package.manifest import GOLDEN_RECORD
from tessera.serving.package.records import Records
from tessera.serving.package.signed_record import unsigned_sha256
from tessera.serving.package.signing import generate_keys, read_private_key, read_public_key
from tests.packaging.archives import read_records, with_record


@pytest.fixture(scope="module")
def commit(tmp_path_factory, packages):
    folder = tmp_path_factory.mktemp("m") / "1"
    folder.mkdir()
    (folder / "model.pt").symlink_to(packages())
    return SyntheticPublisher(folder).publish(rows=50, newest_example_s=12.5)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "apart", "blocks", "bf16"])
def test_commits_patch_packages_of_every_layout(version, kind, tmp_path):
    folder = version(kind)
    publisher = SyntheticPublisher(folder)
    paths = [publisher.publish(rows=100, dense=number != 2) for number in (1, 2, 3)]
    records = read_records(folder / "model.pt")
    contents = {name: np.frombuffer(content, np.uint8).copy() for name, content in records.items()}
    reads = [read_commit(path) for path in paths]
    base = unsigned_sha256(Records(folder / "model.pt").manifest_bytes())
    assert [read.commit.previous for read in reads] == [base, reads[0].sha256, reads[1].sha256]
    for read in reads:
        read.check_fits(publisher.state.sizes)
        apply_commit(contents, read)
    changed = {name for name, content in contents.items() if content.tobytes() != records[name]}
    assert changed == {patch.record for read in reads for patch in read.commit.patches}
    assert all(
        contents[name].tobytes() == content.tobytes()
        for name, content in publisher.state.tensors.items()
    )
    # A whole package of the patched records answers as the last commit says.
    patched = folder / "model.pt"
    for name in sorted(changed):
        patched = with_record(
            patched, tmp_path / f"{name.replace('/', '-')}.pt", name, contents[name].tobytes()
        )
    loaded = load_package(patched, devices=["cpu"], verify_golden=False)
    replay_golden(loaded.runner, reads[-1].golden, reads[-1].commit.golden)
    state = VersionState(folder / "model.pt", "m", 1)
    before = state.log
    olds = [state.apply(read) for read in reads]
    assert state.log == publisher.state.log
    for read, old in reversed(list(zip(reads, olds, strict=True))):
        state.undo(read, old, before)
    assert all(bytes(state.tensors[name]) == records[name] for name in state.tensors)


def test_the_same_commit_is_the_same_file(commit, tmp_path):
    read = read_commit(commit)
    write_commit(tmp_path / "again", read.commit, read.contents)
    assert (tmp_path / "again").read_bytes() == commit.read_bytes()
    names = [entry.name for entry in CommitRecords(commit).entries]
    assert names == [*sorted(names[:-1]), COMMIT_RECORD]


def test_large_records_lie_in_mappings_of_their_own(version, monkeypatch):
    monkeypatch.setattr("tessera.serving.commits.file._MAPPED_BYTES", 100)
    folder = version("cpu")
    read = read_commit(SyntheticPublisher(folder).publish(rows=100))
    patch = max(read.commit.patches, key=lambda patch: patch.count)
    assert read.contents[patch.bytes].nbytes > 100
    found = read.new_bytes(patch)
    while isinstance(found, np.ndarray):
        found = found.base
    assert isinstance(getattr(found, "obj", found), mmap.mmap)  # a buffer of one
    rows = read.rows(patch)
    assert rows is not None
    assert np.array_equal(read.stored_rows(patch), rows)


def test_any_changed_byte_is_noticed(commit, tmp_path):
    good = commit.read_bytes()
    draw = random.Random(0)
    last = CommitRecords(commit).entries[-1]
    spots = [draw.randrange(len(good)) for _ in range(200)]
    spots += [draw.randrange(last.header_offset, len(good)) for _ in range(200)]
    path = tmp_path / "00000001.commit"
    for spot in spots:
        bad = bytearray(good)
        bad[spot] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(CommitError) as failure:
            read_commit(path)
        assert failure.value.refusal in {"damaged", "schema"}
    for size in (0, 21, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(CommitError, match="cut short"):
            read_commit(path)
    path.unlink()
    with pytest.raises(CommitError, match="cannot be read"):
        read_commit(path)


def test_signatures(commit, tmp_path):
    generate_keys(tmp_path / "k", tmp_path / "k.pub")
    generate_keys(tmp_path / "other", tmp_path / "other.pub")
    trusted, other = read_public_key(tmp_path / "k.pub"), read_public_key(tmp_path / "other.pub")
    read = read_commit(commit)
    path = tmp_path / "signed"
    signed = write_commit(path, read.commit, read.contents, read_private_key(tmp_path / "k"))
    assert signed.sha256 == read.sha256  # the chain does not ask who signed
    assert read_commit(path, [other, trusted]).commit == signed.commit
    for file, keys, words in [
        (commit, [trusted], "is not signed"),
        (path, [other], "none of those"),
        (path, [], "none of those"),
    ]:
        with pytest.raises(CommitError, match=words) as failure:
            read_commit(file, keys)
        assert failure.value.refusal == "unsigned"
    # Somebody changes the commit and keeps the signature.
    other_step = dataclasses.replace(signed.commit, step=7)
    forged = _write(tmp_path / "forged", signed.contents, other_step.to_bytes())
    with pytest.raises(CommitError, match="does not hold") as failure:
        read_commit(forged, [trusted])
    assert failure.value.refusal == "unsigned"


def _write(path, contents, last):
    with path.open("w+b") as stream:
        writer = ArchiveWriter(stream, top="commit")
        for name in sorted(contents):
            writer.add(name, [contents[name].data], contents[name].nbytes)
        writer.add(COMMIT_RECORD, [last], len(last))
        writer.finish()
    return path


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("format_version", 2, "format_version is 2"),
        ("format_version", None, "format_version is missing"),
        ("version", 0, "commit.version: is out of its range"),
        ("number", 100_000_000, "commit.number: is out of its range"),
        ("base", "0", "commit.base: expected 64 lower-case hex digits"),
        ("newest_example_s", "now", "commit.newest_example_s: expected a number"),
        ("patches", [], "is named by no patch"),
        ("more", 1, "unknown key 'more'"),
        (("patches", 0, "record"), "code/x.py", "is not one that can be patched"),
        (("patches", 0, "stride"), 1, "more than the stride"),
        (("patches", 0, "count"), 1, "bytes has"),
        (("patches", 1, "bytes"), "bytes/0", "is named twice"),
        (("patches", 0, "rows"), "bytes/0", "is not the name of such a record"),
    ],
)
def test_what_commit_json_must_not_say(commit, tmp_path, field, value, words):
    read = read_commit(commit)
    data = json.loads(read.commit.to_bytes())
    signature = data.pop("signature")
    inner = data
    *way, last = field if isinstance(field, tuple) else (field,)
    for key in way:
        inner = inner[key]
    inner[last] = value
    content = (json.dumps({**data, "signature": signature}, indent=1) + "\n").encode()
    with pytest.raises(ValueError, match=words):
        Commit.from_bytes(content)
    with pytest.raises(CommitError, match=words) as failure:
        read_commit(_write(tmp_path / "c", read.contents, content))
    assert failure.value.refusal == "schema"


def test_rows_must_ascend_and_lie_in_their_record(commit, packages):
    sizes = {e.name: e.bytes for e in Records(packages()).entries}
    read = read_commit(commit)
    read.check_fits(sizes)
    rows = read.contents["rows/0"].view("<u4")
    for bad in (rows[::-1], np.concatenate([rows[:1], rows[:-1]]), rows + 100_000):
        contents = {**read.contents, "rows/0": bad.astype("<u4").view(np.uint8)}
        with pytest.raises(ValueError, match=r"do not ascend|reaches past"):
            dataclasses.replace(read, contents=contents).check_fits(sizes)
    with pytest.raises(ValueError, match="the package has no"):
        read.check_fits({})
    patch = read.commit.patches[0].record
    with pytest.raises(ValueError, match="reaches past"):
        read.check_fits({**sizes, patch: 10})


def test_every_tensor_is_found_in_its_record(packages, tmp_path):
    state = VersionState(packages(), "m", 1)
    records = read_records(packages())
    tensors = {n for n, content in records.items() if n.startswith("data/") and content}
    assert set(state.tensors) == tensors
    assert all(bytes(content) == records[name] for name, content in state.tensors.items())
    inputs, answers = state.answers()
    loaded = load_package(packages())
    replay_golden(loaded.runner, records[GOLDEN_RECORD], state.manifest.golden)
    torch.testing.assert_close(answers, loaded.runner.forward(inputs))
