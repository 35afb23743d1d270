"""Calls to a running server: numpy arrays in, numpy arrays out, no torch.

The way of a request: `assemble.py` checks what the caller has and lays it out (`arrays.py`),
`encode.py` writes the bytes, `sync.py` or `aio.py` sends them, `prediction.py` reads the
answer, `errors.py` names what went wrong.  `credentials.py` has certificates and tokens.  `random_requests.py` draws requests from a schema;
`jsonl.py` reads them from JSON lines.  `repository.py` asks for other versions of models.
"""

from tessera.serving.client.aio import AsyncPredictorClient
from tessera.serving.client.arrays import Bags, RequestArrays, Shared
from tessera.serving.client.credentials import Credentials
from tessera.serving.client.encode import encode_request
from tessera.serving.client.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PredictError,
    ServerBug,
    Unauthenticated,
    Unavailable,
)
from tessera.serving.client.package_schema import read_schema
from tessera.serving.client.prediction import Prediction, Timings, decode_response
from tessera.serving.client.random_requests import Draw, RequestDrawer
from tessera.serving.client.repository import ModelVersion, RepositoryClient
from tessera.serving.client.retry import Retry
from tessera.serving.client.sync import PredictorClient

__all__ = [
    "AsyncPredictorClient",
    "Bags",
    "Credentials",
    "DeadlineExceeded",
    "Draw",
    "InvalidRequest",
    "ModelNotFound",
    "ModelVersion",
    "Overloaded",
    "PredictError",
    "Prediction",
    "PredictorClient",
    "RepositoryClient",
    "RequestArrays",
    "RequestDrawer",
    "Retry",
    "ServerBug",
    "Shared",
    "Timings",
    "Unauthenticated",
    "Unavailable",
    "decode_response",
    "encode_request",
    "read_schema",
]
