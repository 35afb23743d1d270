"""Score the validation set with a module and with what it is packaged as."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.serving.package.manifest import Evaluation, Quality
from tessera.serving.package.runner import HostBatch, Runner
from tessera.serving.package.schema import InputSchema
from tessera.serving.packaging.inputs import named_outputs
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.trainer.metrics import evaluate_probabilities

LabelledBatch = tuple[Sequence[Tensor | KeyedJaggedTensor], Tensor]
"""The arguments of a module, and the labels ``[B]`` of its first output."""


def evaluate(
    module: nn.Module,
    runner: Runner,
    schema: InputSchema,
    batches: Iterable[LabelledBatch],
    *,
    max_rows: int | None = None,
    on_rows: Callable[[int], object] = lambda rows: rows,
) -> Evaluation | None:
    """Compare ``runner``, the packaged module, with the float32 ``module`` over the same rows.

    The first output of both are probabilities.  After each batch, ``on_rows`` is called with its
    number of rows; the batch in which ``max_rows`` are reached is the last.

    Returns:
        The metrics of both; None where there are no rows.

    Raises:
        UserError: the first output has several columns.
    """
    output = schema.outputs[0]
    before, after, truth = [], [], []
    rows = 0
    for arguments, labels in batches:
        if output.width != 1:
            raise UserError(
                f"output {output.name!r} has {output.width} columns, and labels are for one; "
                "package without validation data"
            )
        with torch.inference_mode(), _evaluating(module):
            given = named_outputs(module(*arguments), output.name)[output.name]
        before.append(given.flatten().float().numpy())
        after.append(runner.forward(host_batch(arguments, schema))[output.name].numpy())
        truth.append(labels.numpy())
        rows += len(labels)
        on_rows(len(labels))
        if max_rows is not None and rows >= max_rows:
            break
    if rows == 0:
        return None
    exact, packaged, labelled = map(np.concatenate, (before, after, truth))
    return Evaluation(
        rows=rows,
        fp32=_quality(exact, labelled),
        packaged=_quality(packaged, labelled),
        max_abs_score_error=float(np.abs(packaged - exact).max()),
    )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Run a module in evaluation mode, and leave each of its parts in the mode that it had."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _quality(scores: np.ndarray, labels: np.ndarray) -> Quality:
    metrics = evaluate_probabilities(scores, labels).to_json()
    return Quality(**{name: metrics[name] for name in vars(Quality)["__dataclass_fields__"]})


def host_batch(arguments: Sequence[Tensor | KeyedJaggedTensor], schema: InputSchema) -> HostBatch:
    """A module's arguments as the package's six tensors; ids of both groups may be in one of them."""
    dense = next((given for given in arguments if isinstance(given, Tensor)), None)
    jagged = [given for given in arguments if isinstance(given, KeyedJaggedTensor)]
    rows = jagged[0].stride() if dense is None else len(dense)
    plain_lengths, plain_values, _ = _group(jagged, schema, scored=False)
    scored_lengths, scored_values, weights = _group(jagged, schema, scored=True)
    return HostBatch(
        float_features=torch.empty(rows, 0) if dense is None else dense,
        id_list_features_lengths=plain_lengths,
        id_list_features_values=plain_values,
        id_score_list_features_lengths=scored_lengths,
        id_score_list_features_values=scored_values,
        id_score_list_features_weights=weights,
        batch_size=rows,
    )


def _group(
    jagged: Sequence[KeyedJaggedTensor], schema: InputSchema, *, scored: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths int32, ids and weights of one group, in the schema's order."""
    names = [feature.name for feature in schema.group("id_score_list" if scored else "id_list")]
    if not names:
        empty = torch.empty(0, dtype=torch.int32)
        return empty, empty.long(), empty.float()
    sparse = next(given for given in jagged if set(names) <= set(given.keys()))
    if names != sparse.keys():
        places = sparse.index_per_key()
        sparse = sparse.permute([places[name] for name in names])
    weights = sparse.weights() if scored else torch.empty(0)
    return sparse.lengths().int(), sparse.values(), weights
