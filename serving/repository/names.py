"""What models, versions and labels may be called."""

from __future__ import annotations

import re

MAX_VERSION = (1 << 63) - 1
MAX_LABEL_BYTES = 64
MAX_MODEL_NAME_BYTES = 128

_VERSION = re.compile(r"[1-9][0-9]{0,18}", re.ASCII)
_COMMIT = re.compile(r"0|[1-9][0-9]{0,7}", re.ASCII)
_LABEL = re.compile(rf"[A-Za-z][A-Za-z0-9_-]{{0,{MAX_LABEL_BYTES - 1}}}", re.ASCII)
_MODEL = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9_.-]{{0,{MAX_MODEL_NAME_BYTES - 1}}}", re.ASCII)


def parse_version(text: str) -> int | None:
    """The version that ``text`` writes, from 1 to 2^63 - 1; None where it writes none.

    Digits without a sign, spaces or leading zeros, as `str` writes it.
    """
    if not _VERSION.fullmatch(text):
        return None
    version = int(text)
    return version if version <= MAX_VERSION else None


def parse_state(text: str) -> tuple[int, int] | None:
    """Version and commit of a state such as ``3.42``; None where ``text`` writes none."""
    version, point, commit = text.partition(".")
    number = parse_version(version)
    if number is None or not point or not _COMMIT.fullmatch(commit):
        return None
    return number, int(commit)


def is_version(value: object) -> bool:
    """Whether ``value`` is the number of a version."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_VERSION


def is_label(text: str) -> bool:
    """Whether ``text`` may be a label."""
    return _LABEL.fullmatch(text) is not None


def is_model_name(text: str) -> bool:
    """Whether ``text`` may be a model's name: it needs no escapes in a path of HTTP."""
    return _MODEL.fullmatch(text) is not None


LABEL_RULE = f"a letter, then letters, digits, '_' or '-', at most {MAX_LABEL_BYTES} of them"
"""What error messages say of a label."""
