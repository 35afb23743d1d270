"""The examples of docs/client.md and of the README run as they are, with a real server in place of the address."""

import re
from pathlib import Path

import numpy as np

PAGE = Path(__file__).resolve().parents[2] / "docs" / "client.md"


def test_the_examples_run(server_address, package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").symlink_to(package)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    names = {}
    for block in blocks:
        code = block.replace("127.0.0.1:50051", server_address)
        assert code != block or "PredictorClient(" not in block
        exec(compile(code, str(PAGE), "exec"), names)
    assert names["prediction"].outputs["default"].shape == (2,)
    assert names["by_rows"].shape == (2,)
    assert names["by_key"].model_version == "3"
    assert names["scores"].outputs["default"].shape == (3,)
    first = names["answers"][0].outputs["default"]
    assert all(np.array_equal(answer.outputs["default"], first) for answer in names["answers"])
    assert len(names["response"].predictions["default"].data) == 2


def test_the_readmes_examples_run(server_address, package, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").symlink_to(package)
    readme = PAGE.parents[1] / "README.md"
    blocks = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    exec(compile(blocks[0], str(readme), "exec"), {})
    assert capsys.readouterr().out == "torch.Size([2, 16])\n"
    names = {}
    exec(compile(blocks[1].replace("127.0.0.1:50051", server_address), str(readme), "exec"), names)
    assert names["answer"].outputs["default"].shape == (2,)


def test_the_table_of_exceptions_is_the_clients():
    import grpc

    from tessera.serving import client
    from tessera.serving.client.errors import error_for_status

    rows = re.findall(r"^\| `(\w+)` \| `([A-Z_]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 7
    for name, code in rows:
        error = error_for_status(grpc.StatusCode[code], "why", "h:1")
        assert type(error) is getattr(client, name)
