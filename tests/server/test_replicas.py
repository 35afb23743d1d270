"""Which devices a model's copies and shards go to, and how calls take turns in the copies."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tessera.errors import UserError
from tessera.serving.server.config import ModelSource
from tessera.serving.server.model.loader import PackageLoader
from tessera.serving.server.model.replicas import Replicas, devices_of_replicas
from tests.package_factory import make_package, package_file
from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("devices", "shards", "expected"),
    [
        (["a"], 1, [["a"]]),
        (["a", "b"], 1, [["a"], ["b"]]),
        (["a", "b", "c", "d"], 2, [["a", "b"], ["c", "d"]]),
        (["a", "b", "c"], 2, [["a", "b"]]),
        (["a", "b"], 3, [["a", "b", "a"]]),
        ([], 2, []),
    ],
)
def test_copies(devices, shards, expected):
    assert list(devices_of_replicas(devices, shards)) == expected


def test_calls_take_turns():
    class Named:
        shares_rows = True

        def __init__(self, name):
            self.name = name

        def forward(self, batch):
            return self.name, batch

    model = Replicas([Named("a"), Named("b")])
    assert model.shares_rows
    assert [model.forward(n) for n in range(3)] == [("a", 0), ("b", 1), ("a", 2)]


def test_each_copy_knows_what_it_computes():
    class Waits:
        shares_rows = False

        def __init__(self):
            self.entered = threading.Event()
            self.open = threading.Event()

        def forward(self, batch):
            self.entered.set()
            self.open.wait(PATIENCE_S)
            if batch is None:
                raise RuntimeError("a table is on fire")
            return batch

    runners = [Waits(), Waits()]
    model = Replicas(runners)
    assert [model.in_work(copy) for copy in range(2)] == [0, 0]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(model.forward, "batch")
        runners[0].entered.wait(PATIENCE_S)
        assert [model.in_work(copy) for copy in range(2)] == [1, 0]
        second = pool.submit(model.forward, None)
        runners[1].entered.wait(PATIENCE_S)
        assert [model.in_work(copy) for copy in range(2)] == [1, 1]
        for runner in runners:
            runner.open.set()
    assert first.result() == "batch"
    assert isinstance(second.exception(), RuntimeError)
    assert [model.in_work(copy) for copy in range(2)] == [0, 0]


def test_gpus_do_not_matter_to_a_package_for_the_cpu(tmp_path):
    path = package_file(tmp_path)
    loader = PackageLoader(verify_golden=True, gpus=(3,))
    assert loader.load(ModelSource(path=str(path))).device == "cpu"


def test_a_gpu_that_is_not_there(tmp_path):
    path, _ = make_package(tmp_path, device="cuda")
    with pytest.raises(UserError, match=r"to be served on GPU 99, but there are \d+ here"):
        PackageLoader(verify_golden=True, gpus=(99,)).load(ModelSource(path=str(path)))
