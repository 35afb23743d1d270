"""Score the validation set with a module and with what it is packaged as."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.serving.package.evaluation import Evaluation, LabelQuality, Quality
from tessera.serving.package.runner import HostBatch, Runner
from tessera.serving.package.schema import InputSchema, OutputSpec
from tessera.serving.packaging.inputs import named_outputs
from tessera.training.data.columns import ServedTask
from tessera.training.metrics.binary import auc
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.trainer.metrics import evaluate_probabilities
from tessera.training.trainer.split_metrics import RegressionMetrics

REGRESSION_METRICS = ("root_mean_squared_error", "mean_absolute_error", "r_squared", "calibration")
"""What is measured of a label of the task regression."""

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
    members: Mapping[str, nn.Module] | None = None,
) -> Evaluation | None:
    """Compare ``runner``, the packaged module, with the float32 ``module`` over the same rows.

    The outputs of binary labels are probabilities, or scores that only rank, of which the AUC alone is
    measured.  The metrics of the whole are those of the first such label; each label has its own
    besides, under the name of its output.  The largest change of a score is that of all labels'
    outputs.  After each batch,
    ``on_rows`` is called with its number of rows; the batch in which ``max_rows`` are reached is the last.

    Args:
        module: returns its outputs in the order of the labels.
        runner: the packaged module.
        schema: of both.
        batches: arguments, and labels in the order of ``tasks``; NaN where one is not known.
        tasks: what each label is.
        max_rows: about how many rows are scored; None: all.
        on_rows: see above.
        members: by name, modules that an ensemble is made of; they take and give what it does.

    Returns:
        The metrics of both; None where there are no rows.

    Raises:
        UserError: a label's output has several columns.
    """
    before: list[np.ndarray] = []
    after: list[np.ndarray] = []
    truth: list[np.ndarray] = []
    alone: dict[str, list[np.ndarray]] = {name: [] for name in members or {}}
    rows = 0
    outputs = schema.outputs[: len(tasks)]
    for arguments, labels in batches:
        for output in outputs:
            if output.width != 1:
                raise UserError(
                    f"output {output.name!r} has {output.width} columns, and labels are for one; "
                    "package without validation data"
                )
        found = runner.forward(host_batch(arguments, schema))
        before.append(_scores(module, arguments, outputs))
        for name, member in (members or {}).items():
            alone[name].append(_scores(member, arguments, outputs))
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
        labels={
            output.name: LabelQuality(
                task="regression" if task == "regression" else "binary",
                rows=int((~np.isnan(labelled[:, place])).sum()),
                fp32=_metrics(exact[:, place], labelled[:, place], task),
                packaged=_metrics(packaged[:, place], labelled[:, place], task),
            )
            for place, (output, task) in enumerate(zip(outputs, tasks, strict=True))
        },
        members={
            name: {
                output.name: _metrics(np.concatenate(scores)[:, place], labelled[:, place], task)
                for place, (output, task) in enumerate(zip(outputs, tasks, strict=True))
            }
            for name, scores in alone.items()
        },
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


def _scores(
    module: nn.Module,
    arguments: Sequence[Tensor | KeyedJaggedTensor],
    outputs: Sequence[OutputSpec],
) -> np.ndarray:
    """The outputs ``[B, L]`` of a module in evaluation mode."""
    with torch.inference_mode(), _evaluating(module):
        given = named_outputs(module(*arguments), outputs[0].name)
    return _columns([given[output.name].flatten() for output in outputs])


def _columns(scores: Sequence[Tensor]) -> np.ndarray:
    return torch.stack([each.float() for each in scores], dim=1).numpy()


def _quality(scores: np.ndarray, labels: np.ndarray, tasks: Sequence[ServedTask]) -> Quality:
    """The metrics of the first binary label; none are defined where there is none."""
    place = next((at for at, task in enumerate(tasks) if task != "regression"), None)
    found = {} if place is None else _metrics(scores[:, place], labels[:, place], tasks[place])
    return Quality(**{name: found.get(name) for name in Quality.__dataclass_fields__})


def _metrics(scores: np.ndarray, labels: np.ndarray, task: ServedTask) -> dict[str, float | None]:
    """The metrics of one label, ``[N]`` scores and labels; see `LabelQuality`."""
    known = ~np.isnan(labels)
    if task == "score":
        ranked = auc(scores[known], labels[known])
        return {"auc": None if math.isnan(ranked) else ranked}
    if task == "binary":
        metrics = evaluate_probabilities(scores[known], labels[known]).to_json()
        return {name: metrics[name] for name in Quality.__dataclass_fields__}
    collected = RegressionMetrics(int(known.sum()))
    collected.update(torch.from_numpy(scores[known]), torch.from_numpy(labels[known]))
    found = collected.compute().to_json()
    return {name: value for name, value in found.items() if name in REGRESSION_METRICS}


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
