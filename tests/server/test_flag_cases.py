"""flag_cases.json: flags from the command line, TESSERA_ variables and a file, case by case.

cpp_server/tests/flag_cases_test.cc holds the C++ server to the same table.  ``file`` is the content of the
file of --config (null: none is named), ``FILE`` in an error its path.
"""

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from tessera.cli import run_command
from tessera.errors import edits, nearest

CASES = json.loads(Path(__file__).with_name("flag_cases.json").read_text())


@pytest.fixture
def served(monkeypatch):
    """The configs that would have been served."""
    configs = []
    monkeypatch.setattr(
        "tessera.serving.server.main.serve_until_signal", lambda config: configs.append(config) or 0
    )
    for name in [name for name in os.environ if name.startswith("TESSERA_")]:
        monkeypatch.delenv(name)
    return configs


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_a_case(served, tmp_path, capsys, case):
    path = tmp_path / "server.yaml"
    arguments = case["arguments"]
    if case["file"] is not None:
        path.write_text(case["file"])
        arguments = [*arguments, "--config", str(path)]
    with mock.patch.dict(os.environ, case["variables"]):
        status = run_command("serve", arguments)
    said = capsys.readouterr().err
    if "error" in case:
        assert status == 2
        assert said == f"tessera serve: error: {case['error'].replace('FILE', str(path))}\n"
    else:
        assert (status, said) == (0, "")
        assert [[model.path, model.name] for model in served[0].models] == case["models"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"port: [", "not valid YAML: "),
        (b"port: \xff", "not UTF-8 text; save it as such"),
        (b"port: &x 1\nhttp-port: *x", "not valid YAML: it is used again by an alias"),
        (b"# " + b"x" * (1 << 20), "has more than 1048576 bytes, the limit; make it shorter"),
    ],
    ids=["YAML", "UTF-8", "alias", "size"],
)
def test_a_file_that_cannot_be_read(served, tmp_path, capsys, content, expected):
    path = tmp_path / "server.yaml"
    path.write_bytes(content)
    assert run_command("serve", ["--config", str(path)]) == 2
    assert f"error: {path}: {expected}" in capsys.readouterr().err
    assert not served


def test_edits_and_the_nearest():
    pairs = ("", "abc"), ("kitten", "sitting"), ("a", "a"), ("sevre", "serve"), ("ca", "abc")
    assert [edits(*pair) for pair in pairs] == [3, 3, 0, 1, 3]
    assert nearest("--prot", ["--host", "--port", "--poll-s"]) == "--port"
    assert nearest("xyz", ["port"]) == ""
    assert nearest("p" * 1_000_000, ["port"]) == ""
