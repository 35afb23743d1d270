"""What a whole package is refused for, and how it is loaded."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.kernels import libraries
from tessera.kernels.libraries import LibraryError, load_libraries
from tessera.serving.package.golden import (
    GoldenMismatchError,
    read_golden,
    replay_golden,
    write_golden,
)
from tessera.serving.package.loading import Loading, load_package
from tessera.serving.package.manifest import GOLDEN_RECORD, GoldenInfo
from tessera.serving.package.records import PackageError, Records
from tessera.serving.package.runner import HostBatch, TorchScriptRunner
from tessera.serving.package.torchscript import expected_deprecation
from tests.packaging.archives import with_manifest, with_record
from tests.packaging.batches import random_batch

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("the archive was opened by torch")

    monkeypatch.setattr("torch.jit.load", opened)


def test_a_loaded_package_says_what_it_is(package: Path) -> None:
    loaded = load_package(package)
    assert loaded.path == package
    assert loaded.sha256 == hashlib.sha256(package.read_bytes()).hexdigest()
    assert loaded.load_seconds > 0
    assert loaded.manifest.name == "model"
    assert loaded.manifest.created.endswith("Z")
    assert loaded.manifest.golden.samples == 9


@pytest.mark.usefixtures("not_opened")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data.update(operator_libraries=["evil"]),
            "operator library 'evil' is unknown; known are: fbgemm_gpu",
        ),
        (
            lambda data: data.update(operator_libraries=["../../tmp/evil"]),
            "operator library '../../tmp/evil' is unknown",
        ),
        (
            lambda data: data["versions"].update(torch_min="9.0", torch_below="9.1"),
            r"needs torch >=9.0,<9.1, running is .*; install a torch of that range",
        ),
        (
            lambda data: data["versions"].update(torch_min="1.0", torch_below="2.0"),
            "needs torch >=1.0,<2.0",
        ),
        (
            lambda data: data["versions"].update(torch_min="new"),
            "manifest.versions.torch_min: expected a release such as 2.13",
        ),
    ],
)
def test_what_this_machine_cannot_run_is_refused(
    change: Change, message: str, package: Path, tmp_path: Path
) -> None:
    path = with_manifest(package, tmp_path / "m.pt", change)
    with pytest.raises(PackageError, match=message):
        load_package(path)


@pytest.mark.usefixtures("not_opened")
def test_a_library_that_is_not_installed_is_named_with_what_to_install(
    each_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = Records(each_package).manifest().operator_libraries[0]
    remedy = {
        "fbgemm_gpu_tbe_inference": r"pip install 'tessera-rec\[cpu\]'",
        "tessera_ops": "make build",
    }
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(PackageError, match=f"'{needed}' was not found .* {remedy[needed]}"):
        load_package(each_package)


def test_a_library_built_for_another_torch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "fbgemm_gpu_tbe_inference.so"
    broken.write_bytes(b"no shared object")
    monkeypatch.setattr(libraries, "library_path", lambda _: broken)
    with pytest.raises(LibraryError, match="does not load with torch"):
        load_libraries(["fbgemm_gpu_tbe_inference"])


def test_another_device_is_refused(package: Path) -> None:
    with pytest.raises(PackageError, match="packaged for device 'cpu', asked for is 'cuda'"):
        load_package(package, device="cuda")


def test_records_that_torch_cannot_open_are_refused(package: Path, tmp_path: Path) -> None:
    # Whole by its manifest, but not a model.
    path = with_record(package, tmp_path / "m.pt", "data.pkl", b"not a pickle")
    with pytest.raises(PackageError, match=r"data\.pkl is not as torch writes it"):
        load_package(path)


def rewritten_golden(package: Path, path: Path, golden: bytes) -> Path:
    """A package whose golden record is another, its hash with it."""
    return with_record(package, path, GOLDEN_RECORD, golden)


def golden_of(package: Path) -> tuple[HostBatch, dict[str, torch.Tensor]]:
    return read_golden(Records(package).read(GOLDEN_RECORD, max_bytes=1 << 20))


def test_a_load_pauses_between_its_parts_and_behind_each_call_of_the_model(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def told(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            done.append(name)
            return method(*args, **options)

        return wrapped

    monkeypatch.setattr(torch.jit, "load", told("load", torch.jit.load))
    loading = Loading(package)
    loading.read()
    loading.open(lambda: done.append("rest"))
    assert done[0] == done[-1] == "rest"
    assert done[done.index("load") - 1] == done[done.index("load") + 1] == "rest"
    done.clear()
    loading.build(lambda: done.append("rest"))
    assert done == ["rest"]
    done.clear()
    monkeypatch.setattr(TorchScriptRunner, "forward", told("call", TorchScriptRunner.forward))
    loading.settle(verify_golden=False, rest=lambda: done.append("rest"))
    assert done == ["call", "rest"] * (len(done) // 2)
    assert done


def test_other_answers_are_refused_and_the_sample_is_named(package: Path, tmp_path: Path) -> None:
    batch, outputs = golden_of(package)
    outputs["default"][3] += 1e-3
    path = rewritten_golden(package, tmp_path / "m.pt", write_golden(batch, outputs))
    with pytest.raises(
        PackageError, match=r"golden answers: output 'default' of golden sample 3 is 0\.\d+, rec"
    ):
        load_package(path)
    assert load_package(path, verify_golden=False).manifest.name == "model"


def test_a_golden_record_that_is_none_is_refused(package: Path, tmp_path: Path) -> None:
    path = rewritten_golden(package, tmp_path / "m.pt", b"not safetensors")
    with pytest.raises(PackageError, match=r"golden\.bin cannot be read"):
        load_package(path)


class FixedRunner:
    """Answers always the same."""

    shares_rows = False

    def __init__(self, outputs: dict[str, torch.Tensor]) -> None:
        self.outputs = outputs

    def forward(self, batch: HostBatch) -> dict[str, torch.Tensor]:
        return self.outputs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: {"other": y}, r"the outputs are \['other'\]"),
        (lambda y: {"default": y[:-1]}, r"\[8\], the golden answer is .* \[9\]"),
        (lambda y: {"default": y.double()}, "torch.float64"),
        (
            lambda y: {"default": y.clone().index_fill_(0, torch.tensor(5), float("nan"))},
            "sample 5",
        ),
        (lambda y: {"default": y + 2e-3}, "sample 0"),
    ],
)
def test_every_difference_from_the_golden_answers_counts(
    change: Callable[[torch.Tensor], dict[str, torch.Tensor]], message: str, package: Path
) -> None:
    batch, outputs = golden_of(package)
    content = write_golden(batch, outputs)
    info = GoldenInfo(samples=9, atol=1e-3, rtol=0.0)
    replay_golden(FixedRunner({"default": outputs["default"] + 9e-4}), content, info)
    with pytest.raises(GoldenMismatchError, match=message):
        replay_golden(FixedRunner(change(outputs["default"])), content, info)


def test_golden_inputs_meet_every_edge(package: Path) -> None:
    batch, outputs = golden_of(package)
    schema = load_package(package).manifest.schema
    features = schema.group("id_list")
    lengths = batch.id_list_features_lengths.view(len(features), batch.batch_size)
    assert lengths[:, 0].eq(0).all()
    assert lengths[:, 4].eq(50).all()
    assert batch.float_features[1].isnan().all()
    bags = batch.id_list_features_values.split(lengths.flatten().tolist())
    for place, feature in enumerate(features):
        own = bags[place * batch.batch_size : (place + 1) * batch.batch_size]
        assert own[1].tolist() == [0]
        assert own[2].tolist() == [feature.rows - 1]
        served = not (feature.hashing == "none" and feature.out_of_range == "reject")
        outside = [-1, feature.rows, -(2**63), 2**63 - 1]
        assert own[3].tolist() == (outside if served else [])
    assert outputs["default"].shape == (batch.batch_size,)
    # Answers that hardly differ could not tell a wrong model from a right one.
    assert outputs["default"].unique().numel() == batch.batch_size


def test_stock_torch_opens_the_file_and_reads_the_manifest(package: Path) -> None:
    extra = {"tessera/manifest.json": "", "tessera/golden.bin": ""}
    with expected_deprecation():
        module = torch.jit.load(str(package), _extra_files=extra)
    loaded = load_package(package)
    assert extra["tessera/manifest.json"] == loaded.manifest.to_bytes()
    batch = random_batch(loaded.manifest.schema, 17, max_length=5, seed=0)
    torch.testing.assert_close(
        module(*batch.tensors())["default"],
        loaded.runner.forward(batch)["default"],
        rtol=0,
        atol=1e-5,
    )


_FRESH = """
import sys
import torch
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import zero_batch
package = load_package(sys.argv[1])
batch = zero_batch(package.manifest.schema, 3, wide_ids=False)
print(package.runner.forward(batch)["default"].tolist())
loaded = [n for n in sys.modules if n.startswith(("fbgemm_gpu", "tessera.training"))]
assert not loaded, loaded
assert not any(n.startswith("tessera.serving.packaging") for n in sys.modules)
"""


def test_a_fresh_process_loads_it_without_the_training_side(each_package: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FRESH, str(each_package)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split(",")) == 3
    assert done.stderr == ""
