"""Values and gradients of modules, and steps over ranks, beside TorchRec's own, where TorchRec is installed.

The cases are those whose times `training/bench/modules_versus_torchrec.py` compares, at small shapes.
"""

import pytest
import torch
import torch.distributed as dist

from tessera.training.bench import model_steps, module_steps
from tessera.training.bench.module_steps import Draws
from tessera.training.bench.modules_versus_torchrec import CASES
from tessera.training.bench.parallel_steps import PARALLEL
from tessera.training.bench.pipelines_versus_torchrec import let_cpu_streams_pass
from tessera.training.bench.sharded_steps import libraries
from tests.training.ranks import rank_device, run_on_ranks, uses_cuda
from tests.training.test_modules_versus_torchrec import SMALL

pytest.importorskip(
    "torchrec", reason="TorchRec is not installed: there is nothing to compare with"
)
pytestmark = pytest.mark.multi_gpu
STEPS = 4
# What TorchRec 1.8 refuses, or does not return from, on a CPU.
GPUS_ALONE = {"DMPCollection", "PrefetchTrainPipelineSparseDist", "reshard"}
UNFUSED = {"NDCG", "AUPRC", "AUC", *module_steps.RANKED}
OF_RANKS = [name for name, case in PARALLEL.items() if case.equal]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.equal])
def test_values_and_gradients_are_torchrecs(name, device, monkeypatch):
    made, trained = [], module_steps.trained

    def noted(module, *given):
        made.append(module)
        return trained(module, *given)

    monkeypatch.setattr(model_steps, "trained", noted)
    monkeypatch.setattr(module_steps, "trained", noted)
    if device.type == "cuda":  # TorchRec's pools take a device without its number for another one
        device = torch.device("cuda", torch.cuda.current_device())
    case = CASES[name]
    shape = {key: SMALL[key] for key in case.draw(Draws(torch.Generator().manual_seed(0)))}
    ours, theirs = (case.make(library, shape, device) for library in libraries())
    for _ in range(STEPS):
        torch.testing.assert_close(ours(), theirs(), rtol=1e-5, atol=1e-6, check_dtype=False)
    if made:
        gradients = [[weight.grad for weight in module.parameters()] for module in made]
        for own, their in zip(*gradients, strict=True):
            torch.testing.assert_close(own, their, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("metric", module_steps.METRICS)
def test_metrics_are_torchrecs(metric, fused, device):
    if fused and metric in UNFUSED:
        pytest.skip("TorchRec's takes tasks one by one")
    shape = {"batch": 32, "tasks": 3, "every": 3, "window": 4, "fused": fused, "metric": metric}
    ours, theirs = (module_steps.metric(library, shape, device) for library in libraries())
    for _ in range(STEPS):
        torch.testing.assert_close(ours(), theirs(), rtol=1e-5, atol=1e-6, check_dtype=False)


def steps_of_both(name):
    shape = {"tables": 3, "batch": 8, "ids": 2, "dim": 8, "rows": 20}
    if not uses_cuda():
        let_cpu_streams_pass()
    made = [PARALLEL[name].make(library, shape, rank_device()) for library in libraries()]
    for _ in range(STEPS):
        ours, theirs = (step() for step in made)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, check_dtype=False)
    dist.barrier()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", OF_RANKS)
def test_steps_over_ranks_are_torchrecs(name, ranks):
    if name in GPUS_ALONE and not uses_cuda():
        pytest.skip("TorchRec's takes GPUs alone")
    run_on_ranks(ranks, steps_of_both, name)
