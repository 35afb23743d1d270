"""The code of docs/parallelism.md runs, on four ranks."""

import re
from pathlib import Path

from tests.training.ranks import run_on_ranks

DOCS = Path(__file__).parents[2] / "docs" / "parallelism.md"


def run(code):
    names = {}
    exec(compile(code, str(DOCS), "exec"), names)
    trained = names["trained"].get("tables.embedding_bags.item", [])
    assert names["outputs"].shape == (2, 16)
    return names["model"].device_mesh.mesh.tolist(), len(trained), names["moved_mib"]


def test_the_examples_train_in_groups():
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(blocks) == 4
    found = run_on_ranks(4, run, "\n".join(blocks))
    for rank, (mesh, rows, moved_mib) in enumerate(found):
        assert mesh == [[0, 2], [1, 3]]
        # The second ranks of the groups have the table in the end, and are asked for all of a group's ids.
        assert 0 < rows <= 64 if rank >= 2 else rows == 0
        assert moved_mib == 1000 * 16 * 4 / 2**20
