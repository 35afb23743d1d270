"""The file of --auth-token-file: one token a line, with a name and a limit of its calls if they are wanted.

    # what follows '#' at the start of a line is not read
    TOKEN [NAME [CALLS_PER_S]]

A token consists of the characters that RFC 6750 allows.  NAME is what refusals and metrics call it, by default
``line-N``.  CALLS_PER_S bounds how many calls a second the token allows, on average; a second's worth of them may come
at once.  tests/server/token_cases.json holds this reader and the C++ server's to one table of cases.

A token is kept as its SHA-256 alone, so that how long a comparison takes says nothing of a token.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.repository.small_file import read_small_file

MAX_FILE_BYTES = 1 << 20
MAX_CALLS_PER_S = 1_000_000_000.0

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,10}(\.[0-9]{1,6})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Token:
    """One token that callers may have.

    Attributes:
        name: what it is called where its value may not be told.
        calls_per_s: the most calls a second, on average; 0: any number.
        digest: the SHA-256 of its characters.
    """

    name: str
    calls_per_s: float
    digest: bytes = field(repr=False)


class TokenTable:
    """The tokens of a file.

    Args:
        tokens: by their digests.
    """

    def __init__(self, tokens: Mapping[bytes, Token]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def find(self, token: str) -> Token | None:
        """The token with these characters; None where there is none."""
        digest = _digest(token)
        found = self._tokens.get(digest)
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None


def read_token_file(path: str) -> TokenTable:
    """Read the file.

    Raises:
        UserError: it cannot be read, or a line of it has to be changed; the message quotes no token.
    """
    content = read_small_file(Path(path), MAX_FILE_BYTES)
    if content is None:
        raise UserError(f"{path}: there is no such file")
    try:
        return parse_tokens(content.decode("ascii"))
    except UnicodeDecodeError:
        raise UserError(f"{path}: has bytes that are not ASCII") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def parse_tokens(content: str) -> TokenTable:
    """The tokens of a file with this content.

    Raises:
        UserError: naming the line.
    """
    tokens: dict[bytes, Token] = {}
    for number, line in enumerate(content.split("\n"), start=1):
        words = re.findall(r"[^ \t\r\f\v]+", line)
        if not words or words[0].startswith("#"):
            continue
        token = _token(words, number)
        if token.digest in tokens:
            raise UserError(f"line {number} has a token that an earlier line has, too; keep one")
        tokens[token.digest] = token
    if not tokens:
        raise UserError("holds no token; give one on each line")
    return TokenTable(tokens)


def _token(words: list[str], line: int) -> Token:
    if not _TOKEN.fullmatch(words[0]):
        raise UserError(
            f"line {line} has no token; give letters, digits and -._~+/, then = where they are needed"
        )
    if len(words) > 1 and not _NAME.fullmatch(words[1]):
        raise UserError(f"line {line} has no name; give up to 64 letters, digits and -._")
    rate = float(words[2]) if len(words) > 2 and _NUMBER.fullmatch(words[2]) else 0.0
    if len(words) > 3 or (len(words) == 3 and not 0 < rate <= MAX_CALLS_PER_S):
        raise UserError(f"line {line} is not TOKEN [NAME [CALLS_PER_S]]; give a positive number")
    name = words[1] if len(words) > 1 else f"line-{line}"
    return Token(name, rate, _digest(words[0]))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
