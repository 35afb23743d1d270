"""docs/your-data.md on transforms: its config is valid, and it names every transform."""

import re
from pathlib import Path

from tessera.training.config_source import parse_yaml
from tessera.training.data.columns import ColumnConfig
from tessera.training.data.config import DataConfig
from tessera.training.transforms.description import Transforms, dense_column, id_column
from tessera.training.transforms.transform import transforms_by_name
from tessera.training.typed_config import build

PAGE = (Path(__file__).resolve().parents[2] / "docs/your-data.md").read_text()
SECTION = PAGE.partition("\n## Transforms")[2].partition("\n## ")[0]


def column_of(name: str, own: ColumnConfig):
    if own.kind == "dense":
        return dense_column(name, own.transform)
    return id_column(name, own.transform, table=own.table)


def test_the_config_is_valid_as_it_stands():
    (block,) = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
    source = parse_yaml(block, name="your-data.md")
    source.values = source.values["data"]
    config = build(DataConfig, source)
    made = {
        name: column_of(name, own) for name, own in config.columns.items() if own.kind != "label"
    }
    dense = [name for name in made if config.columns[name].kind == "dense"]
    transforms = Transforms(
        dense=tuple(made[name] for name in dense),
        sparse=tuple(own for name, own in made.items() if name not in dense),
        labels=("clicked",),
        crosses=config.crosses,
        target_statistics=config.target_statistics,
    )
    assert transforms.dense_names == [
        *("price", "views", "likes"),
        *("country_rate_mean", "country_rate_count"),
    ]
    assert transforms.sparse_names[-2:] == ["country_x_device", "age"]


def test_every_transform_is_named():
    for name in (*transforms_by_name("dense"), *transforms_by_name("ids")):
        assert re.search(rf"^\| `\{{?{name}\b", SECTION, re.MULTILINE), name
