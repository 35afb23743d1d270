"""Hosts that a load needs, and the command that says it."""

import dataclasses
import functools
import json
import math
import xml.etree.ElementTree as ET

import pytest

from tessera.cli import main
from tessera.errors import UserError
from tessera.serving.capacity import fit
from tessera.serving.capacity.model import Costs, Host
from tessera.serving.capacity.policy import BatchLimits
from tessera.serving.capacity.sweep import Simulated, size
from tessera.serving.package.records import Records
from tests.capacity.test_calibration import made_up
from tests.package_factory import package_file

US = 1e-6


def one_worker(**changes):
    """M/D/1 with passes of 1 ms, so that closed forms say what a rate makes of it."""
    facts = {
        "host": Host(cores=2, loops=1, workers=1),
        "costs": Costs(passes=((1, 1000 * US),)),
        "samples": 1,
        "limits": BatchLimits(max_samples=1),
        "requests": 4000,
        "seed": 1,
    }
    return Simulated(**{**facts, **changes})


def test_the_highest_rate_is_that_of_the_worker():
    assert one_worker().highest_rate() == pytest.approx(1000, rel=0.03)


def test_a_limit_of_latency_lowers_it():
    one = one_worker()
    within = one.highest_rate(5.0)
    assert 300 < within < one.highest_rate()
    assert one.at(within).p99_ms <= 5
    assert one.at(1.1 * within).p99_ms > 5


def test_hosts_for_a_load():
    found = size(one_worker(), rate=20_000, p99_ms=5.0, headroom=0.25)
    assert found.planned == pytest.approx(0.75 * found.within_limit)
    assert found.needed.hosts == math.ceil(20_000 / found.planned)
    assert found.needed.host.rate == pytest.approx(20_000 / found.needed.hosts)
    assert found.needed.host.p99_ms <= 5
    assert [total.hosts for total in found.totals] == [
        max(1, math.ceil(total.rate / found.planned)) for total in found.totals
    ]
    assert found.totals[-1].rate == 1e6
    utilisations = [point.utilisation for point in found.points]
    assert utilisations == sorted(utilisations)


def test_a_limit_that_no_rate_holds_is_refused():
    with pytest.raises(
        UserError, match=r"p99_ms is 0\.5; a host with hardly any load .* 1(\.\d+)? ms"
    ):
        size(one_worker(), rate=10, p99_ms=0.5, headroom=0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A package, with costs beside it that are made up."""
    path = package_file(tmp_path_factory.mktemp("capacity"))
    manifest = Records(path).manifest()
    costs = made_up(model=manifest.name, model_version=manifest.version)
    costs.write(path.with_suffix(".costs.json"))
    return path, costs


@pytest.fixture(scope="module", autouse=True)
def found_once():
    """What is found of one measurement is found once for the commands of this file: it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "fitted_costs", functools.cache(fit.fitted_costs))
        yield


ASKED = ["--rate", "50000", "--p99-ms", "5", "--requests", "2000"]


def test_the_command_prints_writes_and_draws(measured, tmp_path, capsys):
    package, _ = measured
    figures, plot = tmp_path / "sizing.json", tmp_path / "latency.svg"
    files = ["--json", str(figures), "--plot", str(plot)]
    assert main(["capacity", "--package", str(package), *ASKED, *files, "--cores", "4"]) == 0
    out = capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert found["cores"] == 4 * found["hosts"]
    assert f"50000 requests/s need {found['hosts']} hosts, {found['cores']} cores" in out
    assert "tessera-server on 4 cores, 1 samples a request" in out
    assert found["host"]["loops"] == 2
    assert found["needed"]["host"]["p99_ms"] <= 5
    assert len(found["points"]) == out.split("one host\n")[1].split("\n\n")[0].count("\n")
    drawn = plot.read_text()
    assert ET.fromstring(drawn).tag.endswith("svg")
    assert "limit 5 ms" in drawn
    assert "1,000,000" in drawn.replace("1e+06", "1,000,000")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "0"], "give a number above 0"),
        (["--rate", "x"], "give a number above 0"),
        (["--p99-ms", "inf"], "give a number above 0"),
        (["--headroom", "1"], "at least 0 and below 1"),
        (["--samples", "0"], "at least 1"),
        (["--requests", "20"], "requests is 20; give 100"),
        (["--p99-ms", "0.001"], "p99_ms is 0.001; a host with hardly any load"),
        (["--headrom", "0.2"], "did you mean --headroom?"),
    ],
)
def test_bad_flags_are_refused(measured, capsys, flags, message):
    package, _ = measured
    command = ["capacity", "--package", str(package), *ASKED, *flags]
    try:
        status = main(command)
    except SystemExit as end:
        status = end.code
    assert status == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_costs_of_another_model_or_none_are_refused(measured, tmp_path, capsys):
    package, costs = measured
    other = tmp_path / "other.json"
    dataclasses.replace(costs, model_version="other").write(other)
    command = ["capacity", "--package", str(package), *ASKED]
    assert main([*command, "--costs", str(other)]) == 2
    assert "version other" in capsys.readouterr().err
    assert main([*command, "--costs", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    alone = package_file(tmp_path)
    assert main(["capacity", "--package", str(alone), *ASKED]) == 2
    assert "tessera-load --calibrate" in capsys.readouterr().err
