"""One table says which releases go together; what else names releases agrees with it."""

import re
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tessera import releases
from tessera.errors import UserError
from tessera.kernels import libraries
from tessera.releases import FBGEMM_OF_TORCH, PYTHONS
from tessera.training import fbgemm

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
OLDEST, *_, NEWEST = FBGEMM_OF_TORCH


@pytest.mark.parametrize(
    ("torch_version", "fbgemm_version", "known"),
    [
        ("2.13.0+cpu", "1.8.0", True),
        ("2.11.1+cu130", "1.6.0", True),
        ("2.14.1", "1.9.0", True),
        ("2.12.0", "1.8.0", False),
        ("2.13.0", "1.9.0", False),
        ("2.99.0", "1.9.0", False),
    ],
)
def test_pairs_of_releases(torch_version, fbgemm_version, known):
    assert releases.pair_is_known(torch_version, fbgemm_version) == known


def test_what_to_install_beside_a_torch():
    assert "fbgemm-gpu-cpu==1.6.*" in releases.fbgemm_remedy("2.11.0+cu130")
    unknown = releases.fbgemm_remedy("2.99.1")
    assert "as no fbgemm-gpu was made for torch 2.99: pip install" in unknown
    assert f"'torch=={NEWEST}.*' 'fbgemm-gpu-cpu=={FBGEMM_OF_TORCH[NEWEST]}.*'" in unknown


def test_pyproject_takes_the_releases_of_the_table():
    assert f'"torch>={OLDEST},<{releases.after(NEWEST)}"' in PROJECT
    fbgemm = f">={FBGEMM_OF_TORCH[OLDEST]},<{releases.after(FBGEMM_OF_TORCH[NEWEST])}"
    assert f'"fbgemm-gpu-cpu{fbgemm}"' in PROJECT
    assert f'"fbgemm-gpu{fbgemm}"' in PROJECT
    assert f'requires-python = ">={PYTHONS[0]},<{releases.after(PYTHONS[-1])}"' in PROJECT


def test_the_makefile_installs_the_fbgemm_of_each_torch():
    assert (
        dict(re.findall(r"^FBGEMM_OF_([\d.]+) := ([\d.]+)\.0$", MAKEFILE, re.MULTILINE))
        == FBGEMM_OF_TORCH
    )
    oldest, newest = (tuple(map(int, release.split("."))) for release in (PYTHONS[0], PYTHONS[-1]))
    assert f"not {oldest} <= sys.version_info[:2] <= {newest}" in MAKEFILE


@pytest.mark.parametrize(
    "page", ["README.md", "docs/install.md", "docs/index.md", ".ci/run", "Makefile"]
)
def test_pages_name_the_newest_python(page):
    named = re.findall(r"3\.\d+ to 3\.\d+", (ROOT / page).read_text())
    assert named
    assert set(named) == {f"{PYTHONS[0]} to {PYTHONS[-1]}"}


def test_operators_of_another_torch_are_refused_before_they_are_loaded(tmp_path, monkeypatch):
    library = tmp_path / "libtessera_ops.so"
    library.write_bytes(b"\x7fELF...tessera operators for torch 2.9\0...")
    monkeypatch.setattr(libraries, "library_path", lambda _: library)
    expected = (
        r"libtessera_ops.so\) was built with torch 2\.9, and running is torch 2\.\d+.*; "
        r"pip install 'torch==2\.9\.\*', or .*kernels/build\.py"
    )
    with pytest.raises(libraries.LibraryError, match=expected):
        libraries.load_libraries(["tessera_ops"])


def test_the_operators_say_which_torch_they_were_built_with():
    try:
        path = libraries.library_path("tessera_ops")
    except libraries.LibraryError:
        pytest.skip("the operators are not built (make build)")
    assert libraries.torch_of(path) == releases.minor_of(torch.__version__)


@pytest.mark.parametrize("load", [fbgemm.import_training_tables, fbgemm.import_inference_tables])
def test_without_an_fbgemm_what_to_install_is_told(monkeypatch, load):
    """As `tessera-rec` is without [cpu] or [cuda]: it serves, and neither trains nor packages."""
    monkeypatch.setattr(fbgemm, "_installed_fbgemm", lambda: None)
    with pytest.raises(UserError, match=r"pip install 'tessera-rec\[cpu\]' \(or \[cuda\]\)"):
        load()


@pytest.mark.parametrize(
    ("version", "labelled"),
    [
        ("0.1.0", "0.1.0+torch2.13"),
        ("0.2.0rc1", "0.2.0rc1+torch2.13"),
        ("0.1.dev7+g6d5ea4e14", "0.1.dev7+g6d5ea4e14.torch2.13"),
    ],
)
def test_a_version_tells_the_torch_that_it_needs(version, labelled):
    assert releases.with_torch(version, "2.13") == labelled == str(Version(labelled))
    assert releases.without_torch(labelled) == releases.without_torch(version) == version
    # A requirement of the release takes the wheels of each torch.
    assert SpecifierSet("==0.1.0").contains("0.1.0+torch2.13")
