"""The TorchRec reference's names, parameters and members, and the page that maps them.

`reference_api.json` holds the names that the `torchrec.distributed` reference lists, without
``torchrec.``: of functions and classes the parameters (null where it lists none of use), of
classes the members.
"""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent.parent / "docs"
API = json.loads((HERE / "reference_api.json").read_text())

# What docs/torchrec.md says is left out or has another name.
OTHER_PARAMETERS = {
    "distributed.dist_data.EmbeddingsAllToOneReduce": {"cat_dim"},
    "distributed.embedding_sharding.KJTSplitsAllToAllMeta": {"_input", "splits_cumsum"},
    "distributed.train_pipeline.KJTSplitsAllToAllMeta": {"_input"},
}
OTHER_MEMBERS = {
    "distributed.embedding_sharding.KJTSplitsAllToAllMeta": {"splits_cumsum"},
    # Described there, and not among the class's own fields.
    "distributed.comm_ops.All2AllVInfo": {"dim_sum_per_rank"},
    # Attributes of torch's tracer, set while it traces.
    "distributed.train_pipeline.Tracer": {
        "graph",
        "module_stack",
        "node_name_to_scope",
        "scope",
    },
}


def found(name):
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(f"tessera.training.{module}"), last)


def test_there_is_something_to_check():
    assert len(API) == 161
    assert sum(len(entry.get("members", [])) for entry in API.values()) > 300


@pytest.mark.parametrize("name", sorted(API))
def test_the_name_is_there_with_its_parameters_and_members(name):
    thing, entry = found(name), API[name]
    if entry["parameters"] is not None:
        have = list(inspect.signature(thing).parameters)
        left_out = OTHER_PARAMETERS.get(name, set())
        wanted = [parameter for parameter in entry["parameters"] if parameter not in left_out]
        # In the reference's order; ours may have more.
        assert [parameter for parameter in have if parameter in wanted] == wanted
        assert left_out.isdisjoint(have), "the page says that what is there is left out"
    missing = [
        member
        for member in entry.get("members", [])
        if not hasattr(thing, member)
        and member not in getattr(thing, "__dataclass_fields__", {})
        and member not in inspect.get_annotations(thing)
    ]
    assert set(missing) == OTHER_MEMBERS.get(name, set())


def rows():
    """(TorchRec's modules, ours, names) of each row of the page's tables of names."""
    for line in (DOCS / "torchrec.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `torchrec") and len(cells) == 3:
            theirs, ours, names = (re.findall(r"`([\w.]+)`", cell) for cell in cells)
            yield theirs, [module for module in ours if module.startswith("tessera.")], names


def test_every_name_of_the_page_can_be_imported():
    checked = 0
    for _, modules, names in rows():
        for module in modules:
            importlib.import_module(module)
        for name in names:
            assert getattr(importlib.import_module(modules[0]), name) is not None
            checked += 1
    assert checked > 200


def test_every_name_of_the_reference_is_on_the_page():
    listed = {f"{theirs[0]}.{name}" for theirs, _, names in rows() for name in names}
    assert {f"torchrec.{name}" for name in API} <= listed


def test_what_is_left_out_is_on_the_page():
    left_out = (DOCS / "torchrec.md").read_text().partition("## Left out")[2]
    for names in OTHER_PARAMETERS.values():
        for name in names:
            assert f"`{name}`" in left_out
