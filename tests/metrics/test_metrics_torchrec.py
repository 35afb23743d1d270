"""Every metric that both libraries have, on the same batches, where TorchRec is installed.

Weights are positive, predictions and labels differ: where values have no meaning the two differ as docs/torchrec.md
says.
"""

import importlib

import pytest
import torch

pytest.importorskip("torchrec", reason="TorchRec is not installed; it is a peer, not a dependency")

from tessera.training.metrics.mapping import REC_METRICS_MAPPING

OURS, THEIRS = "tessera.training", "torchrec"
BATCH, CLASSES = 16, 4
# In time, or with another state of the window (docs/torchrec.md).
NOT_COMPARED = {"tower_qps", "ndcg"}
ARGUMENTS = {
    "multiclass_recall": {"number_of_classes": CLASSES},
    "multi_label_precision": {"num_labels": 3},
    "segmented_ne": {"num_groups": 3, "grouping_keys": "session"},
    "recalibrated_ne": {"recalibration_coefficient": 0.3},
    "recalibrated_calibration": {"recalibration_coefficient": 0.3},
    "hindsight_target_pr": {"target_precision": 0.6},
}


def values(library, name):
    config = importlib.import_module(f"{library}.metrics.metrics_config")
    module = importlib.import_module(f"{library}.metrics.metric_module")
    task = config.RecTaskInfo(
        name="a",
        session_metric_def=config.SessionMetricDef("session", top_threshold=2),
        tensor_name="x",
    )
    metric = module.REC_METRICS_MAPPING[config.RecMetricEnum(name)](
        world_size=1,
        my_rank=0,
        batch_size=BATCH,
        tasks=[task],
        window_size=2 * BATCH,
        **ARGUMENTS.get(name, {}),
    )
    generator = torch.Generator().manual_seed(7)

    def rand(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    for _ in range(3):
        shape = (BATCH, CLASSES) if name == "multiclass_recall" else (BATCH,)
        predictions, weights, x = rand(*shape), rand(BATCH) + 0.1, rand(BATCH)
        labels = (rand(BATCH) < 0.5).double()
        if name in {"multiclass_recall", "multi_label_precision"}:
            labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        if name == "multi_label_precision":
            predictions = torch.randint(0, 8, (BATCH,), generator=generator)
        session = torch.randint(0, 3, (BATCH,), generator=generator)
        metric.update(
            predictions={"a": predictions},
            labels={"a": labels},
            weights={"a": weights},
            required_inputs={
                "session": session.reshape(1, -1) if "session" in name else session,
                "x": x,
                "latest_imp": x,
                "total_latest_imp": 2 * x,
            },
        )
    return {key: value.reshape(-1) for key, value in metric.compute().items()}


@pytest.mark.parametrize(
    "name", [str(each) for each in REC_METRICS_MAPPING if str(each) not in NOT_COMPARED]
)
def test_a_metric_reports_what_torchrec_reports(name):
    ours, theirs = values(OURS, name), values(THEIRS, name)
    if name == "hindsight_target_pr":
        # TorchRec reports an empty tensor of that size in the place of the threshold's number.
        for found in (ours, theirs):
            found.pop("hindsight_target_pr-a|lifetime_hindsight_target_pr")
            found.pop("hindsight_target_pr-a|window_hindsight_target_pr")
    if name == "auprc":  # the mean of the windows that were computed, of all tasks together
        theirs = {key: value for key, value in theirs.items() if "lifetime" not in key}
    if name.endswith("weighted_avg"):  # a window of examples here, of updates there
        theirs.pop("weighted_avg-a|window_weighted_avg")
        ours.pop("weighted_avg-a|window_weighted_avg")
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.allclose(value.double(), theirs[key].double(), rtol=1e-5), key
