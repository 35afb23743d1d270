"""One operator for all dense tables, against looking them up one after the other."""

import pytest
import torch

from tessera.training.distributed.tables.kernels.bags import bags_of
from tessera.training.distributed.tables.kernels.dense import DenseTables
from tessera.training.distributed.tables.kernels.dense_tbe import DenseTbeTables
from tessera.training.distributed.tables.kernels.interfaces import TableGroup
from tests.training.kernel_cases import DEVICE, group
from tests.training.test_kernels import draw_bags, kjt_of, on_gpu


def pair(config, *, pooled, mean):
    """The same values in both forms."""
    tables = TableGroup(tables=config.embedding_tables, pooled=pooled, mean=mean, device=DEVICE)
    made = [kind(tables, torch.float32) for kind in (DenseTables, DenseTbeTables)]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for plain, in_one in zip(made[0].weights, made[1].weights, strict=True):
            plain.copy_(torch.randn(plain.shape, generator=generator))
            in_one.copy_(plain)
    return made


@on_gpu
@pytest.mark.parametrize(
    ("pooled", "mean", "weighted"),
    [
        (True, False, False),
        (True, True, False),
        (True, False, True),
        (False, False, False),
    ],
)
def test_vectors_and_gradients_are_those_of_table_after_table(pooled, mean, weighted):
    if not pooled and DEVICE.type == "cpu":
        pytest.skip("on a CPU FBGEMM's dense operator always pools")
    dims = [8, 4, 12] if pooled else [8, 8, 8]
    config = group([(30, dims[0], 2), (5, dims[1], 1), (50, dims[2], 1)], weighted=weighted)
    tables = pair(config, pooled=pooled, mean=mean)
    generator = torch.Generator().manual_seed(1)
    optimizers = [torch.optim.SGD(form.weights, lr=0.1) for form in tables]
    for batch_size in (5, 1, 9):
        kjt = kjt_of(draw_bags(generator, config, batch_size, weighted=weighted))
        outs, of_weights = [], []
        for form, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            bags = bags_of(kjt, weighted=weighted, weighted_mean=False)
            if weighted:
                bags.weights.requires_grad_()
                bags.weights.grad = None
            outs.append(form(bags))
            # Another gradient for every number: sums of the same terms in another order.
            scale = torch.arange(outs[-1].numel(), device=DEVICE).view(outs[-1].shape) % 7
            (outs[-1] * scale).sum().backward()
            of_weights.append(bags.weights.grad.clone() if weighted else None)
        torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-5)
        if weighted:
            torch.testing.assert_close(of_weights[0], of_weights[1], rtol=1e-5, atol=1e-4)
        for plain, in_one in zip(tables[0].weights, tables[1].weights, strict=True):
            torch.testing.assert_close(plain.grad, in_one.grad, rtol=1e-5, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
    for plain, in_one in zip(tables[0].weights, tables[1].weights, strict=True):
        torch.testing.assert_close(plain, in_one, rtol=1e-5, atol=1e-4)


@on_gpu
@pytest.mark.parametrize("batch_size", [0, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_without_ids(batch_size, weighted):
    config = group([(30, 8, 1), (5, 4, 1)], weighted=weighted)
    _, in_one = pair(config, pooled=True, mean=False)
    empty = {
        name: ([[]] * batch_size, [[]] * batch_size if weighted else None)
        for name in ("f0_0", "f1_0")
    }
    bags = bags_of(kjt_of(empty), weighted=weighted, weighted_mean=False)
    if weighted:
        bags.weights.requires_grad_()
    out = in_one(bags)
    assert out.shape == (batch_size, 12)
    assert not out.any()
    out.sum().backward()
    assert not any(weight.grad.any() for weight in in_one.weights)
    # What made the weights has parameters whose gradients other ranks wait for.
    assert not weighted or bags.weights.grad.shape == (0,)


def test_where_it_is_chosen():
    def serves(columns, dtype, device):
        tables = group([(30, columns, 1)]).embedding_tables
        device = torch.device(device)
        return DenseTbeTables.serves(
            TableGroup(tables=tables, pooled=True, mean=False, device=device), dtype
        )

    assert serves(8, torch.float32, "cuda")
    assert not serves(8, torch.float32, "cpu")
    assert not serves(8, torch.float16, "cuda")
    assert not serves(6, torch.float32, "cuda")
