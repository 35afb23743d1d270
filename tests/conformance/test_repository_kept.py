"""Going back to a version that was left a moment ago: it is there as it was, unless its file has changed."""

import os
from pathlib import Path

import pytest

from tessera.serving.package.loading import load_package, open_checked
from tessera.training.models.config import TableConfig
from tests.conformance.conftest import Drawn
from tests.conformance.live_models import Answers, Models, asking, bits, load, ready, serve, unload
from tests.conformance.test_repository_calls import refusal
from tests.package_factory import make_package

FEATURES = {"user": TableConfig(rows=120_000), "item": TableConfig(rows=90_000)}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    made = {}
    for seed, name in enumerate("ab"):
        made[name], _ = make_package(folder, name=name, seed=seed, features=FEATURES, dim=64)
    return made


@pytest.fixture(scope="module")
def table(packages):
    """The largest record of a package."""
    return max(open_checked(packages["a"]).records.entries, key=lambda entry: entry.bytes)


def bytes_read(server):
    """What the server's process has read so far, from files and from what other processes handed over."""
    fields = Path(f"/proc/{server.process.pid}/io").read_text(encoding="ascii").split()
    return int(fields[fields.index("rchar:") + 1])


def switch(server, version):
    """Load a version, unload the other one, and give what was read meanwhile."""
    before = bytes_read(server)
    load(server, "m", version=version, label="stable")
    read = bytes_read(server) - before
    unload(server, "m", version=3 - version)
    server.wait_for(lambda: ready(server, "m") == {version})
    return read


@pytest.fixture
def server(kind, tmp_path, packages):
    models = Models(tmp_path / "models", packages)
    models.put("m", 1, "a")
    with serve(kind, models, "explicit") as running:
        models.put("m", 2, "b")
        yield running, models


def test_the_tables_of_a_version_that_comes_again_are_not_read_again(server, packages, table):
    running, models = server
    message = asking(Drawn(load_package(packages["a"]).manifest.schema).samples(7), "m")
    answers = Answers(packages)
    assert switch(running, 2) > table.bytes  # it is new
    for version in (1, 2, 1, 2):
        assert switch(running, version) < table.bytes / 4
        response = running.predict(message)
        assert response.model_version == str(version)
        assert bits(response) == answers("ab"[version - 1], message).tobytes()
    # Equal content, in a file that was written to since.
    path = models.path("m", 1)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    assert switch(running, 1) > table.bytes
    assert bits(running.predict(message)) == answers("a", message).tobytes()


def hashed(server):
    """The versions whose files' hashes are known: ``tessera-server`` keeps no package whose tables are read for that."""
    return {int(line["version"]) for line in server.log if line["event"] == "file_hash"}


def test_a_version_that_comes_again_is_there_without_its_file_being_read(server, packages):
    running, _ = server
    message = asking(Drawn(load_package(packages["a"]).manifest.schema).samples(7), "m")
    answers = Answers(packages)
    switch(running, 2)
    running.wait_for(lambda: hashed(running) == {1, 2})
    switch(running, 1)
    for version in (2, 1, 2, 1):
        assert switch(running, version) < 100_000  # of pages of /proc and of small files
        response = running.predict(message)
        assert response.model_version == str(version)
        assert bits(response) == answers("ab"[version - 1], message).tobytes()
    # A third version takes the memory of the one that is kept.
    _, models = server
    models.put("m", 3, "a")
    load(running, "m", version=3)
    for version in (1, 3):
        response = running.predict(asking(message, "m", version=str(version)))
        assert bits(response) == answers("a", message).tobytes()


def test_a_file_that_was_damaged_since_is_refused_though_its_tables_are_in_memory(server, table):
    running, models = server
    switch(running, 2)
    with models.path("m", 1).open("r+b") as file:
        file.seek(table.content_offset + table.bytes // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    code, text = refusal(load, running, "m", version=1)
    assert code == "FAILED_PRECONDITION"
    assert "SHA-256" in text
    assert ready(running, "m") == {2}
