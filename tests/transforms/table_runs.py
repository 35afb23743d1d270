"""A run over a small table, with every kind of transform."""

from __future__ import annotations

import random

RUN = """
data:
  format: table
  path: {path}
  columns:
    price: {{kind: dense, transform: [{{clip: [0, 1000]}}, log1p, standardize]}}
    age: {age}
    country: {{kind: categorical, transform: [{{vocabulary: {{min_count: 5}}}}]}}
    device: {{kind: categorical}}
    item: {{kind: categorical, transform: [vocabulary]}}
    clicked: {{kind: label}}
  crosses: {{country_x_device: {{of: [country, device]}}}}
  target_statistics: {{country_rate: {{key: [country], smoothing: 5}}}}
model: {{arch: dlrm, embedding_dim: 4, rows: 100, dense_layers: [8], over_layers: [8]}}
train: {{batch_size: 64, epochs: 2, checkpoint_every_steps: 3, threads: 1}}
run: {{tensorboard: false, report: false}}
"""


def write_run(folder, *, age="{kind: dense, transform: [{quantile: {buckets: 8, to: id}}]}"):
    """A table of 500 rows in ``folder``, and the config of a run over it; returns the config's path."""
    config = folder / "run.yaml"
    config.write_text(RUN.format(path=write_table(folder / "clicks.csv"), age=age))
    return config


def write_table(path, seed=0):
    """A table of 500 rows at ``path``, which is returned."""
    chance = random.Random(seed)
    lines = ["price,age,country,device,item,clicked"]
    for _ in range(500):
        country, price = chance.randint(0, 15), chance.expovariate(0.01)
        label = int(chance.random() < 0.1 + 0.05 * country)
        shown = "" if chance.random() < 0.1 else f"{price:.2f}"
        age_, device, item = chance.randint(10, 90), chance.randint(1, 3), chance.randint(0, 99)
        lines.append(f"{shown},{age_},{country * 1000003 - 5},{device},{item},{label}")
    path.write_text("\n".join(lines) + "\n")
    return path
