"""``make demo-online`` in a very short form: it ends well, and scores every row before it is trained on."""

import json
import subprocess
import sys

from tessera.serving.commits.chain import parse_commit_name
from tests import REPOSITORY
from tests.patience import PATIENCE_S

MODELS = {"best possible", "frozen", "hourly", "followed"}


def test_two_short_hours(tmp_path):
    folder = tmp_path / "demo"
    command = [sys.executable, str(REPOSITORY / "examples" / "online.py"), "--dir", str(folder)]
    command += ["--hours", "2", "--history", "1", "--rows", "128"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((folder / "results.json").read_text())
    assert [hour["version"] for hour in results["hours"]] == ["1", "2"]
    # Each file is scored with the last commit before it: the n-th with commit n, from 0; a checkpoint at the end
    # of the first hour adds one more.
    commits = [hour["commits"] for hour in results["hours"]]
    assert commits[0] == [0, 1, 2, 3, 4, 5]
    assert commits[1] in ([6, 8, 9, 10, 11, 12], [7, 8, 9, 10, 11, 12])
    log = folder / "models" / "followed" / "1" / "log"
    assert max(parse_commit_name(path.name) or 0 for path in log.iterdir()) >= 13
    for hour in results["hours"]:
        assert hour["auc"].keys() == MODELS
        assert all(0 <= value <= 1 for value in hour["auc"].values())
    # Until the first commit and the first new version, all three are the same model.
    first = results["hours"][0]["auc"]
    assert first["frozen"] == first["hourly"]
    assert first["frozen"] != first["followed"]
    page = (folder / "online.html").read_text()
    assert "<svg" in page
    assert "followed" in page
    assert f"{results['mean']['followed']:.4f}" in done.stdout
