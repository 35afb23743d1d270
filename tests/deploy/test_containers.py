"""The Containerfiles and the manifests fit one another; deploy/containers/play.py goes through the steps themselves."""

import json
import re
import subprocess
import sys

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


PROGRAMS = {
    "tessera": ["tessera", "serve"],
    "tessera-gpu": ["tessera", "serve"],
    "tessera-server": ["tessera-server"],
}


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_the_image_is_what_the_manifests_start(name):
    *_, last = instructions(FILES[name])
    told = dict(last)
    security = one("Deployment")["spec"]["template"]["spec"]["securityContext"]
    assert told["USER"] == f"{security['runAsUser']}:{security['runAsGroup']}"
    ports = [port["containerPort"] for port in deployed_container()["ports"]]
    assert told["EXPOSE"].split() == [str(port) for port in ports]
    entry = json.loads(told["ENTRYPOINT"])
    assert [entry[0].rpartition("/")[2], *entry[1:]] == PROGRAMS[name]
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


def checked(path):
    """What play.py --check says of a file."""
    command = [sys.executable, DEPLOY / "containers/play.py", "--check", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()[-1]


@pytest.mark.parametrize("name", list(FILES))
def test_every_step_can_be_played(name):
    assert checked(FILES[name]) == (0, f"{FILES[name].name}: every step can be played")


@pytest.mark.parametrize(
    ("was", "becomes", "told"),
    [
        ("USER 65532:65532", "USER root", "USER is 'root'"),
        ("--from=install", "--from=instal", "COPY: there is no earlier stage instal"),
        ("dist/tessera_rec-*.whl", "dist/*.txt", "COPY: dist/*.txt is neither a wheel nor"),
        (" && rm", " && && rm", "RUN cannot be read: "),
        ("EXPOSE", "HEALTHCHECK", "HEALTHCHECK is not an instruction that can be played"),
        ("FROM debian:bookworm-slim\n", "FROM debian:12\n", "FROM debian:12 is not "),
        ("ENTRYPOINT", "# ENTRYPOINT", "there is no ENTRYPOINT"),
    ],
)
def test_what_is_wrong_with_a_step_is_told(tmp_path, was, becomes, told):
    path = tmp_path / "tessera-gpu.Containerfile"
    text = FILES["tessera-gpu"].read_text()
    assert was in text
    path.write_text(text.replace(was, becomes))
    status, line = checked(path)
    assert status == 1
    assert told in line


def test_the_gpu_image_has_builds_with_cuda():
    install, last = instructions(FILES["tessera-gpu"])
    assert ("ARG", "ACCEL=cuda") in install
    runs = " ".join(rest for word, rest in install if word == "RUN")
    assert '"$(ls /wheels/tessera_rec-*.whl)[$ACCEL]"' in runs
    assert "trains_on_gpus" in runs
    assert ("ENV", "NVIDIA_DRIVER_CAPABILITIES=compute,utility") in last
