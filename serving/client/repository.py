"""`RepositoryClient`: which versions a server has, and calls that change them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc

from tessera.errors import UserError
from tessera.serving.client.codec import check_address, check_timeout
from tessera.serving.client.credentials import Credentials
from tessera.serving.client.errors import error_for_status
from tessera.serving.protocol import inference_pb2 as pb
from tessera.serving.protocol import inference_pb2_grpc

if TYPE_CHECKING:
    from typing_extensions import Self

LOAD_TIMEOUT_S = 300.0
"""A load reads and checks the whole package before its call returns."""


@dataclass(frozen=True, kw_only=True)
class ModelVersion:
    """A row of the server's index.

    Attributes:
        name: the model's.
        version: its number, or a package's own version where the server was given a file.
        state: ``READY``, ``LOADING``, ``UNLOADING`` or ``UNAVAILABLE``.
        reason: why it does not answer; empty where it does.
        labels: that name it.
        traffic_percent: of the calls without a version that go to it, where labels share them; else 0.
        shadow: whether it computes a share of the calls, too.
        load_progress: how much of its load is done, 0 to 1, while it is ``LOADING``; else 0.
    """

    name: str
    version: str
    state: str
    reason: str
    labels: tuple[str, ...] = ()
    traffic_percent: float = 0.0
    shadow: bool = False
    load_progress: float = 0.0


class RepositoryClient:
    """A connection to a server whose models live in a repository; docs/repository.md has the calls.

    Those that change something need a server with ``--model-control explicit``; each returns when the
    change is done.  Close it, or use it as a context manager:

        with RepositoryClient("127.0.0.1:50051") as repository:
            repository.load("ranker", version=4, label="canary")

    Args:
        address: ``HOST:PORT`` of the gRPC port, or another target form of gRPC's.
        timeout_s: the time limit of each call in seconds.
        credentials: files of certificates and of a token; None: neither.

    Raises:
        UserError: the address, the timeout or a file of ``credentials`` cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = LOAD_TIMEOUT_S,
        credentials: Credentials | None = None,
    ) -> None:
        self._address = check_address(address)
        self._timeout_s = check_timeout(timeout_s)
        credentials = credentials or Credentials()
        self._metadata = credentials.metadata()
        self._channel = credentials.channel(address, [])
        self._stub = inference_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def index(self, *, ready: bool = False) -> list[ModelVersion]:
        """Every model and version that the server knows, with ``ready`` those alone that answer.

        Raises:
            PredictError: the call was not answered; the subclass says why.
        """
        request = pb.RepositoryIndexRequest(ready=ready)
        found = self._call(self._stub.RepositoryIndex, request)
        return [
            ModelVersion(
                name=row.name,
                version=row.version,
                state=row.state,
                reason=row.reason,
                labels=tuple(row.labels),
                traffic_percent=row.traffic_percent,
                shadow=row.shadow,
                load_progress=row.load_progress,
            )
            for row in found.models
        ]

    def load(self, model: str, *, version: int | None = None, label: str | None = None) -> None:
        """Load ``version``, too, and let ``label`` be its name; without a version, what is wanted.

        Without one the model's folder is read again, and an unload of the model is taken back.

        Raises:
            UserError: a label without a version.
            PredictError: the server refused, or could not load it; what answered before still does.
        """
        if label is not None and version is None:
            raise UserError(f"label {label!r} needs the version that it is to name")
        self._load(model, version=version, label=label)

    def rollback(self, model: str, *, to: int | str | None = None) -> None:
        """Answer with version ``to`` instead of the one that answers now, which is unloaded.

        Args:
            model: its name.
            to: a version; None: the highest one below the one that answers; a state such as ``"3.40"``: version
                3 without its commits after 40, which are fenced off, so that no server takes them again.

        Raises:
            PredictError: see `load`.
        """
        self._load(model, rollback="previous" if to is None else to)

    def unload(self, model: str, *, version: int | None = None) -> None:
        """Unload one version, or the whole model where it is None; it stays so until it is loaded again.

        Raises:
            PredictError: the server refused; nothing has changed.
        """
        request = pb.RepositoryModelUnloadRequest(
            model_name=model, parameters=_parameters(version=version)
        )
        self._call(self._stub.RepositoryModelUnload, request)

    def close(self) -> None:
        """Close the connection.  May be called twice."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _load(self, model: str, **parameters: int | str | None) -> None:
        request = pb.RepositoryModelLoadRequest(
            model_name=model, parameters=_parameters(**parameters)
        )
        self._call(self._stub.RepositoryModelLoad, request)

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            # grpc's own type for what its stubs raise is not the one that has these methods.
            call: Any = error
            raise error_for_status(call.code(), call.details(), self._address) from error


def _parameters(**values: int | str | None) -> dict[str, pb.ModelRepositoryParameter]:
    return {
        name: pb.ModelRepositoryParameter(int64_param=value)
        if isinstance(value, int)
        else pb.ModelRepositoryParameter(string_param=value)
        for name, value in values.items()
        if value is not None
    }
