"""The benchmark of freshness holds answers against states that are right: by a package of its own making, and two ways to patch it."""

import os

import numpy as np
import pytest
import torch

from tessera.serving.bench.commits import SyntheticPublisher
from tessera.serving.bench.forward import TABLES
from tessera.serving.bench.fresh_commits import (
    Answering,
    CommitFeed,
    CommitMaker,
    Judge,
    PatchedByTorch,
    Verdict,
)
from tessera.serving.bench.large_package import ROW_BYTES, write_large
from tessera.serving.bench.reload_servers import read_requests, write_requests
from tessera.serving.commits.chain import LOG_FOLDER, commit_name
from tessera.serving.commits.file import read_commit
from tessera.serving.package.loading import load_package
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.protocol import predictor_pb2 as pb

ROWS = 300


@pytest.fixture(scope="module")
def version(tmp_path_factory):
    """The folder of a version with a package of random rows."""
    folder = tmp_path_factory.mktemp("models") / "dlrm" / "1"
    folder.mkdir(parents=True)
    write_large(folder / "model.pt", ROWS, PackageOptions(name="dlrm"))
    return folder


def test_a_large_package_is_one_as_any_other(version):
    manifest = load_package(version / "model.pt").manifest  # which compares its golden answers
    assert [(table.rows, table.dtype) for table in manifest.tables] == [(ROWS, "int8")] * TABLES
    assert sum(table.bytes for table in manifest.tables) == ROWS * TABLES * ROW_BYTES


def test_right_answers_are_those_of_the_patched_package_in_a_batch_of_any_size(version, tmp_path):
    requests = read_requests(write_requests(tmp_path / "requests", version / "model.pt", 3))
    publisher = SyntheticPublisher(version)
    other = PatchedByTorch(version / "model.pt", "cpu")
    one, all_sizes = Answering(requests, (1,)), Answering(requests, range(1, 5))
    before = one.answers(publisher.state)
    assert len(frozenset.union(*before)) == len(requests)  # each request has an answer of its own
    path = publisher.publish(rows=TABLES * ROWS)
    after = one.answers(publisher.state)
    assert all(new.isdisjoint(old) for new, old in zip(after, before, strict=True))
    assert one.answers(other) == before
    other.apply(read_commit(path))
    assert one.answers(other) == after
    # On a CPU a score has the same bits in any batch.
    assert all_sizes.answers(other) == after
    (score,) = np.frombuffer(next(iter(after[0])), np.float32)
    assert 0 < score < 1
    torch.testing.assert_close(publisher.state.answers()[1], dict(other.forward(publisher.state.answers()[0])))  # fmt: skip


def test_two_processes_make_commits_and_answers_as_one_does(version, tmp_path):
    requests = read_requests(write_requests(tmp_path / "requests", version / "model.pt", 3))
    right, contents = [], []
    for device in (None, "cpu"):
        folder = tmp_path / str(device) / "dlrm" / "1"
        folder.mkdir(parents=True)
        os.link(version / "model.pt", folder / "model.pt")
        with CommitMaker(folder, requests, gpu=device, largest_batch=2) as maker:
            assert maker.make(2, ROWS) == range(1, 3)
            assert maker.make(1, ROWS) == range(3, 4)
            right.append(maker.right)
        commits = [read_commit(folder / LOG_FOLDER / commit_name(number)) for number in (1, 2, 3)]
        contents.append(
            [[one.contents[name].tobytes() for name in one.contents] for one in commits]
        )
    assert right[0] == right[1]
    assert contents[0] == contents[1]
    assert len({frozenset.union(*answers) for answers in right[0].values()}) == 4  # of each state


@pytest.mark.parametrize("gpu", [False, True])
def test_an_answer_is_judged_by_the_commit_that_it_names(gpu):
    def bits(score):
        return np.array([score], np.float32).tobytes()

    def answer(commit, score):
        return pb.PredictionResponse(
            predictions={"default": pb.FloatVec(data=[score])}, model_commit=commit
        ).SerializeToString()

    right = {0: [frozenset([bits(0.5)])], 1: [frozenset([bits(0.25), bits(0.2500001)])]}
    judge = Judge(right, bits=not gpu)
    assert judge.verdict(0, answer(0, 0.5)) is Verdict.RIGHT
    assert judge.verdict(0, answer(1, 0.2500001)) is Verdict.RIGHT
    near = Verdict.NEAR if gpu else Verdict.WRONG
    assert judge.verdict(0, answer(1, 0.2500005)) is near
    assert judge.verdict(0, answer(1, 0.2500005)) is near  # the second time
    assert judge.verdict(0, answer(1, 0.5)) is Verdict.WRONG  # that of another commit
    assert judge.verdict(0, answer(1, 0.25001)) is Verdict.WRONG
    assert judge.verdict(0, answer(2, 0.5)) is Verdict.WRONG
    no_scores = pb.PredictionResponse(predictions={"default": pb.FloatVec()})
    assert judge.verdict(0, no_scores.SerializeToString()) is Verdict.WRONG


def test_commits_appear_one_after_the_other_up_to_the_last_that_is_asked_for(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    for number in (1, 2, 3):
        (made / commit_name(number)).write_bytes(b"commit")
    feed = CommitFeed(made, tmp_path / LOG_FOLDER)
    with feed.putting_in(0.0, until=2):
        while feed.last < 2:
            pass
    assert sorted(path.name for path in (tmp_path / LOG_FOLDER).iterdir()) == [
        commit_name(1),
        commit_name(2),
    ]
    assert sorted(feed.put_in_ns) == [1, 2]
