"""Models of sequences against slow references that go through a sample's history id by id."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tessera.errors import UserError
from tessera.training import JaggedTensor, KeyedJaggedTensor, ModelConfig, build_ranking_model
from tessera.training.models.config import TableConfig
from tessera.training.modules.batch_norm import BatchNorm
from tessera.training.modules.sequences import (
    CandidateAttention,
    Dice,
    SequenceTransformer,
    latest,
    pooled,
)
from tests.training.ranks import run_on_ranks

LENGTHS = torch.tensor([2, 0, 5, 3], dtype=torch.int32)


def jagged(columns=4):
    torch.manual_seed(0)
    return JaggedTensor(torch.randn(int(LENGTHS.sum()), columns), lengths=LENGTHS)


@pytest.mark.parametrize("places", [1, 3, 7])
def test_the_latest_entries_stand_at_the_right_end(places):
    vectors = jagged()
    padded, known = latest(vectors, places)
    assert padded.shape == (4, places, 4)
    for row, bag in enumerate(vectors.to_dense()):
        kept = bag[-places:]
        assert torch.equal(padded[row, places - len(kept) :], kept)
        assert not padded[row, : places - len(kept)].any()
        assert known[row].tolist() == [0.0] * (places - len(kept)) + [1.0] * len(kept)
        mean = kept.mean(0) if len(kept) else torch.zeros(4)
        torch.testing.assert_close(pooled(vectors, places, mean=True)[row], mean)
        torch.testing.assert_close(pooled(vectors, places, mean=False)[row], kept.sum(0))


def test_no_ids_at_all_give_zeros():
    none = JaggedTensor(torch.zeros(0, 4), lengths=torch.zeros(3, dtype=torch.int32))
    assert not latest(none, 2)[0].any()


def test_gradients_reach_the_entries_that_count():
    vectors = jagged()
    values = vectors.values().requires_grad_()
    latest(JaggedTensor(values, lengths=LENGTHS), 3)[0].sum().backward()
    # Of the bag of five, the first two are left out.
    assert values.grad[:, 0].tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 1, 1]


def test_the_local_activation_unit_is_its_papers_formula():
    vectors, candidate = jagged(), torch.randn(4, 4)
    unit = CandidateAttention(4, [6, 5])
    found = unit(*latest(vectors, 9), candidate)
    for row, bag in enumerate(vectors.to_dense()):
        expected = torch.zeros(4)
        for entry in bag:
            v = candidate[row]
            expected = expected + unit.unit(torch.cat([entry, v, entry - v, entry * v])) * entry
        torch.testing.assert_close(found[row], expected)


def slow_transformer(model, history):
    """SASRec's state after a history ``[n, D]``, place by place and head by head."""
    places = len(model.positions)
    history = history[-places:]
    x = [entry + model.positions[places - len(history) + i] for i, entry in enumerate(history)]
    for block in model.blocks:
        attention, normed = block.attention, [block.attention_norm(entry) for entry in x]
        width, attended = attention._width, []
        for place, entry in enumerate(normed):
            seen, parts = normed[: place + 1], []
            for head in range(attention._heads):
                own = slice(head * width, (head + 1) * width)
                query = attention.query(entry)[own]
                scores = [
                    float((query @ attention.key(e)[own]).detach()) / math.sqrt(width) for e in seen
                ]
                shares = [math.exp(score - max(scores)) for score in scores]
                values = [attention.value(e)[own] for e in seen]
                parts.append(sum(s * v for s, v in zip(shares, values, strict=True)) / sum(shares))
            attended.append(torch.cat(parts))
        x = [entry + more for entry, more in zip(x, attended, strict=True)]
        x = [entry + block.second(torch.relu(block.first(block.norm(entry)))) for entry in x]
    return model.norm(x[-1])


@pytest.mark.parametrize("heads", [1, 2])
def test_the_transformer_is_its_papers_formula(heads):
    torch.manual_seed(1)
    model = SequenceTransformer(4, 4, blocks=2, heads=heads, dropout=0.3).eval()
    vectors = jagged()
    found = model(*latest(vectors, 4))
    assert not found[1].any()  # there is no history
    for row, bag in enumerate(vectors.to_dense()):
        if len(bag):
            torch.testing.assert_close(found[row], slow_transformer(model, bag))


def test_dice_is_its_papers_formula():
    dice = Dice(3)
    with torch.no_grad():
        dice.alpha.copy_(torch.tensor([0.1, -0.2, 0.3]))
    x = torch.randn(50, 3)
    share = torch.sigmoid((x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + 1e-8))
    torch.testing.assert_close(dice(x), share * x + (1 - share) * dice.alpha * x)


def test_batch_norm_is_torchs():
    ours, torchs = BatchNorm(3), nn.BatchNorm1d(3)
    for _ in range(3):
        x = torch.randn(20, 3) * 2 + 1
        torch.testing.assert_close(ours(x), torchs(x))
    torch.testing.assert_close(ours.state_dict()["running_var"], torchs.running_var)
    x = torch.randn(5, 3)
    torch.testing.assert_close(ours.eval()(x), torchs.eval()(x))


def normed_here(x, counts):
    """On a rank: its part of ``x``, normed, the gradient that comes back, and the averages."""
    rank = torch.distributed.get_rank()
    own = x.split(counts)[rank].clone().requires_grad_()
    norm = BatchNorm(3)
    out = norm(own)
    (out * out.detach().cos()).sum().backward()
    return out.detach(), own.grad, norm.running_mean, norm.running_var


@pytest.mark.parametrize("counts", [[4, 6], [10, 0]])
def test_ranks_norm_the_whole_batch(counts):
    torch.manual_seed(0)
    x = torch.randn(10, 3)
    outs, grads, means, variances = zip(*run_on_ranks(2, normed_here, x, counts), strict=True)
    whole, norm = x.clone().requires_grad_(), nn.BatchNorm1d(3)
    out = norm(whole)
    (out * out.detach().cos()).sum().backward()
    torch.testing.assert_close(torch.cat(outs), out.detach())
    torch.testing.assert_close(torch.cat(grads), whole.grad)
    for mean, variance in zip(means, variances, strict=True):
        torch.testing.assert_close(mean, norm.running_mean)
        torch.testing.assert_close(variance, norm.running_var)


def model_of(**fields):
    shared = TableConfig(rows=30, table="item_table")
    tables = dict.fromkeys(("item", "history", "liked"), shared)
    config = ModelConfig(embedding_dim=8, rows=20, tables=tables, **fields)
    return build_ranking_model(config, ["price"], ["user", "item", "history", "liked"])


def ids():
    return KeyedJaggedTensor(
        ["user", "item", "history", "liked"],
        torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 3]),
        lengths=torch.tensor([1, 1, 1, 1, 3, 1, 0, 2], dtype=torch.int32),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"arch": "din", "attention": {"history": "item", "liked": "item"}},
        {"arch": "din", "attention": {"history": "item"}, "activation": "prelu"},
        {"arch": "sasrec", "sequence": "history", "candidate": "item", "heads": 2},
    ],
)
def test_a_sample_is_scored_by_itself(fields):
    model = model_of(**fields).eval()
    dense, sparse = torch.randn(2, 1), ids()
    both = model(dense, sparse)
    assert both.shape == (2,)
    assert both.isfinite().all()
    # A change of the second sample's history leaves the first one's score.
    other = KeyedJaggedTensor(sparse.keys(), sparse.values() * 1, lengths=sparse.lengths())
    other.values()[7] = 11
    changed = model(dense, other)
    assert changed[0] == both[0]
    assert changed[1] != both[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arch": "din", "attention": {"histori": "item"}}, "did you mean history"),
        ({"arch": "din", "attention": {"history": "user"}}, "look up different tables"),
        ({"arch": "din", "attention": {"history": "history"}}, "give two features"),
        ({"arch": "din"}, "attention is empty"),
        ({"arch": "sasrec", "sequence": "history"}, "candidate is empty"),
        (
            {"arch": "sasrec", "sequence": "history", "candidate": "item", "heads": 3},
            "heads=3: they must divide .* 8",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        model_of(**fields)
