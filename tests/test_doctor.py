"""`tessera doctor`: each check on systems as they may be, and the whole on this one."""

import json
import resource
import socket
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

import tessera
from tessera.cli import run_command
from tessera.kernels import libraries
from tessera.kernels.libraries import LibraryError, cpu_kernels
from tessera.serving.commands import doctor_checks
from tessera.serving.commands.doctor_checks import Finding, examine
from tessera.serving.engine import installed


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("TESSERA_CPU_KERNELS", "TESSERA_HUGE_PAGES"):
        monkeypatch.delenv(name, raising=False)


def test_the_whole_of_this_machine(capsys):
    status = run_command("doctor", ["--json"])
    findings = json.loads(capsys.readouterr().out)
    problems = [finding for finding in findings if finding["status"] == "problem"]
    assert status == bool(problems)
    names = [finding["name"] for finding in findings]
    assert len(set(names)) == len(names) == 14
    by_name = {finding["name"]: finding for finding in findings}
    assert by_name["torch"]["found"] == torch.__version__
    assert by_name["tessera"]["found"].startswith(tessera.__version__)
    # What is not as it should be comes with what to do.
    assert all((each["status"] == "ok") == (each["remedy"] == "") for each in findings)
    assert not any("this check itself failed" in finding["remedy"] for finding in findings)


def test_lines_and_the_status(capsys, monkeypatch):
    found = [
        Finding(name="a", status="ok", found="1"),
        Finding(name="long", status="warning", found="2", remedy="mend it"),
    ]
    monkeypatch.setattr(doctor_checks, "examine", lambda: found)
    assert run_command("doctor", []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["ok       a     1", "warning  long  2: mend it"]
    found.append(Finding(name="b", status="problem", found="3", remedy="x " * 100))
    assert run_command("doctor", []) == 1
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120


def test_a_check_that_fails_stops_no_other(monkeypatch):
    def broken():
        raise RuntimeError("oops")

    monkeypatch.setattr(doctor_checks, "cpus", broken)
    for slow in ("operators", "fbgemm", "cpp_server"):
        monkeypatch.setattr(doctor_checks, slow, lambda: Finding(name="x", status="ok", found=""))
    (found,) = (finding for finding in examine() if finding.status == "problem")
    assert (found.name, found.found) == ("cpus", "RuntimeError: oops")


def test_python(monkeypatch):
    assert doctor_checks.python().status == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 9, 0))
    assert doctor_checks.python().status == "problem"


def test_torch_of_another_release_or_broken(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    assert doctor_checks.torch_release().status == "warning"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor_checks.torch_release().status == "problem"


def test_distributions_of_two_versions(monkeypatch):
    versions = {"tessera-rec": "1.0", "tessera-rec-client": "1.1"}
    monkeypatch.setattr(metadata, "distributions", lambda name: [name] if name in versions else [])
    monkeypatch.setattr(metadata, "version", versions.get)
    found = doctor_checks.installed_tessera()
    assert found.status == "problem"
    assert found.remedy == "pip install tessera-rec-client==1.0"
    versions |= {"tessera-rec": "1.1+torch2.13"}  # the client needs no torch, and has no such label
    assert doctor_checks.installed_tessera().status == "ok"
    versions |= {"tessera-rec": "1.0+torch2.13"}
    assert doctor_checks.installed_tessera().remedy == "pip install tessera-rec-client==1.0"


def test_the_kernels_that_run_here(monkeypatch):
    assert cpu_kernels() in {"scalar", "avx2", "avx512", "amx"}
    for kernels, status in (("avx512", "ok"), ("scalar", "warning")):
        monkeypatch.setattr(libraries, "cpu_kernels", lambda kernels=kernels: kernels)
        assert doctor_checks.operators().status == status
    monkeypatch.setenv("TESSERA_CPU_KERNELS", "avx2")
    assert "'avx2'" in doctor_checks.operators().found


def test_operators_that_are_not_there(monkeypatch):
    def missing():
        raise LibraryError(
            "operator library 'tessera_ops' was not found; build it with: make build"
        )

    monkeypatch.setattr(libraries, "cpu_kernels", missing)
    found = doctor_checks.operators()
    assert (found.status, found.remedy) == ("problem", "build it with: make build")


def test_fbgemms_version_is_that_of_the_wheel_that_installs_it(monkeypatch):
    found = libraries.fbgemm_version.__wrapped__
    silent = SimpleNamespace(version="1.7.0", read_text=lambda _: None)
    telling = SimpleNamespace(version="1.8.0", read_text={"top_level.txt": "fbgemm_gpu\n"}.get)
    monkeypatch.setattr(metadata, "distributions", lambda: [silent, telling])
    assert found() == "1.8.0"
    # Where no wheel says what it installs, its files do.
    monkeypatch.setattr(metadata, "distributions", lambda: [silent])
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"fbgemm_gpu": ["fbgemm"]})
    monkeypatch.setattr(metadata, "version", {"fbgemm": "1.7.0"}.get)
    assert found() == "1.7.0"
    monkeypatch.setattr(metadata, "packages_distributions", dict)
    assert found() == ""


def test_fbgemm(monkeypatch):
    monkeypatch.setattr(libraries, "fbgemm_version", lambda: "")
    assert doctor_checks.fbgemm().status == "warning"
    monkeypatch.setattr(libraries, "fbgemm_version", lambda: "1.8.0")
    with monkeypatch.context() as both:
        both.setattr(metadata, "distributions", lambda name: [name])
        assert doctor_checks.fbgemm().found == "fbgemm-gpu and fbgemm-gpu-cpu"
    monkeypatch.setattr(libraries, "load_libraries", lambda names: None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert doctor_checks.fbgemm().status == "ok"
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    found = doctor_checks.fbgemm()
    assert (found.status, found.found) == (
        "warning",
        "1.8.0 loads, but was not made for torch 2.14.1",
    )
    assert "fbgemm-gpu-cpu==1.9.*" in found.remedy


def test_fbgemm_that_does_not_load_says_which_does(monkeypatch):
    def broken(path):
        raise OSError(f"{path}: undefined symbol")

    monkeypatch.setattr(libraries, "fbgemm_version", lambda: "1.8.0")
    monkeypatch.setattr(torch.ops, "load_library", broken)
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    found = doctor_checks.fbgemm()
    assert found.status == "problem"
    assert "does not load with torch 2.12.1" in found.found
    assert found.remedy.startswith("fbgemm-gpu 1.7 goes with torch 2.12: pip install")


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        (f"echo tessera-server {tessera.__version__}", "ok", tessera.__version__),
        ("echo tessera-server 9.9", "warning", "9.9"),
        ("echo libtorch.so is missing >&2; exit 127", "problem", "libtorch.so is missing"),
    ],
)
def test_the_server_in_cpp(monkeypatch, tmp_path, script, status, text):
    program = tmp_path / "tessera-server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = doctor_checks.cpp_server()
    assert found.status == status
    assert text in found.found


def test_no_server_in_cpp(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(installed, "_CHECKOUT", tmp_path)
    assert doctor_checks.cpp_server().status == "warning"


def test_gpus_that_cannot_be_used(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor_checks.cuda(tmp_path).status == "ok"
    (tmp_path / "nvidia0").touch()
    for cuda, status in ((None, "warning"), ("13.0", "problem")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert doctor_checks.cuda(tmp_path).status == status


def test_cpus_and_memory(monkeypatch, tmp_path):
    for usable, status in ((1, "warning"), (2, "ok")):
        monkeypatch.setattr(doctor_checks, "usable_cpus", lambda usable=usable: usable)
        assert doctor_checks.cpus().status == status
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   8388608 kB\n")
    assert doctor_checks.memory(meminfo, tmp_path).found == "8.0 GiB free"
    (tmp_path / "memory.max").write_text("1073741824\n")
    found = doctor_checks.memory(meminfo, tmp_path)
    assert (found.status, found.found) == (
        "warning",
        "8.0 GiB free, 1.0 GiB allowed to the control group",
    )
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor_checks.memory(meminfo, tmp_path).status == "ok"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        ("always [madvise] never", "ok"),
        ("[always] madvise never", "ok"),
        ("always madvise [never]", "warning"),
        (None, "warning"),
    ],
)
def test_huge_pages(tmp_path, content, status):
    setting = tmp_path / "enabled"
    if content is not None:
        setting.write_text(content)
    assert doctor_checks.huge_pages(setting).status == status


def test_open_files(monkeypatch):
    for soft, status in ((1024, "warning"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert doctor_checks.open_files().status == status


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        found = doctor_checks.port("gRPC port", "--port", number)
    assert found.status == "warning"
    assert "another --port" in found.remedy


def test_settings(monkeypatch):
    monkeypatch.setenv("TESSERA_MAX_DELAY_US", "7")
    assert "TESSERA_MAX_DELAY_US" in doctor_checks.settings().found
    monkeypatch.setenv("TESSERA_MAX_DELAY_US", "soon")
    found = doctor_checks.settings()
    assert (found.status, found.remedy) == ("warning", "give a whole number")
