"""State dicts, first values and refusals of sharded collections."""

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from tessera.training.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.training.distributed.model_parallel import DistributedModelParallel
from tessera.training.distributed.types import ShardingEnv, ShardingPlan
from tessera.training.optim import CombinedOptimizer, KeyedOptimizerWrapper
from tessera.training.optim.optimizers import in_backward_optimizer_filter
from tests.training.ranks import rank_device, run_on_ranks, uses_cuda, whole_on_each_rank
from tests.training.sharded_cases import (
    Case,
    kjt_of,
    local_shards,
    plain_collection,
    plan_of,
    shard,
)
from tests.training.test_sharded_ebc import NAMES, TABLES, plans

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning"),
]


def cases_of(world):
    local = 2 if world == 4 else world
    return {
        kind: Case(TABLES, plan, (2,) * world, local_size=local)
        for kind, plan in plans(world).items()
    }


def whole(shards_per_rank):
    """Tables from the shards of all ranks."""
    tables = {t.name: torch.full((t.rows, t.dim), torch.nan) for t in TABLES}
    for shards in shards_per_rank:
        for name, own in shards.items():
            for row, column, values in own:
                rows, columns = values.shape
                tables[name][row : row + rows, column : column + columns] = values
    return tables


def moved_between(pairs):
    return [moved(first, second) for first, second in pairs]


def moved(first, second):
    """Shards of ``second`` after it took over the state of ``first`` through plain tables."""
    source = shard(first)
    for name, table in source.embedding_bags.items():
        for place, (own, values) in enumerate(table.shards):
            # Values that tell where each number of the table is.
            rows, columns = values.shape
            row, column = (0, 0) if own.local_metadata is None else own.local_metadata.shard_offsets
            marks = (
                1e4 * NAMES.index(name)
                + 100.0 * (row + torch.arange(rows))[:, None]
                + column
                + torch.arange(columns)
            )
            values.data.copy_(marks)
            assert getattr(table, f"weight_{place}" if place else "weight") is values
    state = source.state_dict()
    tables = {}
    for name, value in state.items():
        sharded = isinstance(value, ShardedTensor)
        tables[name] = whole_on_each_rank(value) if sharded else value
    target = shard(second)
    target.load_state_dict(tables)
    # A state of the same plan goes in shard by shard.
    again = shard(second)
    again.load_state_dict(target.state_dict())
    return local_shards(target), local_shards(again)


@pytest.mark.parametrize("world", [2, 4])
def test_tables_move_between_all_plans_exactly(world):
    local = 2 if world == 4 else world
    cases = cases_of(world)
    kinds = list(cases)
    expected = {
        t.name: 1e4 * place + 100.0 * torch.arange(t.rows)[:, None] + torch.arange(t.dim)
        for place, t in enumerate(TABLES)
    }
    pairs = [
        (kind, other)
        for place, kind in enumerate(kinds)
        for other in (kinds[place - 1], kinds[place - 3])
    ]
    per_rank = run_on_ranks(
        world,
        moved_between,
        [(cases[kind], cases[other]) for kind, other in pairs],
        local_world_size=local,
    )
    for place, pair in enumerate(pairs):
        for which in (0, 1):
            tables = whole([found[place][which] for found in per_rank])
            for name, value in expected.items():
                assert torch.equal(tables[name], value), (pair, name)


def state_names(case):
    module = shard(case)
    state = module.state_dict()
    return (
        list(state),
        [isinstance(value, ShardedTensor) for value in state.values()],
        [tuple(value.size()) for value in state.values()],
        sorted(name for name, _ in module.named_parameters()),
        sorted(module.fused_optimizer.params),
    )


def test_every_rank_names_every_table_once():
    case = cases_of(2)["table_wise"]
    plain = plain_collection(case).state_dict()
    on_ranks = run_on_ranks(2, state_names, case)
    for names, sharded, sizes, _, _ in on_ranks:
        assert names == list(plain)
        assert all(sharded)
        assert sizes == [tuple(value.shape) for value in plain.values()]
    # Parameters and optimizer state are those of the own shards.
    for place in (3, 4):
        own = [set(found[place]) for found in on_ranks]
        assert own[0] == {"embedding_bags.big.weight"}
        assert own[1] == {"embedding_bags.mean.weight", "embedding_bags.small.weight"}


def first_values(case):
    device = rank_device()
    sharder = EmbeddingBagCollectionSharder()
    module = plain_collection(case, device="meta")
    torch.manual_seed(dist.get_rank())
    sharded = sharder.shard(
        module,
        plan_of(case, module, sharder, device),
        ShardingEnv.from_process_group(dist.group.WORLD),
        device,
    )
    largest = max(values.numel() for _, values in sharded.named_parameters())
    before = local_shards(sharded)
    sharded.reset_parameters()
    return before, local_shards(sharded), largest


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "data_parallel", "mixed"])
def test_tables_on_the_meta_device_get_first_values_shard_by_shard(kind):
    case = cases_of(2)[kind]
    found = run_on_ranks(2, first_values, case)
    for which in (0, 1):
        tables = whole([shards[which] for shards in found])
        for table in TABLES:
            values = tables[table.name]
            # Every number is there, within the bounds of the whole table's rows.
            assert float(values.abs().max()) <= table.rows**-0.5
            assert float(values.abs().max()) > 0.5 * table.rows**-0.5
    assert not torch.equal(whole([s[0] for s in found])["big"], whole([s[1] for s in found])["big"])
    if kind == "data_parallel":
        for which in (0, 1):
            one, other = (shards[which] for shards in found)
            for table in TABLES:
                assert torch.equal(one[table.name][0][2], other[table.name][0][2])
    if kind == "row_wise":
        assert max(largest for _, _, largest in found) == 10 * 8  # half of the 19 rows of `big`


def error_of(kind, function, *args):
    with pytest.raises(kind) as caught:
        function(*args)
    return str(caught.value)


def refused(case, other):
    module = shard(case)
    states = (
        shard(other).state_dict(),
        {**module.state_dict(), "embedding_bags.big.weight": torch.zeros(19, 7)},
        {name: v for name, v in module.state_dict().items() if "big" not in name},
    )
    return [error_of(RuntimeError, module.load_state_dict, state) for state in states]


def test_states_that_do_not_fit_are_refused_with_the_reason():
    cases = cases_of(2)
    for errors in run_on_ranks(2, refused, cases["row_wise"], cases["column_wise"]):
        assert (
            "load a state of another plan with tessera.training.distributed.checkpoint" in errors[0]
        )
        assert "has shape (19, 7); expected (19, 8)" in errors[1]
        assert "Missing key" in errors[2]
        assert "embedding_bags.big.weight" in errors[2]


def plan_errors(case, plans_and_parts):
    return [
        (part, error_of(ValueError, shard, Case(case.tables, plan, case.batch_sizes)))
        for plan, part in plans_and_parts
    ]


def test_plans_by_hand_that_do_not_fit_are_refused():
    def all_of(kind, **arguments):
        return dict.fromkeys(NAMES, (kind, arguments))

    device = "cuda" if uses_cuda() else "cpu"
    attempts = [
        (all_of("table_wise", rank=2), "rank is 2; give 0 to 1"),
        (all_of("row_wise", sizes=[1, 1]), "add up to the table's 19 rows"),
        (all_of("column_wise", ranks=[0, 1, 0]), "8 columns do not divide evenly among 3"),
        (all_of("column_wise", ranks=[0], size_per_rank=[3]), "add up to the table's 8 columns"),
        (all_of("table_row_wise", host_index=1), "host_index is 1; give 0 to 0"),
        (
            all_of("data_parallel", compute_kernel="fused"),
            f"for data_parallel on {device} is 'fused'; give one of dense",
        ),
        ({"big": ("row_wise", {})}, "the module has ['big', 'mean', 'small']"),
    ]
    for found in run_on_ranks(2, plan_errors, cases_of(2)["row_wise"], attempts):
        assert len(found) == len(attempts)
        for part, message in found:
            assert part in message


def through_torchs_checkpoint(folder):
    """What a model and its optimizer hold before, and after they were saved, spoilt and loaded."""
    case = Case(
        TABLES,
        {
            "big": ("table_wise", {"rank": 1}),
            "mean": ("row_wise", {}),
            "small": ("data_parallel", {}),
        },
        (2, 3),
    )
    device = rank_device()
    module, sharder = plain_collection(case), EmbeddingBagCollectionSharder({"optimizer": "adam"})
    plan = ShardingPlan({"": plan_of(case, module, sharder, device)})
    model = DistributedModelParallel(module, device=device, plan=plan, sharders=[sharder])
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), torch.optim.Adam
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    optimizer.save_param_groups(False)
    model(kjt_of(case, dist.get_rank(), 0, device)).values().square().sum().backward()
    optimizer.step()

    def state():
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def tensors():
        leaves = torch.utils._pytree.tree_leaves(state())
        shards = [
            leaf.local_shards() if isinstance(leaf, ShardedTensor) else [leaf] for leaf in leaves
        ]
        return [getattr(part, "tensor", part) for parts in shards for part in parts]

    torch_checkpoint.save(state(), checkpoint_id=folder)
    before = [tensor.detach().cpu().clone() for tensor in tensors()]
    with torch.no_grad():
        for tensor in tensors():
            tensor.zero_()
    loaded = state()
    torch_checkpoint.load(loaded, checkpoint_id=folder)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    return before, [tensor.detach().cpu().clone() for tensor in tensors()]


def test_torchs_own_checkpoints_bring_everything_back(tmp_path):
    for before, after in run_on_ranks(2, through_torchs_checkpoint, str(tmp_path / "saved")):
        assert len(before) == len(after) > 6
        assert any(bool(tensor.any()) for tensor in before)
        assert all(map(torch.equal, before, after))
