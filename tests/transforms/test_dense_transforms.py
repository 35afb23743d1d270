import copy
import math

import pytest
import torch

from tessera.errors import UserError
from tessera.kernels import ops
from tessera.training.transforms.description import Transforms, dense_column, id_column
from tessera.training.transforms.joined import JoinedStages
from tessera.training.transforms.kinds import quantile
from tessera.training.transforms.preprocessor import Preprocessor
from tessera.training.transforms.stages import dense_stages
from tests.transforms import slow
from tests.transforms.harness import fitted, rows, three_forms

ODD = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    3.5,
    1e-30,
    3e38,
    -3e38,
    math.inf,
    -math.inf,
    math.nan,
    7e9,
    16777217.0,
]


def one_column(*items):
    return Transforms(dense=(dense_column("x", items),))


def applied(made, values, columns=1):
    dense = torch.tensor(values, dtype=torch.float32).view(-1, columns)
    given = rows([0.0] * len(dense), [], {}, [0.0] * len(dense))
    return made(dense, given.sparse_features)[0]


def column(values):
    return rows(values, [], {}, [0.0] * len(values))


@pytest.mark.parametrize(
    ("item", "rule"),
    [
        ("log1p", slow.log1p),
        ({"clip": [-1, 5.1]}, lambda x: slow.clip(x, -1, 5.1)),
        ({"clip": [None, 2]}, lambda x: slow.clip(x, -math.inf, 2)),
        ({"missing": 0.1}, lambda x: slow.missing(x, 0.1)),
    ],
)
def test_a_transform_without_a_fit_is_its_formula(item, rule):
    found = applied(Preprocessor(one_column(item)), ODD)
    expected = torch.tensor([[rule(slow.f32(x))] for x in ODD])
    assert slow.same_bits(found, expected)


CHAINS = [
    ["log1p", "standardize"],
    [{"clip": [-1, 5.1]}, {"missing": 0.5}],
    ["log1p"],
    [{"missing": 2.0}, {"log_odds": "b"}, "standardize"],
]


def test_stages_joined_are_the_stages_one_after_the_other(device):
    assert ops.is_built_for("dense_steps", "cpu")
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(200, 4, generator=generator) * 50
    values[torch.rand(values.shape, generator=generator) < 0.1] = math.nan
    made = Preprocessor(
        Transforms(
            dense=tuple(dense_column(name, c) for name, c in zip("abcd", CHAINS, strict=True))
        )
    )
    given = rows([0.0] * len(values), [], {}, [0.0] * len(values)).sparse_features
    joined, there = JoinedStages(), values.to(device)
    own = copy.deepcopy(made).to(device)
    for number in range(3):
        # What a stage was fitted to changes: in place, and by other buffers.
        for part in (made, own):
            for stage in part.stages:
                if hasattr(stage, "mean_F"):
                    if number == 1:
                        stage.mean_F.fill_(7.5)
                    if number == 2:
                        stage.scale_F = torch.full_like(stage.scale_F, 0.25)
        expected = made(values, given)[0]
        assert slow.same_bits(joined(own.stages, there).cpu(), expected)
        assert slow.same_bits(own(there, given.to(there.device))[0].cpu(), expected)


def test_log_odds_read_the_raw_count_of_another_column():
    transforms = Transforms(
        dense=(
            dense_column("n", ["log1p"]),
            dense_column("some", [{"log_odds": {"of": "n", "added": 2.5}}]),
        )
    )
    given = [[0, 0], [10, 3], [5, 5], [3, math.nan], [math.nan, 1], [1, 5], [2e9, 1]]
    found = applied(Preprocessor(transforms), given, columns=2)
    expected = [[slow.log1p(n), slow.log_odds(x, n, 2.5)] for n, x in given]
    assert slow.same_bits(found, torch.tensor(expected))


def test_transforms_apply_in_their_order_whatever_other_columns_have():
    lists = [
        [{"clip": [0, 100]}, "log1p"],
        ["log1p"],
        ["log1p", {"clip": [0, 2]}],
        [],
        [{"missing": 1}, "log1p", {"clip": [0, 1]}, {"missing": 9}],
    ]
    columns = tuple(dense_column(f"x{n}", items) for n, items in enumerate(lists))
    made = Preprocessor(Transforms(dense=columns))
    assert len(made.stages) < sum(map(len, lists))
    functions = {
        "log1p": lambda x, _: slow.log1p(x),
        "clip": lambda x, bounds: slow.clip(x, *bounds),
        "missing": slow.missing,
    }
    expected = []
    for value in ODD:
        row = []
        for items in lists:
            own = slow.f32(value)
            for item in items:
                ((name, setting),) = item.items() if isinstance(item, dict) else ((item, None),)
                own = functions[name](own, setting)
            row.append(own)
        expected.append(row)
    found = applied(made, [value for value in ODD for _ in lists], columns=len(lists))
    assert slow.same_bits(found, torch.tensor(expected))


def test_equal_lists_share_their_stages():
    columns = [dense_column(f"x{n}", ["log1p", {"clip": [0, n + 1]}]) for n in range(50)]
    assert len(dense_stages(columns)) == 2


def test_standardize_takes_mean_and_deviation_of_the_finite_values():
    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(1000, generator=generator) * 3 + 1e4).tolist()
    given = [*values, math.nan, math.inf, -math.inf]
    made = fitted(one_column("standardize"), column(given[:300]), column(given[300:]))
    mean = math.fsum(values) / 1000
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / 1000)
    found = applied(made, [mean, mean + deviation, math.nan, math.inf])
    assert found[:2, 0].tolist() == pytest.approx([0, 1], abs=1e-3)
    assert torch.isnan(found[2, 0])
    assert found[3, 0] == math.inf


@pytest.mark.parametrize("values", [[], [5.0, 5.0], [math.nan], [1e-45, 0.0], [3e38, -3e38]])
def test_standardize_of_odd_columns_is_finite(values):
    made = fitted(one_column("standardize"), column(values))
    assert torch.isfinite(applied(made, [0.0, 5.0, -1.0])).all()


def test_a_fitted_transform_is_fitted_behind_those_before_it():
    both = one_column("log1p", "standardize", {"quantile": 4})
    values = [float(n * n) for n in range(64)]
    made = fitted(both, column(values))
    ranks = applied(made, values).flatten()
    assert ranks.tolist() == [(n // 16 + 0.5) / 4 for n in range(64)]


@pytest.mark.parametrize("to", ["rank", "id"])
def test_quantile_buckets_are_those_of_a_sorted_list(to):
    generator = torch.Generator().manual_seed(2)
    values = torch.randint(0, 40, (500,), generator=generator).float().tolist()
    given = [*values, math.nan, math.nan]
    items = [{"quantile": {"buckets": 7, "to": to}}]
    made = fitted(one_column(*items), column(given))
    bounds = slow.bounds_of(values, 7)
    asked = [*ODD, *range(-1, 41)]
    dense = torch.tensor(asked, dtype=torch.float32).view(-1, 1)
    found, features = made(dense, column(asked).sparse_features)
    buckets = [None if math.isnan(x) else slow.bucket(slow.f32(x), bounds) for x in asked]
    if to == "rank":
        step = torch.tensor(1 / 7)
        ranks = [math.nan if b is None else ((b + 0.5) * step).item() for b in buckets]
        assert slow.same_bits(found.flatten(), torch.tensor(ranks))
    else:
        assert found.shape == (len(asked), 0)
        assert features.keys() == ["x"]
        assert features.values().tolist() == [0 if b is None else b + 1 for b in buckets]
        assert features.lengths().tolist() == [1] * len(asked)


def test_quantiles_of_many_rows_are_those_of_a_sample_that_no_order_changes(monkeypatch):
    monkeypatch.setattr(quantile, "SAMPLE_ROWS", 200)
    values = [float(n) for n in range(2000)]
    whole = rows(values, [], {}, values)
    parts = [rows(values[a : a + 300], [], {}, values[a : a + 300], a) for a in range(0, 2000, 300)]
    transforms = one_column({"quantile": 4})
    one, other = fitted(transforms, whole), fitted(transforms, *reversed(parts))
    assert torch.equal(one.stages[0].bounds_FQ, other.stages[0].bounds_FQ)
    assert one.stages[0].bounds_FQ[0].tolist() == pytest.approx([500, 1000, 1500], abs=150)


@pytest.mark.parametrize("size", [0, 1, 2, 33, 1000])
def test_eager_traced_and_scripted_have_the_same_bits(size):
    transforms = Transforms(
        dense=(
            dense_column("a", [{"missing": 0}, {"clip": [0, 1e9]}, "log1p", "standardize"]),
            dense_column("b", ["log1p", {"quantile": 5}]),
            dense_column("c", [{"log_odds": "a"}]),
            dense_column("d", [{"quantile": {"buckets": 3, "to": "id"}}]),
            dense_column("e", []),
        )
    )
    made = fitted(transforms, rows([float(n) for n in range(500)], [], {}, [0.0] * 100))
    generator = torch.Generator().manual_seed(size)
    dense = torch.randn(size, 5, generator=generator) * 1000
    dense[torch.rand(size, 5, generator=generator) < 0.1] = math.nan
    # One feature: a jagged tensor without keys does not know how many samples it has.
    names, lengths = ["i"], torch.zeros(size, dtype=torch.int32)
    transforms = Transforms(dense=transforms.dense)
    forms = three_forms(with_feature(made, names), names)
    first, *others = [form(dense, torch.empty(0, dtype=torch.int64), lengths) for form in forms]
    for other in others:
        assert all(slow.same_bits(a, b) for a, b in zip(first, other, strict=True))
    assert first[0].shape == (size, 4)
    # Alone a row has the bits that it has among others.
    alone = [forms[0](dense[n : n + 1], first[1][:0], lengths[:1])[0] for n in range(min(size, 40))]
    assert all(slow.same_bits(first[0][n : n + 1], row) for n, row in enumerate(alone))


def with_feature(made, names):
    own = made.transforms
    sparse = tuple(id_column(name, []) for name in names)
    new = Preprocessor(Transforms(dense=own.dense, sparse=sparse))
    new.load_state_dict(made.state_dict())
    return new


def test_what_needs_nothing_is_left_as_it_is():
    made = Preprocessor(one_column())
    given = column([1.0])
    dense, features = made(given.dense_features, given.sparse_features)
    assert dense is given.dense_features
    assert features is given.sparse_features
    assert not made.is_needed


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["log1q"], "transform[0]='log1q': no such transform; .*did you mean log1p"),
        (["vocabulary"], "'vocabulary' is for columns of ids; dense columns take clip"),
        ([{"clip": 5}], "transform\\[0\\].clip: bounds=5: expected a list of 2"),
        ([{"clip": [5, 1]}], "bounds=\\[5.0, 1.0\\]: give \\[low, high\\] with low <= high"),
        ([{"log1p": 3}], "transform\\[0\\].log1p=3: write log1p alone"),
        ([{"quantile": 1}], "buckets=1: give 2 to 4096"),
        ([{"quantile": {"bucket": 8}}], "unknown key bucket; did you mean buckets"),
        ([{"missing": math.inf}], "value=inf: give a finite number"),
        ([{"log_odds": {"of": "y", "added": 0}}], "added=0.*: give a finite number above 0"),
        ([5], "transform\\[0\\]=5: give one transform's name"),
        (["log1p", {"quantile": {"buckets": 4, "to": "id"}}, "log1p"], "put it last"),
        ([{"log_odds": "xx"}], "'xx': the data has no such dense column; it has x; did you mean x"),
    ],
)
def test_a_wrong_item_is_refused_with_its_place_and_the_remedy(items, message):
    with pytest.raises(UserError, match=message.replace("transform[0]", "transform\\[0\\]")):
        one_column(*items)
