"""The open-loop generator: its schedule, whom it charges for a stall, and its report."""

import asyncio
import csv
import time

import grpc
import numpy as np
import pytest

from load_tests import open_loop
from tessera.serving.client import PredictError
from tests.package_factory import package_file


def test_constant_arrivals():
    times_s = open_loop.arrival_times_s(100, 0.5, "constant", seed=0)
    assert times_s.size == 50
    assert np.allclose(np.diff(times_s), 0.01)
    assert times_s[0] == 0


def test_poisson_arrivals():
    times_s = open_loop.arrival_times_s(1000, 20, "poisson", seed=1)
    gaps = np.diff(times_s)
    # 20,000 arrivals with standard deviation 141; gaps are exponential, so their standard
    # deviation is their mean, estimated here to within 1 %.
    assert abs(times_s.size - 20_000) < 5 * 142
    assert gaps.min() >= 0
    assert times_s[-1] < 20
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.05)
    again = open_loop.arrival_times_s(1000, 20, "poisson", seed=1)
    assert np.array_equal(times_s, again)


def run(send, times_s):
    return asyncio.run(open_loop.run_calls(send, [b"a", b"b"], np.asarray(times_s)))


def test_a_stall_is_charged_to_every_call_that_it_delayed():
    stall_s = 0.2
    times_s = [0.0, 0.01, 0.05, 0.1]
    calls = 0

    async def send(_):
        nonlocal calls
        calls += 1
        if calls == 1:
            time.sleep(stall_s)  # noqa: ASYNC251 - the whole process stops, as under a stall
        return b""

    result = run(send, times_s)
    # No call can end before the stall does, so each has at least the rest of it.
    for time_s, latency_s in zip(times_s, result.latency_s, strict=True):
        assert latency_s >= stall_s - time_s
    assert (result.lateness_s[1:] >= stall_s - np.array(times_s[1:])).all()


def test_a_slow_answer_holds_up_nobody():
    first_may_end = asyncio.Event()
    answered = []

    async def send(_):
        if not answered:
            answered.append("first sent")
            await first_may_end.wait()
        else:
            answered.append("another")
            if len(answered) == 5:
                first_may_end.set()
        return b""

    result = run(send, [0, 0.001, 0.002, 0.003, 0.004])
    assert len(answered) == 5  # the four others were sent while the first waited
    assert result.answered.all()


def test_requests_take_turns_and_failures_are_kept():
    sent = []

    async def send(request):
        sent.append(request)
        if len(sent) == 2:
            raise PredictError(grpc.StatusCode.UNAVAILABLE, "draining", "x")
        return b""

    result = run(send, [0, 0, 0])
    assert sent == [b"a", b"b", b"a"]
    assert result.status == ["OK", "UNAVAILABLE", "OK"]
    assert result.answered.tolist() == [True, False, True]
    text = open_loop.summary(result, rate=10)
    assert "failed    1 UNAVAILABLE" in text
    assert "2 calls:" in text


def calls(status):
    count = len(status)
    return open_loop.Calls(
        np.arange(count) / 10, np.zeros(count), np.full(count, 0.002), list(status)
    )


def test_the_warm_up_is_left_out():
    rest = calls(["UNAVAILABLE"] * 3 + ["OK"] * 4).after(0.3)
    assert rest.status == ["OK"] * 4
    assert rest.intended_s[0] == pytest.approx(0.3)
    assert "warm-up is as long" in open_loop.summary(calls(["OK"]).after(1), 10)


@pytest.mark.parametrize("status", [["OK"] * 3, ["OK", "INTERNAL"], ["INTERNAL"]])
def test_files(tmp_path, status):
    open_loop.write_csv(calls(status), tmp_path / "calls.csv")
    with (tmp_path / "calls.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["status"] for row in rows] == status
    assert float(rows[0]["latency_s"]) == 0.002
    open_loop.plot(calls(status), tmp_path / "latency.svg", "title")
    assert (tmp_path / "latency.svg").read_text().rstrip().endswith("</svg>")


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate", "0"],
        ["--rate", "inf"],
        ["--rate", "1e6", "--duration-s", "11"],
        ["--rate", "5", "--samples", "0"],
        ["--rate", "5", "--samples", "1000001"],
        ["--rate", "5", "--duration-s", "1", "--warm-up-s", "1"],
    ],
)
def test_wrong_flags(flags, capsys):
    with pytest.raises(SystemExit) as caught:
        open_loop.main(["--address", "h:1", "--model-file", "m", *flags])
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_missing_package_is_one_line(capsys):
    status = open_loop.main(["--address", "h:1", "--model-file", "absent.pt", "--rate", "1"])
    assert status == 2
    assert "absent.pt" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    package = package_file(tmp_path)
    flags = ["--address", "h:1", "--model-file", str(package), "--rate", "1"]
    assert open_loop.main([*flags, "--out", str(package)]) == 2
    assert capsys.readouterr().err == f"open_loop: error: {package}: File exists\n"


def test_large_requests_make_a_small_pool(tmp_path, monkeypatch):
    package = package_file(tmp_path)
    monkeypatch.setattr(open_loop, "POOL_BYTES", 50_000)
    flags = ["--address", "h:1", "--model-file", str(package), "--rate", "1", "--samples", "500"]
    pool = open_loop.draw_requests(open_loop.parse(flags))
    assert 1 <= len(pool) < 20
