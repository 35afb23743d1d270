"""Checkpoints of TorchRec itself, converted: equal scores and an equal next step, there and back.

Runs where TorchRec is installed (it is not a dependency): trains two steps with one library, converts what it
saved, loads it into the other under another plan, compares the scores, takes a step with both and compares again.
"""

import importlib
import os
import socket

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

from tessera.cli import main
from tessera.training.distributed.checkpoint import load_checkpoint, save_checkpoint

pytest.importorskip("torchrec", reason="TorchRec is not installed; it is a peer, not a dependency")

OURS, THEIRS = "tessera.training", "torchrec"
PLANS = {
    "columns": lambda by: {"t1": by.column_wise(ranks=[0, 0]), "t2": by.table_wise(rank=0)},
    "rows": lambda by: {"t1": by.row_wise(), "t2": by.data_parallel()},
}


@pytest.fixture(autouse=True)
def _one_rank():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    before = dict(os.environ)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


class Trained:
    """A model of one library with its optimizers: fused for the tables, Adam for the rest."""

    def __init__(self, library, arch, plan, fused):
        def module(name):
            return importlib.import_module(f"{library}.{name}")

        top = importlib.import_module(library)
        tables = top.EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                top.EmbeddingBagConfig(
                    name="t1", embedding_dim=8, num_embeddings=10, feature_names=["f1", "f3"]
                ),
                top.EmbeddingBagConfig(
                    name="t2", embedding_dim=8, num_embeddings=6, feature_names=["f2"]
                ),
            ],
        )
        models = module("models.dlrm")
        torch.manual_seed(5)
        if arch == "dlrm":
            model = models.DLRM(tables, 3, [6, 8], [5, 1])
        else:
            model = models.DLRM_DCN(tables, 3, [6, 8], [5, 1], 2, 3)
        apply = module("optim.apply_optimizer_in_backward").apply_optimizer_in_backward
        kinds = {
            "adagrad": torch.optim.Adagrad,
            "row": module("optim.rowwise_adagrad").RowWiseAdagrad,
        }
        apply(kinds[fused], model.sparse_arch.parameters(), {"lr": 0.1, "eps": 1e-8})
        by_hand, types = module("distributed.sharding_plan"), module("distributed.types")
        sharder = module("distributed.embeddingbag").EmbeddingBagCollectionSharder()
        made = by_hand.construct_module_sharding_plan(
            tables, PLANS[plan](by_hand), sharder, local_size=1, world_size=1, device_type="cpu"
        )
        whole = types.ShardingPlan({"sparse_arch.embedding_bag_collection": made})
        self.model = module("distributed.model_parallel").DistributedModelParallel(
            model, device=torch.device("cpu"), plan=whole
        )
        keyed = module("optim.keyed")
        in_backward = module("optim.optimizers").in_backward_optimizer_filter
        dense = dict(in_backward(self.model.named_parameters()))
        adam = keyed.KeyedOptimizerWrapper(dense, lambda own: torch.optim.Adam(own, lr=0.01))
        self.optimizer = keyed.CombinedOptimizer([self.model.fused_optimizer, adam])
        self.keyed = top.KeyedJaggedTensor

    def scores(self, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.tensor([1, 2, 3, 0, 1, 1])
        ids = torch.randint(0, 6, (8,), generator=generator)
        features = self.keyed(["f1", "f2", "f3"], ids, lengths=lengths)
        return self.model(torch.rand(2, 3, generator=generator), features)

    def step(self, seed):
        self.optimizer.zero_grad()
        (self.scores(seed) ** 2).mean().backward()
        self.optimizer.step()


def assert_equal_now_and_after_a_step(one, other):
    for seed in (7, 8):
        assert torch.allclose(one.scores(seed), other.scores(seed), rtol=1e-5, atol=1e-6)
    for trained in (one, other):
        trained.step(9)
        trained.step(10)
    for seed in (7, 11):
        assert torch.allclose(one.scores(seed), other.scores(seed), rtol=1e-5, atol=1e-6)


CASES = [("dlrm", "columns", "row"), ("dcn", "rows", "adagrad"), ("dlrm", "rows", "row")]


@pytest.mark.parametrize(("arch", "plan", "fused"), CASES)
def test_what_torchrec_trained_goes_on_here(tmp_path, arch, plan, fused):
    theirs = Trained(THEIRS, arch, plan, fused)
    for seed in range(2):
        theirs.step(seed)
    saved = {"model": theirs.model.state_dict(), "optimizer": theirs.optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=str(tmp_path / "theirs"))
    args = ["convert-checkpoint", str(tmp_path / "theirs"), "--to", "tessera"]
    assert main([*args, "--out", str(tmp_path / "ours")]) == 0
    # Row-wise states of a table in blocks of columns fit whole rows only where the blocks agree.
    ours = Trained(OURS, arch, plan, fused)
    load_checkpoint(tmp_path / "ours", model=ours.model, optimizer=ours.optimizer)
    assert_equal_now_and_after_a_step(theirs, ours)


@pytest.mark.parametrize(("arch", "plan", "fused"), CASES)
def test_what_was_trained_here_goes_on_in_torchrec(tmp_path, arch, plan, fused):
    ours = Trained(OURS, arch, plan, fused)
    for seed in range(2):
        ours.step(seed)
    save_checkpoint(tmp_path / "ours", model=ours.model, optimizer=ours.optimizer)
    args = ["convert-checkpoint", str(tmp_path / "ours"), "--to", "torchrec"]
    assert main([*args, "--out", str(tmp_path / "theirs")]) == 0
    theirs = Trained(THEIRS, arch, plan, fused)
    theirs.step(0)  # its Adam has states to fill from its first step on
    found = {"model": theirs.model.state_dict(), "optimizer": theirs.optimizer.state_dict()}
    dcp.load(found, checkpoint_id=str(tmp_path / "theirs"))
    theirs.model.load_state_dict(found["model"])
    theirs.optimizer.load_state_dict(found["optimizer"])
    assert_equal_now_and_after_a_step(ours, theirs)


def test_a_plain_state_dict_of_torchrec_scores_the_same_here(tmp_path):
    def model(library):
        top = importlib.import_module(library)
        config = top.EmbeddingBagConfig(
            name="t", embedding_dim=4, num_embeddings=9, feature_names=["a", "b", "c", "d"]
        )
        models = importlib.import_module(f"{library}.models.dlrm")
        tables = top.EmbeddingBagCollection(tables=[config])
        return models.DLRM(tables, 3, [4], [6, 1]), top.KeyedJaggedTensor

    (theirs, keyed), (ours, own_keyed) = model(THEIRS), model(OURS)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    args = ["convert-checkpoint", str(tmp_path / "theirs.pt"), "--to", "tessera"]
    assert main([*args, "--out", str(tmp_path / "ours.pt")]) == 0
    ours.load_state_dict(torch.load(tmp_path / "ours.pt", weights_only=True))
    keys, ids, lengths = list("abcd"), torch.tensor([1, 8, 3, 2, 2, 0]), torch.tensor([1, 1, 2, 2])
    dense = torch.rand(1, 3)
    here = ours(dense, own_keyed(keys, ids, lengths=lengths))
    assert torch.allclose(here, theirs(dense, keyed(keys, ids, lengths=lengths)), rtol=1e-6)
