"""A record of calls read as arrays, against a loop over its bytes."""

import random
import struct
from collections import Counter

import numpy as np
import pytest

from tessera.serving.bench import call_records
from tessera.serving.bench.call_records import read_calls, read_runs
from tessera.serving.bench.reload_servers import ReloadingServer
from tessera.serving.protocol import predictor_pb2 as pb


def entry(due, took, request, code, answer):
    return struct.pack("<qqIII", due, took, request, code, len(answer)) + answer


def drawn(draw, count, sizes):
    return [
        (
            draw.randrange(1 << 62),
            draw.randrange(1 << 40),
            draw.randrange(4),
            draw.choice([0, 0, 0, 14]),
            bytes(draw.choice(b"\0\1") for _ in range(draw.choice(sizes))),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("sizes", [(3,), (0,), (0, 3, 3, 3, 40)])
@pytest.mark.parametrize("most", [2, 7, 1 << 16])
def test_runs_have_each_call_once(tmp_path, monkeypatch, sizes, most):
    monkeypatch.setattr(call_records, "_MOST_CALLS", most)
    calls = drawn(random.Random(len(sizes)), 500, sizes)
    record = tmp_path / "record"
    record.write_bytes(b"".join(entry(*call) for call in calls))
    found = [(one.due, one.took, one.request, one.code, one.answer) for one in read_calls(record)]
    assert found == calls

    runs = list(read_runs(record))
    times = np.concatenate([run.took for run in runs]).tolist()
    assert sorted(times) == sorted(call[1] for call in calls)
    assert max(len(run.took) for run in runs) <= most
    counted = Counter()
    for run in runs:
        for request, answer, count in run.distinct():
            counted[request, answer] += count
    assert counted == Counter((call[2], call[4]) for call in calls if call[3] == 0)


def test_a_record_without_calls_has_none(tmp_path):
    record = tmp_path / "record"
    record.touch()
    assert list(read_runs(record)) == []


@pytest.mark.parametrize("kept", [1, 27, 30, 31 + 29])
def test_a_record_that_is_cut_short_is_refused(tmp_path, kept):
    record = tmp_path / "record"
    record.write_bytes((2 * entry(1, 2, 3, 0, b"abc"))[:kept])
    with pytest.raises(ValueError, match="is cut short"):
        list(read_runs(record))


def answered(score, version, timings=b"", commit=0):
    answer = pb.PredictionResponse(model_name="dlrm", model_version=version, model_commit=commit)
    answer.predictions["default"].data.append(score)
    if timings:
        answer.timings.MergeFromString(timings)
    return answer.SerializeToString()


def test_answers_that_differ_in_timings_alone_are_told_as_one(tmp_path):
    draw = random.Random(3)
    expected = Counter()
    entries = []
    for _ in range(400):
        request, version = draw.randrange(3), draw.choice("12")
        timings = pb.StageTimings(queue_us=draw.choice([0, 5, 300])).SerializeToString()
        commit = draw.choice([0, 0, 0, 7])
        score = draw.choice([0.5, 0.25])
        # One that says another version behind its timings is read as it is.
        more = draw.choice([b"", b"", pb.PredictionResponse(model_version="3").SerializeToString()])
        answer = answered(score, version, timings, commit) + more
        entries.append(entry(1, 2, request, 0, answer))
        found = pb.PredictionResponse.FromString(answer)
        expected[request, found.model_version, found.predictions["default"].data[0]] += 1
    record = tmp_path / "record"
    record.write_bytes(b"".join(entries))
    server = ReloadingServer.__new__(ReloadingServer)  # `told` and `read` know nothing of a server
    counted = Counter()
    asked = 0
    for run in read_runs(record):
        for part in server.told(run):
            for request, answer, count in part.distinct():
                asked += 1
                version, scores = server.read(answer)
                counted[request, version, np.frombuffer(scores, np.float32)[0]] += count
    assert counted == expected
    assert asked < len(entries) // 2
