import logging
import subprocess
import sys

import pytest

import tessera.training
import tessera.training.distributed
from tessera.errors import UserError
from tessera.training import fbgemm


def test_importing_the_library_leaves_fbgemm_alone():
    code = (
        "import sys, tessera.training as t\n"
        "t.DistributedModelParallel, t.build_ranking_model, t.DLRMTrain\n"
        "assert not [m for m in sys.modules if m.startswith('fbgemm')]\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("first", ["tessera.training, torch", "torch, tessera.training"])
def test_fbgemms_operators_are_loaded_when_one_is_used(first, tmp_path):
    script = tmp_path / "program.py"  # TorchScript reads the source
    script.write_text(
        f"import {first}, sys\n"
        "def sums(x: torch.Tensor):\n"
        "    return torch.ops.fbgemm.asynchronous_complete_cumsum(x)\n"
        "assert not [m for m in sys.modules if m.startswith('fbgemm')]\n"
        "assert torch.jit.script(sums)(torch.tensor([1, 2])).tolist() == [0, 1, 3]\n"
        "assert type(torch.ops.fbgemm) is torch._ops._OpNamespace\n"
        "assert not hasattr(torch.ops.fbgemm, 'nonsense')\n"
    )
    subprocess.run([sys.executable, script], check=True)


def test_an_operator_without_fbgemm_is_an_attribute_that_is_missing():
    code = (
        "import tessera.training, torch\n"
        "import tessera.training.fbgemm as door\n"
        "door._installed_fbgemm = lambda: None\n"
        "try:\n"
        "    torch.ops.fbgemm.asynchronous_complete_cumsum\n"
        "except AttributeError as error:\n"
        "    assert 'fbgemm-gpu is not installed' in str(error), error\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sub_modules_are_attributes_under_the_short_name_that_programs_give():
    code = (
        "import sys\n"
        "import tessera.training as torchrec\n"
        "assert 'torch' not in sys.modules\n"
        "assert torchrec.distributed.planner.EmbeddingShardingPlanner\n"
        "assert torchrec.distributed.types.ShardingEnv\n"
        "assert torchrec.modules.embedding_configs.EmbeddingBagConfig\n"
        "assert torchrec.sparse.jagged_tensor.KeyedJaggedTensor\n"
        "assert torchrec.models.dlrm.DLRM and torchrec.quant.embedding_modules\n"
        "assert torchrec.inference.modules and torchrec.fx.Tracer\n"
        "assert torchrec.Pipelineable and torchrec.Multistreamable\n"
        "assert not hasattr(torchrec, 'nonsense') and not hasattr(torchrec.models, 'nonsense')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
