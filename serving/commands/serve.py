"""Score samples over gRPC for one or more packages or repositories of them, until SIGTERM.

    tessera serve --model MODEL.pt --port 50051 --http-port 8002
    tessera serve --model-repository DIR --model-control poll --follow

The gRPC port speaks predictor.Predictor, KServe v2 with Triton's extensions
(inference.GRPCInferenceService, docs/kserve.md), grpc.health.v1.Health and server reflection; the
HTTP port has /metrics (Prometheus), /healthz, /readyz and a status page at /.  Log lines go to
stderr, one JSON object per line; the line with "event": "ready" names both ports.

SIGTERM or SIGINT: health turns NOT_SERVING at once, after --drain-propagation-ms new calls get
UNAVAILABLE, every accepted request is answered, exit status 0.  A repeat within a second is the
same signal; a later one ends at once.  SIGHUP reads certificates, tokens and repositories again, and
opens the access log anew.

With --processes N, N processes answer on the same ports; see its help.  SIGTERM to the first process
drains them all, and one that ends by itself is replaced and counted (tessera_worker_restarts_total).

Every flag can also be a key of the file of --config, or a variable TESSERA_<FLAG>: docs/settings.md.

Exit status: 0 drained; 1 the drain limit passed or a second signal came with requests
unanswered; 2 a flag, a package or a port has to be changed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import get_args

from tessera.errors import FieldError
from tessera.serving.commands.flag_sources import FlagSources
from tessera.serving.commands.flags import RefusedValue, fields_of
from tessera.serving.commands.loading_flags import add_allow_op, add_load_timeout
from tessera.serving.server.config import ModelControl, ModelLimits, ModelSource, ServerConfig

_EXAMPLE = ServerConfig(models=(ModelSource(path="MODEL.pt"),))
_GPUS_REMEDY = "give CUDA's numbers of GPUs, each once, as in 0,1"
_PORTS = {
    "port": "gRPC port; 0: any free one, see the ready line",
    "http_port": "HTTP port; 0: any free one",
}
_BATCHING = {
    "workers": "inference threads (default: half of the CPUs; here {default})",
    "threads_per_worker": "threads inside one forward pass",
    "worker_niceness": "nice levels by which inference stands back behind the network when CPUs "
    "are short",
    "max_batch_samples": "samples of a batch",
    "max_batch_ids": "ids of a batch",
    "max_delay_us": "how long a free worker waits for more requests, microseconds; 0: not at all",
}
_BOUNDS = {
    "max_request_samples": "samples of a request",
    "max_request_ids": "ids of a request",
    "max_queue_requests": "requests that may wait",
    "max_queue_samples": "samples that may wait",
}
_SERVER = {
    "processes": "processes that answer, with the tables in one memory, one port and one metrics page; "
    "they share --workers (each has one at least), --max-inflight-bytes and --max-connections, while the bounds per model are of "
    "each; only for packages made for CPUs; a client's connection stays with one of them, so that clients need "
    "several connections to use all",
    "max_message_bytes": "largest message, bytes",
    "max_inflight_bytes": "what requests and answers inside the server may take, of all models "
    "together, bytes; messages that are still being received may take about as much again",
    "max_connections": "connections of the gRPC port at a time, and no more than there are descriptors for (ulimit -n, "
    "less 64); further ones are closed, and their clients try again",
    "idle_timeout_s": "how long a gRPC connection may be without a call, seconds; then it is closed, and its client's "
    "next call makes a new one",
    "max_connection_age_s": "how old a gRPC connection may become, a tenth more or less, seconds; then its client is "
    "asked to connect anew, by which it finds servers that were added, and no call is lost; 0: any age",
    "max_http_connections": "connections of the HTTP port; a new one takes the place of the oldest "
    "without a complete request",
    "max_shared_memory_bytes": "what the regions that --shared-memory lets clients register may have in sum, bytes",
    "drain_propagation_ms": "between NOT_SERVING and the first refusal, milliseconds",
}

_RECORDING = {
    "record_file_bytes": "with --record, what one of its files may have, bytes; then the next is begun",
    "record_bytes": "with --record, what the folder's files may have in sum, bytes; the oldest are removed",
}

_TLS = {
    "tls_cert": "the certificate of both ports in PEM, and those between it and an authority that clients know; read "
    "again when it changes and on SIGHUP, as are the next two, docs/security.md (default: none, connections are not "
    "encrypted)",
    "tls_key": "the private key of --tls-cert in PEM, without a password (default: none)",
    "tls_client_ca": "authorities in PEM, one of which must have signed the certificate that each client then needs, "
    "on both ports, probes too (default: none, clients need no certificate)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``tessera serve``."""
    parser.add_argument(
        "--model",
        dest="models",
        action="append",
        default=[],
        type=parse_model,
        metavar="[NAME=]MODEL.pt",
        help="a package to serve, and the name that requests use for it (default: the name in "
        "the package); a name holds neither '=' nor '/', so that a path with '=' in its first part is "
        "written with ./ before it; may be given several times, the first one answers requests "
        "without a name; not needed with --model-repository (default: none)",
    )
    _add_repositories(parser)
    parser.add_argument(
        "--host",
        default=_EXAMPLE.host,
        help="address to listen on, for both ports (default: %(default)s, this machine alone; 0.0.0.0: every"
        " interface)",
    )
    _add_numbers(parser, _PORTS, _EXAMPLE)
    batching = parser.add_argument_group("batching, per model")
    _add_numbers(batching, _BATCHING, _EXAMPLE.limits)
    _add_numbers(parser.add_argument_group("bounds, per model"), _BOUNDS, _EXAMPLE.limits)
    parser.add_argument(
        "--shared-memory",
        action="store_true",
        help="let clients of this machine register POSIX shared memory, read inputs from it and write outputs to it; "
        "whoever may call may name any of it that this server's user may open, docs/security.md (default: tensors "
        "come in messages alone)",
    )
    _add_numbers(parser, _SERVER, _EXAMPLE)
    parser.add_argument(
        "--drain-limit-s",
        type=float,
        default=_EXAMPLE.drain_limit_s,
        metavar="S",
        help="what accepted requests may take after SIGTERM, seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--skip-golden",
        dest="verify_golden",
        action="store_false",
        help="do not replay the package's golden answers before serving (default: replay them)",
    )
    add_allow_op(parser)
    add_load_timeout(parser)
    parser.add_argument(
        "--require-signature",
        action="store_true",
        help="serve only packages that are signed with a key of --public-key (default: signatures "
        "are not looked at)",
    )
    parser.add_argument(
        "--public-key",
        dest="public_keys",
        action="append",
        default=[],
        metavar="FILE",
        help="a public Ed25519 key in PEM, as 'tessera keygen' writes it; may be given several "
        "times, one of the keys is enough (default: none)",
    )
    _add_tls(parser)
    parser.add_argument(
        "--auth-token-file",
        default=_EXAMPLE.auth_token_file,
        metavar="FILE",
        help="the tokens that calls on both ports need one of, health checks aside: one a line, TOKEN [NAME "
        "[CALLS_PER_S]]; read again when it changes and on SIGHUP, docs/security.md (default: none, whoever reaches a "
        "port may call)",
    )
    parser.add_argument(
        "--allowed-host",
        dest="allowed_hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which browsers may ask the HTTP port for its pages, beside IP addresses and localhost, such as "
        "ranker.example.com; *: any; may be given several times, docs/security.md (default: none where --host is this "
        "machine alone, else any)",
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
        "--access-log",
        default=_EXAMPLE.access_log,
        metavar="FILE",
        help="a file that gets a line of JSON for each call for scores, with the peer's address, the model and how the "
        "call ended; -: the standard output; SIGHUP opens the file anew, docs/observe.md (default: none)",
    )
    parser.add_argument(
        "--otlp-endpoint",
        default=_EXAMPLE.otlp_endpoint,
        metavar="URL",
        help="an OpenTelemetry collector, http://HOST:PORT or https://HOST:PORT, that gets spans of calls for scores by "
        "OTLP over HTTP, docs/observe.md (default: none, no call is traced)",
    )
    parser.add_argument(
        "--otlp-ca",
        default=_EXAMPLE.otlp_ca,
        metavar="FILE",
        help="authorities in PEM, one of which must have signed the certificate of an --otlp-endpoint https://HOST:PORT "
        "(default: those of the system)",
    )
    parser.add_argument(
        "--otlp-headers-file",
        default=_EXAMPLE.otlp_headers_file,
        metavar="FILE",
        help="headers of the requests to --otlp-endpoint, such as a token: NAME: VALUE on each line; read anew for each "
        "request, docs/observe.md (default: none)",
    )
    parser.add_argument(
        "--trace-share",
        type=float,
        default=_EXAMPLE.trace_share,
        metavar="SHARE",
        help="with --otlp-endpoint, the share of the calls without a traceparent that are traced, 0 to 1; those with "
        "one are where it says that it is sampled (default: %(default)g)",
    )
    _add_recording(parser)
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
    parser.set_defaults(flag_sources=FlagSources(parser))


def run(args: argparse.Namespace) -> int:
    """Serve; see the module's docstring."""
    sources: FlagSources = args.flag_sources
    sources.complete(args, os.environ)
    try:
        config = ServerConfig(
            **{
                **fields_of(ServerConfig, args),
                "models": tuple(args.models),
                "model_repositories": tuple(args.model_repositories),
                "limits": ModelLimits(**fields_of(ModelLimits, args)),
                "public_keys": tuple(args.public_keys),
                "allow_ops": tuple(args.allow_ops),
                "allowed_hosts": tuple(args.allowed_hosts),
            }
        )
    except FieldError as error:
        raise sources.named(error) from error
    # gRPC's own threads write to stderr at once, and would wait for it; read when gRPC is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # torch comes with it, and --help must answer at once.
    from tessera.serving.server.main import serve_until_signal  # noqa: PLC0415

    return serve_until_signal(config)


def _add_recording(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record",
        default=_EXAMPLE.record,
        metavar="DIR",
        help="a folder that gets a share of the requests for scores, as they were received, so that tessera-load "
        "--replay can send them again; made where there is none, for its owner alone, docs/replay.md (default: none, "
        "nothing is recorded)",
    )
    parser.add_argument(
        "--record-share",
        type=float,
        default=_EXAMPLE.record_share,
        metavar="SHARE",
        help="with --record, the share of the calls that are recorded, 0 to 1 (default: %(default)g)",
    )
    _add_numbers(parser, _RECORDING, _EXAMPLE)


def _add_tls(parser: argparse.ArgumentParser) -> None:
    for name, text in _TLS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default="", metavar="FILE", help=text)


def _add_repositories(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("repositories of models, docs/repository.md")
    group.add_argument(
        "--model-repository",
        dest="model_repositories",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of models, DIR/MODEL/VERSION/model.pt, all of which are served; may be given several "
        "times, beside --model (default: none)",
    )
    group.add_argument(
        "--model-control",
        choices=get_args(ModelControl),
        default=_EXAMPLE.model_control,
        help="when the versions of --model-repository change: never, as its folders do, or as calls ask for "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--poll-s",
        type=float,
        default=_EXAMPLE.poll_s,
        metavar="S",
        help="how often --model-control poll reads the folders, seconds (default: %(default)g)",
    )
    group.add_argument(
        "--max-model-bytes",
        type=int,
        default=_EXAMPLE.max_model_bytes,
        metavar="N",
        help="what the files of a repository's loaded versions, and of the one that is being loaded, may have in "
        "sum, bytes; 0: any number (default: %(default)s)",
    )
    group.add_argument(
        "--follow",
        action="store_true",
        help="put the commits of each version's log into it while it answers (default: versions stay as they were "
        "packaged)",
    )
    group.add_argument(
        "--follow-poll-ms",
        type=int,
        default=_EXAMPLE.follow_poll_ms,
        metavar="N",
        help="with --follow, how often the logs are looked at, milliseconds (default: %(default)s)",
    )
    group.add_argument(
        "--rollback-bytes",
        type=int,
        default=_EXAMPLE.rollback_bytes,
        metavar="N",
        help="with --follow, what may be kept of what commits have replaced, of all versions together, bytes; going "
        "back further loads the version anew (default: %(default)s)",
    )


def parse_gpus(text: str) -> tuple[int, ...]:
    """``N,N,...``: CUDA's numbers of GPUs, each once."""
    numbers = text.split(",")
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise RefusedValue(repr(text), _GPUS_REMEDY)
    gpus = tuple(map(int, numbers))
    if len(set(gpus)) < len(gpus):
        raise RefusedValue(repr(text), _GPUS_REMEDY)
    return gpus


def parse_model(text: str) -> ModelSource:
    """``NAME=PATH`` or ``PATH``.

    What stands before the first ``=`` is a name unless it holds a ``/``: then all of it is a path.
    """
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        return ModelSource(path=text)
    if not name or not path:
        raise RefusedValue(repr(text), "give MODEL.pt or NAME=MODEL.pt")
    return ModelSource(path=path, name=name)


def _add_numbers(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    texts: Mapping[str, str],
    defaults: ServerConfig | ModelLimits,
) -> None:
    for name, text in texts.items():
        default: int = getattr(defaults, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=default,
            metavar="N",
            help=text.format(default=default)
            if "(default" in text
            else f"{text} (default: {default})",
        )
