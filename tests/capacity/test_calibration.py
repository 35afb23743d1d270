"""Files of costs: what is made of them, that they come back as they were written, and which are refused."""

import dataclasses
import json

import numpy as np
import pytest

from tessera.errors import UserError
from tessera.serving.capacity.calibration import Calibration, Run, read_calibration


def run_of(samples, in_flight, *, server, client, pass_us, latency, requests=1.0, rate=0.0):
    """A run whose passes and latencies vary by a tenth."""
    around = (0.9, 1.0, 1.1)
    return Run(
        samples=samples,
        in_flight=in_flight,
        rate=rate,
        connections=1,
        seconds=2.0,
        calls=1000,
        cores_used=1.5,
        server_cpu_us=server,
        client_cpu_us=client,
        batch_requests=requests,
        batch_samples=requests * samples,
        latency_us=tuple(latency * one for one in around),
        pass_us=tuple(pass_us * one for one in around),
    )


def pass_us(samples):
    """What a pass takes on the machine that is made up here."""
    return 50 + 10 * samples


def made_up(**changes):
    """A call costs 20 us and 0.5 us a sample, and waking 30 us in all; the client 15, 0.1 and 5."""
    runs = []
    for n in (1, 4, 16, 64):
        server, client = 20 + 0.5 * n + 30 + pass_us(n), 15 + 0.1 * n + 5
        latency = server + client + 8
        runs.append(run_of(n, 1, server=server, client=client, pass_us=pass_us(n), latency=latency))
    server = 20.5 + pass_us(16) / 16
    runs.append(run_of(1, 64, server=server, client=15.1, pass_us=210, latency=900, requests=16.0))
    calm = pass_us(1)
    latency = 50.5 + calm + 20.1 + 11
    runs.append(run_of(1, 0, server=110, client=25, pass_us=calm, latency=latency, rate=2000.0))
    facts = {
        "created": "2026-01-01T00:00:00Z",
        "server": "cpp",
        "server_version": "0.1.0",
        "cpus": 2,
        "model": "clicks",
        "model_version": "1",
        "samples": 1,
        "ids_per_sample": 26.0,
        "runs": tuple(runs),
    }
    return Calibration(**{**facts, **changes})


def test_what_costs_are_made_of_runs():
    costs = made_up().costs(1)
    assert [(n, s * 1e6) for n, s in costs.passes] == [
        (n, pytest.approx(pass_us(n))) for n in (1, 4, 16, 64)
    ]
    assert costs.call_s * 1e6 == pytest.approx(20.5)
    assert costs.client_call_s * 1e6 == pytest.approx(15.1)
    # As lone passes of one sample vary: others' use of the CPU is not a pass's work.
    assert [s * 1e6 for s in costs.spread_s] == pytest.approx([-6, 0, 6])
    # What waking costs, and when threads begin, is found by simulation: test_fit.py.
    assert (costs.wake_s, costs.client_wake_s, costs.wire_s, costs.under) == (0, 0, 0, ())
    assert costs.ids_per_sample == 26
    larger = made_up().costs(101)
    assert larger.call_s * 1e6 == pytest.approx(70.5)
    assert larger.client_call_s * 1e6 == pytest.approx(25.1)


def test_runs_that_do_not_fit_together_are_refused():
    good = made_up()
    cheap = dataclasses.replace(good.busiest, server_cpu_us=1.0)
    with pytest.raises(UserError, match=r"64 calls in flight took 1\.0 us .* calibrate again"):
        made_up(runs=(*good.runs[:-2], cheap, good.runs[-1])).costs(1)


@pytest.mark.parametrize(
    ("beyond_us", "call_us"),
    [(-1, 0.25 * pass_us(16) / 16), (3, 0.25 * pass_us(16) / 16), (3.28125, 3.28125)],
)
def test_a_small_part_beside_the_pass_is_lost_in_it(beyond_us, call_us):
    """A call keeps a part, and passes have what is left: both together are what was measured."""
    good = made_up()
    in_batch = pass_us(16) / 16
    near = dataclasses.replace(good.busiest, server_cpu_us=in_batch + beyond_us)
    costs = made_up(runs=(*good.runs[:-2], near, good.runs[-1])).costs(1)
    assert costs.call_s * 1e6 == pytest.approx(call_us)
    assert costs.pass_s(16) / 16 * 1e6 == pytest.approx(in_batch + beyond_us - call_us)
    together_s = costs.busy_s(1, of_batch=16, client=False)
    assert together_s * 1e6 == pytest.approx(in_batch + beyond_us)


def test_a_file_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "costs.json"
    made_up().write(path)
    assert read_calibration(path) == made_up()


def damaged(change):
    content = json.loads(made_up().text())
    change(content)
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "costs"),
        (made_up().text().encode()[:-40], "costs"),
        (b"[]", "the file is not an object"),
        (b'{"kind": "tessera-costs", "kind": 1}', "twice"),
        (b"[" * 100_000, "deep"),
        (damaged(lambda c: c.update(format=2)), "format 2"),
        (damaged(lambda c: c.update(kind="else")), "kind is 'else'"),
        (damaged(lambda c: c.pop("samples")), "the file has no samples"),
        (damaged(lambda c: c.update(extra=1)), "unknown 'extra'"),
        (damaged(lambda c: c["server"].update(kind="go")), "server.kind is 'go'"),
        (damaged(lambda c: c["server"].update(cpus=0)), "server.cpus is 0"),
        (damaged(lambda c: c["server"].update(cpus=True)), "server.cpus is True"),
        (damaged(lambda c: c["model"].update(name=3)), "model.name is 3"),
        (damaged(lambda c: c.update(runs={})), "runs is not a list"),
        (damaged(lambda c: c.update(runs=[])), "two that differ"),
        (damaged(lambda c: c["runs"].pop(-2)), "several calls of 1 samples"),
        (damaged(lambda c: c["runs"].pop()), "calls of 1 samples at a rate"),
        (damaged(lambda c: c["runs"][-1].update(rate=0)), "one of them is 0"),
        (damaged(lambda c: c["runs"].append(c["runs"][-1])), r"rates \[2000.0, 2000.0\]"),
        (damaged(lambda c: c["runs"].pop(0)), "one call of 1 samples"),
        (damaged(lambda c: c["runs"][1].update(samples=1)), "two that differ"),
        (damaged(lambda c: c["runs"][2].update(calls=1.5)), r"runs\[2\].calls is 1.5"),
        (damaged(lambda c: c["runs"][2].update(server_cpu_us=-1)), "server_cpu_us is -1"),
        (damaged(lambda c: c["runs"][2].update(server_cpu_us=0)), "must be above 0"),
        (damaged(lambda c: c["runs"][2].update(pass_us=[])), "pass_us is not a list"),
        (damaged(lambda c: c["runs"][2].update(pass_us=[2, 1])), "does not ascend"),
        (damaged(lambda c: c["runs"][2].update(pass_us=[0, 0, 0])), "median 0"),
        (damaged(lambda c: c["runs"][2].update(latency_us=["a"])), r"latency_us\[0\] is 'a'"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as refused:
        read_calibration(path)
    assert "tessera-load --calibrate" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_quantiles_between_those_of_the_file_are_of_an_exponential_distribution():
    levels = (np.arange(101) + 0.5) / 101
    exact = -np.log(1 - levels)
    run = dataclasses.replace(made_up().calm, latency_us=tuple(1e6 * exact))
    for level in (0.01, 0.5, 0.9, 0.99):
        assert run.latency_s(level) == pytest.approx(-np.log(1 - level)), level
    assert run.latency_s(0.0) == pytest.approx(exact[0])
    assert run.latency_s(0.999) == pytest.approx(exact[-1])
