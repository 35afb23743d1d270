"""A pod's life without a cluster: models are copied, the server starts as the manifests say, probes ask, SIGTERM ends it.

Paths of the container are folders of the test, ports are free ones, and nobody waits after SIGTERM for the cluster to
notice; everything else is what deploy/kubernetes has.
"""

import shutil
import subprocess

from tests.conformance.conformance_harness import RunningServer, scores_of
from tests.deploy.manifests import DEPLOY, copying_container, deployed_container, service_variables


def test_a_pod_s_life(kind, package, drawn, tmp_path, monkeypatch):
    source, models = tmp_path / "source", tmp_path / "models"
    (source / "ranker/3").mkdir(parents=True)
    shutil.copy(package, source / "ranker/3/model.pt")
    models.mkdir()
    mounts = {"/source": source, "/models": models, "/etc/tessera": DEPLOY / "kubernetes/base"}

    def mapped(words):
        for path, folder in mounts.items():
            words = [word.replace(path, str(folder)) for word in words]
        return words

    subprocess.run(mapped(copying_container()["command"]), check=True)
    assert (models / "ranker/3/model.pt").read_bytes() == package.read_bytes()

    for name, value in service_variables().items():
        monkeypatch.setenv(name, value)
    container = deployed_container()
    probes = {
        key: container[f"{key}Probe"]["httpGet"]["path"]
        for key in ("startup", "readiness", "liveness")
    }
    flags = ["--model-repository", models, "--drain-propagation-ms", 0]
    message = drawn.samples(3, model="ranker")
    with RunningServer(kind, *mapped(container["args"]), *flags) as server:
        assert {server.http(path)[0] for path in probes.values()} == {200}
        assert scores_of(server.predict(message)).shape == (3,)
        server.signal()
        assert server.exit_status() == 0
