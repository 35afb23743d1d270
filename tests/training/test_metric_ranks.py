"""Metrics of two ranks: values of all examples, whatever each rank has seen, and states that are saved."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import distributed as dist

from tessera.training.metrics.metric_module import RecMetricModule, generate_metric_module
from tessera.training.metrics.metrics_config import (
    MetricsConfig,
    RecComputeMode,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    ThroughputDef,
)
from tessera.training.metrics.rec_metric import RecMetricException
from tests.training.ranks import rank_device, run_on_ranks

pytestmark = pytest.mark.multi_gpu
BATCH, WINDOW = 16, 64
TASKS = ("a", "b")
METRICS = (RecMetricEnum.NE, RecMetricEnum.AUC, RecMetricEnum.AUPRC, RecMetricEnum.MSE)


def module_of(rank, world_size, *, fused, on_all):
    config = MetricsConfig(
        rec_tasks=[RecTaskInfo(task, f"{task}-y", f"{task}-p", f"{task}-w") for task in TASKS],
        rec_metrics={
            metric: RecMetricDef(
                rec_task_indices=[0, 1],
                window_size=WINDOW,
                arguments={"grouped_auc": True} if metric is RecMetricEnum.AUC else None,
            )
            for metric in METRICS
        },
        rec_compute_mode=RecComputeMode.FUSED_TASKS_AND_STATES_COMPUTATION
        if fused
        else RecComputeMode.UNFUSED_TASKS_COMPUTATION,
        throughput_metric=ThroughputDef(),
        compute_on_all_ranks=on_all,
        should_validate_update=True,
        min_compute_interval=1e6,
    )
    return generate_metric_module(
        RecMetricModule, config, BATCH, world_size, rank, {}, rank_device()
    )


def batches(rank):
    """Rank 0 sees 3 batches, rank 1 five of other sizes, the last without weights in task b."""
    random = np.random.default_rng(rank)
    for number in range((3, 5)[rank]):
        size = BATCH - 3 * rank
        made = {"grouping_keys": torch.from_numpy(random.integers(0, 3, size))}
        for task in TASKS:
            p = np.round(random.random(size), 1)
            made[f"{task}-p"] = torch.from_numpy(p)
            made[f"{task}-y"] = torch.from_numpy((random.random(size) < p).astype(np.float64))
            w = random.integers(1, 4, size).astype(np.float64)
            made[f"{task}-w"] = torch.from_numpy(w * (task == "a" or number < 4))
        yield made


def numbers(values):
    return {key: float(value) for key, value in values.items() if "throughput" not in key}


def on_a_rank(fused):
    rank, size = dist.get_rank(), dist.get_world_size()
    module = module_of(rank, size, fused=fused, on_all=False)
    none = module.compute()
    for batch in batches(rank):
        module.update({key: value.to(rank_device()) for key, value in batch.items()})
    found, local = numbers(module.compute()), numbers(module.local_compute())
    module.sync()
    synced, refused = numbers(module.local_compute()), False
    saved = module.state_dict()
    saved = {key: value.clone() for key, value in saved.items()}
    try:
        module.update({key: value.to(rank_device()) for key, value in batch.items()})
    except RecMetricException:
        refused = True
    module.unsync()
    again = numbers(module.local_compute())
    # Continued on as many ranks, and by the one that loads a state dict.
    states = module.get_pre_compute_states()
    continued = module_of(rank, size, fused=fused, on_all=True)
    continued.load_pre_compute_states(states)
    by_state_dict = module_of(rank, size, fused=fused, on_all=True)
    if rank == 0:
        by_state_dict.load_state_dict(saved)
    return {
        "none": numbers(none),
        "found": found,
        "local": local,
        "again": again,
        "synced": synced,
        "refused": refused,
        "continued": numbers(continued.compute()),
        "by state dict": numbers(by_state_dict.compute()),
        "interval": module.compute_interval_steps,
        "groups": sorted(states),
    }


def ne(p, y, w):
    def loss(q):
        return sk.log_loss(y, q, sample_weight=w, labels=[0, 1])

    return loss(p) / loss(np.full(len(y), np.average(y, weights=w)))


def grouped(p, y, w, groups):
    """The mean AUC of groups, 0.5 for a group of one class."""
    aucs = []
    for group in np.unique(groups):
        rows = groups == group
        one = len(set(y[rows])) == 1 or not w[rows].any()
        aucs.append(0.5 if one else sk.roc_auc_score(y[rows], p[rows], sample_weight=w[rows]))
    return np.mean(aucs)


def expected(window):
    """The values of the examples of both ranks; each rank has a window of its own, half as large."""
    found = {}
    for task in TASKS:
        parts, rows = [], []
        for rank in (0, 1):
            made = list(batches(rank))
            keys = [f"{task}-p", f"{task}-y", f"{task}-w", "grouping_keys"]
            seen = [[batch[key].numpy() for key in keys] for batch in made]
            # Sums leave out what has no weights, where tasks are updated alone; it adds nothing anyway.
            newest = seen[-(WINDOW // 2 // len(seen[0][0])) :] if window else seen
            parts += newest
            rows.append(
                [np.concatenate(values)[-WINDOW // 2 :] for values in zip(*seen, strict=True)]
            )
        p, y, w = (np.concatenate(values) for values in list(zip(*parts, strict=True))[:3])
        prefix = "window_" if window else "lifetime_"
        found[f"ne-{task}|{prefix}ne"] = ne(p, y, w)
        mse = sk.mean_squared_error(y, p, sample_weight=w)
        found[f"mse-{task}|{prefix}mse"] = mse
        found[f"mse-{task}|{prefix}rmse"] = mse**0.5
        if window:
            p, y, w, groups = (np.concatenate(values) for values in zip(*rows, strict=True))
            found[f"auc-{task}|window_auc"] = sk.roc_auc_score(y, p, sample_weight=w)
            found[f"auc-{task}|window_grouped_auc"] = grouped(p, y, w, groups)
            found[f"auprc-{task}|window_auprc"] = sk.average_precision_score(y, p, sample_weight=w)
    return found


def test_values_are_those_of_all_ranks():
    # Fused, a batch in which one task has weights is counted for both.
    ranks = run_on_ranks(2, on_a_rank, True)
    wanted = {**expected(window=False), **expected(window=True)}
    assert ranks[0]["found"] == pytest.approx(wanted, rel=1e-6)
    assert ranks[1]["found"] == {}
    assert set(ranks[0]["none"].values()) == {0.0}
    for rank in ranks:
        as_global = {key.replace("local_", ""): value for key, value in rank["synced"].items()}
        assert as_global == pytest.approx(ranks[0]["found"], rel=1e-12)
        assert rank["again"] == rank["local"] != rank["synced"]
        assert rank["refused"]
        assert rank["interval"] == ranks[0]["interval"] > 100
        assert rank["groups"] == ["auc", "auprc", "mse", "ne", "throughput"]
        lifetime = expected(window=False)
        for found in (rank["continued"], rank["by state dict"]):
            kept = {key: value for key, value in found.items() if key in lifetime}
            assert kept == pytest.approx(lifetime, rel=1e-6)
            assert found["auc-a|window_auc"] == 0.5


def test_tasks_alone_have_the_same_values():
    lifetime = expected(window=False)
    found = run_on_ranks(2, on_a_rank, False)[0]["found"]
    assert {key: found[key] for key in lifetime} == pytest.approx(lifetime, rel=1e-6)
