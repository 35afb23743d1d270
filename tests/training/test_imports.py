import logging
import subprocess
import sys

import pytest

import tessera.training
import tessera.training.distributed
from tessera.errors import UserError
from tessera.training import fbgemm

# Imported before torch, as by a program that has nothing else; that takes seconds, so what it gives is looked at in turn.
FIRST = """
import sys
import tessera.training as torchrec
assert 'torch' not in sys.modules
torchrec.DistributedModelParallel, torchrec.build_ranking_model, torchrec.DLRMTrain
assert not [m for m in sys.modules if m.startswith('fbgemm')]
assert 'torch._dynamo' not in sys.modules
"""
SUB_MODULES = """
assert torchrec.distributed.planner.EmbeddingShardingPlanner
assert torchrec.distributed.types.ShardingEnv
assert torchrec.modules.embedding_configs.EmbeddingBagConfig
assert torchrec.sparse.jagged_tensor.KeyedJaggedTensor
assert torchrec.models.dlrm.DLRM and torchrec.quant.embedding_modules
assert torchrec.inference.modules and torchrec.fx.Tracer
assert torchrec.Pipelineable and torchrec.Multistreamable
assert not hasattr(torchrec, 'nonsense') and not hasattr(torchrec.models, 'nonsense')
"""
AFTER_TORCH = """
import torch, tessera.training, sys
"""
WITHOUT_FBGEMM = """
import tessera.training.fbgemm as door
found, door._installed_fbgemm = door._installed_fbgemm, lambda: None
try:
    torch.ops.fbgemm.asynchronous_complete_cumsum
except AttributeError as error:
    assert 'fbgemm-gpu is not installed' in str(error), error
else:
    raise AssertionError
door._installed_fbgemm = found
"""
AN_OPERATOR = """
import torch
def sums(x: torch.Tensor):
    return torch.ops.fbgemm.asynchronous_complete_cumsum(x)
assert not [m for m in sys.modules if m.startswith('fbgemm')]
assert torch.jit.script(sums)(torch.tensor([1, 2])).tolist() == [0, 1, 3]
assert type(torch.ops.fbgemm) is torch._ops._OpNamespace
assert not hasattr(torch.ops.fbgemm, 'nonsense')
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(FIRST + AN_OPERATOR + SUB_MODULES, id="before torch"),
        pytest.param(AFTER_TORCH + WITHOUT_FBGEMM + AN_OPERATOR, id="after torch"),
    ],
)
def test_a_program_that_imports_the_library(program, tmp_path):
    """It leaves fbgemm alone until an operator is used, tells where it is missing, and has short names for sub-modules."""
    script = tmp_path / "program.py"  # TorchScript reads the source
    script.write_text(program)
    subprocess.run([sys.executable, script], check=True)


@pytest.mark.parametrize("package", [tessera.training, tessera.training.distributed])
def test_every_promised_name_is_there(package):
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = package.Nonsense


def test_training_tables_leave_the_programs_logging_as_it_was():
    code = (
        "import logging\n"
        "from tessera.training import *\n"
        "config = EmbeddingBagConfig(4, 4, name='t', feature_names=['x'])\n"
        "DistributedModelParallel(EmbeddingBagCollection([config]))\n"
        "assert logging.getLogger().handlers == [] and logging.getLogger().filters == []\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize("known", [True, False])
def test_only_the_remark_on_a_known_pair_is_dropped(known, caplog):
    with fbgemm._quiet_about_known_pairs(known=known):
        logging.getLogger().warning("not guaranteed to be compatible with PyTorch 2.13")
        logging.getLogger().warning("something else")
    expected = ["something else"]
    if not known:
        expected.insert(0, "not guaranteed to be compatible with PyTorch 2.13")
    assert caplog.messages == expected


def test_a_missing_fbgemm_says_what_to_install(monkeypatch):
    monkeypatch.setattr(fbgemm, "_installed_fbgemm", lambda: None)
    with pytest.raises(UserError, match=r"pip install 'tessera-rec\[cpu\]'"):
        fbgemm.import_training_tables()


def test_an_fbgemm_that_does_not_load_says_which_would(monkeypatch):
    def fail(name):
        raise OSError("undefined symbol")

    monkeypatch.setattr(fbgemm.importlib, "import_module", fail)
    with pytest.raises(
        UserError, match=r"does not load with torch .* undefined symbol; .* pip install"
    ):
        fbgemm.import_training_tables()
