"""The examples of docs/extending.md, "A row type", as they stand there."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tessera.kernels import row_header, row_types
from tessera.kernels.row_types import ROW_TYPES
from tessera.kernels.tables import FeatureLookup, from_fbgemm_rows, make_plan, pack_tables

ROOT = Path(__file__).resolve().parents[2]
SECTION = (
    (ROOT / "docs" / "extending.md").read_text().split("\n## A row type\n")[1].split("\n## ")[0]
)
SYMMETRIC, FLOAT8_E5M2 = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
(READING,) = re.findall(r"```cpp\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture
def registered():
    """Runs code as if it stood at the end of kernels/row_types.py; its type is gone afterwards."""
    before = dict(ROW_TYPES)

    def run(code):
        exec(compile(code, "docs/extending.md", "exec"), dict(vars(row_types)))
        (name,) = ROW_TYPES.keys() - before.keys()
        return ROW_TYPES[name]

    yield run
    ROW_TYPES.clear()
    ROW_TYPES.update(before)


def test_a_type_in_one_file_is_looked_up_and_offered(registered):
    kind = registered(SYMMETRIC)
    assert kind.backends == ("tessera", "fbgemm")
    weights = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    weights[3, 5] = 0.0
    weights[4] = 0.0
    stored = kind.encode(weights)
    values = kind.decode(stored, 16)
    assert float(values[3, 5]) == 0
    assert float(values[4].abs().max()) == 0
    # Half a step and the rounding of the scale to float16, which counts up to 127 times.
    step = weights.abs().amax(1, keepdim=True) / 127
    assert bool(((values - weights).abs() <= step * (0.5 + 127 * 2**-11)).all())
    packed = pack_tables([from_fbgemm_rows(stored, dim=16, weight_type=kind)])
    plan = make_plan([FeatureLookup(table=packed.places[0], out_column=0)])
    found = torch.ops.tessera.lookup_rows(
        packed.weights, plan, torch.arange(20), torch.tensor([20]), 16
    )
    # One fused multiply-add against a multiplication and an addition.
    torch.testing.assert_close(found, values, rtol=0, atol=1e-5)
    texts = {path.name: text for path, text in row_header.generated().items()}
    assert '"int8s": "",' in texts["row_type_names.py"]
    assert texts["row_types.h"] == (ROOT / "kernels" / "csrc" / "row_types.h").read_text()


PROGRAM = """
#include "cpu_scalar.cpp"
#include <cstdio>

int main() {
  uint8_t row[%(dim)d] = {%(row)s};
  tessera::FeaturePlan plan{};
  plan.row_stride = plan.dim = %(dim)d;
  plan.rows = 1;
  plan.weight_type = tessera::kFloat8E5M2;
  const int64_t offsets[] = {0, 1}, ids[] = {0}, starts[] = {0};
  float out[%(dim)d];
  tessera::LookupJob job{row, &plan, 1, 1, offsets, ids, starts, nullptr, out,
                         tessera::OutType::kFloat32, %(dim)d};
  tessera::kScalarKernels.lookup(job, 0, 1);
  for (float value : out) std::printf("%%a\\n", value);
}
"""


def compile_with(folder, reading, row):
    """g++'s result for a copy of the kernels with the new type; the program lies in ``folder``."""
    sources = folder / "csrc"
    shutil.copytree(ROOT / "kernels" / "csrc", sources)
    (sources / "row_types.h").write_text(row_header.header())
    values = (sources / "row_values.h").read_text()
    end = "\n}  // namespace tessera\n"
    assert values.endswith(end)
    (sources / "row_values.h").write_text(values.removesuffix(end) + "\n" + reading + end)
    numbers = ", ".join(map(str, row.tolist()))
    (sources / "example.cpp").write_text(PROGRAM % {"dim": len(row), "row": numbers})
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-Wswitch-enum"]
    command = ["g++", *flags, str(sources / "example.cpp"), "-o", str(folder / "example")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_a_type_in_two_files_is_looked_up_by_the_kernels(registered, tmp_path):
    kind = registered(FLOAT8_E5M2)
    weights = torch.tensor([[0.0, -1.5, 3e-5, 57344.0, 0.3, -1e-5, 7.0]])
    stored = kind.encode(weights)
    made = compile_with(tmp_path, READING, stored[0])
    assert made.returncode == 0, made.stderr
    printed = subprocess.run(
        [str(tmp_path / "example")], capture_output=True, text=True, check=True
    ).stdout
    assert [float.fromhex(line) for line in printed.split()] == kind.decode(stored, 7)[0].tolist()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_a_type_that_is_not_read_in_cpp_does_not_compile(registered, tmp_path):
    kind = registered(FLOAT8_E5M2)
    made = compile_with(tmp_path, "", kind.encode(torch.ones(1, 4))[0])
    assert made.returncode != 0
    assert "RowValues" in made.stderr
