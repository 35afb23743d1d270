"""A file and variables in the place of flags, as programs that run; tests/server/flag_cases.json is the table."""

import pytest

from tests.conformance.conformance_harness import RunningServer
from tests.conformance.test_surface import run


def test_a_server_of_a_file_and_variables(kind, package, tmp_path, monkeypatch):
    path = tmp_path / "server.yaml"
    path.write_text(
        f"model: [first={package}, second={package}]\nskip-golden: true\ndrain-limit-s: 600\n"
        "drain-propagation-ms: 500000\n"
    )
    monkeypatch.setenv("TESSERA_CONFIG", str(path))
    monkeypatch.setenv("TESSERA_DRAIN_PROPAGATION_MS", "0")
    with RunningServer(kind) as server:
        loaded = [line["model"] for line in server.log if line["event"] == "loaded"]
    assert loaded == ["first", "second"]


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"TESSERA_PORT": "x"}, "TESSERA_PORT is 'x'; give a whole number"),
        ({"TESSERA_CONFIG": "none.yaml"}, "TESSERA_CONFIG is 'none.yaml'; there is no such file"),
    ],
)
def test_a_wrong_variable_ends_with_2_and_one_line(kind, monkeypatch, variables, line):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status, lines = run(kind, "--model", "m.pt")
    assert status == 2
    assert [said.split(": error: ")[-1] for said in lines] == [line]
