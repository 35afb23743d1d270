"""A data set with a history, several labels and weights, as a program of a user's gives it."""

from __future__ import annotations

import numpy as np

from tessera.training.data.batch import make_batch
from tessera.training.data.columns import DenseColumn, FeatureColumns, LabelColumn, SparseColumn

ITEMS = 12
LABELS = {
    "clicked": LabelColumn(name="clicked"),
    "bought": LabelColumn(name="bought"),
    "spent": LabelColumn(name="spent", task="regression"),
}

MODEL = """
data: {factory: 'tests.trainer.shop:shop', arguments: {labels: [LABELS], weighted: WEIGHTED}}
model:
  arch: ARCH
  embedding_dim: 8
  rows: 40
  embedding_init: 0.1
  tables:
    item: {rows: 30, table: item_table}
    history: {rows: 30, table: item_table}
train:
  batch_size: 32
  epochs: 2
  dense_optimizer: {learning_rate: 0.01}
  embedding_optimizer: {learning_rate: 0.1}
  threads: 1
run: {tensorboard: false, report: false}
"""


def write_config(path, arch, *, labels=("clicked",), weighted=False, model=()):
    """A config file that trains ``arch``; ``model`` are further lines of its section."""
    text = MODEL.replace("ARCH", "\n  ".join([arch, *model]))
    text = text.replace("LABELS", ", ".join(labels)).replace("WEIGHTED", str(weighted).lower())
    path.write_text(text)
    return path


class Shop:
    """Users who click on what they saw before, buy some of it, and spend its price."""

    def __init__(self, labels, weighted, rows=400):
        self.columns = FeatureColumns(
            dense=(DenseColumn(name="price"),),
            sparse=(
                SparseColumn(name="user"),
                SparseColumn(name="item"),
                SparseColumn(name="history", kind="sequence"),
            ),
            labels=tuple(LABELS[name] for name in labels),
            weight="w" if weighted else None,
        )
        chance = np.random.default_rng(0)
        self.user = chance.integers(0, 20, rows)
        self.item = chance.integers(0, ITEMS, rows)
        self.history = [chance.integers(0, ITEMS, n) for n in chance.integers(0, 7, rows)]
        self.price = chance.random((rows, 1), dtype=np.float32)
        self.price[::9] = np.nan
        seen = np.array([i in h for i, h in zip(self.item, self.history, strict=True)])
        clicked = chance.random(rows) < np.where(seen, 0.8, 0.2)
        bought = clicked & (chance.random(rows) < 0.5)
        known = {
            "clicked": clicked.astype(np.float32),
            # What was not clicked on says nothing of buying.
            "bought": np.where(clicked, bought, np.nan).astype(np.float32),
            "spent": (3 + 2 * seen + chance.random(rows)).astype(np.float32),
        }
        self.known = np.stack([known[name] for name in labels], axis=1)
        self.weights = chance.random(rows).astype(np.float32) if weighted else None

    def __len__(self):
        return len(self.user)

    def batch(self, rows):
        history = [self.history[row] for row in rows]
        ones = np.ones(2 * len(rows), np.int32)
        values = [self.user[rows], self.item[rows], *history]
        return make_batch(
            dense=self.price[rows],
            keys=self.columns.sparse_names,
            lengths=np.concatenate([ones, np.array([len(h) for h in history], np.int32)]),
            values=np.concatenate(values).astype(np.int64),
            labels=self.labels(rows),
            weights=None if self.weights is None else self.weights[rows],
        )

    def take(self, start, stop):
        return self.batch(np.arange(start, stop))

    def labels(self, rows):
        known = self.known[rows]
        return known[:, 0] if known.shape[1] == 1 else known


def shop(labels, weighted):
    return Shop(labels, weighted)
