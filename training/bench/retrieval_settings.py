"""What `tessera.training.bench.retrieval` tries of ``two_tower``.

A setting is the keys, of the sections ``model`` and ``train``, that differ from `MODEL` and `TRAIN`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

Setting = Mapping[str, Any]

DATA: dict[str, Any] = {
    "format": "table",
    "split": "files",
    "user_id": "user",
    "item_id": "item",
    "columns": {
        "user": {"kind": "categorical", "side": "user", "transform": ["vocabulary"]},
        "history": {
            "kind": "sequence",
            "side": "user",
            "table": "films",
            "transform": ["vocabulary"],
        },
        "item": {
            "kind": "categorical",
            "side": "item",
            "table": "films",
            "transform": ["vocabulary"],
        },
        "genres": {"kind": "categorical_list", "side": "item", "transform": ["vocabulary"]},
        "year": {"kind": "categorical", "side": "item", "transform": ["vocabulary"]},
    },
}
MODEL: dict[str, Any] = {
    "arch": "two_tower",
    "embedding_dim": 32,
    "pooling": "mean",
    "user_layers": [],
    "item_layers": [],
    "output_dim": 32,
    "similarity": "cosine",
    "temperature": 0.1,
    "sampled_negatives": 256,
}
TRAIN: dict[str, Any] = {
    "batch_size": 1024,
    "epochs": 3,
    "metric": "recall",
    "dense_optimizer": {"name": "adam", "learning_rate": 0.003},
    "embedding_optimizer": {"name": "rowwise_adagrad", "learning_rate": 0.1},
}
_HIDDEN = {"model.user_layers": [128], "model.item_layers": [128]}
_DROPPED = {"model.embedding_dropout": 0.3}
SETTINGS: dict[str, Setting] = {
    "linear towers": {},
    "linear towers, temperature .2": {"model.temperature": 0.2},
    "linear towers, embedding dropout": _DROPPED,
    "hidden layers, embedding dropout": {**_HIDDEN, **_DROPPED},
}


def config_of(setting: Setting, seed: int) -> dict[str, Any]:
    """The sections of a config, without the data's paths."""
    plain: dict[str, Any] = copy.deepcopy({"data": DATA, "model": MODEL, "train": TRAIN})
    plain["train"]["seed"] = seed
    plain["run"] = {"report": False, "tensorboard": False}
    for key, value in setting.items():
        section, _, name = key.partition(".")
        plain[section][name] = value
    return plain
