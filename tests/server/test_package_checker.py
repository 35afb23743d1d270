"""A package that comes again is compared with its hashes again, and its model does not run once more for that."""

import hashlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.package_factory import make_package
from tests.patience import PATIENCE_S

_PROGRAM = """
import hashlib
import os
import sys
from pathlib import Path

from tessera.serving.package.loading import Loading
from tessera.serving.package.records import PackageError, Records
from tessera.serving.server.repository import checker as module

server = os.getpid()
settle, hash_file = Loading.settle, module._sha256_of

def tell(what, path):
    with Path("done").open("a") as done:
        done.write(f"{what} {path.name}\\n")

def told_settle(loading, **options):
    tell("run", loading.path)
    settle(loading, **options)

def told_hash(path, *rest):
    tell("hash" if os.getpid() == server else "hash elsewhere", path)
    return hash_file(path, *rest)

Loading.settle, module._sha256_of = told_settle, told_hash
module._MOST_HASHED_HERE = int(sys.argv.pop(1))
# A process of the idle class is begun again where it has too little of a CPU, and would tell twice.
module.run_when_idle = lambda body: body()
checker = module.PackageChecker(module.CheckOptions(load_timeout_s=600))
for path in map(Path, sys.argv[1:]):
    manifest_sha256 = hashlib.sha256(Records(path).manifest_bytes()).hexdigest()
    try:
        with checker.check(path, manifest_sha256, lambda _: None, beside_others=False):
            print("checked", checker.file_sha256(path))
    except PackageError as error:
        print("refused", error.reason)
checker.close()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two packages, a copy of the first one, and one of which a byte of a record was changed."""
    folder = tmp_path_factory.mktemp("packages")
    for seed, name in ((1, "a"), (2, "b")):
        made, _ = make_package(folder, seed=seed, name=name)
        made.rename(folder / f"{name}.pt")
    shutil.copyfile(folder / "a.pt", folder / "copy.pt")
    content = bytearray((folder / "a.pt").read_bytes())
    with zipfile.ZipFile(folder / "a.pt") as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
    content[largest.header_offset + largest.file_size // 2] ^= 1
    (folder / "damaged.pt").write_bytes(content)
    return folder


def checked(folder, *names, most_hashed_here=1 << 20):
    (folder / "done").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(most_hashed_here), *names],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    answers = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return answers, (folder / "done").read_text(encoding="ascii").splitlines()


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_model_runs_once_and_a_file_is_hashed_once(folder):
    names = ["a.pt", "b.pt", "a.pt", "b.pt", "copy.pt"]
    answers, done = checked(folder, *names)
    assert answers == [["checked", sha256(folder / name)] for name in names]
    assert done == ["run a.pt", "hash a.pt", "run b.pt", "hash b.pt", "hash copy.pt"]


def test_a_large_file_is_hashed_in_another_process(folder):
    answers, done = checked(folder, "a.pt", "a.pt", most_hashed_here=1_000)
    assert answers == 2 * [["checked", sha256(folder / "a.pt")]]
    assert done == ["run a.pt", "hash elsewhere a.pt"]


def test_what_has_run_is_compared_with_its_hashes_again(folder):
    answers, _ = checked(folder, "a.pt", "damaged.pt")
    assert answers[0] == ["checked", sha256(folder / "a.pt")]
    verdict, reason = answers[1]
    assert verdict == "refused"
    assert "SHA-256" in reason
