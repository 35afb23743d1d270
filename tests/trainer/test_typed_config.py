from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import UserError
from tessera.training.config_source import ConfigError, apply_overrides, parse_yaml, read_yaml
from tessera.training.typed_config import build, differing_keys, to_plain, to_yaml


@dataclass(frozen=True, kw_only=True)
class Table:
    rows: int | None = None
    pooling: Literal["sum", "mean"] = "sum"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    learning_rate: float = 0.1
    nesterov: bool = False

    def __post_init__(self):
        if self.learning_rate <= 0:
            raise UserError(f"learning_rate={self.learning_rate}: give a number above 0")


@dataclass(frozen=True, kw_only=True)
class Model:
    layers: tuple[int, ...] = (8, 4)
    span: tuple[float, float] = (0.0, 1.0)
    paths: str | tuple[str, ...] = "data"
    tables: dict[str, Table] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Root:
    name: str
    model: Model
    optimizer: Optimizer = field(default_factory=Optimizer)
    bound: float | None = None


def read(text, *overrides):
    return build(Root, apply_overrides(parse_yaml(text, name="a.yaml"), overrides))


def test_every_value_reaches_its_field_with_its_type():
    root = read(
        "name: x\n"
        "model:\n"
        "  layers: [3, 2, 1]\n"
        "  span: [0, 2]\n"
        "  paths: [a, b]\n"
        "  tables:\n"
        "    C1: {rows: 7}\n"
        "    C2: {pooling: mean}\n"
        "optimizer: {learning_rate: 1e-3, nesterov: true}\n",
        "bound=3",
    )
    assert root == Root(
        name="x",
        model=Model(
            layers=(3, 2, 1),
            span=(0.0, 2.0),
            paths=("a", "b"),
            tables={"C1": Table(rows=7), "C2": Table(pooling="mean")},
        ),
        optimizer=Optimizer(learning_rate=0.001, nesterov=True),
        bound=3.0,
    )
    assert isinstance(root.model.span[0], float)
    assert isinstance(root.bound, float)


def test_a_section_of_defaults_need_not_be_said():
    assert read("name: x").model == Model()
    assert read("name: x\nmodel:\n").model == Model()


def test_overrides_win_in_order_and_reach_new_sections():
    root = read("name: x\n", "model.tables.C9.rows=5", "name=y", "name=z", "model.paths=other")
    assert root.name == "z"
    assert root.model.tables == {"C9": Table(rows=5)}
    assert root.model.paths == "other"


def test_an_override_leaves_its_source_as_it_was():
    source = parse_yaml("name: x\nmodel: {layers: [1]}\n", name="a.yaml")
    apply_overrides(source, ["name=y", "model.layers=[2]"])
    assert source.values == {"name": "x", "model": {"layers": [1]}}
    assert source.origin(("model", "layers")) == "a.yaml:2"


BAD = [
    # text, overrides, message
    ("name: x\nnmae: y", [], "a.yaml:2: unknown key nmae; did you mean name?"),
    ("name: x", ["model.layer=[1]"], "unknown key model.layer; did you mean model.layers?"),
    (
        "name: x\nlearning_rate: 1",
        [],
        "a.yaml:2: unknown key learning_rate; did you mean optimizer.learning_rate?",
    ),
    (
        "name: x",
        ["model.tables.C1.rws=1"],
        (
            "override 'model.tables.C1.rws=1': unknown key model.tables.C1.rws; did you mean"
            " model.tables.C1.rows?"
        ),
    ),
    (
        "name: x",
        ["zzz.qqq=1"],
        (
            "override 'zzz.qqq=1': unknown key zzz; the top level has the keys name, model, optimizer,"
            " bound"
        ),
    ),
    (
        "name: x",
        ["model.lr=1"],
        ("unknown key model.lr; section 'model' has the keys layers, span, paths, tables"),
    ),
    ("model: {}", [], "a.yaml: name is missing (text); add it there or give name=..."),
    ("name: 3", [], "a.yaml:1: name=3: expected text"),
    ("name: x\nbound: wide", [], "a.yaml:2: bound='wide': expected a number or null"),
    ("name: x", ["bound=true"], "override 'bound=true': bound=True: expected a number or null"),
    (
        "name: x\nmodel:\n  layers: [1, two]",
        [],
        "a.yaml:3: model.layers.1='two': expected an integer",
    ),
    ("name: x", ["model.layers=3"], "model.layers=3: expected a list, each item an integer"),
    ("name: x", ["model.layers=[true]"], "model.layers.0=True: expected an integer"),
    ("name: x", ["model.span=[1]"], "model.span=[1]: expected a list of 2: a number, a number"),
    (
        "name: x\nmodel: {tables: {C1: {pooling: max}}}",
        [],
        "a.yaml:2: model.tables.C1.pooling='max': expected 'sum' or 'mean'",
    ),
    ("name: x", ["model.tables=[1]"], "expected a mapping, each value a section with the keys"),
    ("name: x\noptimizer: 3", [], "optimizer=3: expected a section with the keys learning_rate"),
    ("name: x", ["optimizer.nesterov=1"], "optimizer.nesterov=1: expected true or false"),
    (
        "name: x\noptimizer:\n  learning_rate: -1",
        [],
        "a.yaml:3: in section 'optimizer': learning_rate=-1.0: give a number above 0",
    ),
    ("name: x", ["name"], "override 'name': expected KEY=VALUE"),
    ("name: x", [".a=1"], "override '.a=1': expected KEY=VALUE"),
    ("name: x", ["name=[1"], "override 'name=[1': the value is not valid YAML"),
    ("name: x", ["name.first=1"], "override 'name.first=1': name is a value, not a section"),
    ("name: x\nname: y", [], "a.yaml:2: name is given twice"),
    ("- 1", [], "a.yaml: expected sections"),
    ("name: [", [], "a.yaml: not valid YAML"),
    ("name: x\nbound: 2026-13-45", [], "'2026-13-45' cannot be read as timestamp"),
    ("name: x\nbound: 2026-01-02", [], "expected a number or null"),
    ("name: x", ["bound=2026-02-30"], "'2026-02-30' cannot be read as timestamp"),
    ("name: x\nbound: !!timestamp abc", [], "'abc' cannot be read as timestamp"),
    ("name: x\nbound: !!int abc", [], "'abc' cannot be read as int"),
    ("name: x\nbound: !!float abc", [], "'abc' cannot be read as float"),
    ("name: x\nbound: !!bool maybe", [], "'maybe' cannot be read as bool"),
    (f"name: x\nbound: {'9' * 400}", [], "a value of 400 letters that begins with '9999"),
    (f"name: x\nbound: {'9' * 5000}", [], "a value of 5000 letters that begins with '9999"),
    ("name: x", [f"bound={'9' * 5000}"], "a value of 5000 letters that begins with '9999"),
    (f"name: x\nbound: 0x{'f' * 5000}", [], "does not fit into 64 bits"),
    ("name: x", ["model.layers=[9223372036854775808]"], "does not fit into 64 bits"),
    (f"name: {'[' * 3000}", [], "a.yaml: not valid YAML"),
    (f"name: {'[' * 3000}{']' * 3000}", [], "nested more than 100 deep"),
    ("name: x", [f"model={'[' * 3000}{']' * 3000}"], "nested more than 100 deep"),
    (f"name: {'[' * 101}{']' * 101}", [], "nested more than 100 deep"),
    ("name: x\nmodel: &m [*m]", [], "an alias refers to what contains it"),
    ("name: x\nmodel: &m {layers: *m}", [], "an alias refers to what contains it"),
    ("name: x\nmodel: &m {<<: *m}", [], "an alias refers to what contains it"),
    (
        "name: x\na: &a {"
        + ", ".join(f"k{i}: 1" for i in range(9))
        + "}\n"
        + "\n".join(
            f"{b}: &{b} {{" + ", ".join(f"k{i}: *{a}" for i in range(9)) + "}"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        [],
        "its aliases stand for more than 1000000 values",
    ),
    ('name: "\\ud800"', [], "cannot be read as str"),
    (
        "name: x",
        ["name=[a,"],
        "write a list as 'name=[a, b]' and a mapping as 'name={name: value}', in quotes",
    ),
    ("name: x", ["32]"], "a list or mapping stands in quotes, such as 'model.over_layers=[128"),
    (
        "name: x",
        ["model.layers=64,32"],
        (
            "model.layers='64,32': expected a list, each item an integer; write it in quotes, such"
            " as 'model.layers=[64, 32]'"
        ),
    ),
    ("name: x", ["model.tables=C1"], "write it in quotes, such as 'model.tables={name: value}'"),
    (
        "name: x",
        ["model.tables.C1.pooling=means"],
        "expected 'sum' or 'mean'; did you mean mean?",
    ),
    ("name: x", ["model.tables.C1={row: 1}"], "did you mean model.tables.C1.rows?"),
]


@pytest.mark.parametrize(("text", "overrides", "message"), BAD)
def test_a_bad_config_says_where_what_and_how(text, overrides, message):
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True, kw_only=True)
class Either:
    source: Table | Optimizer | None = None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("source: {learning_rate: 1, nestrov: true}", "did you mean source.nesterov?"),
        ("source: {row: 1}", "a.yaml:1: unknown key source.row; did you mean source.rows?"),
        ("source: {pooling: max}", "source.pooling='max': expected 'sum' or 'mean'"),
    ],
)
def test_of_several_sections_the_nearest_says_what_is_wrong(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(Either, parse_yaml(text, name="a.yaml"))


def test_of_several_sections_the_one_with_the_keys_is_made():
    made = build(Either, parse_yaml("source: {learning_rate: 2}", name="a.yaml"))
    assert made.source == Optimizer(learning_rate=2.0)


int64 = st.integers(-(2**63), 2**63 - 1)  # wider ones are refused
numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
roots = st.builds(
    Root,
    name=texts,
    model=st.builds(
        Model,
        layers=st.lists(int64).map(tuple),
        span=st.tuples(numbers, numbers),
        paths=texts | st.lists(texts).map(tuple),
        tables=st.dictionaries(
            texts,
            st.builds(
                Table,
                rows=st.none() | int64,
                pooling=st.sampled_from(["sum", "mean"]),
            ),
        ),
    ),
    optimizer=st.builds(
        Optimizer,
        learning_rate=st.floats(1e-30, 1e30),
        nesterov=st.booleans(),
    ),
    bound=st.none() | numbers,
)


@given(roots)
def test_yaml_round_trip(root):
    assert build(Root, parse_yaml(to_yaml(root), name="dumped")) == root


def test_differing_keys_are_dotted_leaves():
    left = Root(name="x", model=Model(tables={"C1": Table(rows=1)}))
    right = dataclasses.replace(
        left,
        bound=1.0,
        model=Model(layers=(1,), tables={"C1": Table(rows=2), "C2": Table()}),
    )
    assert differing_keys(to_plain(left), to_plain(right)) == [
        "model.layers",
        "model.tables.C1.rows",
        "model.tables.C2",
        "bound",
    ]
    assert differing_keys(to_plain(left), to_plain(left)) == []


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match=r"a\.yaml: not UTF-8 text"):
        read_yaml(tmp_path / "a.yaml")
