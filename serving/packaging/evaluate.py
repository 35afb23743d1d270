"""Score the validation set with the trained model and with the packaged one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from tessera.serving.package.manifest import Evaluation, Quality
from tessera.serving.package.runner import HostBatch, Runner
from tessera.serving.package.schema import InputSchema
from tessera.training.data.batch import Batch
from tessera.training.models.ranking import RankingModel
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.trainer.metrics import evaluate_probabilities


def evaluate(
    model: RankingModel,
    runner: Runner,
    schema: InputSchema,
    batches: Iterable[Batch],
    *,
    max_rows: int | None = None,
    on_rows: Callable[[int], object] = lambda rows: rows,
) -> Evaluation | None:
    """Compare ``runner`` with ``model`` over the same rows.

    Args:
        model: the trained float32 model.
        runner: the packaged model.
        schema: its inputs and its one output.
        batches: the validation set.
        max_rows: stop at the batch in which this many rows are reached.
        on_rows: called with the number of rows after each batch.

    Returns:
        The metrics of both; None where there are no rows.
    """
    trained, packaged, labels = [], [], []
    rows = 0
    for batch in batches:
        with torch.inference_mode():
            logits = model(batch.dense_features, batch.sparse_features)
        trained.append(torch.sigmoid(logits).numpy())
        packaged.append(runner.forward(host_batch(batch, schema))[schema.outputs[0].name].numpy())
        labels.append(batch.labels.numpy())
        rows += batch.size
        on_rows(batch.size)
        if max_rows is not None and rows >= max_rows:
            break
    if rows == 0:
        return None
    before, after, truth = np.concatenate(trained), np.concatenate(packaged), np.concatenate(labels)
    return Evaluation(
        rows=rows,
        fp32=_quality(before, truth),
        packaged=_quality(after, truth),
        max_abs_score_error=float(np.abs(after - before).max()),
    )


def _quality(scores: np.ndarray, labels: np.ndarray) -> Quality:
    metrics = evaluate_probabilities(scores, labels).to_json()
    return Quality(**{name: metrics[name] for name in vars(Quality)["__dataclass_fields__"]})


def host_batch(batch: Batch, schema: InputSchema) -> HostBatch:
    """A training batch as the package's six tensors."""
    plain_lengths, plain_values, _ = _group(batch.sparse_features, schema, scored=False)
    scored_lengths, scored_values, weights = _group(batch.sparse_features, schema, scored=True)
    return HostBatch(
        float_features=batch.dense_features,
        id_list_features_lengths=plain_lengths,
        id_list_features_values=plain_values,
        id_score_list_features_lengths=scored_lengths,
        id_score_list_features_values=scored_values,
        id_score_list_features_weights=weights,
        batch_size=batch.size,
    )


def _group(
    sparse: KeyedJaggedTensor, schema: InputSchema, *, scored: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths int32, ids and weights of one group, in the schema's order."""
    names = [feature.name for feature in schema.group("id_score_list" if scored else "id_list")]
    if not names:
        empty = torch.empty(0, dtype=torch.int32)
        return empty, empty.long(), empty.float()
    if names != sparse.keys():
        places = sparse.index_per_key()
        sparse = sparse.permute([places[name] for name in names])
    weights = sparse.weights() if scored else torch.empty(0)
    return sparse.lengths().int(), sparse.values(), weights
