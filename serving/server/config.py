"""What an operator may set, with its unit and its default.

`ModelLimits` changes what a request may ask for and how requests share batches;
`ServerConfig` holds it together with ports, drain and logging.  Both refuse values that
cannot work, naming the field, the value and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn

from tessera.cpus import usable_cpus
from tessera.errors import FieldError, UserError
from tessera.serving.package.time_limit import DEFAULT_LOAD_TIMEOUT_S
from tessera.serving.server.observe.collector import REMEDY, read_collector

DEFAULT_GRPC_PORT = 50051
DEFAULT_HTTP_PORT = 8002
_HOST_NAME = re.compile(r"[a-z0-9._-]{1,253}")


def default_workers() -> int:
    """Half of the CPUs: the other half serves the network and the clients' bytes."""
    return max(1, usable_cpus() // 2)


def host_name_of(name: str) -> str:
    """``name`` as hosts are compared: lower-case, without a dot at its end."""
    return name.removesuffix(".").lower()


def _refuse(name: str, value: object, remedy: str) -> NoReturn:
    raise FieldError(name, f"{value:g}" if isinstance(value, float) else value, remedy)


def _at_most(most: int, **values: int) -> None:
    for name, value in values.items():
        if value > most:
            _refuse(name, value, f"give a number of at most {most}")


def _at_least(minimum: int, **values: int) -> None:
    for name, value in values.items():
        if value < minimum:
            _refuse(name, value, f"give a whole number of at least {minimum}")


# Threads: where the system gives no more of them, OpenMP ends the process.  Delay: a minute.
_MOST = {
    "workers": 4_096,
    "threads_per_worker": 4_096,
    "max_delay_us": 60_000_000,
    "worker_niceness": 19,
}

_MOST_PROCESSES = 256
_LARGEST_MESSAGE = (1 << 31) - 1
_LONGEST_DRAIN_S = 1_000_000
_LONGEST_POLL_S = 86_400
_LONGEST_FOLLOW_POLL_MS = 3_600_000

_MOST_CONNECTIONS = 1_000_000
_LONGEST_IDLE_S = 1_000_000
_OLDEST_CONNECTION_S = 1_000_000
_MOST_HTTP_CONNECTIONS = 65_536
_MOST_SHARED_MEMORY_BYTES = 1 << 50
_LEAST_RECORD_BYTES = 4_096
_MOST_RECORD_BYTES = 1 << 50

ModelControl = Literal["none", "poll", "explicit"]


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """Bounds of one model's requests, queue and batches.

    Attributes:
        max_request_samples: samples of one request.
        max_request_ids: ids of one request as they are looked up: those of shared features once
            where the model shares rows, else once per sample that uses them.
        max_batch_samples: samples that one forward pass takes.  A larger request is cut into
            several passes and put together again.
        max_batch_ids: ids that one forward pass takes; one sample alone may have more, and samples that
            share more than half of them may have as many as half beside those.
        max_queue_requests: requests that may wait, each once, in however many parts.
        max_queue_samples: samples that may wait.
        max_delay_us: microseconds that a free worker waits for more requests; 0: it takes at once
            whatever is queued.
        workers: inference threads.
        threads_per_worker: threads that torch may use inside one forward pass.
        worker_niceness: how far the inference threads stand back (nice levels) behind the
            event loop's when CPUs are short, so that batches grow instead of the loop waiting.
    """

    max_request_samples: int = 16_384
    max_request_ids: int = 4_194_304
    max_batch_samples: int = 512
    max_batch_ids: int = 262_144
    max_queue_requests: int = 4_096
    max_queue_samples: int = 65_536
    max_delay_us: int = 0
    workers: int = field(default_factory=default_workers)
    threads_per_worker: int = 1
    worker_niceness: int = 5

    def __post_init__(self) -> None:
        """Refuse values that no request could pass.

        Raises:
            UserError: a limit is too small or too large, or two contradict each other.
        """
        _at_least(
            1,
            max_request_samples=self.max_request_samples,
            max_request_ids=self.max_request_ids,
            max_batch_samples=self.max_batch_samples,
            max_batch_ids=self.max_batch_ids,
            max_queue_requests=self.max_queue_requests,
            max_queue_samples=self.max_queue_samples,
            workers=self.workers,
            threads_per_worker=self.threads_per_worker,
        )
        _at_least(0, max_delay_us=self.max_delay_us, worker_niceness=self.worker_niceness)
        for name, most in _MOST.items():
            _at_most(most, **{name: getattr(self, name)})
        if self.max_queue_samples < self.max_request_samples:
            _refuse(
                "max_queue_samples",
                self.max_queue_samples,
                f"a request of --max-request-samples {self.max_request_samples} could never wait "
                "in it: raise the one or lower the other",
            )


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A package to serve.

    Attributes:
        path: the package's file.
        name: the name that requests use; empty: the name in the package's manifest.
    """

    path: str
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Everything a `Server` needs to know.

    Attributes:
        models: packages to serve; the first one answers requests that name no model.
        model_repositories: folders of models whose versions come and go (docs/repository.md).
        model_control: when these change: ``none`` (at the start alone), ``poll`` or ``explicit`` (by calls).
        poll_s: seconds between two looks at the folders, with ``poll``.
        max_model_bytes: what the files of loaded versions of repositories, and of the one that is being loaded,
            may have together; 0: without a limit.
        follow: put the commits of repositories' versions into them while they answer (docs/repository.md).
        follow_poll_ms: milliseconds between two looks at the logs of commits.
        rollback_bytes: what may be kept of what commits have replaced, of all versions together.
        host: address to listen on.
        port: gRPC port; 0: any free one.
        http_port: port of metrics, probes and the status page; 0: any free one.
        limits: see `ModelLimits`.
        max_message_bytes: largest request or response on the wire.
        max_inflight_bytes: what requests and answers inside the server may take, of all models
            together; messages that are still being received may take about as much again.
        max_connections: connections of the gRPC port at a time, and no more than there are descriptors for
            (`front.connection_limits`); further ones are closed.
        idle_timeout_s: how long a gRPC connection may be without a call, in seconds.
        max_connection_age_s: how old a gRPC connection may become, a tenth more or less, in seconds; then its
            client is asked to connect anew, by which it finds servers that were added; 0: any age.
        max_http_connections: connections of the HTTP port at a time; a new one takes the place of the oldest
            that has no complete request.
        shared_memory: clients of this machine may register POSIX shared memory (docs/kserve.md).
        max_shared_memory_bytes: what the regions that they register may have together.
        drain_propagation_ms: milliseconds between "not serving" and the first refusal, so
            that load balancers can turn away first.
        drain_limit_s: seconds that accepted requests may take after SIGTERM.  Kubernetes ends a
            container 30 seconds after it.
        verify_golden: replay the package's golden answers before serving it.
        allow_ops: operators that a package's graph may call beside those that every package may.
        load_timeout_s: seconds that a package's own code may take while it is loaded; then the server
            ends.
        require_signature: serve only packages that one of ``public_keys`` has signed.
        public_keys: PEM files with an Ed25519 public key each.
        allowed_hosts: names by which browsers may ask the HTTP port (`front.host_rule`); ``*``: any.
        auth_token_file: the tokens that callers must have one of (`security.token_file`); empty: they need none.
        tls_cert: PEM file with the certificate of both ports; empty: connections are not encrypted.
        tls_key: PEM file with its private key.
        tls_client_ca: PEM file with the authorities of clients' certificates; empty: clients need none.
        processes: processes that answer; those of more than one share the tables, the port and
            ``max_inflight_bytes``.
        gpus: CUDA's numbers of the GPUs for packages made for GPUs; empty: every one.
        access_log: a file that gets a line for each call for scores, or ``-``: the standard output; empty: none.
        otlp_endpoint: the address of a collector of spans (docs/observe.md); empty: no call is traced.
        otlp_ca: PEM file with the authorities of the collector's certificate; empty: those of the system.
        otlp_headers_file: a file of headers for the collector (`observe.collector`); empty: there are none.
        trace_share: the share of the calls without a traceparent that are traced, 0 to 1.
        record: a folder that gets a share of the requests (docs/replay.md); empty: nothing is recorded.
        record_share: the share of the calls that are recorded, 0 to 1.
        record_file_bytes: what one of its files may have.
        record_bytes: what the folder's files may have together.
    """

    models: tuple[ModelSource, ...] = ()
    model_repositories: tuple[str, ...] = ()
    model_control: ModelControl = "none"
    poll_s: float = 2.0
    max_model_bytes: int = 0
    follow: bool = False
    follow_poll_ms: int = 200
    rollback_bytes: int = 256 * 1024 * 1024
    host: str = "127.0.0.1"
    port: int = DEFAULT_GRPC_PORT
    http_port: int = DEFAULT_HTTP_PORT
    limits: ModelLimits = field(default_factory=ModelLimits)
    max_message_bytes: int = 64 * 1024 * 1024
    max_inflight_bytes: int = 1024 * 1024 * 1024
    max_connections: int = 4_096
    idle_timeout_s: int = 3_600
    max_connection_age_s: int = 0
    max_http_connections: int = 128
    shared_memory: bool = False
    max_shared_memory_bytes: int = 1024 * 1024 * 1024
    drain_propagation_ms: int = 1_000
    drain_limit_s: float = 25.0
    verify_golden: bool = True
    allow_ops: tuple[str, ...] = ()
    load_timeout_s: float = DEFAULT_LOAD_TIMEOUT_S
    require_signature: bool = False
    public_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    auth_token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    processes: int = 1
    gpus: tuple[int, ...] = ()
    access_log: str = ""
    otlp_endpoint: str = ""
    otlp_ca: str = ""
    otlp_headers_file: str = ""
    trace_share: float = 0.01
    record: str = ""
    record_share: float = 0.01
    record_file_bytes: int = 64 * 1024 * 1024
    record_bytes: int = 1024 * 1024 * 1024
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "text"] = "json"

    def __post_init__(self) -> None:
        """Refuse what cannot be served.

        Raises:
            UserError: naming the field, the value and the remedy.
        """
        if not self.models and not self.model_repositories:
            raise UserError(
                "--model is missing; give at least one MODEL.pt, or --model-repository DIR"
            )
        self._check_repositories()
        for name, port in (("port", self.port), ("http_port", self.http_port)):
            _at_least(0, **{name: port})
            _at_most(65_535, **{name: port})
        if self.port == self.http_port != 0:
            _refuse("http_port", self.http_port, "the gRPC port is the same: choose another")
        if self.require_signature and not self.public_keys:
            raise UserError(
                "--require-signature needs to know whom to trust; give --public-key FILE"
            )
        if self.public_keys and not self.require_signature:
            _refuse(
                "public_keys",
                self.public_keys[0],
                "nothing is checked against it; add --require-signature",
            )
        self._check_tls()
        self._check_hosts()
        self._check_tracing()
        self._check_recording()
        _at_least(1024, max_message_bytes=self.max_message_bytes)
        _at_most(_LARGEST_MESSAGE, max_message_bytes=self.max_message_bytes)
        _at_least(1, max_http_connections=self.max_http_connections)
        _at_most(_MOST_HTTP_CONNECTIONS, max_http_connections=self.max_http_connections)
        _at_least(1, max_connections=self.max_connections, idle_timeout_s=self.idle_timeout_s)
        _at_most(_MOST_CONNECTIONS, max_connections=self.max_connections)
        _at_most(_LONGEST_IDLE_S, idle_timeout_s=self.idle_timeout_s)
        _at_least(0, max_connection_age_s=self.max_connection_age_s)
        _at_most(_OLDEST_CONNECTION_S, max_connection_age_s=self.max_connection_age_s)
        _at_least(1, max_shared_memory_bytes=self.max_shared_memory_bytes)
        _at_most(_MOST_SHARED_MEMORY_BYTES, max_shared_memory_bytes=self.max_shared_memory_bytes)
        self._check_processes()
        self._check_drain()

    def limits_of(self, batching: Mapping[str, int]) -> ModelLimits:
        """The limits of a model whose serving.yaml has these in the place of the flags' ones.

        Raises:
            UserError: two limits contradict each other.
        """
        return replace(self.limits, **batching)

    def _check_repositories(self) -> None:
        if not 0 < self.poll_s <= _LONGEST_POLL_S:
            _refuse("poll_s", self.poll_s, f"give seconds above 0 and up to {_LONGEST_POLL_S}")
        _at_least(0, max_model_bytes=self.max_model_bytes, rollback_bytes=self.rollback_bytes)
        _at_least(1, follow_poll_ms=self.follow_poll_ms)
        _at_most(_LONGEST_FOLLOW_POLL_MS, follow_poll_ms=self.follow_poll_ms)
        if not self.model_repositories:
            if self.model_control != "none":
                _refuse(
                    "model_control",
                    self.model_control,
                    "there is nothing to control; add --model-repository DIR",
                )
            if self.follow:
                raise UserError(
                    "--follow needs versions with logs of commits; add --model-repository DIR"
                )
            return
        if len(set(self.model_repositories)) < len(self.model_repositories):
            _refuse(
                "model_repositories", repr(self.model_repositories[-1]), "give each folder once"
            )
        if self.processes > 1:
            _refuse(
                "processes",
                self.processes,
                "a repository's versions change in one process: leave --processes out, or --model-repository",
            )

    def _check_tls(self) -> None:
        if self.tls_key and not self.tls_cert:
            _refuse("tls_key", repr(self.tls_key), "it needs its certificate; add --tls-cert")
        if self.tls_cert and not self.tls_key:
            _refuse("tls_cert", repr(self.tls_cert), "it needs its private key; add --tls-key")
        if self.tls_client_ca and not self.tls_cert:
            _refuse(
                "tls_client_ca",
                repr(self.tls_client_ca),
                "the server needs a certificate of its own; add --tls-cert and --tls-key",
            )

    def _check_hosts(self) -> None:
        for host in self.allowed_hosts:
            if host != "*" and not _HOST_NAME.fullmatch(host_name_of(host)):
                _refuse(
                    "allowed_hosts",
                    repr(host),
                    "give a host's name without scheme and port, such as ranker.example.com, or *",
                )

    def _check_tracing(self) -> None:
        encrypted = False
        if self.otlp_endpoint:
            try:
                encrypted = read_collector(self.otlp_endpoint).encrypted
            except ValueError:
                _refuse("otlp_endpoint", f"'{self.otlp_endpoint}'", REMEDY)
        if self.otlp_ca and not encrypted:
            _refuse(
                "otlp_ca",
                f"'{self.otlp_ca}'",
                "only a collector that is asked by TLS has a certificate; give --otlp-endpoint https://HOST:PORT",
            )
        if self.otlp_headers_file and not self.otlp_endpoint:
            _refuse(
                "otlp_headers_file",
                f"'{self.otlp_headers_file}'",
                "there is no collector that would get them; add --otlp-endpoint",
            )
        # Written so that a NaN is refused.
        if not 0 <= self.trace_share <= 1:
            _refuse("trace_share", self.trace_share, "give a share from 0 to 1")

    def _check_recording(self) -> None:
        # Written so that a NaN is refused.
        if not 0 <= self.record_share <= 1:
            _refuse("record_share", self.record_share, "give a share from 0 to 1")
        for name in ("record_file_bytes", "record_bytes"):
            _at_least(_LEAST_RECORD_BYTES, **{name: getattr(self, name)})
            _at_most(_MOST_RECORD_BYTES, **{name: getattr(self, name)})
        writers = self.processes if self.record else 1
        if self.record_bytes < self.record_file_bytes * writers:
            files = f"{writers} files" if writers > 1 else "a file"
            _refuse(
                "record_bytes",
                self.record_bytes,
                f"{files} of --record-file-bytes {self.record_file_bytes} could never be in it: "
                "raise the one or lower the other",
            )

    def _check_processes(self) -> None:
        if self.max_inflight_bytes < self.max_message_bytes:
            _refuse(
                "max_inflight_bytes",
                self.max_inflight_bytes,
                f"a message of --max-message-bytes {self.max_message_bytes} could never come in: "
                "raise the one or lower the other",
            )
        _at_least(1, processes=self.processes)
        _at_most(_MOST_PROCESSES, processes=self.processes)
        if self.max_connections < self.processes:
            _refuse(
                "max_connections",
                self.max_connections,
                f"each of {self.processes} processes needs one: raise the one or lower the other",
            )
        if self.processes > 1 and self.shared_memory:
            _refuse(
                "processes",
                self.processes,
                "a client's shared memory is known to one process: leave --processes out, or --shared-memory",
            )
        if self.max_inflight_bytes // self.processes < self.max_message_bytes:
            _refuse(
                "max_inflight_bytes",
                self.max_inflight_bytes,
                f"a message of --max-message-bytes {self.max_message_bytes} could never come into one "
                f"of {self.processes} processes: raise the one or lower the other",
            )

    def of_one_process(self) -> ServerConfig:
        """The same for one of the processes: its share of the workers, of the bytes and of the connections."""
        workers = max(1, self.limits.workers // self.processes)
        return replace(
            self,
            processes=1,
            limits=replace(self.limits, workers=workers),
            max_inflight_bytes=self.max_inflight_bytes // self.processes,
            max_connections=self.max_connections // self.processes,
        )

    def _check_drain(self) -> None:
        _at_least(0, drain_propagation_ms=self.drain_propagation_ms)
        # Written so that a NaN is refused.
        below = self.drain_limit_s < _LONGEST_DRAIN_S
        if not (below and self.drain_limit_s * 1_000 > self.drain_propagation_ms):
            _refuse(
                "drain_limit_s",
                self.drain_limit_s,
                f"it must be longer than --drain-propagation-ms {self.drain_propagation_ms} and below "
                f"{_LONGEST_DRAIN_S}",
            )
