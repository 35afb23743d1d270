"""A repository of models on the disk, servers of it, and what their answers should be."""

import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tessera.serving.package.loading import load_package
from tessera.serving.protocol import inference_pb2 as ipb
from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer, scores_of
from tests.conformance.test_answers import run_in_process
from tests.kserve_messages import stub_of

NAMES = itertools.count()


class Models:
    """A repository's folder; everything appears and goes by rename, as docs/repository.md asks."""

    def __init__(self, folder, packages):
        self.folder = folder
        self._packages = packages
        folder.mkdir(exist_ok=True)

    def content(self, name):
        """A package's bytes."""
        return self._packages[name].read_bytes()

    def path(self, model, version):
        return self.folder / model / str(version) / "model.pt"

    def put(self, model, version, name, *, spoil=bytes):
        """Publish a version: a copy of a package, or what ``spoil`` makes of its content."""
        hidden = self.folder / model / f".{next(NAMES)}.partial"
        hidden.mkdir(parents=True)
        (hidden / "model.pt").write_bytes(spoil(self.content(name)))
        hidden.rename(self.path(model, version).parent)

    def replace(self, model, version, content):
        """Another file in the place of a version's."""
        draft = self.folder / model / f".{next(NAMES)}.partial"
        draft.write_bytes(content)
        draft.rename(self.path(model, version))

    def remove(self, model, version=None):
        """Take a version, or the whole model, away."""
        place = self.folder / model if version is None else self.path(model, version).parent
        hidden = self.folder / f".{next(NAMES)}.gone"
        place.rename(hidden)
        shutil.rmtree(hidden)

    def settings(self, model, text=None, **keys):
        """The model's serving.yaml: ``text``, or the keys as JSON, which is YAML."""
        draft = self.folder / model / f".{next(NAMES)}.yaml"
        draft.parent.mkdir(exist_ok=True)
        draft.write_text(json.dumps(keys) if text is None else text)
        draft.rename(self.folder / model / "serving.yaml")

    def record(self, model):
        """What control.json says; nothing where there is none."""
        path = self.folder / model / "control.json"
        return json.loads(path.read_text()) if path.exists() else {}


def serve(kind, models, control, *flags):
    """A server of the repository, not yet entered."""
    if kind == "given":
        pytest.skip("needs a server with a repository of its own")
    repository = ["--model-repository", models.folder, "--model-control", control]
    return RunningServer(kind, *repository, *flags, "--drain-propagation-ms", 0)


def index(server):
    """State and reason by model and version."""
    found = stub_of(server).RepositoryIndex(ipb.RepositoryIndexRequest(), timeout=TIMEOUT_S)
    return {(row.name, row.version): (row.state, row.reason) for row in found.models}


def ready(server, model):
    """The model's versions that answer."""
    return {
        int(version)
        for (name, version), (state, _) in index(server).items()
        if name == model and state == "READY"
    }


def settled(server):
    """Whether no version is on its way in or out."""
    return not {"LOADING", "UNLOADING"} & {state for state, _ in index(server).values()}


def parameters(**values):
    return {
        name: ipb.ModelRepositoryParameter(int64_param=value)
        if isinstance(value, int)
        else ipb.ModelRepositoryParameter(string_param=value)
        for name, value in values.items()
    }


def load(server, model, **values):
    """RepositoryModelLoad; `grpc.RpcError` where it is refused."""
    request = ipb.RepositoryModelLoadRequest(model_name=model, parameters=parameters(**values))
    stub_of(server).RepositoryModelLoad(request, timeout=TIMEOUT_S)


def unload(server, model, **values):
    request = ipb.RepositoryModelUnloadRequest(model_name=model, parameters=parameters(**values))
    stub_of(server).RepositoryModelUnload(request, timeout=TIMEOUT_S)


def asking(message, model, version="", key=""):
    """A copy of ``message`` for a model, a version or label, and a traffic key."""
    copy = type(message)()
    copy.CopyFrom(message)
    copy.model_name, copy.model_version, copy.traffic_key = model, version, key
    return copy


def predict_all(server, messages, **options):
    """The answers to many messages, some of them at a time, in their order."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda message: server.predict(message, **options), messages))


class Answers:
    """What each package answers to a message, by the package itself in this process."""

    def __init__(self, packages):
        self._packages = packages
        self._loaded = {}

    def __call__(self, name, message):
        if name not in self._loaded:
            self._loaded[name] = load_package(self._packages[name])
        return run_in_process(self._loaded[name], message)


def bits(response):
    return scores_of(response).tobytes()
