"""Score the validation set with a module and with what it is packaged as."""

from __future__ import annotations

import math
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
from tessera.training.data.columns import ServedTask
from tessera.training.metrics.binary import auc
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.trainer.metrics import evaluate_probabilities

LabelledBatch = tuple[Sequence[Tensor | KeyedJaggedTensor], Tensor]
"""The arguments of a module, and the labels ``[B]`` of its first output or ``[B, L]`` of its first ``L``."""


def evaluate(
    module: nn.Module,
    runner: Runner,
    schema: InputSchema,
    batches: Iterable[LabelledBatch],
    *,
    tasks: Sequence[ServedTask] = ("binary",),
    max_rows: int | None = None,
    on_rows: Callable[[int], object] = lambda rows: rows,
) -> Evaluation | None:
    """Compare ``runner``, the packaged module, with the float32 ``module`` over the same rows.

    The metrics are those of the first label whose task is binary: the outputs of such labels are
    probabilities.  Of scores that only rank, it is the AUC alone.  The largest change of a score is that of all labels' outputs.  After each batch,
    ``on_rows`` is called with its number of rows; the batch in which ``max_rows`` are reached is the last.

    Args:
        module: returns its outputs in the order of the labels.
        runner: the packaged module.
        schema: of both.
        batches: arguments, and labels in the order of ``tasks``; NaN where one is not known.
        tasks: what each label is.
        max_rows: about how many rows are scored; None: all.
        on_rows: see above.

    Returns:
        The metrics of both; None where there are no rows.

    Raises:
        UserError: a label's output has several columns.
    """
    before: list[np.ndarray] = []
    after: list[np.ndarray] = []
    truth: list[np.ndarray] = []
    rows = 0
    outputs = schema.outputs[: len(tasks)]
    for arguments, labels in batches:
        for output in outputs:
            if output.width != 1:
                raise UserError(
                    f"output {output.name!r} has {output.width} columns, and labels are for one; "
                    "package without validation data"
                )
        with torch.inference_mode(), _evaluating(module):
            given = named_outputs(module(*arguments), outputs[0].name)
        found = runner.forward(host_batch(arguments, schema))
        before.append(_columns([given[output.name].flatten() for output in outputs]))
        after.append(_columns([found[output.name] for output in outputs]))
        truth.append(labels.view(len(labels), -1).numpy())
        rows += len(labels)
        on_rows(len(labels))
        if max_rows is not None and rows >= max_rows:
            break
    if rows == 0:
        return None
    exact, packaged, labelled = map(np.concatenate, (before, after, truth))
    return Evaluation(
        rows=rows,
        fp32=_quality(exact, labelled, tasks),
        packaged=_quality(packaged, labelled, tasks),
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


def _columns(scores: Sequence[Tensor]) -> np.ndarray:
    return torch.stack([each.float() for each in scores], dim=1).numpy()


def _quality(scores: np.ndarray, labels: np.ndarray, tasks: Sequence[ServedTask]) -> Quality:
    """The metrics of the first binary label; none are defined where there is none."""
    if "score" in tasks:
        place = tasks.index("score")
        known = ~np.isnan(labels[:, place])
        found = auc(scores[known, place], labels[known, place])
        defined = None if math.isnan(found) else found
        return Quality(auc=defined, normalised_entropy=None, log_loss=None, calibration=None)
    if "binary" not in tasks:
        return Quality(auc=None, normalised_entropy=None, log_loss=None, calibration=None)
    place = tasks.index("binary")
    known = ~np.isnan(labels[:, place])
    metrics = evaluate_probabilities(scores[known, place], labels[known, place]).to_json()
    return Quality(**{name: metrics[name] for name in vars(Quality)["__dataclass_fields__"]})


def host_batch(arguments: Sequence[Tensor | KeyedJaggedTensor], schema: InputSchema) -> HostBatch:
    """A module's arguments as the package's six tensors; ids of both groups may be in one of them."""
    dense = next((given for given in arguments if isinstance(given, Tensor)), None)
    jagged = [given for given in arguments if isinstance(given, KeyedJaggedTensor)]
    rows = jagged[0].stride() if dense is None else len(dense)
    return HostBatch.of(
        torch.empty(rows, 0) if dense is None else dense,
        _group(jagged, schema, scored=False)[:2],
        _group(jagged, schema, scored=True),
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
