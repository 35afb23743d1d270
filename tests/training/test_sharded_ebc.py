"""Sharded collections on ranks against plain arithmetic on one: every sharding type."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.training import EmbOptimType
from tessera.training.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig
from tests.training.ranks import run_on_ranks
from tests.training.sharded_cases import Case, Table, check, run_cases

TABLES = (
    Table("big", 19, 8, ("u", "shared")),
    Table("mean", 11, 12, ("v",), mean=True),
    Table("small", 3, 4, ("shared", "w")),
)
NAMES = [table.name for table in TABLES]


def every(kind, **arguments):
    return dict.fromkeys(NAMES, (kind, arguments))


def plans(world):
    """Per sharding type a plan of `TABLES`; the world is two nodes where it has four ranks."""
    local = 2 if world == 4 else world
    nodes = world // local
    last = world - 1
    return {
        "table_wise": {
            name: ("table_wise", {"rank": rank % world})
            for rank, name in zip((0, last, last), NAMES, strict=True)
        },
        "row_wise": every("row_wise"),
        "column_wise": {name: ("column_wise", {"ranks": [last, 0]}) for name in NAMES},
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
        "data_parallel": every("data_parallel"),
        "mixed": {
            "big": ("row_wise", {}),
            "mean": ("column_wise", {"ranks": [0, last], "size_per_rank": [4, 8]}),
            "small": ("data_parallel", {}),
        },
    }


BATCHES = {1: (4,), 2: (3, 5), 4: (2, 0, 4, 3)}


KINDS = [kind.value for kind in EmbOptimType]


def check_cases(world, cases, **bounds):
    local = 2 if world == 4 else world
    per_rank = run_on_ranks(world, run_cases, cases, local_world_size=local)
    for place, case in enumerate(cases):
        check(case, [results[place] for results in per_rank], **bounds)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_equal_one_ranks_arithmetic(world, kind):
    cases = [
        Case(
            TABLES,
            plan,
            BATCHES[world],
            weighted=weighted,
            optimizer=kind,
            seed=seed,
            local_size=2 if world == 4 else world,
        )
        for weighted in (False, True)
        for seed, plan in enumerate(plans(world).values())
    ]
    check_cases(world, cases)


@st.composite
def random_cases(draw, world):
    """Some tables of random sizes that share features, each with a random placement."""
    count = draw(st.integers(1, 4))
    tables, plan = [], {}
    for place in range(count):
        features = draw(
            st.lists(st.sampled_from("abcde"), min_size=1, max_size=3, unique=True).map(tuple)
        )
        table = Table(
            f"t{place}",
            rows=draw(st.integers(1, 40)),
            dim=draw(st.sampled_from([4, 6, 8, 12])),
            features=features,
            mean=draw(st.booleans()),
        )
        tables.append(table)
        ranks = st.integers(0, world - 1)
        hosts = max(world // 2, 1)
        widths = draw(st.sampled_from([(table.dim,), (2, table.dim - 2), (1, 1, table.dim - 2)]))
        cuts = draw(st.lists(st.integers(0, table.rows), min_size=world - 1, max_size=world - 1))
        bounds = [0, *sorted(cuts), table.rows]
        plan[table.name] = draw(
            st.sampled_from(
                [
                    ("table_wise", {"rank": draw(ranks)}),
                    ("row_wise", {}),
                    (
                        "row_wise",
                        {"sizes": [b - a for a, b in pairwise(bounds)]},
                    ),
                    (
                        "column_wise",
                        {
                            "ranks": [draw(ranks) for _ in widths],
                            "size_per_rank": list(widths),
                        },
                    ),
                    ("table_row_wise", {"host_index": draw(st.integers(0, hosts - 1))}),
                    ("table_column_wise", {"host_index": draw(st.integers(0, hosts - 1))}),
                    (
                        "grid_shard",
                        {"host_indexes": draw(st.permutations(range(hosts)))},
                    ),
                    ("data_parallel", {}),
                ]
            )
        )
    return Case(
        tuple(tables),
        plan,
        tuple(draw(st.lists(st.integers(0, 5), min_size=world, max_size=world))),
        weighted=draw(st.booleans()),
        optimizer=draw(st.sampled_from(KINDS)),
        seed=draw(st.integers(0, 1000)),
        local_size=2 if world == 4 else world,
        steps=2,
    )


@pytest.mark.parametrize("world", [2, 4])
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_tables_and_placements(world, data):
    check_cases(world, [data.draw(random_cases(world)) for _ in range(8)])


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_that_varies_per_feature_gives_what_its_whole_form_gives(world, weighted):
    cases = [
        Case(
            TABLES,
            plan,
            tuple(2 * size for size in BATCHES[world]),
            weighted=weighted,
            variable=True,
            seed=seed,
            local_size=2 if world == 4 else world,
        )
        for seed, plan in enumerate(plans(world).values())
    ]
    check_cases(world, cases)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("precision", [CommType.FP16, CommType.BF16])
def test_vectors_and_gradients_may_travel_in_16_bits(precision):
    codecs = QCommsConfig(forward_precision=precision, backward_precision=precision)
    cases = [
        Case(
            TABLES, plan, BATCHES[4], seed=seed, local_size=2, codecs=codecs, optimizer="exact_sgd"
        )
        for seed, plan in enumerate(plans(4).values())
    ]
    # A number keeps 11 bits (bf16: 8); grid sharding rounds it twice on its way, row-wise each of
    # four parts.  Values are below 4, gradients below 16 and enter times 0.1, three times.
    bound = 4 * 16 * 2.0 ** (-11 if precision is CommType.FP16 else -8) * 0.3
    check_cases(4, cases, rtol=0, atol=bound)
    # They do travel so: the plain case is exact to far less.
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check_cases(4, cases[:1], rtol=1e-6, atol=1e-6)
