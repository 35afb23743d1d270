"""A version that is loaded beside others rests between its steps; the first one, which nobody waits beside, does not."""

import threading

import pytest

from tessera.serving.package.pace import Pace
from tessera.serving.server.config import ServerConfig
from tessera.serving.server.repository import version_loader
from tests.package_factory import make_package


@pytest.mark.parametrize("beside_others", [True, False])
def test_rests_are_taken_by_the_threads_that_work_and_only_beside_others(
    tmp_path, monkeypatch, beside_others
):
    made, rests = [], []

    class Told(Pace):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.maker = threading.get_ident()
            made.append(self)

        def rest(self):
            # The time of the thread's own CPU is what a pace goes by.
            assert threading.get_ident() == self.maker
            rests.append(threading.get_ident())

    path, _ = make_package(tmp_path)
    monkeypatch.setattr(version_loader, "Pace", Told)
    config = ServerConfig(model_repositories=(str(tmp_path),))
    loader = version_loader.PackageVersionLoader(config, None)
    loaded = loader.load(path, lambda _: None, beside_others=beside_others)
    assert loaded.runner is not None
    if beside_others:
        here = threading.get_ident()
        assert rests.count(here) >= 7  # of opening
        assert len(rests) - rests.count(here) >= 30  # behind each call that settles the executor
    else:
        assert not made
