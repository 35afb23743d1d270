"""What the tests of `tessera evaluate` share: a shop's table, runs over it, and packages of them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from tessera.cli import main

HEADER = ("price", "country", "user_id", "item", "tags", "spent", "click", "day", "half", "weight")
COUNTRIES = ("DE", "FR", "IT", "ES", "日本")

RUN = """
data:
  format: table
  path: {path}
  columns:
    price: {{kind: dense, transform: [log1p]}}
    price_bucket: {{kind: dense, column: price, transform: [{{quantile: {{buckets: 4, to: id}}}}]}}
    country: {{kind: categorical}}
    item: {{kind: categorical, table: item}}
    tags: {{kind: {tags}, table: item, max_length: 2}}
    shopper: {{kind: group, column: user_id}}
    {labels}
model: {{arch: dlrm, embedding_dim: 4, rows: 50, dense_layers: [4], over_layers: [4]}}
train: {{batch_size: 64, epochs: 2, threads: 1, dense_optimizer: {{learning_rate: 0.02}}}}
run: {{tensorboard: false, report: false}}
"""
CLICK = "click: {kind: label}"
SPENT = "spent: {kind: label, task: regression}"


def shop_rows(count: int, seed: int) -> list[list[object]]:
    """Rows whose clicks depend on the price, the country and the user."""
    random = np.random.default_rng(seed)
    users = random.normal(size=30)
    made: list[list[object]] = []
    for number in range(count):
        country, user = int(random.integers(5)), int(random.integers(30))
        price = round(float(random.lognormal(2, 1)), 2)
        chance = 1 / (1 + np.exp(-(0.7 * country - 1 + users[user] - 0.4 * np.log(price))))
        tags = "|".join(f"t{tag}" for tag in random.integers(0, 20, random.integers(0, 5)))
        made.append(
            [
                price if random.random() > 0.1 else "",
                COUNTRIES[country],
                f"u{user}",
                int(random.integers(40)),
                tags,
                round(2 * country + float(random.random()), 3),
                int(random.random() < chance),
                f"2024-01-{1 + number * 28 // count:02d}",
                number % 7 / 2,
                int(random.integers(1, 4)),
            ]
        )
    return made


def write_table(path: Path, rows: list[list[object]]) -> Path:
    """A CSV of the rows."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(rows)
    return path


def train_and_package(folder: Path, name: str, *, labels: tuple[str, ...], tags: str) -> None:
    """A run ``name`` and its package ``name.pt`` in ``folder``, which holds ``shop.csv``."""
    config = folder / f"{name}.yaml"
    text = RUN.format(path=folder / "shop.csv", labels="\n    ".join(labels), tags=tags)
    config.write_text(text)
    run, package = folder / name, folder / f"{name}.pt"
    assert main(["train", "--config", str(config), "--out", str(run), "--quiet"]) == 0
    assert main(["package-model", str(run), "--out", str(package)]) == 0
