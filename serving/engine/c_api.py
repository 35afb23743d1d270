"""cpp_server/src/engine/tessera_engine.h for ctypes: its structures and its functions.

The header is their description; `load` refuses a library of another ``TESSERA_ENGINE_ABI``.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from tessera.errors import UserError

_ABI = 2
_MESSAGE_BYTES = 240

Int32s = ctypes.POINTER(ctypes.c_int32)
Floats = ctypes.POINTER(ctypes.c_float)


class Facts(ctypes.Structure):
    """What ``tessera_engine_facts`` holds."""

    _fields_ = (
        ("model", ctypes.c_char_p),
        ("version", ctypes.c_char_p),
        ("device", ctypes.c_char_p),
        ("dense_features", ctypes.c_int64),
        ("id_list_features", ctypes.c_int64),
        ("id_score_list_features", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("scores_per_sample", ctypes.c_int64),
    )


class Group(ctypes.Structure):
    """What ``tessera_engine_group`` holds."""

    _fields_ = (
        ("lengths", ctypes.c_void_p),
        ("length_count", ctypes.c_size_t),
        ("values", ctypes.c_void_p),
        ("value_count", ctypes.c_size_t),
        ("weights", ctypes.c_void_p),
        ("weight_count", ctypes.c_size_t),
        ("value_bytes", ctypes.c_int32),
    )


class Request(ctypes.Structure):
    """What ``tessera_engine_request`` holds."""

    _fields_ = (
        ("samples", ctypes.c_int64),
        ("dense", ctypes.c_void_p),
        ("dense_count", ctypes.c_size_t),
        ("id_list", Group),
        ("id_score_list", Group),
        ("timeout_us", ctypes.c_int64),
        ("priority", ctypes.c_int32),
    )


class Submission(ctypes.Structure):
    """What ``tessera_engine_submission`` holds."""

    _fields_ = (
        ("request", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("score_count", ctypes.c_size_t),
        ("tag", ctypes.c_uint64),
    )


class Completion(ctypes.Structure):
    """What ``tessera_engine_completion`` holds."""

    _fields_ = (
        ("tag", ctypes.c_uint64),
        ("code", ctypes.c_int32),
        ("message", ctypes.c_char * _MESSAGE_BYTES),
    )


_MESSAGE = (ctypes.c_char_p, ctypes.c_size_t)
# (name, result, arguments) of every function.
_FUNCTIONS = (
    ("abi", ctypes.c_int32, ()),
    ("version", ctypes.c_char_p, ()),
    (
        "open",
        ctypes.c_int32,
        (
            ctypes.c_char_p,
            ctypes.POINTER(ctypes.c_char_p),
            ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_void_p),
            *_MESSAGE,
        ),
    ),
    ("describe", None, (ctypes.c_void_p, ctypes.POINTER(Facts))),
    (
        "output",
        ctypes.c_char_p,
        (ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)),
    ),
    (
        "submit",
        ctypes.c_int32,
        (
            ctypes.c_void_p,
            ctypes.POINTER(Request),
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_uint64,
            *_MESSAGE,
        ),
    ),
    (
        "submit_many",
        ctypes.c_size_t,
        (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_int32),
            *_MESSAGE,
        ),
    ),
    (
        "wait",
        ctypes.c_int64,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64),
    ),
    ("close", None, (ctypes.c_void_p,)),
    ("free", None, (ctypes.c_void_p,)),
)


@cache
def load(path: Path) -> ctypes.CDLL:
    """The library at ``path`` with the types of its functions.

    Raises:
        UserError: the system cannot load it, or it belongs to another release.
    """
    try:
        library = ctypes.CDLL(str(path))
        for name, result, arguments in _FUNCTIONS:
            function = getattr(library, f"tessera_engine_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be loaded ({error}); install tessera-rec-server and torch of releases that go together"
        ) from error
    if (abi := library.tessera_engine_abi()) != _ABI:
        raise UserError(
            f"{path} has the interface {abi}, this Tessera needs {_ABI}; install the same release of both"
        )
    return library
