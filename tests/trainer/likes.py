"""A table of what users liked: groups of users like groups of items; positives only."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

GROUPS, ITEMS, USERS = 4, 40, 30

CONFIG = """
data:
  format: table
  path: PATH
  user_id: user
  item_id: movie
  split: time
  columns:
    user: {kind: categorical, side: user, transform: [vocabulary]}
    age: {kind: dense, side: user, transform: [standardize]}
    hour: {kind: dense, side: context, transform: [{quantile: {buckets: 4, to: id}}]}
    history: {kind: sequence, side: user, table: movies, transform: [vocabulary]}
    movie: {kind: categorical, side: item, table: movies, transform: [vocabulary]}
    year: {kind: dense, side: item, transform: [{missing: 1990}, standardize]}
    price: {kind: dense, side: item, transform: [log1p, standardize]}
    words: {kind: weighted_list, side: item, weights: word_weights}
    time: {kind: timestamp}
  crosses:
    age_group: {of: [user, history]}
model:
  arch: two_tower
  embedding_dim: 8
  rows: 50
  user_layers: [16]
  item_layers: []
  output_dim: 8
  temperature: 0.2
  sampled_negatives: 10
  tables:
    words: {weighted: true}
train:
  metric: recall
  retrieval: {k: 5}
  batch_size: 32
  epochs: 2
  dense_optimizer: {learning_rate: 0.01}
  embedding_optimizer: {learning_rate: 0.1}
  threads: 1
run: {tensorboard: false, report: false}
"""


def rows(count=600, seed=0):
    """Rows in the order of time, as a table of Arrow."""
    chance = np.random.default_rng(seed)
    history = [[] for _ in range(USERS)]
    found = []
    for time in range(count):
        user = int(chance.integers(USERS))
        group = user % GROUPS
        movie = int(group + GROUPS * min(chance.geometric(0.2) - 1, ITEMS // GROUPS - 1))
        found.append(
            {
                "user": 1000 + user,
                "age": float(20 + user),
                "hour": float(chance.random()),
                "history": list(history[user][-5:]),
                "movie": 7 * movie + 3,
                "year": None if movie % 5 == 0 else float(1950 + movie),
                "price": float(movie % 7),
                "words": [movie % 3, movie % 4 + 10],
                "word_weights": [0.5, 0.25 * (movie % 4)],
                "time": time,
            }
        )
        history[user].append(7 * movie + 3)
    return pa.Table.from_pylist(found)


def write_config(folder, *, change=lambda text: text, count=600):
    """``likes.parquet`` and a config that trains on it; returns the config's path."""
    pq.write_table(rows(count), folder / "likes.parquet")
    path = folder / "likes.yaml"
    path.write_text(change(CONFIG.replace("PATH", str(folder / "likes.parquet"))))
    return path
