"""How versions are loaded while a server starts, and beside those that answer."""

import asyncio
import io

import pytest

from tessera.serving.server.config import ServerConfig
from tessera.serving.server.front.health_service import HealthService
from tessera.serving.server.front.recent_requests import RecentRequests
from tessera.serving.server.log import make_logger
from tessera.serving.server.metrics.metrics_page import MetricsPage
from tessera.serving.server.model.registry import Registry
from tessera.serving.server.repository.manager import RepositoryManager
from tessera.serving.server.repository.version_loader import PackageVersionLoader
from tests.package_factory import make_package
from tests.patience import PATIENCE_S
from tests.repository.server_repository import put, wait_until


class Watched(PackageVersionLoader):
    """Notes how each version was loaded."""

    def __init__(self, config):
        super().__init__(config, None)
        self.loads = []

    def load(self, path, progress, *, beside_others):
        self.loads.append((path.parent.parent.name, path.parent.name, beside_others))
        return super().load(path, progress, beside_others=beside_others)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return make_package(tmp_path_factory.mktemp("package"), name="ranker")[0]


def test_loads_stand_back_once_all_of_the_start_have_ended(tmp_path, package):
    for model in ("a", "b"):
        put(package, tmp_path / model, 1)

    async def body():
        config = ServerConfig(
            model_repositories=(str(tmp_path),), model_control="poll", poll_s=0.05
        )
        loader = Watched(config)
        manager = RepositoryManager(
            config=config,
            registry=Registry([]),
            metrics=MetricsPage("0", lambda: 0),
            health=HealthService([]),
            loader=loader,
            recent=RecentRequests(),
            log=make_logger("info", "json", io.StringIO()),
        )
        try:
            await manager.start()
            assert sorted(loader.loads) == [("a", "1", False), ("b", "1", False)]
            put(package, tmp_path / "a", 2)
            await asyncio.to_thread(wait_until, lambda: set(manager.models["a"].live) == {2})
            assert loader.loads[2:] == [("a", "2", True)]
        finally:
            await manager.close()

    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))
