"""What wheels/build.py makes holds what the checkout holds, each file once, and its programs start.

`make test-wheels` installs it into fresh environments and goes the whole way; here it is unpacked.
"""

import email
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import Version

import tessera
from tessera import releases
from tessera.cli import COMMANDS
from tessera.kernels.libraries import LIBRARIES
from tests.tracked import tracked_files

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tessera", "training", "serving", "kernels")
SHIPPED_SUFFIXES = {".py", ".pyi", ".yaml", ".html", ".css", ".js", ".typed"}
WITH_TORCH = releases.with_torch(tessera.__version__, releases.minor_of(torch.__version__))
OPERATORS = f"tessera/{LIBRARIES['tessera_ops'].file}"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds distributions by their names on wheels/build.py's command line; the wheels' files."""
    if not (ROOT / OPERATORS).exists():
        pytest.skip("the operators are not built (make build)")
    tracked_files()  # outside a checkout it cannot be told what belongs into a wheel
    out = tmp_path_factory.mktemp("dist")

    def build(*names):
        command = [sys.executable, str(ROOT / "wheels" / "build.py"), "--out", str(out)]
        only = [word for name in names for word in ("--only", name)]
        done = subprocess.run([*command, *only], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return {path.name.split("-")[0]: path for path in out.glob("*.whl")}

    return build


@pytest.fixture(scope="module")
def wheels(built):
    return built("client", "full")


@pytest.fixture(scope="module")
def site(wheels, tmp_path_factory):
    """A folder as pip leaves it when both are installed."""
    folder = tmp_path_factory.mktemp("site")
    for path in wheels.values():
        zipfile.ZipFile(path).extractall(folder)
    return folder


def files_of(path):
    return {name for name in zipfile.ZipFile(path).namelist() if ".dist-info/" not in name}


def metadata_of(path):
    archive = zipfile.ZipFile(path)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(archive.read(name))


def test_every_source_file_is_in_one_wheel(wheels):
    full, client = (files_of(wheels[name]) for name in ("tessera_rec", "tessera_rec_client"))
    assert full & client == set()
    expected = {
        name if name.startswith("tessera/") else f"tessera/{name}"
        for name in tracked_files()
        if name.split("/")[0] in FOLDERS and Path(name).suffix in SHIPPED_SUFFIXES
    }
    assert len(expected) > 500
    assert expected - full - client == set()
    # The operators' sources are in the source archive.
    assert full - expected - {OPERATORS} <= {
        f"tessera/{n}" for n in tracked_files() if n.endswith(".md")
    }


def test_the_operators_are_in_a_wheel_of_one_platform(wheels):
    assert OPERATORS in files_of(wheels["tessera_rec"])
    assert "-py3-none-manylinux_2_" in wheels["tessera_rec"].name
    assert wheels["tessera_rec_client"].name.endswith("-py3-none-any.whl")


def test_one_version_and_what_needs_what(wheels):
    full, client = (metadata_of(wheels[name]) for name in ("tessera_rec", "tessera_rec_client"))
    assert client["Version"] == tessera.__version__
    assert full["Version"] == WITH_TORCH
    assert Version(full["Version"]).public == Version(tessera.__version__).public
    needs = [line.split(";")[0].strip() for line in full.get_all("Requires-Dist")]
    assert f"tessera-rec-client=={tessera.__version__}" in needs
    # What holds machine code is for the torch that it was compiled with, and its fbgemm-gpu.
    torch_release = releases.minor_of(torch.__version__)
    fbgemm_release = releases.FBGEMM_OF_TORCH[torch_release]
    assert f"torch<{releases.after(torch_release)},>={torch_release}" in needs
    assert f"fbgemm-gpu-cpu<{releases.after(fbgemm_release)},>={fbgemm_release}" in needs
    names = {line.partition("<")[0] for line in client.get_all("Requires-Dist")}
    assert names == {"numpy", "grpcio", "protobuf", "xxhash"}


def test_the_files_of_one_release_of_torch_replace_no_others(wheels, tmp_path, monkeypatch):
    """Names tell the torch, so that all fit into one index; the folder has what was built last."""
    assert parse_wheel_filename(wheels["tessera_rec"].name)[1] == Version(WITH_TORCH)
    monkeypatch.syspath_prepend(ROOT / "wheels")
    spec = importlib.util.spec_from_file_location("wheels_build", ROOT / "wheels" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    monkeypatch.setattr(build, "__version__", "1.2.0")
    monkeypatch.setattr(build, "torch_release", lambda: "2.14")
    assert build.version_with_code(no_label=True) == "1.2.0"
    kept = {
        "tessera_rec-1.2.0+torch2.14-py3-none-manylinux_2_32_x86_64.whl",
        "tessera_rec-1.2.0+torch2.14.tar.gz",
        "tessera-rec-1.2.0+torch2.14.cdx.json",
        "tessera_rec_server-1.2.0+torch2.14-py3-none-manylinux_2_35_x86_64.whl",
        "tessera_rec_client-1.2.0-py3-none-any.whl",
        "tessera_rec_client-1.2.0.tar.gz",
        "notes.txt",
    }
    others = {
        "tessera_rec-1.2.0+torch2.13-py3-none-manylinux_2_32_x86_64.whl",
        "tessera_rec-1.2.0-py3-none-manylinux_2_32_x86_64.whl",
        "tessera_rec_server-1.2.0+torch2.13-py3-none-manylinux_2_35_x86_64.whl",
        "tessera_rec_client-1.2.0.1-py3-none-any.whl",
        "tessera-rec-1.1.0+torch2.14.cdx.json",
    }
    for name in kept | others:
        (tmp_path / name).touch()
    build.remove_others(tmp_path, no_label=False)
    assert {path.name for path in tmp_path.iterdir()} == kept


ALONE = """
import sys
class Refuses:
    def find_spec(self, name, path=None, target=None):
        allowed = {"numpy", "grpc", "google", "xxhash", "typing_extensions", "cython_runtime", "tessera"}
        if name.partition(".")[0] not in allowed | set(sys.stdlib_module_names) and name[0] != "_":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuses())
import tessera.serving.client as client, importlib, pkgutil
for folder in (client, importlib.import_module("tessera.serving.protocol")):
    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{folder.__name__}.{module.name}")
print(client.__file__)
"""


def test_the_client_needs_nothing_else(wheels, tmp_path):
    zipfile.ZipFile(wheels["tessera_rec_client"]).extractall(tmp_path)
    done = run(ALONE, tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_the_program_and_the_operators_of_the_wheels(site, tmp_path):
    probe = (
        "import tessera\nfrom tessera.cli import main\n"
        "from tessera.kernels.libraries import library_path, load_libraries\n"
        "load_libraries(['tessera_ops'])\nprint(tessera.__file__, library_path('tessera_ops'))\n"
        "main(['--version'])"
    )
    done = run(probe, site, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{site / 'tessera' / '__init__.py'} {site / OPERATORS}",
        f"tessera {tessera.__version__}",
    ]


def test_the_server_of_the_wheel_finds_its_libraries(built, tmp_path):
    if not (ROOT / "build" / "cpp" / "release" / "tessera-server").exists():
        pytest.skip("the C++ server is not built (make build)")
    path = built("server")["tessera_rec_server"]
    archive = zipfile.ZipFile(path)
    archive.extractall(tmp_path)
    program = tmp_path / "tessera_rec_server" / "bin" / "tessera-server"
    load = program.parent / "tessera-load"
    for one in (program, load):
        one.chmod(0o755)  # as pip does
    helped = run("import tessera_rec_server as t; t.load()", tmp_path, tmp_path, "--help")
    assert helped.stdout.startswith("usage: tessera-load")
    own = {path.name for path in (tmp_path / "tessera_rec_server" / "lib").iterdir()}
    found = ldd(load, own)
    assert found
    for name, place in found.items():
        assert place.startswith(str(tmp_path / "tessera_rec_server")), (name, place)
    missing = run("import tessera_rec_server as t; t.main()", tmp_path, tmp_path, "-S")
    assert missing.returncode == 2
    assert "torch is not in" in missing.stderr
    (tmp_path / "torch").symlink_to(Path(importlib.util.find_spec("torch").origin).parent)
    done = run("import tessera_rec_server as t; t.main()", tmp_path, tmp_path, "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"tessera-server {tessera.__version__}\n"
    assert metadata_of(path)["Version"] == WITH_TORCH
    other = tmp_path / "other"
    archive.extractall(other)
    for name, text in {
        "lib/libtorch_cpu.so": "",
        "version.py": "__version__ = '2.9.1+cpu'\n",
    }.items():
        (other / "torch" / name).parent.mkdir(parents=True, exist_ok=True)
        (other / "torch" / name).write_text(text)
    refused = run("import tessera_rec_server as t; t.main()", other, other, "--version")
    assert refused.returncode == 2
    release = releases.minor_of(torch.__version__)
    assert (
        f"was built with torch {release}, and in {other} is torch 2.9.1+cpu; pip" in refused.stderr
    )
    # Those of the wheel, though this machine has them too.
    libraries = program.parents[1] / "lib"
    engine = libraries / "libtessera-engine.so"
    ours = {path.name for path in libraries.iterdir()} - {engine.name}
    found = ldd(program, ours)
    assert len(found) == len(ours) >= 1
    for name, place in {**found, **ldd(engine, ours)}.items():
        assert Path(place.split(" (")[0]).resolve().parent == libraries, name


def version_of(name):
    return tessera.__version__ if name == "tessera-rec-client" else WITH_TORCH


def bill_of(wheel, name):
    """The bill of materials in a wheel, which is the one beside it."""
    archive = zipfile.ZipFile(wheel)
    (inside,) = (n for n in archive.namelist() if n.endswith(f".dist-info/sboms/{name}.cdx.json"))
    content = archive.read(inside).decode()
    assert content == wheel.with_name(f"{name}-{version_of(name)}.cdx.json").read_text()
    return content


def valid(content):
    """Whether CycloneDX's own schema, in its strict form, has nothing to say against a bill."""
    validation = pytest.importorskip("cyclonedx.validation.json", reason="in the extra [dev]")
    schema = importlib.import_module("cyclonedx.schema").SchemaVersion.V1_6
    return validation.JsonStrictValidator(schema).validate_str(content) is None


def check_graph(bill):
    """Every component stands in the graph once, and is needed by something."""
    itself = bill["metadata"]["component"]["bom-ref"]
    needs = {one["ref"]: one["dependsOn"] for one in bill["dependencies"]}
    assert len(needs) == len(bill["dependencies"])
    assert needs.keys() == {itself, *(one["bom-ref"] for one in bill["components"])}
    reached, waiting = set(), [itself]
    while waiting:
        ref = waiting.pop()
        if ref not in reached:
            reached.add(ref)
            waiting += needs[ref]
    assert reached == needs.keys()


def test_a_bill_names_what_a_wheel_needs(wheels):
    for name in ("tessera-rec", "tessera-rec-client"):
        wheel = wheels[name.replace("-", "_")]
        bill = json.loads(bill_of(wheel, name))
        check_graph(bill)
        versions = {one["name"]: one["version"] for one in bill["components"]}
        assert len(versions) == len(bill["components"])
        own = {"tessera-rec-client": tessera.__version__}
        for found, version in versions.items():
            assert version == own.get(found) or version == metadata.version(found)
        needs = [Requirement(line) for line in metadata_of(wheel).get_all("Requires-Dist")]
        asked = {one.name.lower(): one for one in needs if one.marker is None}
        assert asked.keys() <= versions.keys()
        for one in bill["components"]:
            if one["name"] in asked:
                told = [each["value"] for each in one["properties"]]
                assert str(asked[one["name"]]) in told
        assert bill["metadata"]["component"]["version"] == version_of(name)
    assert {"torch", "pyarrow", "numpy", "yarl"} <= json_names(wheels["tessera_rec"], "tessera-rec")


def json_names(wheel, name):
    return {one["name"] for one in json.loads(bill_of(wheel, name))["components"]}


def test_a_bill_is_as_its_schema_says(wheels):
    for name in ("tessera-rec", "tessera-rec-client"):
        content = bill_of(wheels[name.replace("-", "_")], name)
        assert valid(content)
        assert not valid(content.replace('"bomFormat"', '"bom-format"'))


def test_the_servers_bill_names_the_libraries_in_its_wheel(built):
    if not (ROOT / "build" / "cpp" / "release" / "tessera-server").exists():
        pytest.skip("the C++ server is not built (make build)")
    wheel = built("server")["tessera_rec_server"]
    content = bill_of(wheel, "tessera-rec-server")
    bill, archive = json.loads(content), zipfile.ZipFile(wheel)
    check_graph(bill)
    told = {
        file["name"]: file["hashes"][0]["content"]
        for one in bill["components"]
        for file in one.get("components", [])
    }
    libraries = {n for n in archive.namelist() if n.startswith("tessera_rec_server/lib/")}
    assert told.keys() == {n for n in libraries if not n.endswith("/libtessera-engine.so")}
    for name, sha256 in told.items():
        assert hashlib.sha256(archive.read(name)).hexdigest() == sha256
    packages = [one for one in bill["components"] if one["purl"].startswith("pkg:deb/")]
    assert len(packages) >= 1
    assert all(one["version"] in unquote(one["purl"]) for one in packages)
    assert valid(content)


def ldd(program, names):
    """Where ``program`` finds those of ``names`` that it needs."""
    loaded = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    places = dict(line.split(" => ")[:2] for line in loaded.splitlines() if " => " in line)
    return {name.strip(): place for name, place in places.items() if name.strip() in names}


def run(code, site, folder, *words):
    """Python code outside the checkout, with ``site`` before what is installed and no PATH; -S: without that."""
    without_site = [word for word in words if word == "-S"]
    arguments = [word for word in words if word != "-S"]
    return subprocess.run(
        [sys.executable, *without_site, "-c", code, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(site), "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("arguments", [["nonsense"], ["train", "--nonsense"], []])
def test_a_wrong_command_line_exits_with_2(arguments):
    result = subprocess.run(
        [sys.executable, "-m", "tessera", *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "error:" in result.stderr


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_needs_no_torch(command):
    probe = (
        "import sys\n"
        "from tessera.cli import main\n"
        "try:\n"
        f"    main([{command!r}, '--help'])\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout
