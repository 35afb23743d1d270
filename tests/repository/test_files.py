"""What is read of a repository's folders and files, and what is refused of them."""

import os

import pytest

from tessera.errors import UserError
from tessera.serving.repository.control import (
    ControlRecord,
    parse_control,
    read_control,
    write_control,
)
from tessera.serving.repository.folder import scan_repository
from tessera.serving.repository.settings import (
    Every,
    Latest,
    Listed,
    ServingSettings,
    Shadow,
    parse_settings,
    read_settings,
)


def put(path, content=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_a_scan_finds_models_and_versions(tmp_path):
    for name in ("b/12/model.pt", "b/3/model.pt", "a/1/model.pt", "b/.4/model.pt", ".c/1/model.pt"):
        put(tmp_path / name)
    (tmp_path / "b" / "5").mkdir()  # its file is on its way
    (tmp_path / "empty").mkdir()
    put(tmp_path / "b" / "serving.yaml")
    put(tmp_path / "a file")
    found = scan_repository(tmp_path)
    assert {name: list(model.versions) for name, model in found.models.items()} == {
        "a": [1],
        "b": [3, 12],
        "empty": [],
    }
    assert found.remarks == ()
    assert [model.remarks for model in found.models.values()] == [()] * 3
    package = found.models["b"].package(12)
    assert package == tmp_path / "b" / "12" / "model.pt"


def test_a_scan_tells_what_cannot_be_used(tmp_path):
    put(tmp_path / "m" / "07" / "model.pt")
    (tmp_path / "m" / "2" / "model.pt").mkdir(parents=True)
    (tmp_path / "two words\n").mkdir()
    found = scan_repository(tmp_path)
    assert list(found.models) == ["m"]
    assert "'two words?' is not a model's name" in found.remarks[0]
    first, second = sorted(found.models["m"].remarks)
    assert "'07' is not a version" in first
    assert second.endswith("2/model.pt: is not a regular file")


def test_a_replaced_and_a_rewritten_file_have_other_fingerprints(tmp_path):
    path = tmp_path / "m" / "1" / "model.pt"
    put(path, b"one")
    first = scan_repository(tmp_path).models["m"].versions[1]
    assert scan_repository(tmp_path).models["m"].versions[1] == first
    put(tmp_path / "new", b"two")
    os.utime(tmp_path / "new", ns=(first.modified_ns, first.modified_ns))
    (tmp_path / "new").replace(path)
    second = scan_repository(tmp_path).models["m"].versions[1]
    put(path, b"three")
    third = scan_repository(tmp_path).models["m"].versions[1]
    assert len({first, second, third}) == 3


def test_settings(tmp_path):
    assert read_settings(tmp_path) == ServingSettings()
    text = b"""
versions: [3, 7]
labels: {stable: 3, canary: 7}
traffic: {stable: 99.5, canary: 0.5}
shadow: {version: 8, share: 10}
batching: {max_batch_samples: 256, max_delay_us: 0}
"""
    put(tmp_path / "serving.yaml", text)
    assert read_settings(tmp_path) == ServingSettings(
        versions=Listed(frozenset({3, 7})),
        labels={"stable": 3, "canary": 7},
        traffic={"stable": 99.5, "canary": 0.5},
        shadow=Shadow(8, 10.0),
        batching={"max_batch_samples": 256, "max_delay_us": 0},
    )
    assert parse_settings(b"versions: all", "f").versions == Every()
    assert parse_settings(b"versions: {latest: 2}", "f").versions == Latest(2)
    assert parse_settings(b"shadow: {version: 8}", "f").shadow == Shadow(8, 100.0)
    assert parse_settings(b"", "f") == ServingSettings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: all", "f: key is 'version'; give one of versions, .*; did you mean versions?"),
        ("[1]", "f: expected keys such as"),
        ("versions: some", "f: versions is 'some'; give {latest: N}, all, or a list"),
        ("versions: {latest: 0}", "f: versions.latest is 0; give how many"),
        ("versions: []", "f: versions is .*; give at least one version"),
        ("versions: [1, 1]", "f: versions is .*; give at least one version, and each once"),
        ("versions: [1, '2']", "f: versions: a version is '2'; give a positive whole number"),
        ("versions: [1, true]", "f: versions: a version is True"),
        ("labels: 3", "f: labels is 3; give a mapping"),
        ("labels: {3: 3}", "f: labels: a label is 3; give a letter"),
        ("labels: {no: 3}", "f: labels: a label is False; give a letter"),
        ("labels: {a b: 3}", "f: labels: a label is 'a b'"),
        ("labels: {stable: -3}", "f: labels.stable is -3; give a version"),
        ("traffic: {a: 60, b: 41}", "f: traffic is 101 percent in sum"),
        ("traffic: {a: 101}", "f: traffic.a is 101; give a percentage from 0 to 100"),
        ("traffic: {a: .nan}", "f: traffic.a is nan; give a percentage"),
        ("shadow: {share: 3}", "f: shadow.version is None; give a version"),
        ("shadow: {version: 3, share: 0}", "f: shadow.share is 0; give a percentage above 0"),
        ("shadow: {version: 3, part: 1}", "f: shadow: key is 'part'; give one of version, share"),
        ("batching: {max_samples: 3}", "f: batching: key is 'max_samples'; .* mean max_queue_sa"),
        ("batching: {max_batch_ids: 0}", "f: batching.max_batch_ids is 0; give a whole number of"),
        ("batching: {max_delay_us: 99999999}", "f: batching.max_delay_us is .*; give 60000000 at"),
        ("labels: {a: 1, a: 2}", r"f: a is given twice \(line 1\); keep one"),
        ("a: &x [1]\nb: *x", "f: not valid YAML: .*used again by an alias"),
        ("? [a]\n: 1", "f: not valid YAML"),
        ("versions: [", "f: not valid YAML"),
        ("labels: !!python/object:os.system {}", "f: not valid YAML"),
        ("versions: " + "[" * 200 + "]" * 200, "f: not valid YAML: .*nested"),
    ],
)
def test_refused_settings_are_told_in_one_line(text, message):
    with pytest.raises(UserError, match=message) as failure:
        parse_settings(text.encode(), "f")
    assert "\n" not in str(failure.value)


def test_settings_that_are_no_small_file(tmp_path):
    path = tmp_path / "serving.yaml"
    put(path, b"#" * 65_537)
    with pytest.raises(UserError, match="more than 65536 bytes"):
        read_settings(tmp_path)
    put(path, b"\xff")
    with pytest.raises(UserError, match="not UTF-8 text"):
        read_settings(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="is not a regular file"):
        read_settings(tmp_path)


def test_a_record_of_calls_is_read_as_it_was_written(tmp_path):
    assert read_control(tmp_path) == ControlRecord()
    record = ControlRecord(
        unloaded=True, add=frozenset({5}), remove=frozenset({4, 2}), labels={"stable": 3}
    )
    write_control(tmp_path, record)
    assert read_control(tmp_path) == record
    write_control(tmp_path, ControlRecord())
    assert read_control(tmp_path) == ControlRecord()
    assert [path.name for path in tmp_path.iterdir()] == ["control.json"]


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path):
    write_control(tmp_path, ControlRecord(unloaded=True))
    labels = {f"label-{number}-{'x' * 50}": 1 for number in range(1_200)}
    with pytest.raises(UserError, match="the limit is 65536"):
        write_control(tmp_path, ControlRecord(labels=labels))
    assert read_control(tmp_path).unloaded
    with pytest.raises(UserError, match="cannot be written"):
        write_control(tmp_path / "gone", ControlRecord())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f: is not JSON"),
        ("[]", "f: is not a JSON object"),
        ('{"format": 2}', "f: format is 2; this server reads 1"),
        ('{"formats": 1}', "f: key is 'formats'; .*; did you mean format?"),
        ('{"unloaded": 1}', "f: unloaded is 1; give true or false"),
        ('{"add": 3}', "f: add is 3; give a list"),
        ('{"add": [0]}', "f: add has 0; give versions"),
        ('{"remove": [1.0]}', "f: remove has 1.0; give versions"),
        ('{"labels": []}', r"f: labels is \[\]; give an object"),
        ('{"labels": {"1": 1}}', "f: labels has '1'; give a letter"),
        ('{"labels": {"a": "1"}}', "f: labels.a is '1'; give a version"),
        ('{"add": [3], "remove": [3]}', "f: add and remove both have 3"),
        ('{"add": [], "add": [1]}', "f: is not JSON .*twice"),
        ("[" * 100_000, "f: is not JSON"),
    ],
)
def test_refused_records_are_told_in_one_line(text, message):
    with pytest.raises(UserError, match=message) as failure:
        parse_control(text.encode(), "f")
    assert "\n" not in str(failure.value)
