"""Commits that are put in beside passes: one of two instances has the new weights, and no pass waits."""

import threading
from dataclasses import replace

import pytest
import torch

from tessera.serving.bench.commits import SyntheticPublisher
from tessera.serving.commits.file import CommitError, read_commit
from tessera.serving.package import loading as package_loading
from tessera.serving.package.own_weights import lie_alike, with_own_weights
from tessera.serving.package.record_memory import memory_of_records
from tessera.serving.package.torchscript import expected_deprecation
from tessera.serving.server.config import ServerConfig
from tessera.serving.server.follow.followed_model import FollowedModel, UndoRecord
from tessera.serving.server.follow.row_overlay import RowOverlay
from tessera.serving.server.repository.version_loader import PackageVersionLoader
from tests.patience import PATIENCE_S

COUNT = 5


class Followed:
    """A followed version, its log of `COUNT` commits, and what each of its states answers."""

    def __init__(self, folder):
        publisher = SyntheticPublisher(folder)
        self.batch, outputs = publisher.state.answers()
        self.expected = {0: outputs}
        self.paths = {}
        for number in range(1, COUNT + 1):
            self.paths[number] = publisher.publish(rows=40)
            self.expected[number] = publisher.state.answers()[1]
        path = folder / "model.pt"
        config = ServerConfig(model_repositories=(str(folder.parent.parent),), follow=True)
        loader = PackageVersionLoader(config, None)
        # A package for GPUs has the same graph on the CPU, over tables whose scales lie apart from their rows.
        loader._packages.replica_devices = lambda _: [["cpu"]]
        loaded = loader.load(path, lambda _: None, beside_others=False)
        self.model: FollowedModel = loaded.followed
        self.runner = loaded.runner

    def stage(self, number):
        path = self.paths[number]
        return self.model.stage(path, read_commit(path), beside_others=True)

    def put_in(self, number):
        """Returns what undoes it."""
        staged = self.stage(number)
        self.model.put_in(staged)
        return UndoRecord.of(staged)

    def answers(self, state):
        """What a pass with ``state`` answers; on a thread of its own, as in a server."""
        found = []

        def compute():
            found.append((state.runner or self.runner).forward(self.batch))

        thread = threading.Thread(target=compute)
        thread.start()
        thread.join(PATIENCE_S)
        return found[0]

    def assert_right(self, state):
        found = self.answers(state)
        for name, expected in self.expected[state.commit].items():
            assert torch.equal(found[name], expected), (name, state.commit)

    def assert_state(self, number):
        """Passes see commit ``number``, and so would they with the other instance."""
        with self.model.lock.shared() as state:
            assert state.commit == number
            self.assert_right(state)
        if self.model._instances is not None:
            self.assert_right(replace(state, runner=self.model._instances.spare))


@pytest.fixture(params=["cpu", "bf16", "blocks"])
def followed(request, version):
    made = Followed(version(request.param))
    for before, after in zip(range(COUNT), range(1, COUNT + 1), strict=True):
        name = next(iter(made.expected[0]))
        assert not torch.equal(made.expected[before][name], made.expected[after][name])
    return made


@pytest.fixture
def alone(monkeypatch):
    """How many commits have stopped passes."""
    seen = []
    put_in_alone = FollowedModel._put_in_alone

    def counted(model, staged):
        seen.append(staged)
        return put_in_alone(model, staged)

    monkeypatch.setattr(FollowedModel, "_put_in_alone", counted)
    return seen


def test_each_commit_is_there_whole_and_goes_back_whole(followed, alone):
    followed.assert_state(0)
    undo = {}
    for number in range(1, COUNT + 1):
        undo[number] = followed.put_in(number)
        followed.assert_state(number)
    followed.model.take_back([undo[number] for number in (5, 4, 3)], 2)
    followed.assert_state(2)
    undo[3] = followed.put_in(3)
    followed.assert_state(3)
    followed.model.take_back([undo[number] for number in (3, 2, 1)], 0)
    followed.assert_state(0)
    assert not alone


def test_a_pass_that_has_begun_goes_on_with_what_it_saw_while_others_see_the_commit(
    followed, alone, monkeypatch
):
    followed.put_in(1)
    staged, seen = followed.stage(2), []
    compare, write = followed.model._compare, RowOverlay.write

    def compare_beside(staged, runners):
        compare(staged, runners)
        with followed.model.lock.shared() as state:  # begins while the golden answers are computed
            seen.append(state.commit)
            followed.assert_right(state)

    def write_beside(overlay, pause_s):
        seen.append("written")
        followed.assert_state(2)
        write(overlay, pause_s)

    monkeypatch.setattr(followed.model, "_compare", compare_beside)
    monkeypatch.setattr(RowOverlay, "write", write_beside)
    began = followed.model.lock.shared()
    state = began.__enter__()
    committer = threading.Thread(target=followed.model.put_in, args=(staged,))
    committer.start()
    while followed.model.lock.state.commit == 1:
        pass
    followed.assert_right(state)
    with followed.model.lock.shared() as later:
        assert later.commit == 2
        followed.assert_right(later)
        followed.assert_right(state)
    committer.join(0.1)
    assert committer.is_alive()  # it waits for the pass that began before
    assert seen == [1]
    began.__exit__(None, None, None)
    committer.join(PATIENCE_S)
    assert seen == [1, "written"]
    followed.assert_state(2)
    assert not alone


def test_passes_beside_commits_have_the_bits_of_the_one_that_they_name(followed, alone):
    wrong, ended = [], threading.Event()
    passes = dict.fromkeys(range(COUNT + 1), 0)

    def ask():
        while not ended.is_set():
            with followed.model.lock.shared() as state:
                found = state.runner.forward(followed.batch)
            passes[state.commit] += 1
            for name, expected in followed.expected[state.commit].items():
                if not torch.equal(found[name], expected):
                    wrong.append(state.commit)

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for thread in askers:
        thread.start()
    for _ in range(3):
        undo = []
        for number in range(1, COUNT + 1):
            undo.append(followed.put_in(number))
            seen = passes[number]
            while passes[number] == seen:
                pass
        followed.model.take_back(undo[::-1], 0)
    ended.set()
    for thread in askers:
        thread.join(PATIENCE_S)
    assert not wrong
    assert not alone
    followed.assert_state(0)


def test_a_commit_with_other_golden_answers_is_never_seen(followed, alone):
    followed.put_in(1)
    staged = followed.stage(2)
    batch, golden = staged.golden
    other = {name: answers + 1 for name, answers in golden.items()}
    with pytest.raises(CommitError, match="golden"):
        followed.model.put_in(replace(staged, golden=(batch, other)))
    followed.assert_state(1)
    followed.put_in(2)
    followed.assert_state(2)
    assert not alone


def test_rows_that_cannot_be_laid_under_a_plan_are_put_in_while_no_pass_runs(version, alone):
    made = Followed(version("apart"))
    made.assert_state(0)
    undo = [made.put_in(number) for number in (1, 2)]
    made.assert_state(2)
    assert len(alone) == 2
    made.model.take_back(undo[::-1], 0)
    made.assert_state(0)


def test_golden_answers_that_are_not_asked_for_stop_passes_for_a_moment(followed, alone):
    followed.model._verify_golden = False
    followed.put_in(1)
    followed.assert_state(1)
    assert len(alone) == 1


def test_the_second_instance_shares_tables_alone(followed):
    (memory,) = followed.model._memory
    tables = {patch.record for patch in followed.stage(1).read.commit.patches if patch.table}
    own = {one.data_ptr() for one, _ in followed.model._instances._pairs.values()}
    places = {record: places for record, (places,) in memory.items()}
    assert tables
    assert not own & {places[record].data_ptr() for record in tables}
    floats = [record for record in places if record not in tables and places[record].numel() > 8]
    assert floats
    assert own >= {places[record].data_ptr() for record in floats}


def test_weights_that_are_large_beside_the_tables_are_not_held_twice(version, monkeypatch):
    monkeypatch.setattr(package_loading, "_MOST_OWN", 0.0)
    monkeypatch.setattr(package_loading, "_LEAST_OWN_BYTES", 0)
    made = Followed(version())
    assert made.model._instances is None
    made.put_in(1)
    made.assert_state(1)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(4, dtype=torch.uint8))
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.weight + self.table


def test_two_instances_are_of_one_type():
    with expected_deprecation():
        first = torch.jit.script(Counting()).eval()
    second = with_own_weights(first)
    assert second._c._type() == first._c._type()
    assert second.table.data_ptr() == first.table.data_ptr()
    with torch.no_grad():
        second.weight.fill_(2)
    values = torch.ones(4)
    assert first(values).tolist() == [1, 2, 3, 4]
    assert second(values).tolist() == [2, 3, 4, 5]


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.same = torch.nn.Parameter(self.weight.data)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.weight + self.same


def test_tensors_that_share_a_storage_are_seen_to_come_apart():
    with expected_deprecation():
        first = torch.jit.script(Tied()).eval()
    second = with_own_weights(first)
    records, sizes = {"weight": "data/0", "same": "data/0"}, {"data/0": 16}
    memory, copied = (memory_of_records(one, records, sizes) for one in (first, second))
    assert lie_alike(memory, memory)
    assert not lie_alike(memory, copied)
