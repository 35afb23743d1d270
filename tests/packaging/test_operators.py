"""What a package's own code may do: call operators of the list, and nothing while it is opened."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tessera.kernels.libraries import load_libraries
from tessera.serving.commands import verify
from tessera.serving.package.loading import load_package
from tessera.serving.package.operators import ALLOWED_OPERATORS
from tessera.serving.package.records import PackageError
from tessera.serving.package.scripted_source import SourceError, check_source
from tests import forked_program
from tests.conformance.conformance_harness import CPP_PROGRAM, commands, start_that_ends
from tests.packaging.archives import read_records, with_record
from tests.patience import PATIENCE_S

CLASS = "class M(Module):\n  __parameters__ = []\n  training : bool\n"
STATE = CLASS + "  def __setstate__(self: __torch__.M, state: Tuple[Tensor, bool]) -> NoneType:\n"
# Of no effect, and not left out as dead code.
RANDOM = "float_features = torch.where(torch.gt(torch.rand([1]), 2), torch.neg(float_features), float_features)"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (f'{CLASS}  def forward(self: M) -> Tensor:\n    return torch.save(x, "a")\n', ""),
        (f'{CLASS}  x : Final[int] = torch.save(1, "a")\n', "line 4 computes something"),
        ("def f(x: int=torch.f()) -> int:\n  return x\n", "line 1 computes something"),
        ("def f(x: int=3) -> int:\n  return x\n", ""),
        (f"{STATE}    self.x = (state)[0]\n    return None\n", ""),
        (f"{STATE}    _1 = ops.mkldnn._reorder_linear_weight((state)[0])\n", ""),
        (f"{STATE}    _1 = torch.save((state)[0], (state)[1])\n", "line 5 would call torch.save"),
        (f"{STATE}    f = torch.save; f((state)[0])\n", "line 5 has ';'"),
        (f'{STATE}    (state)[0].save("a")\n', "line 5 would run"),
        (f"{STATE}    _1 = (torch.save)((state)[0])\n", "line 5 would run"),
        (f"{STATE}    if (state)[1]:\n      x = 1\n", "line 5 would run"),
        (f"{CLASS}  def __setstate__(self: M, state: Any) -> NoneType:\n", "line 4 defines"),
        ("x = 1 # comment\n", "line 1 has '#'"),
        ('x = """a"""\n', "line 1 has a text where"),
        ('x = r"a"\n', "line 1 has a text where"),
        ('x = "a\n', "line 1 has a text that does not end"),
        ("x = \ty\n", "line 1 has a byte"),
        (f"{CLASS}   x = 1\n", "line 4 is not laid out"),
        (f"{CLASS}      x = 1\n", "line 4 is not laid out"),
        ("x = [\n", "a bracket is not closed"),
        ("x = ]\n", "line 1 closes a bracket"),
        ("@torch.save\n", "line 1 has '@'"),
    ],
)
def test_nothing_runs_while_an_archive_is_opened(source: str, reason: str) -> None:
    if not reason:
        check_source(source.encode())
        return
    with pytest.raises(SourceError, match=reason):
        check_source(source.encode())


def test_every_operator_of_the_list_is_one_of_torchs() -> None:
    load_libraries(["tessera_ops", "fbgemm_gpu_tbe_inference", "fbgemm_gpu_sparse_async_cumsum"])
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}
    # TorchScript's own syntax has no schemas.
    unknown = {name for name in ALLOWED_OPERATORS - known if not name.startswith("prim::")}
    assert unknown == set()
    for name in ("aten::save", "aten::from_file", "aten::manual_seed", "aten::set_grad_enabled"):
        assert name in known
        assert name not in ALLOWED_OPERATORS
    assert not {"prim::Print", "prim::PythonOp", "prim::SetAttr", "prim::fork"} & ALLOWED_OPERATORS


def forward_record(package: Path) -> tuple[str, str]:
    """Name and source of the record with the model's forward."""
    return next(
        (name, content.decode())
        for name, content in read_records(package).items()
        if name.startswith("code/") and b"id_list_features_lengths: Tensor" in content
    )


def with_statement(package: Path, path: Path, statement: str) -> Path:
    """A copy whose forward begins with ``statement``, its hashes with it."""
    name, source = forward_record(package)
    begin = source.index("def forward(self")
    body = source.index(" -> Dict[str, Tensor]:\n", begin) + len(" -> Dict[str, Tensor]:\n")
    changed = source[:body] + "".join(f"    {line}\n" for line in statement.split("\n"))
    return with_record(package, path, name, (changed + source[body:]).encode())


def verified(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return forked_program.run(["verify", path, *flags])


def served(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(CPP_PROGRAM), "--model", str(path), "--host", "127.0.0.1", "--port", "0"]
    command += ["--http-port", "0", "--log-level", "error", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("statement", "operator"),
    [
        ('torch.save(float_features, "WITNESS")', "aten::save"),
        (
            'float_features = torch.add(float_features, torch.from_file("WITNESS", False, 1))',
            "aten::from_file",
        ),
        ("torch.manual_seed(3)", "aten::manual_seed"),
        ("print(float_features)", "prim::Print"),
        (RANDOM, "aten::rand"),
    ],
)
def test_an_operator_that_is_not_on_the_list_is_refused_by_name(
    statement: str, operator: str, package: Path, tmp_path: Path
) -> None:
    witness = tmp_path / "witness"
    path = with_statement(package, tmp_path / "m.pt", statement.replace("WITNESS", str(witness)))
    with pytest.raises(PackageError, match=rf"operator {operator}, .* add --allow-op {operator}$"):
        load_package(path)
    assert not witness.exists()
    if CPP_PROGRAM.exists():
        done = served(path)
        assert done.returncode == 2
        assert done.stderr.endswith(f"add --allow-op {operator}\n"), done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not witness.exists()


def test_more_operators_may_be_allowed(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_statement(package, tmp_path / "m.pt", RANDOM)
    assert load_package(path, allow_ops=["aten::rand"]).manifest.name == "model"
    parser = verify.argparse.ArgumentParser()
    verify.add_arguments(parser)
    assert verify.run(parser.parse_args([str(path)])) == 1
    assert "add --allow-op aten::rand" in capsys.readouterr().err
    assert verify.run(parser.parse_args([str(path), "--allow-op", "aten::rand"])) == 0


def test_an_endless_loop_ends_a_start_in_one_line(package: Path, tmp_path: Path) -> None:
    loop = "i = 0\nwhile True:\n  i = torch.add(i, 1)"
    path = with_statement(package, tmp_path / "m.pt", loop)
    line = f"package {path}: its model ran longer than --load-timeout-s 1 while it was loaded; "
    done = verified(path, "--load-timeout-s", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"failed: {line}"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    flags = ["--model", path, "--port", 0, "--http-port", 0, "--host", "127.0.0.1"]
    flags += ["--log-level", "error", "--load-timeout-s", 1]
    for kind in commands():
        done = start_that_ends(kind, *flags)
        assert done.returncode == 2, (kind, done)
        assert line in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
