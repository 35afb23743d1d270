import random

import pytest
import torch

from tessera.errors import UserError
from tessera.training.transforms.crosses import Cross
from tessera.training.transforms.description import Transforms, id_column
from tessera.training.transforms.ids import seeds
from tessera.training.transforms.kinds import vocabulary
from tessera.training.transforms.preprocessor import Preprocessor
from tests.transforms import slow
from tests.transforms.harness import fitted, jagged, rows, three_forms

ODD = [0, -1, 1, 5, 2**63 - 1, -(2**63), 2**32, -7, 123456789012345]


def random_bags(size, names, seed, most=3):
    draw = random.Random(seed)
    return {
        name: [draw.choices(ODD, k=draw.randint(0, most)) for _ in range(size)] for name in names
    }


def ids_of(made, names, bags):
    size = len(bags[names[0]])
    return made(torch.zeros(size, 0), jagged(names, bags))[1]


def bags_of(features):
    """``[feature][sample]`` lists of ids."""
    return {name: part.to_dense() for name, part in features.to_dict().items()}


def as_lists(features):
    return {name: [bag.tolist() for bag in own] for name, own in bags_of(features).items()}


def vocabularies(**rules):
    return Transforms(sparse=tuple(id_column(name, items) for name, items in rules.items()))


@pytest.mark.parametrize(
    "settings", [{}, {"min_count": 3}, {"max_size": 2}, {"min_count": 2, "max_size": 3}]
)
def test_vocabulary_rows_are_those_of_a_counted_dictionary(settings):
    transforms = vocabularies(a=[{"vocabulary": settings}], b=[], c=["vocabulary"], d=["hash"])
    names = "abcd"
    seen = random_bags(40, names, 1)
    made = fitted(transforms, rows([], names, seen, [0.0] * 40))
    asked = random_bags(50, names, 2)
    asked["a"][0] = asked["c"][0] = asked["b"][0] = [77, -78, 5]
    found = as_lists(ids_of(made, names, asked))
    known = {
        "a": slow.vocabulary(seen["a"], settings.get("min_count", 1), settings.get("max_size")),
        "c": slow.vocabulary(seen["c"], 1, None),
    }
    assert known["a"]
    assert known["c"]
    for name in "ac":
        assert found[name] == [[known[name].get(one, 0) for one in bag] for bag in asked[name]]
    assert all(found[name] == asked[name] for name in "bd")


def test_features_of_one_table_share_its_vocabulary():
    item = id_column("item", ["vocabulary"], table="t")
    history = id_column("history", ["vocabulary"], table="t")
    bags = {"item": [[5], [6]], "history": [[7, 9], []]}
    made = fitted(Transforms(sparse=(item, history)), rows([], bags, bags, [0.0, 0.0]))
    asked = {"item": [[9]], "history": [[5, 6, 8]]}
    assert as_lists(ids_of(made, list(bags), asked)) == {"item": [[4]], "history": [[1, 2, 0]]}


def test_an_id_of_another_vocabulary_is_unknown_even_where_it_meets_its_key():
    transforms = vocabularies(a=["vocabulary"], b=["vocabulary"])
    made = fitted(transforms, rows([], "ab", {"a": [[5]], "b": [[6]]}, [0.0]))
    first, second = seeds(2).tolist()
    as_five = slow.signed((5 ^ first) ^ second)  # stands in b where 5 stands in a
    found = as_lists(ids_of(made, "ab", {"a": [[5, 6]], "b": [[as_five, 6]]}))
    assert found == {"a": [[1, 0]], "b": [[0, 1]]}


def test_ids_of_two_vocabularies_that_would_meet_are_told_apart():
    first, second = seeds(2).tolist()
    met = slow.signed((5 ^ first) ^ second)
    transforms = vocabularies(a=["vocabulary"], b=["vocabulary"])
    made = fitted(transforms, rows([], "ab", {"a": [[5]], "b": [[met, 1]]}, [0.0]))
    found = as_lists(ids_of(made, "ab", {"a": [[5, met]], "b": [[5, met]]}))
    assert found == {"a": [[1, 0]], "b": [[0, 1 + (met > 1)]]}


def test_a_vocabulary_of_no_row_knows_no_id():
    transforms = vocabularies(a=["vocabulary"])
    for made in (
        Preprocessor(transforms),
        fitted(transforms, rows([], "a", {"a": [[], []]}, [0.0, 0.0])),
    ):
        assert as_lists(ids_of(made, "a", {"a": [[0, 5, -1]]})) == {"a": [[0, 0, 0]]}


def test_of_too_many_ids_the_rarest_are_forgotten(monkeypatch):
    monkeypatch.setattr(vocabulary, "MAX_COUNTED", 100)
    bags = {"a": [[n] for n in range(1000)] + [[7], [8]]}
    made = fitted(vocabularies(a=["vocabulary"]), rows([], "a", bags, [0.0] * 1002))
    assert as_lists(ids_of(made, "a", {"a": [[7, 8, 9]]})) == {"a": [[1, 2, 0]]}


CROSSED = Transforms(
    sparse=tuple(id_column(name, []) for name in "abc"),
    crosses={"ab": Cross(of=("a", "b")), "cab": Cross(of=("c", "a", "b"))},
)


@pytest.mark.parametrize("size", [0, 1, 30])
def test_crosses_join_the_first_ids_of_their_columns(size):
    bags = random_bags(size, "abc", size)
    found = ids_of(Preprocessor(CROSSED), "abc", bags)
    assert found.keys() == ["a", "b", "c", "ab", "cab"]
    expected = dict(bags)
    for cross in ("ab", "cab"):
        expected[cross] = [
            [slow.joined([bags[c][row][0] for c in cross])]
            if all(bags[c][row] for c in cross)
            else []
            for row in range(size)
        ]
    assert found.lengths().tolist() == [len(bag) for own in expected.values() for bag in own]
    assert found.values().tolist() == [x for own in expected.values() for bag in own for x in bag]


def test_features_in_another_order_are_found_by_their_names():
    bags = random_bags(9, "abc", 3)
    one = ids_of(Preprocessor(CROSSED), "abc", bags)
    other = ids_of(Preprocessor(CROSSED), "cab", bags)
    assert other.keys() == one.keys()
    assert torch.equal(one.values(), other.values())
    with pytest.raises(KeyError, match="feature 'b' is missing"):
        ids_of(Preprocessor(CROSSED), "ac", bags)


def test_a_made_id_has_weight_one():
    features = jagged("abc", {"a": [[1]], "b": [[2]], "c": [[3, 4]]})
    weights = torch.tensor([0.5, 0.25, 2.0, 3.0])
    weighted = features.with_fields(features.values(), weights, features.lengths(), None)
    found = Preprocessor(CROSSED)(torch.zeros(1, 0), weighted)[1]
    assert found.weights().tolist() == [0.5, 0.25, 2.0, 3.0, 1.0, 1.0]


@pytest.mark.parametrize("size", [0, 1, 5, 64])
def test_eager_traced_and_scripted_give_the_same_ids(size):
    transforms = Transforms(
        sparse=(
            id_column("a", [{"vocabulary": 2}]),
            id_column("b", []),
            id_column("c", ["vocabulary"], table="t"),
        ),
        crosses={"ab": Cross(of=("a", "b"))},
    )
    made = fitted(transforms, rows([], "abc", random_bags(50, "abc", 9), [0.0] * 50))
    given = jagged("abc", random_bags(size, "abc", size))
    dense = torch.zeros(size, 0)
    first, *others = [
        form(dense, given.values(), given.lengths()) for form in three_forms(made, "abc")
    ]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: id_column("a", ["log1p"]), "columns.a.transform.0.='log1p' is for dense columns"),
        (lambda: id_column("a", [{"vocabulary": 0}]), "min_count=0: give at least 1"),
        (lambda: id_column("a", ["hash", "vocabulary"]), "ids have one rule"),
        (lambda: Cross(of=("a",)), "give 2 to 8 different columns"),
        (lambda: Cross(of=("a", "a")), "give 2 to 8 different columns"),
        (
            lambda: Transforms(
                sparse=(id_column("cat", []), id_column("b", [])),
                crosses={"x": Cross(of=("cad", "b"))},
            ),
            r"crosses.x.of='cad': the data has no such column of ids; it has cat, b; did you mean cat",
        ),
        (
            lambda: Transforms(
                sparse=(id_column("a", ["vocabulary"], table="t"), id_column("b", [], table="t"))
            ),
            "a and b share table 't', so they share its vocabulary; give both the same transform",
        ),
        (
            lambda: Transforms(
                sparse=(id_column("a", []), id_column("b", [])), crosses={"a": Cross(of=("a", "b"))}
            ),
            "the name 'a' stands for two features; rename one",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place_and_the_remedy(make, message):
    with pytest.raises(UserError, match=message):
        make()
