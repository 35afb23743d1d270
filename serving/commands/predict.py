"""Send samples to a running server and print one JSON line with the scores of each.

Samples come from a file (--input) or are drawn at random (--random).  With --model-file a file
holds rows of raw values, as the data did that the model was trained on: JSON lines, CSV, TSV, Parquet or
Arrow, by the end of its name.

    {"price": 3.5, "country": "DE", "tags": [7, 8]}

Columns that the training data had and that are not inputs, as labels are, are left out; others that the
model does not take are named with --ignore.  Criteo's own files are read as they are, without a header,
for a model that was trained on such.  JSON lines may also have the request's
own parts:

    {"dense": {"I1": 0.5, "I2": null}, "sparse": {"C1": [7], "C2": []}, "weights": {}}

null or an absent name is a missing dense value, an absent sparse feature has no ids, and
"weights" holds one number per id for the features that the model weights.  Without --model-file
the command knows no names: "dense" and "sparse" are then lists in the model's own order.

Output, in the order of the input: {"sample": 0, "scores": {"default": 0.25}}

Exit status: 0 every sample was scored; 1 the server failed to answer in time (overload,
deadline, a bug of its own); 2 a flag, the address or a line of the input has to be changed.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO, TypedDict

import numpy as np
from tqdm import tqdm

from tessera.errors import UserError
from tessera.serving.client import (
    InvalidRequest,
    ModelNotFound,
    PredictError,
    Prediction,
    PredictorClient,
    RequestDrawer,
    Unauthenticated,
    Unavailable,
    read_schema,
)
from tessera.serving.client.arrays import Array
from tessera.serving.client.jsonl import is_raw_row, read_batches
from tessera.serving.client.latency import LatencySummary
from tessera.serving.client.row_files import (
    DAMAGED_GZIP,
    ROW_FILES,
    RowBatch,
    json_rows,
    open_text,
    read_row_batches,
    row_batches,
    row_file_end,
)
from tessera.serving.client.rows import rows_to_parts
from tessera.serving.commands.credential_flags import add_credentials, credentials_of
from tessera.serving.commands.flags import not_negative, positive
from tessera.serving.package.schema import InputSchema

EXIT_NOT_ANSWERED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``tessera predict``."""
    parser.add_argument(
        "--address", required=True, metavar="HOST:PORT", help="the server's gRPC address"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input",
        metavar="FILE",
        help="rows as .jsonl, .csv, .tsv (each also .gz), .parquet or .arrow; - reads JSON lines from"
        " standard input",
    )
    source.add_argument(
        "--random",
        type=positive,
        metavar="N",
        help="draw N random samples that fit --model-file",
    )
    parser.add_argument(
        "--model-file",
        metavar="MODEL.pt",
        help="the served package, for its features' names and order; needed by --random"
        " (default: none)",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="COLUMN",
        help="a column of --input that the model does not take, besides those that its training data"
        " had; may be repeated (default: none)",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="the model's name at the server (default: the server's only or first model)",
    )
    parser.add_argument(
        "--model-version",
        default="",
        metavar="VERSION",
        help="the model's version at the server, a number or a label (default: the server's choice)",
    )
    parser.add_argument(
        "--traffic-key",
        default="",
        metavar="KEY",
        help="what draws the version of every request where the model's traffic is shared (default:"
        " the address of this machine)",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        default=64,
        metavar="N",
        help="samples per request (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout-ms",
        type=positive,
        default=5000,
        metavar="MS",
        help="time limit of a request, in milliseconds (default: %(default)s)",
    )
    add_credentials(parser)
    parser.add_argument(
        "--seed", type=not_negative, default=0, help="seed of --random (default: %(default)s)"
    )
    parser.add_argument(
        "--latency",
        action="store_true",
        help="after the last answer, print the requests' latencies to stderr (default: off)",
    )


def run(args: argparse.Namespace) -> int:
    """Send everything and print the answers; returns the exit status."""
    schema = None if args.model_file is None else read_schema(args.model_file)
    if args.random is not None and schema is None:
        raise UserError("--random needs --model-file MODEL.pt, to draw samples that fit the model")
    latencies_s: list[float] = []
    with ExitStack() as stack:
        client = stack.enter_context(
            PredictorClient(
                args.address,
                schema=schema,
                timeout_s=args.timeout_ms / 1e3,
                credentials=credentials_of(args),
            )
        )
        if args.random is not None:
            assert schema is not None
            answers = _random_answers(client, schema, args, latencies_s)
        else:
            answers = _input_answers(client, schema, stack, args, latencies_s)
        try:
            _print_answers(answers, total=args.random)
        except PredictError as error:
            return _failed(error)
        except BrokenPipeError:
            # The reader (head, say) has seen enough.  What is still buffered has no reader.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    if args.latency:
        print(LatencySummary.of_seconds(latencies_s), file=sys.stderr)
    return 0


class _UnreadableError(UserError):
    """An input whose lines cannot be read."""


def _lines(name: str, stack: ExitStack) -> Iterator[str]:
    """The lines of a file, of standard input, or of a file that gzip compressed.

    Raises:
        UserError: they are not UTF-8, or the compressed file is damaged.
    """
    try:
        yield from stack.enter_context(_opened(name))
    except UnicodeDecodeError as error:
        raise _UnreadableError(f"{name}: not UTF-8 text ({error})") from error
    except DAMAGED_GZIP as error:
        raise _UnreadableError(f"{name}: not a whole file of gzip ({error})") from error


def _opened(name: str) -> TextIO:
    if name == "-":
        # A descriptor of its own, so that closing it leaves the process's stdin alone.
        return open(sys.stdin.fileno(), encoding="utf-8", closefd=False)
    return io.TextIOWrapper(open_text(Path(name)), encoding="utf-8")


def _random_answers(
    client: PredictorClient,
    schema: InputSchema,
    args: argparse.Namespace,
    latencies_s: list[float],
) -> Iterator[tuple[Prediction, int]]:
    drawer = RequestDrawer(schema, seed=args.seed)
    for begin in range(0, args.random, args.batch):
        arrays = drawer.samples(min(args.batch, args.random - begin))
        began = time.perf_counter()
        prediction = client.predict_arrays(arrays, **_whom(args))
        latencies_s.append(time.perf_counter() - began)
        yield prediction, arrays.batch_size


def _input_answers(
    client: PredictorClient,
    schema: InputSchema | None,
    stack: ExitStack,
    args: argparse.Namespace,
    latencies_s: list[float],
) -> Iterator[tuple[Prediction, int]]:
    path = Path(args.input)
    if row_file_end(path) in ROW_FILES:
        if schema is None:
            raise UserError(
                f"--input {path} needs --model-file MODEL.pt, which says what columns are"
            )
        batches = read_row_batches(path, batch_size=args.batch, schema=schema)
        return _row_answers(client, schema, batches, args, latencies_s)
    lines = _lines(args.input, stack)
    seen: list[str] = []
    while not seen or (seen[-1] and not seen[-1].strip()):
        seen.append(next(lines, ""))
    whole = itertools.chain(seen, lines)
    if schema is not None and is_raw_row(seen[-1]):
        rows = json_rows(whole, args.input, schema)
        return _row_answers(client, schema, row_batches(rows, args.batch), args, latencies_s)
    return _line_answers(client, schema, whole, args, latencies_s)


def _row_answers(
    client: PredictorClient,
    schema: InputSchema,
    batches: Iterator[RowBatch],
    args: argparse.Namespace,
    latencies_s: list[float],
) -> Iterator[tuple[Prediction, int]]:
    for batch in batches:
        try:
            dense, sparse = rows_to_parts(
                batch.rows, schema, ignore=args.ignore, first_row=batch.first
            )
        except UserError as error:
            raise UserError(f"{args.input}: {error}") from error
        began = time.perf_counter()
        prediction = client.predict(dense, sparse, **_whom(args))
        latencies_s.append(time.perf_counter() - began)
        yield prediction, batch.size


def _line_answers(
    client: PredictorClient,
    schema: InputSchema | None,
    lines: Iterable[str],
    args: argparse.Namespace,
    latencies_s: list[float],
) -> Iterator[tuple[Prediction, int]]:
    batches = read_batches(lines, batch_size=args.batch, schema=schema)
    while True:
        try:
            batch = next(batches, None)
        except _UnreadableError:
            raise
        except UserError as error:
            raise UserError(f"{args.input}, {error}") from error
        if batch is None:
            return
        began = time.perf_counter()
        try:
            prediction = client.predict(batch.dense, batch.sparse, **_whom(args))
        except InvalidRequest as error:
            where = f"{args.input}, lines {batch.first_line} to {batch.last_line}"
            raise UserError(f"{where}: the server refused them: {error.message}") from error
        latencies_s.append(time.perf_counter() - began)
        yield prediction, batch.size


class _Whom(TypedDict):
    """Which model and version a request asks for, as arguments of `PredictorClient.predict`."""

    model: str
    version: str
    traffic_key: str


def _whom(args: argparse.Namespace) -> _Whom:
    return {
        "model": args.model,
        "version": args.model_version,
        "traffic_key": args.traffic_key,
    }


def _print_answers(answers: Iterator[tuple[Prediction, int]], *, total: int | None) -> None:
    sample = 0
    # The bar is for a person at a terminal; with answers on the same terminal it is in the way.
    hidden = sys.stdout.isatty() or not sys.stderr.isatty()
    with tqdm(total=total, unit=" samples", file=sys.stderr, disable=hidden) as bar:
        for prediction, size in answers:
            columns = {name: _numbers(out) for name, out in prediction.outputs.items()}
            for row in range(size):
                scores = {name: column[row] for name, column in columns.items()}
                print(json.dumps({"sample": sample, "scores": scores}))
                sample += 1
            bar.update(size)
    sys.stdout.flush()


def _numbers(output: Array) -> list[Any]:
    """Each sample's float32 score, or list of them, as numbers for JSON."""
    if output.ndim == 1:
        return [_shortest(value) for value in output]
    return [[_shortest(value) for value in row] for row in output]


def _shortest(value: np.float32) -> float | None:
    """The shortest decimal that reads back as the same float32; JSON has neither NaN nor infinity."""
    return float(str(value)) if math.isfinite(value) else None


def _failed(error: PredictError) -> int:
    if isinstance(error, Unavailable):
        raise UserError(
            f"no answer from a server at {error.address} ({error.message}); is the address right"
            " and 'tessera serve' running and ready?"
        ) from error
    if isinstance(error, ModelNotFound):
        raise UserError(f"{error}; see --model and --model-version") from error
    if isinstance(error, Unauthenticated):
        raise UserError(f"{error}; see --token-file") from error
    print(f"tessera predict: {error}", file=sys.stderr)
    return EXIT_NOT_ANSWERED
