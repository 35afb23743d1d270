import math
import random

import pytest
import torch

from tessera.errors import UserError
from tessera.training.transforms import target_statistics
from tessera.training.transforms.description import Transforms, dense_column, id_column
from tessera.training.transforms.preprocessor import Preprocessor
from tessera.training.transforms.target_statistics import TargetStatistic
from tests.transforms import slow
from tests.transforms.harness import fitted, jagged, rows, three_forms

NAMES = ("a", "b")


def transforms_of(dense=(), **statistics):
    return Transforms(
        dense=tuple(dense),
        sparse=tuple(id_column(name, []) for name in NAMES),
        labels=("click", "buy"),
        target_statistics=statistics,
    )


def drawn(size, seed):
    draw = random.Random(seed)
    bags = {
        name: [[draw.choice([1, -5, 2**62, 9])] if draw.random() < 0.9 else [] for _ in range(size)]
        for name in NAMES
    }
    return bags, [[float(draw.random() < 0.3), float(draw.random() < 0.6)] for _ in range(size)]


def key_of(bags, columns, row):
    own = [bags[column][row] for column in columns]
    return tuple(bag[0] for bag in own) if all(own) else None


STATISTICS = {
    "one": TargetStatistic(key=("a",), smoothing=3.0),
    "two": TargetStatistic(key=("b", "a"), label="buy", smoothing=0.0, folds=3),
}


def expected_of(train, asked, *, own):
    """Every statistic of the rows ``asked``, by loops; ``own``: as training shows them."""
    (bags, labels), (asked_bags, asked_labels) = train, asked
    found = []
    for row in range(len(asked_labels)):
        values = []
        for statistic in STATISTICS.values():
            label = 1 if statistic.label == "buy" else 0
            fitted_rows = [
                (number, key_of(bags, statistic.key, number), labels[number][label])
                for number in range(len(labels))
            ]
            mean, count, _ = slow.statistic(
                fitted_rows,
                key_of(asked_bags, statistic.key, row),
                None,
                statistic.smoothing,
                own_row=row if own else None,
                folds=statistic.folds,
            )
            values += [mean, count]
        found.append(values)
    return torch.tensor(found)


def test_training_rows_are_shown_the_other_folds_and_others_the_whole_table():
    train, other = drawn(120, 1), drawn(50, 2)
    batch = rows([], NAMES, *train)
    made = fitted(transforms_of(**STATISTICS), batch)
    dense, _ = made(torch.zeros(120, 0), batch.sparse_features, batch.row_numbers)
    torch.testing.assert_close(dense, expected_of(train, train, own=True))
    dense, _ = made(torch.zeros(50, 0), jagged(NAMES, other[0]))
    torch.testing.assert_close(dense, expected_of(train, other, own=False))
    assert made.transforms.dense_names == ["one_mean", "one_count", "two_mean", "two_count"]


def test_batches_of_any_size_fit_the_same_table():
    bags, labels = drawn(90, 3)
    whole = rows([], NAMES, bags, labels)
    parts = [
        rows([], NAMES, {n: bags[n][a : a + 7] for n in NAMES}, labels[a : a + 7], a)
        for a in range(0, 90, 7)
    ]
    one, other = (fitted(transforms_of(**STATISTICS), *given) for given in ([whole], parts))
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_a_key_of_one_row_is_shown_the_prior():
    bags = {"a": [[n] for n in range(10)], "b": [[0]] * 10}
    labels = [float(n % 2) for n in range(10)]
    batch = rows([], NAMES, bags, labels)
    made = fitted(transforms_of(s=TargetStatistic(key=("a",), smoothing=0)), batch)
    dense, _ = made(torch.zeros(10, 0), batch.sparse_features, batch.row_numbers)
    assert dense[:, 0].tolist() == [0.5] * 10
    assert dense[:, 1].tolist() == [0.0] * 10


def test_no_row_sees_its_own_label():
    bags, labels = drawn(80, 4)
    statistic = {"s": TargetStatistic(key=("a",), smoothing=0.0)}
    batch = rows([], NAMES, bags, labels)
    made = fitted(transforms_of(**statistic), batch)
    before, _ = made(torch.zeros(80, 0), batch.sparse_features, batch.row_numbers)
    assert len(before[:, 0].unique()) > 5
    for row in range(80):
        turned = [list(pair) for pair in labels]
        turned[row][0] = 1.0 - turned[row][0]
        batch = rows([], NAMES, bags, turned)
        made = fitted(transforms_of(**statistic), batch)
        after, _ = made(torch.zeros(80, 0), batch.sparse_features, batch.row_numbers)
        if bags["a"][row]:  # without a key it is shown the mean of all rows
            assert torch.equal(after[row], before[row])
            assert not torch.equal(after, before)


def auc(scores, labels):
    pairs = [(s, t) for s, y in zip(scores, labels, strict=True) if y == 1
             for t, z in zip(scores, labels, strict=True) if z == 0]  # fmt: skip
    return sum((s > t) + 0.5 * (s == t) for s, t in pairs) / len(pairs)


def test_a_random_label_is_not_learned_from_a_unique_key():
    draw = random.Random(5)
    labels = [float(draw.random() < 0.5) for _ in range(300)]
    bags = {"a": [[n * 7919] for n in range(300)], "b": [[0]] * 300}
    train = rows([], NAMES, {name: own[:200] for name, own in bags.items()}, labels[:200])
    made = fitted(transforms_of(s=TargetStatistic(key=("a",))), train)
    held_out = jagged(NAMES, {name: own[200:] for name, own in bags.items()})
    dense, _ = made(torch.zeros(100, 0), held_out)
    assert auc(dense[:, 0].tolist(), labels[200:]) == 0.5
    dense, _ = made(torch.zeros(200, 0), train.sparse_features, train.row_numbers)
    assert auc(dense[:, 0].tolist(), labels[:200]) == 0.5
    # The labels are in the table: without folds they would be told.
    dense, _ = made(torch.zeros(200, 0), train.sparse_features)
    assert auc(dense[:, 0].tolist(), labels[:200]) == 1.0


def test_a_missing_label_counts_for_nothing():
    bags = {"a": [[1]] * 4, "b": [[0]] * 4}
    batch = rows([], NAMES, bags, [1.0, 0.0, math.nan, math.nan])
    made = fitted(transforms_of(s=TargetStatistic(key=("a",), smoothing=0)), batch)
    dense, _ = made(torch.zeros(4, 0), batch.sparse_features)
    assert dense[0, 0] == 0.5
    assert dense[0, 1] == torch.log1p(torch.tensor(2.0))


def test_of_too_many_keys_the_rarest_are_forgotten(monkeypatch):
    monkeypatch.setattr(target_statistics, "MAX_KEYS", 10)
    bags = {"a": [[n] for n in range(50)] + [[3], [4]], "b": [[0]] * 52}
    batch = rows([], NAMES, bags, [1.0] * 25 + [0.0] * 27)
    made = fitted(transforms_of(s=TargetStatistic(key=("a",), smoothing=0)), batch)
    dense, _ = made(torch.zeros(3, 0), jagged(NAMES, {"a": [[3], [4], [5]], "b": [[0]] * 3}))
    prior = torch.tensor(25 / 52, dtype=torch.float64).float().item()
    assert dense[:, 0].tolist() == [0.5, 0.5, prior]


def test_the_prior_of_no_rows_is_finite():
    made = Preprocessor(transforms_of(**STATISTICS))
    dense, _ = made(torch.zeros(1, 0), jagged(NAMES, {"a": [[1]], "b": [[0]]}))
    assert dense.tolist() == [[0.0] * 4]


@pytest.mark.parametrize("size", [0, 1, 5, 64])
def test_eager_traced_and_scripted_have_the_same_bits(size):
    own = transforms_of([dense_column("x", ["log1p"])], **STATISTICS)
    bags, labels = drawn(100, 6)
    made = fitted(own, rows([0.5] * 100, NAMES, bags, labels))
    given = jagged(NAMES, drawn(size, size)[0])
    dense = torch.randn(size, 1)
    first, *others = [
        form(dense, given.values(), given.lengths()) for form in three_forms(made, NAMES)
    ]
    assert first[0].shape == (size, 5)
    for other in others:
        assert all(slow.same_bits(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TargetStatistic(key=()), "key=.*: give one or more different columns"),
        (lambda: TargetStatistic(key=("a",), smoothing=-1), "smoothing=-1: give 0 or a number"),
        (lambda: TargetStatistic(key=("a",), folds=1), "folds=1: give 2 to 64"),
        (
            lambda: transforms_of(s=TargetStatistic(key=("a",), label="clik")),
            "target_statistics.s.label='clik': .*it has click, buy; did you mean click",
        ),
        (
            lambda: transforms_of(s=TargetStatistic(key=("z",))),
            "target_statistics.s.key='z': the data has no such column of ids; it has a, b",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place_and_the_remedy(make, message):
    with pytest.raises(UserError, match=message):
        make()
