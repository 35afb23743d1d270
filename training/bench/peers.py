"""The peers of `quality`: what the same rows score in scikit-learn and LightGBM.

They get the very features of a `Batch`.  Logistic regression: one 0/1 column per id seen in training
(a count where a bag holds an id several times), the dense values standardised, and a 0/1 column per
dense value that is missing.  LightGBM: the dense values with their gaps, and the categories as its
own categorical features, ids with fewer than `RARE` training rows as missing ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
from sklearn.linear_model import LogisticRegression

from tessera.training.data.dataset import View
from tessera.training.data.loader import BatchLoader
from tessera.training.transforms.preprocessor import Preprocessor

RARE = 5
LIGHTGBM = {
    "objective": "binary",
    "learning_rate": 0.03,
    "num_leaves": 15,
    "min_data_in_leaf": 50,
    "feature_fraction": 0.5,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "cat_smooth": 20,
    "cat_l2": 20,
    "seed": 0,
    "verbose": -1,
}
LIGHTGBM_ROUNDS = 300

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Plain:
    """Rows as numpy has them.

    Dense ``[n, F_dense]``, NaN where missing; lengths ``[F, n]``; per feature, the ids of all its
    bags; labels ``[n]``.
    """

    dense: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int32]
    values: list[npt.NDArray[np.int64]]
    labels: npt.NDArray[np.float32]


def plain(view: View) -> Plain:
    """All rows of ``view``, which has at least one, in its order."""
    whole = BatchLoader(view, batch_size=len(view), shuffle=False, seed=0, prefetch=0)
    batch = next(whole.epoch(0))
    features = len(view.dataset.columns.sparse)
    lengths = batch.sparse_features.lengths().numpy().reshape(features, -1)
    bounds = np.cumsum(lengths.sum(axis=1))[:-1]
    values = np.split(batch.sparse_features.values().numpy(), bounds)
    # The peers get the dense values that a model's layers get: no transform of these data sets has
    # anything to learn.
    preprocessor = Preprocessor(view.dataset.columns.transforms())
    dense, _ = preprocessor(batch.dense_features, batch.sparse_features)
    return Plain(dense.numpy(), lengths, values, batch.labels.numpy())


class LinearFeatures:
    """The columns of the logistic regression, as training rows define them."""

    def __init__(self, train: Plain) -> None:
        self._ids = [np.unique(values) for values in train.values]
        self._mean = np.nanmean(train.dense, axis=0)
        self._std = np.nanstd(train.dense, axis=0) + 1e-9

    def matrix(self, rows: Plain) -> Any:
        """``[n, columns]`` sparse float32."""
        count = len(rows.labels)
        blocks = []
        for ids, lengths, values in zip(self._ids, rows.lengths, rows.values, strict=True):
            place = np.minimum(np.searchsorted(ids, values), max(len(ids) - 1, 0))
            known = ids[place] == values if len(ids) else np.zeros(len(values), np.bool_)
            sample = np.repeat(np.arange(count), lengths)
            ones = np.ones(int(known.sum()), np.float32)
            blocks.append(
                scipy.sparse.csr_matrix(
                    (ones, (sample[known], place[known])), shape=(count, len(ids))
                )
            )
        missing = np.isnan(rows.dense)
        scaled = np.where(missing, 0, (rows.dense - self._mean) / self._std)
        dense = np.concatenate([scaled, missing], axis=1).astype(np.float32)
        return scipy.sparse.hstack([*blocks, scipy.sparse.csr_matrix(dense)]).tocsr()


def logistic_regression(train: Plain, test: Plain, *, inverse_l2: float) -> Scores:
    """Probabilities of ``test``; ``inverse_l2`` is scikit-learn's ``C``."""
    features = LinearFeatures(train)
    model = LogisticRegression(C=inverse_l2, max_iter=300)
    model.fit(features.matrix(train), train.labels)
    scores: Scores = model.predict_proba(features.matrix(test))[:, 1]
    return scores


def joined(first: Plain, second: Plain) -> Plain:
    """The rows of both, one after the other."""
    pairs = zip(first.values, second.values, strict=True)
    return Plain(
        np.concatenate([first.dense, second.dense]),
        np.concatenate([first.lengths, second.lengths], axis=1),
        [np.concatenate(both) for both in pairs],
        np.concatenate([first.labels, second.labels]),
    )


def lightgbm(
    train: Plain, test: Plain, *, leaves: int | None = None, rounds: int = LIGHTGBM_ROUNDS
) -> Scores:
    """Probabilities of ``test``; of a bag of several ids LightGBM is not told any.

    ``leaves`` stands for the number of leaves in `LIGHTGBM`.
    """
    import lightgbm as lgb  # noqa: PLC0415 - half a second that the other peer need not wait

    features = len(train.values)
    kept = [_frequent(values) for values in train.values]
    width = train.dense.shape[1]

    def matrix(rows: Plain) -> npt.NDArray[np.float64]:
        columns = np.full((len(rows.labels), features), np.nan)
        for number, (lengths, values) in enumerate(zip(rows.lengths, rows.values, strict=True)):
            known = kept[number]
            place = np.searchsorted(known, values)
            found = known[np.minimum(place, len(known) - 1)] == values
            alone = np.repeat(lengths == 1, lengths)
            columns[lengths == 1, number] = np.where(found, place, np.nan)[alone]
        return np.concatenate([rows.dense.astype(np.float64), columns], axis=1)

    data = lgb.Dataset(
        matrix(train), train.labels, categorical_feature=[*range(width, width + features)]
    )
    settings = LIGHTGBM if leaves is None else {**LIGHTGBM, "num_leaves": leaves}
    model = lgb.train(settings, data, rounds)
    return np.asarray(model.predict(matrix(test)), np.float64)


def _frequent(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The ids of at least `RARE` rows, ascending; never empty."""
    ids, counts = np.unique(values, return_counts=True)
    frequent = ids[counts >= RARE]
    return frequent if len(frequent) else np.full(1, -1, np.int64)
