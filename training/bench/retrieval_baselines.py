"""The models that `training.bench.retrieval` holds ``two_tower`` against.

Each takes the profiles of the training rows, ``[users, I]`` with 1 where a user has an item, and gives a matrix
``[I, I]``: a profile times it are the scores of all items.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]


def popularity(matrix: Matrix) -> Matrix:
    """``[I, I]`` that gives every profile the items' counts."""
    counts: Matrix = matrix.sum(axis=0)
    return np.broadcast_to(counts, (matrix.shape[1], matrix.shape[1]))


def item_knn(matrix: Matrix, *, neighbours: int, shrinkage: float) -> Matrix:
    """``[I, I]``: what an item of a profile gives to every item: the cosine of its next neighbours."""
    both = (matrix.T @ matrix).astype(np.float64)
    norms = np.sqrt(np.diag(both))
    similar = both / (norms[:, None] * norms[None, :] + shrinkage)
    np.fill_diagonal(similar, 0.0)
    if neighbours < len(similar):
        # Of each item that is to be scored, the neighbours that are most similar to it.
        bound = np.partition(similar, -neighbours, axis=0)[-neighbours]
        similar[similar < bound] = 0.0
    made: Matrix = similar.astype(np.float32)
    return made


def ease(matrix: Matrix, *, ridge: float) -> Matrix:
    """``[I, I]``: the ridge regression of every item on all others, with no weight for itself."""
    gram = (matrix.T @ matrix).astype(np.float64)
    inverse = np.linalg.inv(gram + ridge * np.eye(len(gram)))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0.0)
    made: Matrix = weights.astype(np.float32)
    return made
