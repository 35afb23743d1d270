"""The ``eps`` of a table whose optimizer works in the backward pass, against the arithmetic by hand."""

import math

import pytest
import torch

from tessera.training import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)
from tessera.training.optim import RowWiseAdagrad
from tessera.training.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

LR, GRADIENT = 0.5, 3e-9  # so small that eps decides the step


def trained(optimizer_class, **settings):
    """The table of three rows after two steps in which row 1 has the gradient `GRADIENT` in each column."""
    table = EmbeddingBagConfig(3, 4, name="t", feature_names=["f"])
    tables = EmbeddingBagCollection([table], device=torch.device("meta"))
    apply_optimizer_in_backward(optimizer_class, tables.parameters(), {"lr": LR, **settings})
    model = DistributedModelParallel(tables, device=torch.device("cpu"))
    model.load_state_dict({"embedding_bags.t.weight": torch.zeros(3, 4)})
    ids = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1]), torch.tensor([1]))
    for _ in range(2):
        model(ids).values().backward(torch.full((1, 4), GRADIENT))
    return model.state_dict()["embedding_bags.t.weight"]


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adagrad, RowWiseAdagrad])
@pytest.mark.parametrize(("settings", "eps"), [({}, 1e-8), ({"eps": 1e-10}, 1e-10)])
def test_eps_is_that_of_fused_tables_unless_it_is_given(optimizer_class, settings, eps):
    weight = total = 0.0
    for _ in range(2):
        total += GRADIENT**2  # of equal columns the mean of squares is the square of one
        weight -= LR * GRADIENT / (math.sqrt(total) + eps)
    row = torch.full((4,), weight)
    whole = torch.stack([torch.zeros(4), row, torch.zeros(4)])
    # Squares of 3e-9 are normal float32 numbers; two steps round a few times.
    torch.testing.assert_close(trained(optimizer_class, **settings), whole, rtol=1e-5, atol=0)
