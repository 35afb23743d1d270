"""TorchRec programs with the import replaced: one of our own, and those of given checkouts.

The environment variable ``TESSERA_TORCHREC_CHECKOUT`` lists checkouts, as ``PATH`` does.
"""

import json
import os
from pathlib import Path

import pytest

from tessera.training.bench.program_list import PROGRAMS, Program
from tessera.training.bench.program_rewrite import HOME, cells_as_source, moved
from tessera.training.bench.torchrec_programs import difference, prepare, run, steps_of_nan

CHECKOUTS = [Path(p) for p in os.environ.get("TESSERA_TORCHREC_CHECKOUT", "").split(":") if p]
OWN = Program(
    name="own",
    folder="examples/own",
    module="examples.own.train",
    edits=(("train.py", "STEPS = 1000", "STEPS = 4"),),
)
SOURCE = """
import torch
import torchrec
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import (
    apply_optimizer_in_backward,
)

STEPS = 1000
dist.init_process_group("gloo")
table = torchrec.EmbeddingBagConfig(
    name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"]
)
tables = torchrec.EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.5})
model = DistributedModelParallel(tables, device=torch.device("cpu"))
for _ in range(STEPS):
    ids = torchrec.KeyedJaggedTensor.from_lengths_sync(
        ["f"], torch.tensor([1, 2, 2]), torch.tensor([1, 2])
    )
    (model(ids).values() ** 2).mean().backward()
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torchrec", "import tessera.training as torchrec"),
        ("import torchrec as t, os", "import tessera.training as t, os"),
        (
            "import torchrec.distributed",
            "import tessera.training as torchrec, tessera.training.distributed",
        ),
        (
            "import torchrec.distributed as d  # why",
            "import tessera.training.distributed as d  # why",
        ),
        ("from torchrec import X", "from tessera.training import X"),
        (
            "try:\n    from  torchrec.a import (\n        B,  # kept\n        C,\n    )\nfinally: pass",
            "try:\n    from  tessera.training.a import (\n        B,  # kept\n        C,\n    )\nfinally: pass",
        ),
        ("é = patch('torchrec.a.b')", "é = patch('tessera.training.a.b')"),
        ("from torchrec_dlrm import a", "from torchrec_dlrm import a"),
        ("from .torchrec import a", "from .torchrec import a"),
        ("x = 'see torchrec.a, torchrec'", "x = 'see torchrec.a, torchrec'"),
        ("import torch, torchrecipes", "import torch, torchrecipes"),
    ],
)
def test_imports_are_replaced_and_all_else_stays(source, expected):
    assert moved(source) == expected


def test_a_notebook_becomes_a_program():
    cells = [
        {"cell_type": "code", "source": ["!pip install torchrec\n", "import torchrec\n", "a = 1"]},
        {"cell_type": "markdown", "source": ["text"]},
        {"cell_type": "code", "source": ["%time\n", "b = 2"]},
    ]
    assert cells_as_source(json.dumps({"cells": cells})) == "import torchrec\na = 1\nb = 2\n"


def checkout(folder, source):
    own = folder / "examples" / "own"
    own.mkdir(parents=True)
    (own / "train.py").write_text(source)
    return folder


def test_a_moved_program_trains_and_its_losses_are_recorded(tmp_path):
    scratch = tmp_path / "scratch"
    prepare(OWN, checkout(tmp_path / "checkout", SOURCE), scratch, HOME)
    outcome = run(OWN, scratch, HOME, ranks=1, limit_s=300)
    assert outcome.status == "runs", outcome.last_line
    (losses,) = outcome.losses
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
    # The edits and the replacement are in the copy alone.
    assert (tmp_path / "checkout" / "examples" / "own" / "train.py").read_text() == SOURCE


def test_every_plain_model_of_a_program_has_the_same_weights(tmp_path):
    source = (
        "import torch\nSTEPS = 1000\nfor place in range(3):\n"
        "    torch.manual_seed(place)\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)\n"
        "    for _ in range(2):\n"
        "        optimizer.zero_grad()\n"
        "        (model(torch.ones(1, 2)) ** 2).sum().backward()\n"
        "        optimizer.step()\n"
        "    torch.optim.SGD(model.parameters(), lr=0.5)\n"  # A second one leaves them alone.
        "    (model(torch.ones(1, 2)) ** 2).sum().backward()\n"
    )
    prepare(OWN, checkout(tmp_path / "checkout", source), tmp_path / "scratch", HOME)
    outcome = run(OWN, tmp_path / "scratch", HOME, ranks=1, limit_s=300)
    assert outcome.status == "runs", outcome.last_line
    (losses,) = outcome.losses
    first, second, third = losses[:3], losses[3:6], losses[6:]
    assert first == second == third
    assert len(set(first)) == 3


def test_a_moved_program_may_not_import_torchrec_after_all(tmp_path):
    source = 'STEPS = 1000\nname = "torch" + "rec"\n__import__(name)\n'
    prepare(OWN, checkout(tmp_path / "checkout", source), tmp_path / "scratch", HOME)
    outcome = run(OWN, tmp_path / "scratch", HOME, ranks=1, limit_s=60)
    assert outcome.status == "fails"
    assert "a program that was moved to tessera.training imports torchrec" in outcome.last_line


def test_an_edit_that_matches_nothing_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"own: nothing in train.py is STEPS = 1000"):
        prepare(OWN, checkout(tmp_path / "checkout", "pass\n"), tmp_path / "scratch", HOME)


def test_losses_are_compared_step_by_step():
    assert difference([[1.0, 2.0]], [[1.0, 2.0]]) == 0
    assert difference([[1.0, 2.2]], [[1.0, 2.0]]) == pytest.approx(0.1)
    assert difference([[0.1, 2.0], [0.0]], [[0.0, 2.0], [0.0]]) == pytest.approx(0.05)
    assert difference([[1.0]], [[1.0, 2.0]]) == float("inf")
    assert difference([], []) == 0


def test_a_loss_that_is_nan_with_one_library_alone_is_a_difference():
    nan, inf = float("nan"), float("inf")
    for ours, theirs in (([nan, 1.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, nan]), ([nan], [inf])):
        assert difference([ours], [theirs]) == inf
        assert steps_of_nan([ours], [theirs]) == 0
    assert difference([[inf]], [[1.0]]) == difference([[1.0]], [[inf]]) == inf
    assert difference([[inf]], [[inf]]) == 0
    # The others are compared as a part of the largest finite loss.
    assert difference([[nan, 2.2]], [[nan, 2.0]]) == pytest.approx(0.1)
    assert steps_of_nan([[nan, 2.2], [nan]], [[nan, 2.0], [nan]]) == 2


@pytest.mark.skipif(not CHECKOUTS, reason="TESSERA_TORCHREC_CHECKOUT names no checkout")
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.small], ids=lambda p: p.name)
def test_a_small_program_of_a_checkout_runs(program, tmp_path):
    found = [folder for folder in CHECKOUTS if (folder / program.folder).exists()]
    if not found:
        pytest.skip(f"no checkout has {program.folder}")
    prepare(program, found[0], tmp_path, HOME)
    outcome = run(program, tmp_path, HOME, ranks=1, limit_s=300)
    assert outcome.status == "runs", outcome.last_line
