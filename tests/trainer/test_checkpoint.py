from __future__ import annotations

import contextlib
import io
import pickle
import random
import sys
import textwrap
import traceback
import zipfile

import pytest
import torch

from tessera.training.data.columns import FeatureColumns
from tessera.training.data.criteo_format import COLUMNS as CRITEO
from tessera.training.data.movielens import COLUMNS as MOVIELENS
from tessera.training.distributed.checkpoint.basics import CheckpointError
from tessera.training.trainer.checkpoint import load_checkpoint, prune_checkpoints
from tessera.training.trainer.checkpoint_file import Checkpoint, write_file
from tessera.training.trainer.files import checkpoint_path, latest_checkpoint, list_checkpoints
from tessera.training.transforms.preprocessor import FittedSizes
from tests.patience import PATIENCE_S
from tests.training.ranks import process_context


def make(step=1, rows=100, **changes):
    """A checkpoint whose every value tells its step."""
    content = {
        "config": {"train": {"epochs": step}},
        "fitted": {},
        "columns": {"labels": [{"name": "label"}]},
        "dense_names": ["I1"],
        "sparse_names": ["C1"],
        "split_rows": [8, 1, 1],
        "progress": {"step": step, "loss_sum": 0.1 * step},
        "model": {"table": torch.full((rows, 4), float(step))},
        "fused_optimizer": {"state": {"table": {"sum": torch.full((rows,), float(step))}}},
        "dense_optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "rng": torch.get_rng_state(),
    }
    return Checkpoint(**{"ranges": [], **content, **changes})


def test_round_trip(tmp_path):
    path = checkpoint_path(tmp_path, 7)
    written = make(7)
    write_file(path, written)
    read = load_checkpoint(path)
    assert read.config == written.config
    assert read.progress == written.progress
    assert read.dense_optimizer == written.dense_optimizer
    torch.testing.assert_close(read.model, written.model, rtol=0, atol=0)
    torch.testing.assert_close(read.rng, written.rng, rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000007.pt"]


def first_version(data_format):
    """A checkpoint as the first trainers wrote it: no columns, transforms only in words."""
    content = vars(make(3, config={"data": {"format": data_format}}))
    kept = {name: value for name, value in content.items() if name not in {"columns", "fitted"}}
    return {"format": "tessera-checkpoint", "version": 1, "dense_transform": "log", **kept}


@pytest.mark.parametrize(("data_format", "columns"), [("criteo", CRITEO), ("movielens", MOVIELENS)])
def test_the_first_version_gets_the_columns_of_its_format(tmp_path, data_format, columns):
    path = checkpoint_path(tmp_path, 3)
    torch.save(first_version(data_format), path)
    read = load_checkpoint(path)
    assert FeatureColumns.from_json(read.columns, name="it") == columns
    assert FittedSizes(**read.fitted) == FittedSizes()
    assert read.model["table"].unique().tolist() == [3.0]


def test_the_first_version_had_no_other_formats(tmp_path):
    path = checkpoint_path(tmp_path, 3)
    torch.save(first_version("table"), path)
    with pytest.raises(CheckpointError, match="version 1, which has no data format 'table'"):
        load_checkpoint(path)


def test_writing_to_loaded_tensors_leaves_the_file_alone(tmp_path):
    path = checkpoint_path(tmp_path, 1)
    write_file(path, make(1))
    load_checkpoint(path).model["table"].fill_(9.0)
    assert load_checkpoint(path).model["table"].unique().tolist() == [1.0]


def test_latest_is_by_step_and_only_whole_files_count(tmp_path):
    assert latest_checkpoint(tmp_path / "absent") is None
    for step in (999, 1000, 20):
        write_file(checkpoint_path(tmp_path, step), make(step))
    (tmp_path / ".step-0000009999.pt.1.partial").write_bytes(b"x")
    (tmp_path / "step-0000009999.pt.bak").write_bytes(b"x")
    assert list(list_checkpoints(tmp_path)) == [20, 999, 1000]
    assert latest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 1000)


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step in range(1, 7):
        write_file(checkpoint_path(tmp_path, step), make(step))
    leftover = tmp_path / ".step-0000000003.pt.77.partial"
    leftover.write_bytes(b"half")
    prune_checkpoints(tmp_path, newest=2, best=3)
    assert list(list_checkpoints(tmp_path)) == [3, 5, 6]
    assert not leftover.exists()
    prune_checkpoints(tmp_path, newest=1, best=None)
    assert list(list_checkpoints(tmp_path)) == [6]


def damaged(path, how):
    data = bytearray(path.read_bytes())
    if how == "cut":
        del data[len(data) // 2 :]
    elif how == "empty":
        data.clear()
    else:  # a bit of the table's own bytes
        place = data.index(torch.full((8,), 1.0).numpy().tobytes())
        data[place + 5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["cut", "empty", "bit"])
def test_a_damaged_file_is_refused(tmp_path, how):
    path = checkpoint_path(tmp_path, 1)
    write_file(path, make(1))
    damaged(path, how)
    with pytest.raises(CheckpointError, match=r"step-0000000001\.pt is (damaged|not a whole)"):
        load_checkpoint(path)


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    return str(caught.value)


def test_random_damage_is_refused_in_one_line(tmp_path):
    """Bytes of the archive's directory and end lead zipfile to places that are not there."""
    path = checkpoint_path(tmp_path, 1)
    write_file(path, make(1))
    whole = path.read_bytes()
    draw = random.Random(0)
    reasons = []
    for round_ in range(600):
        data = bytearray(whole)
        reach = 100 if round_ % 2 else 4000  # the end record, and what stands before it
        for _ in range(draw.randrange(1, 4)):
            data[-draw.randrange(1, reach)] = draw.randrange(256)
        path.write_bytes(data)
        with contextlib.suppress(CheckpointError):  # some bytes mean nothing
            load_checkpoint(path)
            continue
        reasons.append(refusal(path))
    assert len(reasons) > 400
    assert all(reason and reason.splitlines() == [reason] for reason in reasons)


class Evil:
    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return (open, (str(self.witness), "w"))


def test_a_file_that_would_run_code_is_refused_and_runs_nothing(tmp_path):
    path, witness = tmp_path / "evil.pt", tmp_path / "witness"
    torch.save({"format": "tessera-checkpoint", "version": 2, "config": Evil(witness)}, path)
    with pytest.raises(CheckpointError, match="could run code") as caught:
        load_checkpoint(path)
    assert "weights_only" not in str(caught.value)
    assert not witness.exists()
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps(Evil(witness)))
    with pytest.raises(CheckpointError, match="not a whole"):
        load_checkpoint(plain)
    assert not witness.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weight": torch.zeros(1)}, "not a Tessera checkpoint"),
        ([1, 2], "not a Tessera checkpoint"),
        ({"format": "tessera-checkpoint", "version": 99}, "version 99"),
        ({"format": "tessera-checkpoint", "version": 2}, "no config"),
        ({**vars(make()), "format": "tessera-checkpoint", "version": 2, "rng": 3}, "no rng"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "other.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def test_a_compressed_archive_is_refused(tmp_path):
    path, packed = checkpoint_path(tmp_path, 1), tmp_path / "packed.pt"
    write_file(path, make(1))
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        load_checkpoint(packed)


def test_a_package_is_no_checkpoint(tmp_path, recwarn):
    path = tmp_path / "model.pt"
    torch.jit.script(torch.nn.ReLU()).save(str(path))
    recwarn.clear()
    with pytest.raises(CheckpointError, match=r"is a TorchScript archive.*give a run or its"):
        load_checkpoint(path)
    assert recwarn.list == []


def in_child(code, *arguments):
    """What Python code prints in a process of its own, whose limits and death are its own."""
    context = process_context()
    ours, theirs = context.Pipe(duplex=False)
    given = (code, [str(a) for a in arguments], theirs)
    process = context.Process(target=run, args=given, daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(PATIENCE_S)
    said = ours.recv()
    process.join(PATIENCE_S)
    assert process.exitcode == 0, said
    return said


def run(code, arguments, pipe):
    torch.set_num_threads(1)  # what is forked has no threads of its own
    sys.argv, said = ["-c", *arguments], io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(textwrap.dedent(code), "<string>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc(file=said)
        raise
    finally:
        pipe.send(said.getvalue())


def test_a_full_disk_leaves_the_old_checkpoint_and_says_so(tmp_path):
    # A limit on the size of files stands for the full disk: both fail in write(2).
    out = in_child(
        """
        import resource, sys
        from pathlib import Path
        from tests.trainer.test_checkpoint import CheckpointError, checkpoint_path, make, write_file
        folder = Path(sys.argv[1])
        write_file(checkpoint_path(folder, 1), make(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        try:
            write_file(checkpoint_path(folder, 2), make(2, rows=100_000))
        except CheckpointError as error:
            print(error)
        """,
        tmp_path,
    )
    assert "cannot write the checkpoint" in out
    assert "step-0000000002.pt: File too large" in out
    assert f"the last whole checkpoint is {checkpoint_path(tmp_path, 1)}" in out
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001.pt"]
    assert load_checkpoint(checkpoint_path(tmp_path, 1)).progress["step"] == 1


def test_a_full_disk_is_told_in_the_system_s_words_for_a_folder_too(tmp_path):
    # torch wraps the failed write(2) into errors of its archive and of its ranks.
    out = in_child(
        """
        import resource, sys
        from pathlib import Path
        from tessera.training import DistributedModelParallel as Model
        from tessera.training import EmbeddingBagCollection, EmbeddingBagConfig
        from tests.trainer.test_checkpoint import CheckpointError
        from tessera.training.distributed.checkpoint import save_checkpoint
        table = EmbeddingBagConfig(100_000, 16, name="item", feature_names=["item"])
        model = Model(EmbeddingBagCollection([table]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        try:
            save_checkpoint(Path(sys.argv[1]) / "c", model=model)
        except CheckpointError as error:
            print(error)
        """,
        tmp_path,
    )
    assert out == f"cannot write the checkpoint {tmp_path / 'c'}: rank 0: File too large\n"
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        write_file(tmp_path / "absent" / "step-0000000001.pt", make(1))


def test_writing_takes_no_second_copy_of_the_tables(tmp_path):
    # 128 MiB of table; the peak may grow by an eighth of it for buffers and imports.
    out = in_child(
        """
        import resource, sys
        from pathlib import Path
        from tests.trainer.test_checkpoint import checkpoint_path, make, write_file
        folder = Path(sys.argv[1])
        write_file(checkpoint_path(folder, 1), make(1))
        large = make(2, rows=8_000_000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        write_file(checkpoint_path(folder, 2), large)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        """,
        tmp_path,
    )
    kib_per_unit = 1 if sys.platform == "linux" else 1 / 1024
    assert int(out) * kib_per_unit < 16 * 1024


# Forks writers and kills them, so that torch is imported once and not sixty times.
KILLER = """
import itertools, os, random, signal, sys, time
from pathlib import Path
from tests.trainer.test_checkpoint import *

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
chance = random.Random(5)

def write_for_ever(first, said):
    for step in itertools.count(first):
        write_file(checkpoint_path(folder, step), make(step, rows=50_000))
        prune_checkpoints(folder, newest=1, best=None)
        os.write(said, b"%d\\n" % step)

last, torn = 0, 0
for kill in itertools.count():
    if kill >= kills and torn:  # the last one: a kill that never falls into a write shows nothing
        break
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        write_for_ever(last + 1, write)
    os.close(write)
    with os.fdopen(read) as said:
        steps = [int(said.readline())]  # from here on it is in its loop
        time.sleep(chance.uniform(0.0, 0.02))  # a write takes about as long
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        steps += map(int, said)
    torn += any(path.name.endswith(".partial") for path in folder.iterdir())
    path = latest_checkpoint(folder)
    checkpoint = load_checkpoint(path)
    last = checkpoint.progress["step"]
    # What was said to be written is there; one more may have been finished unsaid.
    assert steps[-1] <= last <= steps[-1] + 1, (steps, last)
    assert path == checkpoint_path(folder, last)
    assert checkpoint.model["table"].unique().tolist() == [float(last)]
print(torn)
"""
KILLS = 60


def test_a_kill_at_any_moment_leaves_the_last_checkpoint_whole(tmp_path):
    out = in_child(KILLER, tmp_path, KILLS)
    assert int(out) > 0
