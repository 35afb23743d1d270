"""What docs/planner.md shows runs."""

import re
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "planner.md"


def test_the_planner_example_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(blocks[0], str(DOC), "exec"), names)
    printed = capsys.readouterr().out
    assert "Plan for 3 tables" in printed
    exec(compile(blocks[1], str(DOC), "exec"), names)
    assert names["estimator"].config.kernel_device_bandwidths == {("cuda", "fused"): 2.1e12}
    assert set(names["plan"].plan[""]) == {"item", "shop", "weekday"}
    assert (tmp_path / "plan.html").stat().st_size > 10_000
    assert (
        (tmp_path / "plan.json").read_text().startswith('{\n "format": "tessera sharding plan 1"')
    )
