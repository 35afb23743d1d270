"""Tables in one flat parameter: what their gradients are, against tables that are parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tessera.training.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag
from tessera.training.distributed.comm.replicas import replicas
from tessera.training.distributed.embedding_types import EmbeddingComputeKernel
from tessera.training.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tests.training.kernel_cases import DEVICE, group
from tests.training.ranks import rank_device, run_on_ranks
from tests.training.test_kernels import kjt_of, on_gpu

FIRST = {"f0_0": ([[1, 2], [1]], None), "f1_0": ([[], [3, 0]], None)}
SECOND = {"f0_0": ([[0], [2, 2]], None), "f1_0": ([[3], [1]], None)}


def new_kernel(columns=(4, 4), device=DEVICE):
    config = group([(3, columns[0], 1), (4, columns[1], 1)], kernel=EmbeddingComputeKernel.DENSE)
    return BatchedDenseEmbeddingBag(config, device=device)


def tables_of(kernel):
    return [parameter for _, parameter in kernel.named_parameters_by_table()]


def backward(kernel, jagged, scale=1.0, device=DEVICE):
    out = kernel(kjt_of(jagged, device))
    factors = torch.arange(1.0, out.numel() + 1, device=out.device).view(out.shape)
    (out * factors * scale).sum().backward()


def expected(jagged, columns=(4, 4), scale=1.0):
    """Row by row: the factor of each bag's output, added to each id of the bag."""
    whole = sum(columns)
    found = []
    for number, rows in enumerate((3, 4)):
        first = sum(columns[:number])
        gradient = torch.zeros(rows, columns[number])
        for sample, ids in enumerate(jagged[f"f{number}_0"][0]):
            start = sample * whole + first + 1.0
            for row in ids:
                gradient[row] += scale * torch.arange(start, start + columns[number])
        found.append(gradient)
    return found


def assert_gradients(kernel, *parts):
    for number, table in enumerate(tables_of(kernel)):
        assert torch.equal(table.grad.cpu(), sum(part[number] for part in parts))


@on_gpu
@pytest.mark.parametrize("columns", [(4, 4), (4, 8), (3, 3)])
def test_backward_passes_add_up_until_gradients_are_dropped(columns):
    kernel = new_kernel(columns)
    one, two = expected(FIRST, columns), expected(SECOND, columns, 0.5)
    backward(kernel, FIRST)
    assert_gradients(kernel, one)
    backward(kernel, SECOND, 0.5)
    assert_gradients(kernel, one, two)
    for table in tables_of(kernel):
        table.grad = None
    backward(kernel, SECOND, 0.5)
    assert_gradients(kernel, two)
    torch.optim.SGD(tables_of(kernel)).zero_grad(set_to_none=False)
    backward(kernel, FIRST)
    assert_gradients(kernel, one)


@on_gpu
def test_two_lookups_of_one_backward_pass_add_up():
    kernel = new_kernel()
    outs = [kernel(kjt_of(jagged)) for jagged in (FIRST, SECOND)]
    factors = torch.arange(1.0, 17.0, device=DEVICE).view(2, 8)
    sum((out * factors).sum() for out in outs).backward()
    assert_gradients(kernel, expected(FIRST), expected(SECOND))


@on_gpu
def test_one_tables_gradient_dropped_replaced_or_not_wanted():
    kernel = new_kernel()
    first, second = tables_of(kernel)
    backward(kernel, FIRST)
    first.grad, second.grad = None, torch.ones_like(second)
    backward(kernel, SECOND)
    found = expected(SECOND)
    assert torch.equal(first.grad.cpu(), found[0])
    assert torch.equal(second.grad.cpu(), found[1] + 1)
    first.grad = second.grad = None
    second.requires_grad_(False)
    backward(kernel, SECOND)
    assert torch.equal(first.grad.cpu(), found[0])
    assert second.grad is None


@on_gpu
def test_gradients_dropped_through_the_flat_parameter():
    kernel = new_kernel()
    backward(kernel, FIRST)
    kernel.zero_grad()
    backward(kernel, SECOND)
    assert_gradients(kernel, expected(SECOND))


@on_gpu
def test_a_failed_backward_pass_leaves_nothing_behind():
    kernel = new_kernel()

    def fail(_gradient):
        raise RuntimeError("on purpose")

    source = torch.zeros(1, device=DEVICE, requires_grad=True)
    source.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        (kernel(kjt_of(FIRST)).sum() + source.sum() + (source * 1).sum()).backward()
    for table in tables_of(kernel):
        table.grad = None
    backward(kernel, SECOND)
    assert_gradients(kernel, expected(SECOND))


def one_gradient_of_all_ranks(static_graph):
    rank, device = dist.get_rank(), rank_device()
    kernel = new_kernel(device=device)
    wrapped = replicas(kernel, dist.group.WORLD, device, static_graph=static_graph)
    assert [tuple(parameter.shape) for parameter in wrapped.parameters()] == [(28,)]
    apply_optimizer_in_backward(torch.optim.SGD, tables_of(kernel)[:1], {"lr": 1.0})
    steps = []
    for jagged in (FIRST, SECOND, FIRST):
        own = jagged if rank == 0 else {"f0_0": ([[], []], None), "f1_0": ([[2], []], None)}
        tables_of(kernel)[1].grad = None
        backward(wrapped, own, device=device)
        table, other = tables_of(kernel)
        steps.append((table.detach().cpu().clone(), other.grad.cpu().clone()))
    return steps


@pytest.mark.multi_gpu
@pytest.mark.parametrize("static_graph", [False, True])
def test_ranks_average_one_gradient_and_optimizers_in_the_backward_pass_see_it(static_graph):
    other = {"f0_0": ([[], []], None), "f1_0": ([[2], []], None)}
    for steps in run_on_ranks(2, one_gradient_of_all_ranks, static_graph):
        table = torch.zeros(3, 4)
        for jagged, (after, _) in zip((FIRST, SECOND, FIRST), steps, strict=True):
            table -= expected(jagged)[0] / 2
            assert torch.equal(after, table)
        assert torch.equal(steps[-1][1], (expected(FIRST)[1] + expected(other)[1]) / 2)


@on_gpu
def test_optimizers_take_the_tables_for_leaves():
    for parameter in tables_of(new_kernel()):
        assert type(parameter) is nn.Parameter
        assert parameter.is_leaf
