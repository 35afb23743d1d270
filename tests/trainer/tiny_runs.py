"""A run small enough for a test: its config, its data."""

from __future__ import annotations

import dataclasses
import random

TINY = """
data:
  format: criteo
  path: PATH
  workers: 0
model:
  embedding_dim: 4
  rows: 50
  dense_layers: [8]
  over_layers: [8]
  dropout: 0.2
train:
  batch_size: 16
  eval_batch_size: 15
  epochs: 2
  dense_optimizer: {name: adam, learning_rate: 0.01}
  embedding_optimizer: {name: rowwise_adagrad, learning_rate: 0.1}
  schedule: {kind: cosine, warmup_steps: 5}
  eval_every_steps: 9
  checkpoint_every_steps: 7
  log_every_steps: 2
  threads: 1
run: {tensorboard: false, report: false}
"""


def write_criteo(path, rows, seed=0):
    """Rows whose label leans on the first number and the first category."""
    chance = random.Random(seed)
    with path.open("w") as stream:
        for _ in range(rows):
            ints = [chance.choice(["", "0", "1", "5", "120"]) for _ in range(13)]
            hexes = [chance.choice(["", *(f"{n:08x}" for n in range(9))]) for _ in range(26)]
            lean = 0.25 + 0.25 * (ints[0] == "5") + 0.35 * (hexes[0] in {"00000001", "00000002"})
            label = int(chance.random() < lean)
            stream.write("\t".join([str(label), *ints, *hexes]) + "\n")
    return path


def changed(config, **train):
    """``config`` with other values in its train section."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **train))
