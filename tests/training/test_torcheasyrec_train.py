"""What TorchEasyRec's whole program is given: data, a configuration, and the library's planner."""

import ast

import pyarrow.parquet as pq
import pytest

from tessera.training.bench import torcheasyrec_train
from tessera.training.bench.program_rewrite import moved
from tessera.training.bench.torcheasyrec_train import (
    IDS,
    MODELS,
    NUMBERS,
    configuration,
    with_planner,
    write_data,
)

MAIN = """
from torch import distributed as dist

from tzrec.utils.plan_util import create_planner, get_default_sharders


def _create_features(configs):
    return configs
"""


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_has_every_feature_and_closes_what_it_opens(name):
    text = configuration(name)
    assert text.count("{") == text.count("}") > 0
    for feature in (*IDS, *NUMBERS):
        assert f"feature_configs {{ {'id' if feature in IDS else 'raw'}_feature" in text
        assert text.count(f'feature_name: "{feature}"') == 1
        assert f'feature_names: "{feature}"' in text


def test_the_library_s_planner_takes_the_place_of_torcheasyrec_s_own():
    edited = with_planner(MAIN)
    names = {node.name for node in ast.parse(edited).body if isinstance(node, ast.FunctionDef)}
    assert names == {"create_planner", "_create_features"}
    assert "import create_planner" not in edited
    assert "from tessera.training.distributed.planner import" in moved(edited)
    with pytest.raises(ValueError, match=r"main\.py of the checkout does not say"):
        with_planner(edited)


def test_data_are_the_same_for_a_seed_and_have_ids_in_range(tmp_path, monkeypatch):
    monkeypatch.setattr(torcheasyrec_train, "ROWS", 64)
    tables = []
    for number in (1, 2):
        write_data(tmp_path / str(number))
        files = sorted((tmp_path / str(number)).iterdir())
        assert [file.name for file in files] == [
            f"{use}-{part}.parquet" for use in ("eval", "train") for part in (0, 1)
        ]
        tables.append([pq.read_table(file) for file in files])
    assert tables[0] == tables[1]
    assert tables[0][0] != tables[0][1]
    assert [len(table) for table in tables[0]] == [32] * 4
    for table in tables[0]:
        assert set(table.column_names) == {*IDS, *NUMBERS, "label"}
        assert set(table["label"].to_pylist()) == {0, 1}
        for name, count in IDS.items():
            bags = table[name].to_pylist()
            ids = [one for bag in bags for one in (bag if isinstance(bag, list) else [bag])]
            assert 0 <= min(ids) <= max(ids) < count
