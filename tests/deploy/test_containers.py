"""The Containerfiles and the manifests fit one another; deploy/containers/play.py goes through the steps themselves."""

import json
import re

import pytest

from tests.deploy.manifests import DEPLOY, deployed_container, one

FILES = {path.name.split(".")[0]: path for path in (DEPLOY / "containers").glob("*.Containerfile")}


def instructions(path):
    """Stage by stage, the instruction and the rest of each line."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", path.read_text()))
    stages = []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append([])
        stages[-1].append((word, rest))
    return stages


@pytest.mark.parametrize("name", ["tessera", "tessera-server"])
def test_the_image_is_what_the_manifests_start(name):
    *_, last = instructions(FILES[name])
    told = dict(last)
    security = one("Deployment")["spec"]["template"]["spec"]["securityContext"]
    assert told["USER"] == f"{security['runAsUser']}:{security['runAsGroup']}"
    ports = [port["containerPort"] for port in deployed_container()["ports"]]
    assert told["EXPOSE"].split() == [str(port) for port in ports]
    program = {"tessera": ["tessera", "serve"], "tessera-server": ["tessera-server"]}[name]
    entry = json.loads(told["ENTRYPOINT"])
    assert [entry[0].rpartition("/")[2], *entry[1:]] == program
    version = deployed_container()["image"].rpartition(":")[2]
    assert f"-t {name}:{version} " in FILES[name].read_text()


def test_the_last_stage_installs_python_at_most():
    for path in FILES.values():
        *_, last = instructions(path)
        installed = [
            name
            for word, rest in last
            if word == "RUN"
            for names in re.findall(r"--no-install-recommends ([^&]*)", rest)
            for name in names.split()
        ]
        assert set(installed) <= {"python3"}, path.name
