"""GAUC and NDCG of a training's batches, against scikit-learn session by session."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from tessera.training.metrics.gauc import GAUCMetric
from tessera.training.metrics.metrics_config import RecComputeMode, RecTaskInfo
from tessera.training.metrics.ndcg import NDCGMetric
from tessera.training.metrics.ranked import by_falling_score
from tessera.training.metrics.ranking import GroupRanking
from tessera.training.metrics.rec_metric import RecMetricException

SIZES = (5, 1, 7, 4, 3, 6)
EXAMPLES = sum(SIZES)
SESSIONS = np.repeat(np.arange(len(SIZES)), SIZES)


def batch(seed):
    """Predictions with ties, labels from 0 to 3, and weights."""
    random = np.random.default_rng(seed)
    return [random.integers(0, n, EXAMPLES).astype(np.float64) for n in (5, 4)] + [
        random.integers(1, 4, EXAMPLES).astype(np.float64)
    ]


def fed(kind, batches, required, tasks=("t",), **arguments):
    metric = kind(
        1,
        0,
        EXAMPLES,
        [RecTaskInfo(name=task) for task in tasks],
        window_size=2 * EXAMPLES,
        **arguments,
    )
    for of_tasks in batches:
        values = [dict(zip(tasks, map(torch.tensor, each), strict=True)) for each in of_tasks]
        metric.update(predictions=values[0], labels=values[1], weights=values[2], **required)
    return {k: v.item() for k, v in metric.compute().items()}


def gauc_of(p, y, w):
    aucs = []
    for session in range(len(SIZES)):
        rows = session == SESSIONS
        if len(set(y[rows])) == 2 and len(set(p[rows])) > 1:
            aucs.append(sk.roc_auc_score(y[rows], p[rows], sample_weight=w[rows]))
    return aucs


@pytest.mark.parametrize("fused", [False, True])
def test_gauc_is_the_mean_of_the_sessions(fused):
    mode = (
        RecComputeMode.FUSED_TASKS_COMPUTATION
        if fused
        else RecComputeMode.UNFUSED_TASKS_COMPUTATION
    )
    made = []
    for seed in range(3):
        p, y, w = batch(seed)
        y = (y > 1).astype(np.float64)
        y[SESSIONS == 3] = 1.0
        p[SESSIONS == 4] = 0.3
        made.append(([p, -p], [y, y], [w, w]))
    required = {"num_candidates": torch.tensor(SIZES)}
    found = fed(GAUCMetric, made, required, ("t", "u"), compute_mode=mode)
    for prefix, part in (("lifetime", made), ("window", made[-2:])):
        for place, task in enumerate(("t", "u")):
            aucs = [auc for p, y, w in part for auc in gauc_of(p[place], y[place], w[place])]
            assert 0 < len(aucs) < len(SIZES) * len(part)
            assert found[f"gauc-{task}|{prefix}_gauc"] == pytest.approx(np.mean(aucs), rel=1e-8)
            assert found[f"gauc-{task}|{prefix}_gauc_num_samples"] == len(aucs)


def test_gauc_needs_sessions():
    p, y, w = batch(1)
    for required, match in (({}, "missing"), ({"num_candidates": torch.tensor([4, 5])}, "has 9")):
        with pytest.raises(RecMetricException, match=match):
            fed(GAUCMetric, [([p], [y], [w])], required)
    of_one_class = fed(GAUCMetric, [([p], [0 * y], [w])], {"num_candidates": torch.tensor(SIZES)})
    assert of_one_class["gauc-t|lifetime_gauc"] == pytest.approx(0.5)


def ndcg_of(p, y, *, k=None, exponential=False):
    """Each session's NDCG; 0 where no label is above 0, 1 or 0 for one example."""
    values = []
    for session in range(len(SIZES)):
        rows = session == SESSIONS
        gains = 2 ** y[rows] - 1 if exponential else y[rows]
        if rows.sum() == 1:
            values.append(float(gains[0] > 0))
        else:
            values.append(sk.ndcg_score([gains], [p[rows]], k=k))
    return np.array(values)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"k": 2},
        {"k": 3, "exponential_gain": True, "report_ndcg_as_decreasing_curve": False},
        {"remove_single_length_sessions": True},
        {"scale_by_weights_tensor": True},
    ],
    ids=["all", "k", "exponential", "longer", "scaled"],
)
def test_ndcg_is_that_of_scikit_learn(arguments):
    made, reported = [], []
    of_session = np.array(SIZES) > (1 if "remove_single_length_sessions" in arguments else 0)
    for seed in range(3):
        p, y, w = batch(seed + 10)
        y[SESSIONS == 3] = 0.0
        made.append(([p], [y], [w]))
        scale = w if "scale_by_weights_tensor" in arguments else np.ones(EXAMPLES)
        value = ndcg_of(
            scale * p,
            scale * y,
            k=arguments.get("k"),
            exponential=arguments.get("exponential_gain", False),
        )
        if arguments.get("report_ndcg_as_decreasing_curve", True):
            value = 1 - value
        if "scale_by_weights_tensor" not in arguments:
            value = value * [w[session == SESSIONS].max() for session in range(len(SIZES))]
        reported.append(value[of_session])
    names = torch.tensor(SESSIONS * 7 + 100)
    found = fed(NDCGMetric, made, {"required_inputs": {"session_id": names}}, **arguments)
    assert found["ndcg-t|lifetime_ndcg"] == pytest.approx(np.mean(reported), rel=1e-9)
    assert found["ndcg-t|window_ndcg"] == pytest.approx(np.mean(reported[-2:]), rel=1e-9)


def test_ndcg_equals_that_of_an_evaluation():
    p, y, w = batch(20)
    expected = GroupRanking(p, y, SESSIONS).ndcg_at_k(4)
    found = fed(
        NDCGMetric,
        [([p], [y], [w * 0 + 1])],
        {"required_inputs": {"s": torch.tensor(SESSIONS)}},
        session_key="s",
        k=4,
        report_ndcg_as_decreasing_curve=False,
    )
    defined = sum(y[session == SESSIONS].max() > 0 for session in range(len(SIZES)))
    assert defined == len(SIZES)  # the evaluation leaves out sessions without positives
    assert found["ndcg-t|lifetime_ndcg"] == pytest.approx(expected.value, rel=1e-9)


def test_ndcg_of_negative_tasks_and_fused_ones():
    p, y, w = batch(30)
    p, y = p / 5, (y > 1).astype(np.float64)
    tasks = [RecTaskInfo(name="like"), RecTaskInfo(name="skip", is_negative_task=True)]
    metric = NDCGMetric(
        1, 0, EXAMPLES, tasks, RecComputeMode.FUSED_TASKS_COMPUTATION, window_size=EXAMPLES
    )
    assert metric.get_required_inputs() == {"session_id"}
    values = [{"like": torch.tensor(v), "skip": torch.tensor(v)} for v in (p, y, w)]
    sessions = {"required_inputs": {"session_id": torch.tensor(SESSIONS)}}
    metric.update(predictions=values[0], labels=values[1], weights=values[2], **sessions)
    found = {k: v.item() for k, v in metric.compute().items()}
    largest = np.array([w[session == SESSIONS].max() for session in range(len(SIZES))])
    for task, ndcg in (("like", ndcg_of(p, y)), ("skip", ndcg_of(1 - p, 1 - y))):
        expected = np.mean((1 - ndcg) * largest)
        assert found[f"ndcg-{task}|window_ndcg"] == pytest.approx(expected, rel=1e-9)
    assert values[0]["skip"].tolist() == p.tolist()  # the caller's tensors stay as they are
    with pytest.raises(RecMetricException, match="session_id"):
        metric.update(predictions=values[0], labels=values[1], weights=values[2])
    with pytest.raises(RecMetricException, match="give at least 1"):
        fed(NDCGMetric, [], {}, k=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 100, 50_000])
def test_scores_fall_as_torch_sorts_them(dtype, count):
    generator = torch.Generator().manual_seed(count)
    scores = (torch.randn(count, generator=generator) * 8).round()
    if dtype.is_floating_point:
        unusual = [-0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 0.25, -1e-40]
        for place, value in enumerate(unusual, start=1):
            scores[place :: 5 + 2 * place] = value
    scores = scores.to(dtype)
    assert torch.equal(by_falling_score(scores), scores.argsort(descending=True, stable=True))
