"""What `tessera.training.bench.architectures` tries: features, each architecture's sizes, and settings.

A setting is the name of its features and the keys, of the sections ``model`` and ``train``, that differ from
`MODEL` and `TRAIN`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tessera.training.data import movielens

Setting = tuple[str, dict[str, Any]]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "dlrm": {},
    "dlrm_dcn": {"model.dcn_num_layers": 2, "model.dcn_low_rank_dim": 16},
    "deepfm": {},
    "din": {"model.sequence_length": 20},
    "sasrec": {
        "model.sequence": "history",
        "model.candidate": "item",
        "model.sequence_length": 20,
        "model.blocks": 1,
    },
    "mmoe": {"model.experts": 4, "model.expert_layers": [64], "model.tower_layers": [32]},
    "ple": {"model.levels": 1, "model.expert_layers": [64], "model.tower_layers": [32]},
}
"""What each architecture has of its own."""

WITHOUT_BOTTOM = ("mmoe", "ple", "din", "sasrec")
"""The architectures that take the dense values as they are."""
SEVERAL_LABELS = ("mmoe", "ple")
"""The architectures with towers in the place of a top MLP."""

_WITHOUT_USER = (
    "item", "gender", "age", "occupation", "year", "genres", "history", "dislikes",
)  # fmt: skip
FEATURES = {
    "default": movielens.SPARSE_NAMES,
    "no user": _WITHOUT_USER,
    "zip": (*_WITHOUT_USER, *movielens.CHOSEN_NAMES[1:]),
}
"""The sets of features that were tried."""
TABLES: dict[str, dict[str, Any]] = {
    "user": {"rows": 10_000},
    "item": {"rows": 5_000, "table": "item_table", "pooling": "mean"},
    "history": {"rows": 5_000, "table": "item_table", "pooling": "mean"},
    "dislikes": {"rows": 5_000, "table": "item_table", "pooling": "mean"},
    "genres": {"pooling": "mean"},
    "zip_prefix": {"rows": 1_000},
}

MODEL: dict[str, Any] = {
    "embedding_dim": 16,
    "rows": 200,
    "dense_layers": [64],
    "over_layers": [128],
    "dropout": 0.5,
    "embedding_init": 0.3,
}
TRAIN: dict[str, Any] = {"batch_size": 1024, "schedule": {"kind": "linear"}, "metric": "auc"}
_SGD = {
    "model.embedding_init": 0.3,
    "train.dense_optimizer": {"name": "adam", "learning_rate": 5.0e-3},
    "train.embedding_optimizer": {"name": "sgd", "learning_rate": 10.0},
    "train.epochs": 2,
}
_L2 = {
    **_SGD,
    "train.embedding_optimizer": {"name": "sgd", "learning_rate": 10.0, "weight_decay": 0.01},
}
_SLOW_SGD = {
    **_SGD,
    "model.embedding_init": 0.1,
    "train.dense_optimizer": {"name": "adam", "learning_rate": 1.0e-3},
    "train.embedding_optimizer": {"name": "sgd", "learning_rate": 3.0},
    "train.epochs": 4,
}
_ADAGRAD = {
    **_SLOW_SGD,
    "model.embedding_init": 0.01,
    "train.embedding_optimizer": {
        "name": "rowwise_adagrad",
        "learning_rate": 0.01,
        "weight_decay": 0.1,
    },
    "train.epochs": 2,
}
FIRST = "model.first_order"
_DROPPED = {"model.embedding_dropout": 0.3}
_OWN_RATE = {
    "train.first_order_optimizer": {"name": "sgd", "learning_rate": 0.6, "weight_decay": 0.02}
}
"""The rate of first-order weights: their sum over 100 ids of lists diverges at the rates of the tables."""
SETTINGS: dict[str, Setting] = {
    "SGD": ("default", _SGD),
    "no user": ("no user", _SGD),
    "no user, embedding dropout": ("no user", {**_SGD, **_DROPPED}),
    "no user, embedding dropout, L2": ("no user", {**_L2, **_DROPPED}),
    "no user, embedding dropout, L2, first order": (
        "no user",
        {**_L2, **_DROPPED, **_OWN_RATE, FIRST: True},
    ),
    "no user, slow SGD, embedding dropout": ("no user", {**_SLOW_SGD, **_DROPPED}),
    "no user, Adagrad": ("no user", _ADAGRAD),
}
"""How the models are trained: the features' name and the keys."""

SLOWER = ("din", "sasrec", "mmoe", "ple")
SETTINGS_OF_SLOWER = (
    "no user",
    "no user, embedding dropout",
    "no user, embedding dropout, L2",
    "no user, embedding dropout, L2, first order",
    "no user, slow SGD, embedding dropout",
)
"""A run of these takes up to ten times as long as one of ``dlrm``; these settings were its best five."""

_SGD_AT_1 = {
    **_SGD,
    **_DROPPED,
    "model.embedding_init": 0.1,
    "train.embedding_optimizer": {"name": "sgd", "learning_rate": 1.0},
}
DEEPFM_SETTINGS: dict[str, Setting] = {
    "no user, SGD at 1, embedding dropout": ("no user", _SGD_AT_1),
    "no user, SGD at 1, embedding dropout .5": (
        "no user",
        {**_SGD_AT_1, "model.embedding_dropout": 0.5},
    ),
    "no user, SGD at 1, embedding dropout, L2": (
        "no user",
        {
            **_SGD_AT_1,
            "train.embedding_optimizer": {"name": "sgd", "learning_rate": 1.0, "weight_decay": 0.1},
        },
    ),
    "no user, Adagrad, embedding dropout, L2": (
        "no user",
        {
            **_ADAGRAD,
            "model.embedding_dropout": 0.5,
            "train.embedding_optimizer": {
                "name": "rowwise_adagrad",
                "learning_rate": 0.005,
                "weight_decay": 1.0,
            },
        },
    ),
}
"""Further settings of ``deepfm``, whose sum over all pairs of vectors diverges at the other rates."""

_WIDE = {
    **_L2,
    **_DROPPED,
    **_OWN_RATE,
    FIRST: True,
    "model.expert_layers": [128],
    "model.tower_layers": [64],
    "model.dropout": 0.3,
}
EXPERTS_SETTINGS: dict[str, Setting] = {
    "no user, SGD at 1, embedding dropout, L2, first order, FM": (
        "no user",
        {
            **_SGD_AT_1,
            **_OWN_RATE,
            FIRST: True,
            "train.embedding_optimizer": {"name": "sgd", "learning_rate": 1.0, "weight_decay": 0.1},
            "model.fm": True,
        },
    ),
    "no user, embedding dropout, L2, first order, wide": ("no user", _WIDE),
    "no user, embedding dropout, L2, first order, wide, Adam at .002": (
        "no user",
        {**_WIDE, "train.dense_optimizer": {"name": "adam", "learning_rate": 2.0e-3}},
    ),
}
"""Further settings of ``mmoe`` and ``ple``.

``FM`` adds the products of all pairs of vectors, which ``dlrm`` and ``deepfm`` have anyway, at the rate of
``deepfm``'s tables.  ``wide`` has experts and towers twice as wide and less dropout, which they apply one behind the
other: half of 64 columns and then half of 32 is less than what the one hidden layer of the others keeps.
"""


def settings_of(arch: str) -> dict[str, Setting]:
    """The settings that the architecture is tried with."""
    if arch in SLOWER:
        own = {name: SETTINGS[name] for name in SETTINGS_OF_SLOWER}
        return own | EXPERTS_SETTINGS if arch in SEVERAL_LABELS else own
    if arch != "deepfm":
        return SETTINGS
    # It has the first-order term in any case.
    own = {name: setting for name, setting in SETTINGS.items() if FIRST not in setting[1]}
    return {
        name: (features, {**keys, **_OWN_RATE})
        for name, (features, keys) in (own | DEEPFM_SETTINGS).items()
    }


def model_and_train(
    arch: str, features: Sequence[str], keys: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """The sections ``model``, ``train`` and ``run`` of a config."""
    plain = {
        "model": {**MODEL, "arch": arch},
        "train": {**TRAIN, "seed": seed},
        "run": {"report": False, "tensorboard": False},
    }
    plain["model"]["tables"] = {name: own for name, own in TABLES.items() if name in features}
    if arch in WITHOUT_BOTTOM:
        del plain["model"]["dense_layers"]
    if arch in SEVERAL_LABELS:
        del plain["model"]["over_layers"]
    for key, value in {**ARCHITECTURES[arch], **keys}.items():
        section, _, name = key.partition(".")
        plain[section][name] = value
    if arch == "din":
        sequences = [name for name in ("history", "dislikes") if name in features]
        plain["model"]["attention"] = dict.fromkeys(sequences, "item")
    plain["train"]["eval_every_epochs"] = plain["train"]["epochs"]
    return plain
