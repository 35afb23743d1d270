"""Score samples over gRPC for one or more packages, until SIGTERM.

    tessera serve --model MODEL.pt --port 50051 --http-port 8002

The gRPC port speaks predictor.Predictor, KServe v2 with Triton's extensions
(inference.GRPCInferenceService, docs/kserve.md), grpc.health.v1.Health and server reflection; the
HTTP port has /metrics (Prometheus), /healthz, /readyz and a status page at /.  Log lines go to
stderr, one JSON object per line; the line with "event": "ready" names both ports.

SIGTERM or SIGINT: health turns NOT_SERVING at once, after --drain-propagation-ms new calls get
UNAVAILABLE, every accepted request is answered, exit status 0.  A repeat within a second is the
same signal; a later one ends at once.  SIGHUP changes nothing.

Exit status: 0 drained; 1 the drain limit passed or a second signal came with requests
unanswered; 2 a flag, a package or a port has to be changed.
"""

from __future__ import annotations

import argparse
import os

from tessera.serving.server.config import ModelLimits, ModelSource, ServerConfig

_LIMITS = ModelLimits()
_EXAMPLE = ServerConfig(models=(ModelSource(path="MODEL.pt"),))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``tessera serve``."""
    parser.add_argument(
        "--model",
        required=True,
        action="append",
        type=parse_model,
        metavar="[NAME=]MODEL.pt",
        help="a package to serve, and the name that requests use for it (default: the name in "
        "the package); a name holds neither '=' nor '/', so that a path with '=' in its first part is "
        "written with ./ before it; may be given several times, the first one answers requests "
        "without a name",
    )
    parser.add_argument(
        "--host",
        default=_EXAMPLE.host,
        help="address to listen on, for both ports (default: %(default)s, every interface)",
    )
    _add_number(parser, "port", _EXAMPLE.port, "gRPC port; 0: any free one, see the ready line")
    _add_number(parser, "http-port", _EXAMPLE.http_port, "HTTP port; 0: any free one")
    _add_batching(parser.add_argument_group("batching, per model"))
    _add_bounds(parser.add_argument_group("bounds, per model"))
    _add_number(parser, "max-message-bytes", _EXAMPLE.max_message_bytes, "largest message, bytes")
    _add_number(
        parser,
        "max-inflight-bytes",
        _EXAMPLE.max_inflight_bytes,
        "what requests and answers inside the server may take, of all models together, bytes; messages "
        "that are still being received may take about as much again",
    )
    _add_number(
        parser,
        "max-http-connections",
        _EXAMPLE.max_http_connections,
        "connections of the HTTP port; a new one takes the place of the oldest without a complete request",
    )
    _add_number(
        parser,
        "drain-propagation-ms",
        _EXAMPLE.drain_propagation_ms,
        "between NOT_SERVING and the first refusal, milliseconds",
    )
    parser.add_argument(
        "--drain-limit-s",
        type=float,
        default=_EXAMPLE.drain_limit_s,
        metavar="S",
        help="what accepted requests may take after SIGTERM, seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--skip-golden",
        action="store_true",
        help="do not replay the package's golden answers before serving (default: replay them)",
    )
    parser.add_argument(
        "--require-signature",
        action="store_true",
        help="serve only packages that are signed with a key of --public-key (default: signatures "
        "are not looked at)",
    )
    parser.add_argument(
        "--public-key",
        action="append",
        default=[],
        metavar="FILE",
        help="a public Ed25519 key in PEM, as 'tessera keygen' writes it; may be given several "
        "times, one of the keys is enough (default: none)",
    )
    parser.add_argument(
        "--gpus",
        type=parse_gpus,
        default=(),
        metavar="N[,N...]",
        help="on which GPUs a package made for GPUs is served, the whole model on each (on as many as "
        "it has shards); default: on every one that is there",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=_EXAMPLE.log_level,
        help="debug has a line per request (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format",
        choices=("json", "text"),
        default=_EXAMPLE.log_format,
        help="json: one object per line (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve; see the module's docstring."""
    config = ServerConfig(
        models=tuple(args.model),
        host=args.host,
        port=args.port,
        http_port=args.http_port,
        limits=ModelLimits(
            max_request_samples=args.max_request_samples,
            max_request_ids=args.max_request_ids,
            max_batch_samples=args.max_batch_samples,
            max_batch_ids=args.max_batch_ids,
            max_queue_requests=args.max_queue_requests,
            max_queue_samples=args.max_queue_samples,
            max_delay_us=args.max_delay_us,
            workers=args.workers,
            threads_per_worker=args.threads_per_worker,
            worker_niceness=args.worker_niceness,
        ),
        max_message_bytes=args.max_message_bytes,
        max_inflight_bytes=args.max_inflight_bytes,
        max_http_connections=args.max_http_connections,
        drain_propagation_ms=args.drain_propagation_ms,
        drain_limit_s=args.drain_limit_s,
        verify_golden=not args.skip_golden,
        require_signature=args.require_signature,
        public_keys=tuple(args.public_key),
        gpus=args.gpus,
        log_level=args.log_level,
        log_format=args.log_format,
    )
    # gRPC's own threads write to stderr at once, and would wait for it; read when gRPC is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # torch comes with it, and --help must answer at once.
    from tessera.serving.server.main import serve_until_signal  # noqa: PLC0415

    return serve_until_signal(config)


def parse_gpus(text: str) -> tuple[int, ...]:
    """``N,N,...``: CUDA's numbers of GPUs, each once."""
    numbers = text.split(",")
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of GPUs' numbers such as 0,1")
    gpus = tuple(map(int, numbers))
    if len(set(gpus)) < len(gpus):
        raise argparse.ArgumentTypeError(f"{text!r} names a GPU twice")
    return gpus


def parse_model(text: str) -> ModelSource:
    """``NAME=PATH`` or ``PATH``.

    What stands before the first ``=`` is a name unless it holds a ``/``: then all of it is a path.
    """
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        return ModelSource(path=text)
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is neither MODEL.pt nor NAME=MODEL.pt")
    return ModelSource(path=path, name=name)


def _add_batching(parser: argparse._ArgumentGroup) -> None:
    _add_number(
        parser, "workers", _LIMITS.workers, "inference threads; the default is half of the CPUs"
    )
    _add_number(
        parser,
        "threads-per-worker",
        _LIMITS.threads_per_worker,
        "threads inside one forward pass",
    )
    _add_number(
        parser,
        "worker-niceness",
        _LIMITS.worker_niceness,
        "nice levels by which inference stands back behind the network when CPUs are short",
    )
    _add_number(parser, "max-batch-samples", _LIMITS.max_batch_samples, "samples of a batch")
    _add_number(parser, "max-batch-ids", _LIMITS.max_batch_ids, "ids of a batch")
    _add_number(
        parser,
        "max-delay-us",
        _LIMITS.max_delay_us,
        "how long a free worker waits for more requests, microseconds; 0: not at all",
    )


def _add_bounds(parser: argparse._ArgumentGroup) -> None:
    _add_number(parser, "max-request-samples", _LIMITS.max_request_samples, "samples of a request")
    _add_number(parser, "max-request-ids", _LIMITS.max_request_ids, "ids of a request")
    _add_number(parser, "max-queue-requests", _LIMITS.max_queue_requests, "requests that may wait")
    _add_number(parser, "max-queue-samples", _LIMITS.max_queue_samples, "samples that may wait")


def _add_number(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, name: str, default: int, text: str
) -> None:
    parser.add_argument(
        f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})"
    )
