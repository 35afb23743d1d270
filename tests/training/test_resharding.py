"""Checkpoints saved under one plan and number of ranks, loaded under another: every pair."""

import io
import itertools
import json
import os
import pickle
import random
import zipfile
from enum import Enum

import pytest
import torch
from torch import distributed as dist
from torch import nn

from tessera.training import CombinedOptimizer, DistributedModelParallel, KeyedOptimizerWrapper
from tessera.training.distributed.checkpoint import (
    async_save_checkpoint,
    load_checkpoint,
    read_checkpoint,
    read_extra,
    save_checkpoint,
)
from tessera.training.distributed.checkpoint import writer as checkpoint_writer
from tessera.training.distributed.checkpoint.basics import (
    CheckpointError,
    replaced_path,
    restore_replaced,
)
from tessera.training.optim import (
    GradientClipping,
    GradientClippingOptimizer,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    optimizers,
)
from tessera.training.optim.optimizers import in_backward_optimizer_filter
from tessera.training.optim.rowwise_adagrad import RowWiseAdagrad
from tests.training import test_sharded_ec
from tests.training.ranks import rank_device, run_on_ranks
from tests.training.sharded_cases import (
    Case,
    Table,
    bags,
    kjt_of,
    local_shards,
    plain_collection,
    shard,
)
from tests.training.test_sharded_ebc import BATCHES, TABLES, plans

DENSE = {
    "adam": lambda params: optimizers.Adam(params, lr=0.1),
    "exact_row_wise_adagrad": lambda params: RowWiseAdagrad(params, lr=0.1, eps=1e-3),
    "partial_row_wise_adam": lambda params: optimizers.PartialRowWiseAdam(params, lr=0.1),
}


def cases_of(world, kind):
    """The plans to try; for one rank only those that it holds differently."""
    last = world - 1
    dense = {
        "big": ("row_wise", {"compute_kernel": "dense"}),
        "mean": ("table_wise", {"rank": last, "compute_kernel": "dense"}),
        "small": ("column_wise", {"ranks": [last, 0], "compute_kernel": "dense"}),
    }
    every = {**plans(world), "dense": dense}
    names = ["table_wise", "column_wise", "data_parallel"] if world == 1 else list(every)
    return {
        name: Case(
            TABLES,
            every[name],
            BATCHES[world],
            optimizer=kind,
            seed=3,
            local_size=min(world, 2),
        )
        for name in names
    }


def built(case):
    module = shard(case)
    left = dict(in_backward_optimizer_filter(module.named_parameters()))
    parts = [module.fused_optimizer]
    if left:
        parts.append(KeyedOptimizerWrapper(left, DENSE[case.optimizer]))
    return module, CombinedOptimizer(parts)


def train(module, optimizer, case, steps):
    rank, device = dist.get_rank(), rank_device()
    for step in range(steps):
        optimizer.zero_grad()
        out = module(kjt_of(case, rank, step, device)).values()
        (out * out + out).sum().backward()
        optimizer.step()


def states_here(module, optimizer):
    """(table, state) to the (row, column, values) that are here; plain ones are whole.

    The column is that of the shard's first one in the table, for states of one number per row too.
    """
    found = {}
    for name, states in optimizer.state_dict()["state"].items():
        table = name.split(".")[1]
        places = [
            (0, 0) if own.local_metadata is None else tuple(own.local_metadata.shard_offsets)
            for own, _ in module.embedding_bags[table].shards
        ]
        for key, value in states.items():
            shards = getattr(value, "local_shards", None)
            parts = [value] if shards is None else [shard.tensor for shard in shards()]
            if value.dim() == 0:
                places = [(0, 0)]
            found[table, key] = [
                (*place, part.detach().cpu().clone())
                for place, part in zip(places, parts, strict=True)
            ]
    return found


def save_all(root, cases):
    kept = {}
    for name, case in cases.items():
        module, optimizer = built(case)
        train(module, optimizer, case, 2)
        extra = {"plan": name}
        rank = dist.get_rank()
        save_checkpoint(
            root / f"{name}-{dist.get_world_size()}",
            model=module,
            optimizer=optimizer,
            extra=extra,
            extra_tensors={f"rng.{rank}": torch.tensor([rank])},
        )
        kept[name] = (local_shards(module), states_here(module, optimizer))
    return kept


def load_all(folders, cases):
    """Per plan here and folder: the shards and states that were loaded."""
    found = {}
    for name, case in cases.items():
        module, optimizer = built(case)
        for folder in folders:
            extra = load_checkpoint(folder, model=module, optimizer=optimizer)
            assert extra == {"plan": folder.name.rpartition("-")[0]}
            found[name, folder.name] = (local_shards(module), states_here(module, optimizer))
    return found


def columns_of(case, table, world_results):
    """Where the table's column shards begin, and its columns."""
    starts = {column for shards, _ in world_results for _, column, _ in shards[table.name]}
    return [*sorted(starts), table.dim]


def expected_rowwise(saved, cut_then, cut_now, number):
    """What column shard ``number`` of the new cut gets, a row and a column at a time."""
    columns = range(cut_now[number], cut_now[number + 1])
    then = [max(i for i, start in enumerate(cut_then[:-1]) if start <= c) for c in columns]
    made = []
    for row in saved.view(saved.size(0), -1).tolist():
        values = [row[shard] for shard in then]
        made.append(values[0] if len(set(values)) == 1 else sum(values) / len(values))
    return torch.tensor(made)


@pytest.mark.multi_gpu
def test_every_pair_of_plans_and_worlds(tmp_path):
    # It has every kind of state: one number per weight, per row, and a count.
    kind, worlds = "partial_row_wise_adam", [1, 2, 4]
    cut = {}
    for world in worlds:
        cases = cases_of(world, kind)
        local = min(world, 2)
        results = run_on_ranks(world, save_all, tmp_path, cases, local_world_size=local)
        for name, case in cases.items():
            own = [result[name] for result in results]
            whole = read_checkpoint(tmp_path / f"{name}-{world}")
            assert set(whole.extra_tensors) == {f"rng.{rank}" for rank in range(world)}
            for table in case.tables:
                cut[name, world, table.name] = columns_of(case, table, own)
                weight = whole.model[f"embedding_bags.{table.name}.weight"]
                for shards, _ in own:
                    check_parts(weight, shards[table.name])
    folders = sorted(path for path in tmp_path.iterdir())
    assert len(folders) == 3 + 9 + 9
    wholes = {folder.name: read_checkpoint(folder) for folder in folders}
    for world in worlds:
        cases = cases_of(world, kind)
        results = run_on_ranks(world, load_all, folders, cases, local_world_size=min(world, 2))
        for (name, case), folder in itertools.product(cases.items(), folders):
            then, _, then_world = folder.name.rpartition("-")
            for result in results:
                shards, states = result[name, folder.name]
                for table in case.tables:
                    entry = f"embedding_bags.{table.name}.weight"
                    whole = wholes[folder.name]
                    check_parts(whole.model[entry], shards[table.name])
                    for key, saved in whole.optimizer["state"][entry].items():
                        check_state(
                            saved,
                            states.get((table.name, key), []),
                            cut[then, int(then_world), table.name],
                            cut[name, world, table.name],
                            table,
                        )


def check_parts(whole, parts):
    for row, column, values in parts:
        span = (slice(row, row + values.size(0)), slice(column, column + values.size(1)))
        assert torch.equal(values, whole[span])


def check_state(saved, parts, cut_then, cut_now, table):
    for row, column, values in parts:
        if saved.dim() == 0:
            assert int(values) == int(saved) == 2
        elif saved.shape == (table.rows, table.dim):
            check_parts(saved, [(row, column, values)])
        else:
            expected = expected_rowwise(saved, cut_then, cut_now, cut_now.index(column))
            expected = expected[row : row + values.size(0)].view(values.shape)
            if len(cut_then) == 2 or cut_then == cut_now:
                assert torch.equal(values, expected)
            else:  # a mean, whose sum may be taken in another order
                torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)


def resume_on_ranks(folder, first, second):
    """Train 2 + 2 steps with a change of plan in the middle, and 4 without."""
    module, optimizer = built(first)
    train(module, optimizer, first, 2)
    pending = async_save_checkpoint(folder, model=module, optimizer=optimizer)
    train(module, optimizer, first, 2)  # goes on while it is written
    pending.wait()
    again, optimizer_again = built(second)
    load_checkpoint(folder, model=again, optimizer=optimizer_again)
    train(again, optimizer_again, second, 2)
    return local_shards(module), local_shards(again)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kind", ["adam", "exact_row_wise_adagrad"])
def test_a_run_goes_on_under_another_plan_as_if_nothing_had_happened(kind, tmp_path):
    cases = cases_of(2, kind)
    results = run_on_ranks(
        2, resume_on_ranks, tmp_path / "c", cases["table_wise"], cases["row_wise"]
    )
    wholes = [torch.zeros(2, table.rows, table.dim) for table in TABLES]
    for both in results:
        for place, shards in enumerate(both):
            for whole, table in zip(wholes, TABLES, strict=True):
                for row, column, values in shards[table.name]:
                    rows, cols = values.shape
                    whole[place, row : row + rows, column : column + cols] = values
    for straight, resumed in wholes:
        # The same sums in another order (rounding 6e-8 each), over steps of size 0.1.
        torch.testing.assert_close(straight, resumed, rtol=0, atol=1e-5)


def unpooled_round_trips(root, cases):
    """Every plan's checkpoint loaded under every plan: the shards, then what was saved."""
    made, saved = {}, {}
    for name, case in cases.items():
        module = test_sharded_ec.shard(case)
        optimizer = CombinedOptimizer([module.fused_optimizer])
        made[name] = module, optimizer
        for step in range(2):
            kjt = test_sharded_ec.kjt_of(case, bags(case, dist.get_rank(), step), rank_device())
            sum(out.values().square().sum() for out in module(kjt).values()).backward()
        save_checkpoint(root / name, model=module, optimizer=optimizer)
    for folder in sorted(root.iterdir()):
        for name, (module, optimizer) in made.items():
            load_checkpoint(folder, model=module, optimizer=optimizer)
            save_checkpoint(root.with_name("again"), model=module, optimizer=optimizer)
            saved[folder.name, name] = read_checkpoint(root.with_name("again"))
    return {key: (found.model, found.optimizer["state"]) for key, found in saved.items()}


@pytest.mark.multi_gpu
def test_unpooled_tables_move_between_plans_and_back(tmp_path):
    names = ["table_wise", "row_wise", "column_wise"]
    cases = {
        name: Case(test_sharded_ec.TABLES, test_sharded_ec.plans(2)[name], (3, 2), optimizer="adam")
        for name in names
    }
    (tmp_path / "all").mkdir()
    found, _ = run_on_ranks(2, unpooled_round_trips, tmp_path / "all", cases)
    assert len(found) == 9
    for (then, _), (model, states) in found.items():
        whole = read_checkpoint(tmp_path / "all" / then)
        assert model.keys() == whole.model.keys()
        assert all(torch.equal(value, whole.model[name]) for name, value in model.items())
        for table, own in whole.optimizer["state"].items():
            assert set(own) == {"momentum1", "momentum2", "step"}
            assert all(torch.equal(states[table][key], value) for key, value in own.items())


def fail_on_one_rank(folder, place):
    """Rank 1 cannot do its part; every rank must hear of it."""
    case = cases_of(2, "adam")["table_wise"]
    module, optimizer = built(case)
    if place == "load":
        save_checkpoint(folder, model=module, optimizer=optimizer)
        if dist.get_rank() == 1:
            folder = folder.with_name("elsewhere")
        with pytest.raises(CheckpointError) as raised:
            load_checkpoint(folder, model=module, optimizer=optimizer)
        return str(raised.value)
    real = checkpoint_writer.FileSystemWriter
    if dist.get_rank() == 1:
        checkpoint_writer.FileSystemWriter = lambda path, **more: real(os.devnull + "/x", **more)
    try:
        with pytest.raises(CheckpointError) as raised:
            save_checkpoint(folder, model=module, optimizer=optimizer)
    finally:
        checkpoint_writer.FileSystemWriter = real
    return str(raised.value)


def test_a_failure_on_one_rank_is_one_on_all(tmp_path):
    first, second = run_on_ranks(2, fail_on_one_rank, tmp_path / "c", "load")
    assert first.startswith("rank 1 failed: ")
    assert "elsewhere is not a whole sharded checkpoint" in second
    for message in run_on_ranks(2, fail_on_one_rank, tmp_path / "d", "save"):
        assert "cannot write the checkpoint" in message
        assert "rank 1: " in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def model_here():
    case = Case((Table("big", 19, 8, ("u",)),), {}, (3,), optimizer="adam")
    from tessera.training.distributed.embeddingbag import EmbeddingBagCollectionSharder

    sharder = EmbeddingBagCollectionSharder({"optimizer": "adam", "learning_rate": 0.1})
    model = nn.ModuleDict({"tables": plain_collection(case), "top": nn.Linear(8, 1)})
    dmp = DistributedModelParallel(model, sharders=[sharder])
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.1))
    return case, dmp, CombinedOptimizer([dmp.fused_optimizer, wrapped])


def step_here(case, dmp, optimizer, step):
    optimizer.zero_grad()
    pooled = dmp.module["tables"](kjt_of(case, 0, step, "cpu")).values()
    dmp.module["top"](pooled).square().sum().backward()
    optimizer.step()


def test_one_process_without_a_group_saves_loads_and_goes_on_bit_by_bit(tmp_path):
    case, dmp, optimizer = model_here()
    for step in range(2):
        step_here(case, dmp, optimizer, step)
    optimizer.param_groups[0]["lr"] = 0.05
    folder = tmp_path / "c"
    save_checkpoint(folder, model=dmp, optimizer=optimizer, extra={"nan": float("nan"), "x": [1]})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert read_extra(folder)["x"] == [1]
    _, again, optimizer_again = model_here()
    load_checkpoint(folder, model=again, optimizer=optimizer_again)
    for step in range(2, 4):
        step_here(case, dmp, optimizer, step)
        step_here(case, again, optimizer_again, step)
    for name, value in dmp.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    # A new one takes the old one's place.
    save_checkpoint(folder, model=dmp, optimizer=optimizer, extra={"second": True})
    assert read_extra(folder) == {"second": True}
    whole = read_checkpoint(folder, only_model=True)
    assert whole.optimizer["state"] == {}
    assert torch.equal(whole.model["top.weight"], dmp.state_dict()["top.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_wrappers_of_optimizers_are_saved_with_what_they_remember(tmp_path):
    def wrapped(optimizer):
        stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=10, value=0.1)]
        clipped = GradientClippingOptimizer(optimizer, GradientClipping.NORM, max_gradient=0.5)
        return WarmupOptimizer(clipped, stages, lr=0.4)

    case, dmp, optimizer = model_here()
    optimizer = wrapped(optimizer)
    for step in range(3):
        step_here(case, dmp, optimizer, step)
    save_checkpoint(tmp_path / "c", model=dmp, optimizer=optimizer)
    _, again, optimizer_again = model_here()
    optimizer_again = wrapped(optimizer_again)
    load_checkpoint(tmp_path / "c", model=again, optimizer=optimizer_again)
    rates = [group["lr"] for group in optimizer_again.param_groups]
    assert rates == pytest.approx([0.4 * (0.1 + 0.9 * 3 / 10)] * 2)
    for step in range(3, 5):
        step_here(case, dmp, optimizer, step)
        step_here(case, again, optimizer_again, step)
    for name, value in dmp.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_a_writer_that_was_killed_between_two_names_loses_nothing(tmp_path):
    _, dmp, _ = model_here()
    folder = tmp_path / "c"
    save_checkpoint(folder, model=dmp, extra={"which": "old"})
    # The moment in which the old one has given up its name and the new one does not have it yet.
    folder.rename(replaced_path(folder))
    restore_replaced(tmp_path)
    assert read_extra(folder) == {"which": "old"}
    folder.rename(replaced_path(folder))
    save_checkpoint(tmp_path / "d", model=dmp)
    assert read_extra(folder) == {"which": "old"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d"]


def test_an_asynchronous_save_holds_the_moment_it_was_asked_for(tmp_path):
    case, dmp, optimizer = model_here()
    step_here(case, dmp, optimizer, 0)
    before = {name: value.clone() for name, value in dmp.state_dict().items()}
    pending = async_save_checkpoint(tmp_path / "c", model=dmp, optimizer=optimizer)
    with torch.no_grad():
        for value in dmp.state_dict().values():
            value.zero_()
    pending.wait()
    assert pending.done
    saved = read_checkpoint(tmp_path / "c")
    assert all(torch.equal(saved.model[name], value) for name, value in before.items())
    (tmp_path / "file").write_text("")
    failing = async_save_checkpoint(tmp_path / "file" / "c", model=dmp)
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        failing.wait()
    # Its error is its waiter's; the next save is not concerned.
    save_checkpoint(tmp_path / "d", model=dmp)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    _, dmp, optimizer = model_here()
    folder = tmp_path / "c"
    save_checkpoint(folder, model=dmp, optimizer=optimizer)
    _, again, optimizer_again = model_here()
    wider = nn.ModuleDict({"tables": again.module["tables"], "top": nn.Linear(9, 1)})
    with pytest.raises(CheckpointError, match=r"'model.top.weight' has shape \[1, 8\]"):
        load_checkpoint(folder, model=wider)
    with pytest.raises(CheckpointError, match=r"has no 'model\.more\.weight'"):
        load_checkpoint(folder, model=nn.ModuleDict({"more": nn.Linear(1, 1)}))
    optimizer_again.init_state()
    with pytest.raises(CheckpointError, match="or before that one's first step"):
        load_checkpoint(folder, model=again, optimizer=optimizer_again)


class Evil:
    def __reduce__(self):
        return (print, ("this ran",))


class Taken:
    """What an attack may ask of the function that older Pythons name for members of enumerations."""

    def __reduce__(self):
        return (getattr, (torch.Size, "count"))


class OlderPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do, Debian 12's among them."""

    def reducer_override(self, given):
        return (getattr, (type(given), given.name)) if isinstance(given, Enum) else NotImplemented


def without_hashes(folder, **changes):
    """Make a checkpoint one of version 1, which had no hashes: what is behind them must hold, too."""
    path = folder / "tessera.json"
    plain = json.loads(path.read_text())
    for name in ("records", "index", "sha256"):
        plain.pop(name, None)
    path.write_text(json.dumps({**plain, "version": 1, **changes}))


def test_nothing_in_a_checkpoint_is_run(tmp_path, capsys):
    _, dmp, _ = model_here()
    folder = tmp_path / "c"
    save_checkpoint(folder, model=dmp)
    without_hashes(folder)
    index = folder / ".metadata"
    good = index.read_bytes()
    harms = (Evil(), {"x": Evil()}, torch.nn.Linear, Taken())
    for harm in map(pickle.dumps, harms):
        index.write_bytes(harm)
        with pytest.raises(CheckpointError, match="is refused"):
            read_checkpoint(folder)
    index.write_bytes(pickle.dumps([1]))
    with pytest.raises(CheckpointError, match="holds no index"):
        read_checkpoint(folder)
    for cut in (0, 1, len(good) // 2, len(good) - 1):
        index.write_bytes(good[:cut])
        with pytest.raises(CheckpointError, match="is refused"):
            read_checkpoint(folder)
    data = next(path for path in folder.iterdir() if path.suffix == ".distcp")
    index.write_bytes(good.replace(data.name.encode(), b"../" + data.name.encode()[3:]))
    with pytest.raises(CheckpointError, match="outside of it"):
        read_checkpoint(folder)
    index.write_bytes(good)
    assert "this ran" not in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil()))
    data.write_bytes((tmp_path / "evil.zip").read_bytes())
    with pytest.raises(CheckpointError, match="is damaged"):
        read_checkpoint(folder)
    assert "this ran" not in capsys.readouterr().out


def test_an_index_that_an_older_python_wrote_is_read(tmp_path):
    _, dmp, _ = model_here()
    folder = tmp_path / "c"
    save_checkpoint(folder, model=dmp)
    without_hashes(folder)
    expected = read_checkpoint(folder).model
    written = io.BytesIO()
    OlderPickler(written).dump(pickle.loads((folder / ".metadata").read_bytes()))
    assert b"getattr" in written.getvalue()
    (folder / ".metadata").write_bytes(written.getvalue())
    found = read_checkpoint(folder).model
    assert found.keys() == expected.keys()
    for name, values in found.items():
        torch.testing.assert_close(values, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("part", "missing"),
    [
        *((lambda index: next(iter(index.state_dict_metadata.values())), name)
          for name in ("properties", "size", "chunks")),
        *((lambda index: next(iter(index.state_dict_metadata.values())).chunks[0], name)
          for name in ("offsets", "sizes")),
        *((lambda index: next(iter(index.storage_data.values())), name)
          for name in ("relative_path", "offset", "length")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("other", [False, True])
def test_an_index_without_one_of_its_parts_is_refused(tmp_path, part, missing, other):
    _, dmp, _ = model_here()
    folder = tmp_path / "c"
    save_checkpoint(folder, model=dmp)
    without_hashes(folder)
    index = pickle.loads((folder / ".metadata").read_bytes())
    if other:
        object.__setattr__(part(index), missing, 3.5)
    else:
        object.__delattr__(part(index), missing)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="is refused"):
        read_checkpoint(folder)


@pytest.mark.parametrize("damaged", [".metadata", "__0_0.distcp", "tessera.json"])
def test_any_changed_byte_is_refused_in_one_line(tmp_path, damaged):
    _, dmp, optimizer = model_here()
    folder = tmp_path / "c"
    save_checkpoint(folder, model=dmp, optimizer=optimizer, extra={"rate": 0.125})
    whole = (folder / damaged).read_bytes()
    draw = random.Random(0)
    for _ in range(150):
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (folder / damaged).write_bytes(data)
        with pytest.raises(CheckpointError) as refused:
            load_checkpoint(folder, model=dmp, optimizer=optimizer)
        assert len(str(refused.value).splitlines()) == 1
    (folder / damaged).write_bytes(whole)
    assert load_checkpoint(folder, model=dmp, optimizer=optimizer) == {"rate": 0.125}


@pytest.mark.parametrize("damaged", [".metadata", "__0_0.distcp"])
def test_random_damage_of_version_1_is_read_or_refused_in_one_line(tmp_path, damaged):
    _, dmp, _ = model_here()
    folder = tmp_path / "c"
    save_checkpoint(folder, model=dmp)
    without_hashes(folder)
    whole = (folder / damaged).read_bytes()
    draw = random.Random(0)
    reasons = []
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        (folder / damaged).write_bytes(data)
        try:
            read_checkpoint(folder)  # some bytes are those of numbers, others mean nothing
        except (CheckpointError, FileNotFoundError) as error:
            reasons.append(str(error))
    assert len(reasons) > 20
    assert all(reason.splitlines() == [reason] for reason in reasons)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is not a sharded checkpoint of Tessera's"),
        ({"version": 99}, "has version 99; this Tessera reads versions 1 to 2"),
        ({"extra": []}, "is damaged: extra is missing or not an object"),
        ({"groups": 4}, "is damaged: groups is not a list"),
    ],
)
def test_other_formats_are_refused(change, message, tmp_path):
    _, dmp, _ = model_here()
    folder = tmp_path / "c"
    save_checkpoint(folder, model=dmp)
    path = folder / "tessera.json"
    without_hashes(folder, **change)
    with pytest.raises(CheckpointError, match=message):
        read_extra(folder)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_extra(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="is not a whole sharded checkpoint"):
        read_checkpoint(folder)
