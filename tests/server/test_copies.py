"""Which devices a model's copies and shards go to, and how calls take turns in the copies."""

import pytest
from package_factory import make_package

from tessera.errors import UserError
from tessera.serving.server.config import ModelSource
from tessera.serving.server.models import Copies, PackageLoader, copies


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
    assert list(copies(devices, shards)) == expected


def test_calls_take_turns():
    class Named:
        shares_rows = True

        def __init__(self, name):
            self.name = name

        def forward(self, batch):
            return self.name, batch

    model = Copies([Named("a"), Named("b")])
    assert model.shares_rows
    assert [model.forward(n) for n in range(3)] == [("a", 0), ("b", 1), ("a", 2)]


def test_gpus_do_not_matter_to_a_package_for_the_cpu(tmp_path):
    path, _ = make_package(tmp_path)
    loader = PackageLoader(verify_golden=True, gpus=(3,))
    assert loader.load(ModelSource(path=str(path))).device == "cpu"


def test_a_gpu_that_is_not_there(tmp_path):
    path, _ = make_package(tmp_path, device="cuda")
    with pytest.raises(UserError, match=r"to be served on GPU 99, but there are \d+ here"):
        PackageLoader(verify_golden=True, gpus=(99,)).load(ModelSource(path=str(path)))
