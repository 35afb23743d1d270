"""Small packages with random weights, made through the real packager, for everyone's tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.training.data.columns import DenseColumn, FeatureColumns, LabelColumn, SparseColumn
from tessera.training.models.config import ModelConfig, TableConfig
from tessera.training.models.ranking import RankingModel, build_ranking_model

FEATURES = {
    "user": TableConfig(rows=1000),
    "item": TableConfig(rows=700, table="item_table"),
    "history": TableConfig(rows=700, table="item_table"),
    "genre": TableConfig(rows=19, hashing="none", out_of_range="reject"),
    "region": TableConfig(rows=50, hashing="none", out_of_range="clamp"),
    "tag": TableConfig(rows=64, hashing="none", out_of_range="hash"),
    "bucket": TableConfig(rows=128, hashing="modulo"),
}
"""The features that `make_package` takes by default: every hashing and out-of-range rule, and
two features that share a table."""


def string_columns() -> FeatureColumns:
    """Columns of the default features: some of strings, one of a list that is cut."""
    strings = {"user": "categorical", "history": "sequence", "bucket": "categorical_list"}
    return FeatureColumns(
        dense=tuple(DenseColumn(name=f"dense_{index}") for index in range(4)),
        sparse=tuple(
            SparseColumn(
                name=name,
                kind=strings.get(name, "categorical_list"),
                strings=name in strings,
                max_length=3 if name == "history" else None,
            )
            for name in FEATURES
        ),
        labels=(LabelColumn(name="label"),),
    )


def make_model(
    *,
    arch: str = "dlrm",
    num_dense: int = 4,
    features: Mapping[str, TableConfig] = FEATURES,
    dim: int = 8,
    dense_layers: tuple[int, ...] = (16,),
    over_layers: tuple[int, ...] = (32, 16),
    dropout: float = 0.0,
    seed: int = 0,
) -> RankingModel:
    """An untrained float32 model whose scores spread over (0, 1)."""
    torch.manual_seed(seed)
    crosses = {"dcn_num_layers": 2, "dcn_low_rank_dim": 8} if arch == "dlrm_dcn" else {}
    config = ModelConfig(
        arch=arch,
        embedding_dim=dim,
        dense_layers=dense_layers,
        over_layers=over_layers,
        **crosses,
        tables=dict(features),
        dropout=dropout,
        embedding_init=1.0,
    )
    names = [f"dense_{index}" for index in range(num_dense)]
    return build_ranking_model(config, names, list(features)).eval()


def make_package(
    tmp_path: Path,
    *,
    arch: str = "dlrm",
    num_dense: int = 4,
    features: Mapping[str, TableConfig] = FEATURES,
    dtype: str = "int8",
    dim: int = 8,
    seed: int = 0,
    name: str = "model",
    version: str = "1",
    backend: str | None = None,
    device: str = "cpu",
    dense_dtype: str = "fp32",
    columns: FeatureColumns | None = None,
) -> tuple[Path, RankingModel]:
    """Write ``<name>-<version>.pt`` into ``tmp_path``; returns it and the float32 model.

    Without a backend it is the packager's default.
    """
    model = make_model(arch=arch, num_dense=num_dense, features=features, dim=dim, seed=seed)
    path = tmp_path / f"{name}-{version}.pt"
    chosen = {} if backend is None else {"backend": backend}
    options = PackageOptions(
        name=name, version=version, dtype=dtype, device=device, dense_dtype=dense_dtype, **chosen
    )
    write_model(model, path, options, columns=columns)
    return path, model


_kept: dict[str, bytes] = {}


def package_file(folder: Path, **options: Any) -> Path:
    """The file of a small package as `make_package` writes it, which this process makes once of the same options."""
    key = repr(sorted(options.items()))
    if key in _kept:
        path = folder / f"{options.get('name', 'model')}-{options.get('version', '1')}.pt"
        path.write_bytes(_kept[key])
        return path
    path, _ = make_package(folder, **options)
    _kept[key] = path.read_bytes()
    return path
