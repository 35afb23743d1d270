"""Sharded unpooled collections on ranks against plain arithmetic on one."""

import random
from dataclasses import replace

import pytest
import torch
from torch import distributed as dist

from tessera.training.distributed import sharding_plan
from tessera.training.distributed.embedding import (
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
    get_ec_index_dedup,
    set_ec_index_dedup,
)
from tessera.training.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from tessera.training.distributed.model_parallel import (
    DistributedModelParallel,
    get_unwrapped_module,
)
from tessera.training.distributed.travel.index_dedup import IndexDeduplicator
from tessera.training.distributed.types import LazyAwaitable, ShardingEnv
from tessera.training.modules.embedding_configs import EmbeddingConfig
from tessera.training.modules.embedding_modules import EmbeddingCollection
from tessera.training.optim.optimizers import in_backward_optimizer_filter
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tests.training.optimizer_reference import new_states, update_row
from tests.training.ranks import rank_device, run_on_ranks
from tests.training.sharded_cases import (
    EPS,
    LR,
    Case,
    Table,
    bags,
    check_close,
    check_shards,
    column_blocks,
    placed,
    plan_of,
)

D = 12
TABLES = (
    Table("big", 19, D, ("u", "shared")),
    Table("middle", 11, D, ("v",)),
    Table("small", 3, D, ("shared", "w")),
)
NAMES = [table.name for table in TABLES]
BATCHES = {1: (4,), 2: (3, 5), 4: (2, 0, 4, 3)}
OPTIMIZERS = (
    "exact_row_wise_adagrad",
    "exact_sgd",
    "exact_adagrad",
    "adam",
    "partial_row_wise_adam",
    "lamb",
    "partial_row_wise_lamb",
    "lars_sgd",
    "lion",
)


def plans(world):
    """Per sharding type a plan of `TABLES`; the world is two nodes where it has four ranks."""
    local = 2 if world == 4 else world
    nodes, last = world // local, world - 1
    # On one rank, blocks of a table are equally wide.
    halves = {"ranks": [last, 0], "size_per_rank": [8, 4] if last else [6, 6]}
    return {
        "table_wise": {
            name: ("table_wise", {"rank": rank})
            for rank, name in zip((0, last, last), NAMES, strict=True)
        },
        "row_wise": {name: ("row_wise", {}) for name in NAMES},
        "column_wise": {name: ("column_wise", {"ranks": [last, 0]}) for name in NAMES},
        "column_wise, blocks of two widths": {
            name: ("column_wise", halves if name == "big" else {"ranks": [0, last]})
            for name in NAMES
        },
        "table_row_wise": {
            name: ("table_row_wise", {"host_index": place % nodes})
            for place, name in enumerate(NAMES)
        },
        "table_column_wise": {
            name: ("table_column_wise", {"host_index": place % nodes})
            for place, name in enumerate(NAMES)
        },
        "grid_shard": {
            name: ("grid_shard", {"host_indexes": list(range(nodes))[::-1]}) for name in NAMES
        },
        "data_parallel": {name: ("data_parallel", {}) for name in NAMES},
        "dense": {
            "big": ("row_wise", {"compute_kernel": "dense"}),
            "middle": ("table_wise", {"rank": last, "compute_kernel": "dense"}),
            "small": ("column_wise", {"ranks": [0, last], "compute_kernel": "dense"}),
        },
        "mixed": {
            "big": ("row_wise", {}),
            "middle": ("column_wise", halves),
            "small": ("data_parallel", {}),
        },
    }


def plain(case, *, need_indices=False, device=None):
    torch.manual_seed(case.seed)
    return EmbeddingCollection(
        [
            EmbeddingConfig(
                table.rows, table.dim, name=table.name, feature_names=list(table.features)
            )
            for table in case.tables
        ],
        need_indices=need_indices,
        device=device,
    )


def kjt_of(case, made, device, order=None):
    """The bags of every feature as a tensor, keys in ``order``."""
    keys = order or case.features()
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor([i for key in keys for bag in made[key] for i, _ in bag]).long(),
        lengths=torch.tensor([len(bag) for key in keys for bag in made[key]]).long(),
        stride=len(made[keys[0]]),
    ).to(device)


def shard(case, *, dedup=False, need_indices=False):
    device = rank_device()
    sharder = EmbeddingCollectionSharder(
        {"optimizer": case.optimizer, "learning_rate": LR, "eps": EPS},
        qcomm_codecs_registry=case.codecs,
        use_index_dedup=dedup,
    )
    module = plain(case, need_indices=need_indices)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(module, plan_of(case, module, sharder, device), env, device)


def gradient(case, rank, step, name, count):
    seed = case.seed * 7919 + rank * 211 + step * 17 + sum(map(ord, name))
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed))


def run_case(case, dedup):
    """Outputs of each step by name, and the shards after the last."""
    rank, device = dist.get_rank(), rank_device()
    module = shard(case, dedup=dedup)
    left = [p for _, p in in_backward_optimizer_filter(module.named_parameters())]
    dense = torch.optim.SGD(left, lr=LR) if left else None
    outputs = []
    for step in range(case.steps):
        kjt = kjt_of(case, bags(case, rank, step), device, case.features()[::-1])
        out = module(kjt)
        assert isinstance(out, LazyAwaitable)
        outputs.append(
            {
                name: (jagged.values().detach().cpu().clone(), jagged.lengths().cpu().clone())
                for name, jagged in out.items()
            }
        )
        loss = sum(
            (
                jagged.values()
                * gradient(case, rank, step, name, jagged.values().size(0)).to(device)
            ).sum()
            for name, jagged in out.items()
        )
        if dense is not None:
            dense.zero_grad()
        loss.backward()
        if dense is not None:
            dense.step()
    shards = {
        name: [
            (
                *((0, 0) if own.local_metadata is None else own.local_metadata.shard_offsets),
                values.detach().cpu().clone(),
            )
            for own, values in table.shards
        ]
        for name, table in module.embeddings.items()
    }
    return outputs, shards


def run_cases(cases, dedup):
    return [run_case(case, dedup) for case in cases]


def is_dense(placement):
    """Whether a table has gradients and an optimizer of the test's: plain SGD."""
    kind, how = placement
    return kind == "data_parallel" or how.get("compute_kernel") == "dense"


class Reference:
    """The tables of a case on one rank, in float64, a row at a time."""

    def __init__(self, case, column_blocks):
        whole = plain(case)
        self.case = case
        self.weights = {name: e.weight.detach().double() for name, e in whole.embeddings.items()}
        self.kinds = {
            name: "exact_sgd" if is_dense(case.plan[name]) else case.optimizer
            for name in self.weights
        }
        # A column shard is a table of its own to the optimizer.
        self.blocks = column_blocks
        self.states = {
            (table.name, first): new_states(self.kinds[table.name], table.rows, last - first)
            for table in case.tables
            for first, last in column_blocks[table.name]
        }
        self.outputs = [
            (table.name, feature, name)
            for table, names in zip(case.tables, whole.embedding_names_by_table(), strict=True)
            for feature, name in zip(table.features, names, strict=True)
        ]

    def step(self, step):
        """One step; per rank, (name, vectors, lengths) before it."""
        world = len(self.case.batch_sizes)
        gradients = {name: {} for name in self.weights}
        seen = []
        for rank in range(world):
            made = bags(self.case, rank, step)
            seen.append([])
            for table, feature, name in self.outputs:
                ids = [id_ for bag in made[feature] for id_, _ in bag]
                vectors = self.weights[table][ids].view(-1, D)
                seen[-1].append((name, vectors, [len(bag) for bag in made[feature]]))
                grad = gradient(self.case, rank, step, name, len(ids)).double() / world
                rows = gradients[table]
                for place, id_ in enumerate(ids):
                    rows[id_] = rows.get(id_, 0) + grad[place]
        for name, rows in gradients.items():
            for row, g in rows.items():
                self._update(name, row, g, step)
        return seen

    def _update(self, name, row, g, step):
        for first, last in self.blocks[name]:
            update_row(
                self.kinds[name],
                self.weights[name][row, first:last],
                g[first:last],
                [state[row] for state in self.states[name, first]],
                step=step + 1,
                lr=LR,
                eps=EPS,
            )


def check(case, results, *, rtol=1e-4, atol=1e-4):
    """Hold all ranks against one rank's arithmetic in float64; see `sharded_cases.check`."""
    reference = Reference(case, column_blocks(case, results))
    for step in range(case.steps):
        for rank, expected in enumerate(reference.step(step)):
            found = results[rank][0][step]
            assert list(found) == [name for name, _, _ in expected]
            for name, vectors, lengths in expected:
                assert found[name][1].tolist() == lengths
                what = f"{name}, step {step}, rank {rank}, {case}"
                check_close(found[name][0], vectors, what, rtol=rtol, atol=atol)
    check_shards(case, results, reference.weights, rtol=rtol, atol=atol)


def run_and_check(world, cases, *, dedup=False, **bounds):
    local = 2 if world == 4 else world
    per_rank = run_on_ranks(world, run_cases, cases, dedup, local_world_size=local)
    for place, case in enumerate(cases):
        check(case, [results[place] for results in per_rank], **bounds)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dedup", [False, True])
def test_three_steps_equal_one_ranks_arithmetic(world, dedup):
    local = 2 if world == 4 else world
    cases = [
        Case(TABLES, plan, BATCHES[world], seed=seed, local_size=local)
        for seed, plan in enumerate(plans(world).values())
    ]
    run_and_check(world, cases, dedup=dedup)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_optimizer_under_every_way_of_cutting(world):
    local = 2 if world == 4 else world
    kinds = ("table_wise", "row_wise", "column_wise", "table_row_wise")
    some = [plans(world)[kind] for kind in kinds]
    cases = [
        Case(TABLES, plan, BATCHES[world], optimizer=optimizer, seed=9, local_size=local)
        for optimizer in OPTIMIZERS
        for plan in some
    ]
    run_and_check(world, cases)


def random_case(seed, world):
    """Some tables that share some features, each placed in a way of its own."""
    choose = random.Random(seed)
    tables = tuple(
        Table(
            f"t{place}",
            choose.choice((1, 2, 7, 30)),
            D,
            tuple(sorted(choose.sample(("a", "b", "c", "d"), choose.choice((1, 1, 2, 3))))),
        )
        for place in range(choose.randint(1, 4))
    )
    plan = {}
    for table in tables:
        kind = choose.choice(("table_wise", "row_wise", "column_wise", "data_parallel"))
        pieces = choose.choice((1, 2, 3, 4))
        how = {
            "table_wise": {"rank": choose.randrange(world)},
            "column_wise": {"ranks": [choose.randrange(world) for _ in range(pieces)]},
        }.get(kind, {})
        plan[table.name] = (kind, how)
    return Case(
        tables,
        plan,
        tuple(choose.choice((0, 1, 5)) for _ in range(world)),
        optimizer=choose.choice(OPTIMIZERS),
        seed=seed,
        most_ids=choose.choice((1, 6)),
        local_size=world,
    )


@pytest.mark.multi_gpu
@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_random_tables_placed_at_random(world, dedup):
    cases = [random_case(seed, world) for seed in range(12)]
    per_rank = run_on_ranks(world, run_cases, cases, dedup)
    for place, case in enumerate(cases):
        check(case, [results[place] for results in per_rank])


def _empty(case):
    """No rank has an id; then one has."""
    device = rank_device()
    module = shard(case)
    nothing = {feature: [[], []] for feature in case.features()}
    out = module(kjt_of(case, nothing, device))
    total = sum(jagged.values().sum() for jagged in out.values())
    total.backward()
    assert all(jagged.values().shape == (0, D) for jagged in out.values())
    if dist.get_rank() == 0:
        nothing["v"] = [[], [(2, 1.0)]]
    out = module(kjt_of(case, nothing, device))
    expected = plain(case).embeddings["middle"].weight[2:3].detach().to(device)
    assert out["v"].values().shape == (int(dist.get_rank() == 0), D)
    if dist.get_rank() == 0:
        assert torch.equal(out["v"].values().detach(), expected)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "table_row_wise"])
def test_a_batch_without_ids(kind):
    run_on_ranks(2, _empty, Case(TABLES, plans(2)[kind], (2, 2)))


def _varying(case, dedup):
    """Every feature has a batch size of its own."""
    rank, device = dist.get_rank(), rank_device()
    module, whole = shard(case, dedup=dedup, need_indices=True), plain(case, need_indices=True)
    sizes = {feature: (rank + 2 * place) % 4 for place, feature in enumerate(case.features())}
    made = {
        feature: own[: sizes[feature]]
        for feature, own in bags(replace(case, batch_sizes=(4, 4, 4, 4)), rank, 0).items()
    }
    kjt = KeyedJaggedTensor(
        keys=case.features(),
        values=torch.tensor([i for f in case.features() for bag in made[f] for i, _ in bag]).long(),
        lengths=torch.tensor([len(bag) for f in case.features() for bag in made[f]]),
        stride_per_key_per_rank=[[sizes[feature]] for feature in case.features()],
    )
    out, expected = module(kjt.to(device)), whole(kjt)
    for name, jagged in expected.items():
        assert torch.equal(out[name].values().cpu(), jagged.values())
        assert torch.equal(out[name].lengths().cpu(), jagged.lengths())
        assert torch.equal(out[name].weights().cpu(), jagged.weights())


@pytest.mark.multi_gpu
@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "table_row_wise"])
def test_batches_that_vary_per_feature(kind, dedup):
    run_on_ranks(2, _varying, Case(TABLES, plans(2)[kind], (4, 4)), dedup)


@pytest.mark.multi_gpu
def test_vectors_travel_in_fewer_bytes():
    """fp16 rounds vectors by 2**-11 of themselves and gradients likewise; three steps of them."""
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    cases = [
        Case(
            TABLES,
            plan,
            BATCHES[2],
            optimizer="exact_sgd",
            codecs=get_qcomm_codecs_registry(config),
            local_size=2,
        )
        for plan in (plans(2)["table_wise"], plans(2)["row_wise"])
    ]
    run_and_check(2, cases, rtol=2e-3, atol=1e-3)
    per_rank = run_on_ranks(2, run_cases, cases, False)
    with pytest.raises(AssertionError):  # float32's bound does not hold: something was rounded
        check(cases[0], [results[0] for results in per_rank], rtol=1e-6, atol=1e-6)


def _state(case):
    module = shard(case)
    state = module.state_dict()
    assert list(state) == [f"embeddings.{name}.weight" for name in NAMES]
    other = shard(replace(case, seed=5))
    other.load_state_dict(state)
    for name, table in module.embeddings.items():
        for (_, mine), (_, theirs) in zip(table.shards, other.embeddings[name].shards, strict=True):
            assert torch.equal(mine, theirs)
    module.reset_parameters()
    changed = [
        not torch.equal(mine, theirs)
        for name in NAMES
        for (_, mine), (_, theirs) in zip(
            module.embeddings[name].shards, other.embeddings[name].shards, strict=True
        )
    ]
    assert all(changed)
    optimizer = module.fused_optimizer.state_dict()["state"]
    return sorted(optimizer), str(module)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "mixed"])
def test_states_have_the_plain_names(kind):
    results = run_on_ranks(2, _state, Case(TABLES, plans(2)[kind], (2, 2)))
    for names, text in results:
        assert all(name.startswith("embeddings.") for name in names)
        assert "GroupedEmbeddingsLookup" in text


def plan_alone(plan, sharder):
    """A plan for one process without a group."""
    return sharding_plan.construct_module_sharding_plan(
        plain(Case(TABLES, plan, (1,))),
        {name: placed(kind, how) for name, (kind, how) in plan.items()},
        sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )


def test_blocks_of_two_widths_on_one_rank_are_refused():
    sharder = EmbeddingCollectionSharder()
    cut = ("column_wise", {"ranks": [0, 0], "size_per_rank": [8, 4]})
    plan = plan_alone(dict.fromkeys(NAMES, cut), sharder)
    with pytest.raises(ValueError, match=r"table 'big': .* blocks of \[4, 8\] columns on rank 0"):
        sharder.shard(plain(Case(TABLES, {}, (1,))), plan, ShardingEnv.from_local(1, 0))


def test_one_process_without_a_group():
    case = Case(TABLES, {}, (3,))
    whole = plain(case, need_indices=True)
    kjt = kjt_of(case, bags(case, 0, 0), torch.device("cpu"))
    expected = whole(kjt)
    # Without a group nobody gathers a table's columns: it is in one piece.
    for kind in ("table_wise", "row_wise", "table_row_wise", "data_parallel"):
        plan = plans(1)[kind]
        sharder = EmbeddingCollectionSharder({"learning_rate": LR}, use_index_dedup=True)
        env = ShardingEnv.from_local(1, 0)
        module = plain(case, need_indices=True)
        out = sharder.shard(module, plan_alone(plan, sharder), env)(kjt)
        for name, jagged in expected.items():
            assert torch.equal(out[name].values(), jagged.values()), kind
            assert torch.equal(out[name].weights(), jagged.weights()), kind


def test_deduplication_keeps_one_of_each_id_of_a_feature():
    kjt = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([5, 1, 5, 5, 0, 1], dtype=torch.int32),
        lengths=torch.tensor([3, 0, 1, 2]),
    )
    alone, places = IndexDeduplicator([6, 6]).deduplicate(kjt)
    assert alone.keys() == ["a", "b"]
    assert alone.stride() == 1
    assert alone.values().tolist() == [1, 5, 0, 1, 5]
    assert alone.values().dtype == torch.int32
    assert alone.lengths().tolist() == [2, 3]
    assert torch.equal(alone.values()[places], kjt.values())


@pytest.mark.parametrize("wrong", [-1, 6])
def test_deduplication_names_an_id_that_is_no_row(wrong):
    kjt = KeyedJaggedTensor(
        keys=["a", "b"], values=torch.tensor([1, wrong]), lengths=torch.tensor([1, 1])
    )
    with pytest.raises(IndexError, match=f"feature 'b' has id {wrong}, but its table has rows 0"):
        IndexDeduplicator([6, 6]).deduplicate(kjt)


def test_deduplication_keeps_ids_that_are_no_rows_to_their_feature(monkeypatch):
    # As on a GPU, where nobody waits to look.
    monkeypatch.setattr(IndexDeduplicator, "_check", lambda *_: None)
    kjt = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([-1, 4, 2, 9, 4, 0, -3]), lengths=torch.tensor([3, 1, 0, 3])
    )
    alone, places = IndexDeduplicator([3, 6], torch.device("cpu")).deduplicate(kjt)
    assert {key: own.values().tolist() for key, own in alone.to_dict().items()} == {
        "a": [2, 3],
        "b": [0, 4, 6],
    }
    assert alone.values()[places].tolist() == [3, 3, 2, 3, 4, 0, 6]


def _sharder_follows_the_switch():
    case = Case(TABLES, plans(1)["table_wise"], (2,))
    before = [d is not None for d in shard(case)._deduplicators]
    set_ec_index_dedup(True)
    try:
        assert get_ec_index_dedup()
        return before, [d is not None for d in shard(case)._deduplicators]
    finally:
        set_ec_index_dedup(False)


def test_the_switch_for_all_collections():
    assert run_on_ranks(1, _sharder_follows_the_switch) == [([False], [True])]


def test_an_unknown_sharding_type_is_refused():
    case = Case(TABLES, {}, (2,))
    sharder = EmbeddingCollectionSharder()
    plan = plan_alone(plans(1)["table_wise"], sharder)
    plan["big"].sharding_type = "diagonal"
    with pytest.raises(ValueError, match="sharding_type is 'diagonal'; give one of data_par"):
        sharder.shard(plain(case), plan, ShardingEnv.from_local(1, 0))


def test_sharded_tables_stay_where_they_are():
    sharder = EmbeddingCollectionSharder()
    plan = plan_alone(plans(1)["table_wise"], sharder)
    module = plain(Case(TABLES, {}, (2,)))
    sharded = sharder.shard(module, plan, ShardingEnv.from_local(1, 0))
    assert sharded.to(torch.device("cpu")) is sharded
    with pytest.raises(ValueError, match="sharded tables stay float32 on cpu"):
        sharded.half()


def _in_a_model(case):
    """A model whose collection the planner places, and its optimizer's state."""
    device = rank_device()
    model = torch.nn.ModuleDict({"history": plain(case), "top": torch.nn.Linear(D, 1)})
    model.forward = lambda kjt: model["top"](model["history"](kjt)["v"].values())
    model.to(device)
    dmp = DistributedModelParallel(model, device=device)
    assert isinstance(get_unwrapped_module(dmp)["history"], ShardedEmbeddingCollection)
    kjt = kjt_of(case, bags(case, dist.get_rank(), 0), device)
    expected = plain(case)(kjt.to(torch.device("cpu")))["v"].values()
    found = get_unwrapped_module(dmp)["history"](kjt)["v"].values()
    torch.testing.assert_close(found.cpu(), expected)
    names = [name.split(".")[-2] for name in dmp.state_dict() if "history" in name]
    return names, sorted(dmp.fused_optimizer.state_dict()["state"])


@pytest.mark.multi_gpu
def test_the_planner_places_the_tables_of_a_model():
    for names, states in run_on_ranks(2, _in_a_model, Case(TABLES, {}, BATCHES[2])):
        assert names == NAMES
        assert all(state.startswith("history.embeddings.") for state in states)
