"""The CPUs that a process may use, from made-up control groups."""

import math
import os

import pytest

from tessera.cpus import usable_cpus


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def groups_of(folder, member, **files):
    """Groups' files by their path below ``folder``, and the file that says of which ones we are."""
    for path, text in files.items():
        target = folder / "groups" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    (folder / "member").write_text(member)
    return {"groups": folder / "groups", "membership": folder / "member"}


@pytest.mark.parametrize(
    ("quota", "count"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("5000 100000", 1),
        ("1600000 100000", 8),
        ("0 100000", 8),
        ("junk", 8),
        ("", 8),
    ],
)
def test_a_quota_counts_as_so_many_cpus_rounded_up(tmp_path, quota, count):
    groups = groups_of(tmp_path, "0::/\n", **{"cpu.max": quota + "\n"})
    assert usable_cpus(**groups) == count


def test_the_least_quota_of_all_groups_above_counts(tmp_path):
    files = {
        "pods/cpu.max": "300000 100000",
        "pods/one/cpu.max": "max 100000",
        "pods/one/container/cpu.max": "400000 100000",
        "others/cpu.max": "100000 100000",
    }
    groups = groups_of(tmp_path, "0::/pods/one/container\n", **files)
    assert usable_cpus(**groups) == 3


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path):
    # Without a namespace the path is the host's, and what is mounted is the container's group.
    groups = groups_of(tmp_path, "0::/docker/0123\n", **{"cpu.max": "200000 100000"})
    assert usable_cpus(**groups) == 2


def test_version_1(tmp_path):
    files = {
        "cpu,cpuacct/box/cpu.cfs_quota_us": "250000",
        "cpu,cpuacct/box/cpu.cfs_period_us": "100000",
        "memory/box/cpu.max": "100000 100000",
    }
    member = "4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/box\n"
    assert usable_cpus(**groups_of(tmp_path, member, **files)) == math.ceil(2.5)
    files["cpu,cpuacct/box/cpu.cfs_quota_us"] = "-1"
    assert usable_cpus(**groups_of(tmp_path, member, **files)) == 8


def test_without_control_groups(tmp_path):
    assert usable_cpus(groups=tmp_path / "none", membership=tmp_path / "none") == 8
