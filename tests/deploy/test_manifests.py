"""The objects of Kubernetes in deploy/ fit their schemas, the servers' flags and one another.

Built-in kinds are held to Kubernetes' own schemas.  Of custom kinds the fields are named here, as their definitions come with
no package, and the containers in them are held to the schema of a Pod.  By hand all of them were held to the definitions
themselves, with unknown fields refused, on 2026-11-26: KServe at aaac4e2, Kubeflow's trainer at 8c0f505 and Prometheus'
operator at 6adcebc, all of August 2026.
"""

import configparser
import json
import re
import shutil
import subprocess

import pytest
import yaml

from tessera.cli import run_command
from tests.deploy.manifests import (
    DEPLOY,
    KUSTOMIZE,
    copying_container,
    deployed_container,
    files,
    objects,
    one,
    service_variables,
)
from tests.deploy.test_monitoring import SAMPLES

BUILT_IN = ("Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget", "ConfigMap")
# Of each kind the fields that we use, as its definition names them; POD marks what a Pod's spec has, too.
POD = object()
CUSTOM = {
    "ServiceMonitor": {
        "selector": {"matchLabels": {}},
        "endpoints": [{"port": "", "path": "", "interval": ""}],
    },
    "PrometheusRule": {
        "groups": [
            {
                "name": "",
                "rules": [{"alert": "", "expr": "", "for": "", "labels": {}, "annotations": {}}],
            }
        ]
    },
    "ServingRuntime": {
        "annotations": {},
        "supportedModelFormats": [{"name": "", "version": "", "autoSelect": True, "priority": 1}],
        "protocolVersions": [""],
        "containers": POD,
    },
    "InferenceService": {
        "predictor": {
            "terminationGracePeriodSeconds": POD,
            "model": {
                "modelFormat": {"name": "", "version": ""},
                "protocolVersion": "",
                "storageUri": "",
            },
        }
    },
    "TrainingRuntime": {
        "mlPolicy": {"numNodes": 1, "torch": {}},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": "",
                        "template": {
                            "metadata": {"labels": {}},
                            "spec": {"template": {"spec": POD}},
                        },
                    }
                ]
            }
        },
    },
    "TrainJob": {
        "runtimeRef": {"kind": "", "name": ""},
        "trainer": {
            "numNodes": 1,
            "numProcPerNode": 1,
            "command": [""],
            "args": [""],
            "resourcesPerNode": {"requests": {}, "limits": {}},
        },
    },
}
COMMON = {"containers": [{"name": "c", "image": "i"}]}


def misfits(have, known, where=""):
    """Paths of fields that ``known`` does not name or whose type is another; parts of a Pod are validated."""
    if known is POD:
        spec = have if isinstance(have, dict) else COMMON | {where.rpartition(".")[2]: have}
        check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    elif type(have) is not type(known):
        yield where
    elif isinstance(known, dict) and known:
        for key, value in have.items():
            if key in known:
                yield from misfits(value, known[key], f"{where}.{key}")
            else:
                yield f"{where}.{key}"
    elif isinstance(known, list):
        for index, value in enumerate(have):
            yield from misfits(value, known[0], f"{where}[{index}]")


def check(document):
    # Importing it takes a sixth of the time in which all tests are collected.
    import kubernetes_validate

    for release in ("1.29", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(document, release, strict=True)


def test_an_unknown_field_is_found():
    import kubernetes_validate

    deployment = json.loads(json.dumps(one("Deployment")))
    check(deployment)
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check(deployment)
    known = {"a": [{"b": ""}], "c": {}}
    assert list(misfits({"a": [{"b": "x"}, {"d": 1}], "c": {"any": 1}}, known)) == [".a[1].d"]
    assert list(misfits({"a": {}}, known)) == [".a"]


def test_every_object_fits_its_schema():
    kinds = set()
    for path, document in objects():
        kind = document["kind"]
        kinds.add(kind)
        if kind in CUSTOM:
            assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}, path
            assert list(misfits(document["spec"], CUSTOM[kind])) == [], path
        elif kind in BUILT_IN and path.parent.name != "init-copy":
            check(document)
        else:
            assert kind in (*KUSTOMIZE, "Deployment"), (path, kind)
    assert kinds >= {*CUSTOM, *BUILT_IN} - {"ConfigMap"}
    spec = {"initContainers": [copying_container()], **COMMON}
    check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})


def test_kustomizations_name_their_files():
    for path, document in objects():
        if document["kind"] not in KUSTOMIZE:
            continue
        named = list(document.get("resources", ()))
        named += [patch["path"] for patch in document.get("patches", ())]
        for maker in document.get("configMapGenerator", ()):
            named += [name.rpartition("=")[2] for name in maker["files"]]
        assert all((path.parent / name).exists() for name in named), path
        own = {
            file.name
            for file in files()
            if file.parent == path.parent and file != path and "kind:" in file.read_text()
        }
        assert own <= set(named), path


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("overlay", ["base", "python"])
def test_kustomize_renders(tmp_path, overlay, copied):
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    chosen = tmp_path / "kubernetes/chosen"
    chosen.mkdir()
    lines = {"resources": [f"../{overlay}"], "components": ["../init-copy"] if copied else []}
    (chosen / "kustomization.yaml").write_text(yaml.safe_dump(lines))
    done = subprocess.run(
        ["kubectl", "kustomize", chosen], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rendered = {d["kind"]: d for d in yaml.safe_load_all(done.stdout)}
    for document in rendered.values():
        check(document)
    pod = rendered["Deployment"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["config"]["configMap"]["name"] == rendered["ConfigMap"]["metadata"]["name"]
    assert volumes["models"].keys() == {"name", "emptyDir" if copied else "persistentVolumeClaim"}
    assert pod["containers"][0]["image"].startswith(
        "tessera:" if overlay == "python" else "tessera-server:"
    )


def test_names_fit_one_another():
    labels = one("Deployment")["spec"]["template"]["metadata"]["labels"]
    container = deployed_container()
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    for kind, name in (("Service", "tessera"), ("Service", "tessera-pods")):
        service = one(kind, name)
        assert service["spec"]["selector"] == labels
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named.keys()
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert one(kind)["spec"]["selector"]["matchLabels"] == labels
    monitor = one("ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"] == one("Service")["metadata"]["labels"]
    assert [end["port"] for end in monitor["endpoints"]] == ["http"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    pod = one("Deployment")["spec"]["template"]["spec"]
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_autoscaler_reads_a_metric_that_is_exported():
    metrics = one("HorizontalPodAutoscaler")["spec"]["metrics"]
    (own,) = [metric["pods"]["metric"]["name"] for metric in metrics if metric["type"] == "Pods"]
    assert SAMPLES[own][0].kind == "gauge"
    (rule,) = yaml.safe_load((DEPLOY / "monitoring/adapter-rule.yaml").read_text())
    assert rule["name"]["as"] == own
    assert rule["seriesQuery"].startswith(own + "{")


@pytest.fixture
def configured(monkeypatch):
    """Reads flags as `tessera serve` does, in an environment as Kubernetes gives it; the config that it would serve."""
    configs = []
    monkeypatch.setattr(
        "tessera.serving.server.main.serve_until_signal", lambda config: configs.append(config) or 0
    )

    def read(arguments):
        for name, value in service_variables().items():
            monkeypatch.setenv(name, value)
        assert run_command("serve", [str(argument) for argument in arguments]) == 0
        return configs[-1]

    return read


def grace_s(pod):
    return pod["terminationGracePeriodSeconds"]


def test_the_deployment_s_flags(configured, capsys):
    container = deployed_container()
    (mount,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "config"]
    folder = DEPLOY / "kubernetes/base"
    config = configured([argument.replace(mount, str(folder)) for argument in container["args"]])
    assert (config.host, [config.port, config.http_port]) == (
        "0.0.0.0",
        [port["containerPort"] for port in container["ports"]],
    )
    assert config.max_connection_age_s > 0
    assert config.drain_propagation_ms / 1e3 < config.drain_limit_s
    # A second for the last bytes, and some for the node.
    pod = one("Deployment")["spec"]["template"]["spec"]
    assert config.drain_limit_s + 5 <= grace_s(pod)
    mounted = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "models"]
    assert [str(path) for path in config.model_repositories] == mounted


@pytest.mark.parametrize("name", ["tessera-rest", "tessera-grpc"])
def test_the_runtimes_flags(configured, name):
    (container,) = one("ServingRuntime", name)["spec"]["containers"]
    assert container["name"] == "kserve-container"
    config = configured([argument.replace("{{.Name}}", "ranker") for argument in container["args"]])
    (model,) = config.models
    assert (model.name, str(model.path)) == ("ranker", "/mnt/models/model.pt")
    offered = {"http1": config.http_port, "h2c": config.port}
    (port,) = container["ports"]
    assert port["containerPort"] == offered[port["name"]]
    probed = [value["httpGet"]["port"] for key, value in container.items() if key.endswith("Probe")]
    assert set(probed) == {config.http_port}
    predictor = one("InferenceService", "ranker")["spec"]["predictor"]
    assert config.drain_limit_s + 5 <= grace_s(predictor)


def unit():
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read_string((DEPLOY / "systemd/tessera-server.service").read_text())
    return parser["Service"]


def test_the_unit_s_flags_and_limits(configured):
    program, *arguments = unit()["ExecStart"].split()
    assert program.endswith("/tessera-server")
    config = configured(
        [
            a if a != "/etc/tessera/server.yaml" else DEPLOY / "kubernetes/base/server.yaml"
            for a in arguments
        ]
    )
    assert config.drain_limit_s + 5 <= int(unit()["TimeoutStopSec"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path):
    text = (DEPLOY / "systemd/tessera-server.service").read_text()
    program = shutil.which("true")
    path = tmp_path / "tessera-server.service"
    path.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={program}", text))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
