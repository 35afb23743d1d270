"""The status page's texts that both servers have: its style, its form, its script, and the policy that allows these alone.

``--write`` writes them for the C++ server, as ``cpp_server/src/front/page_texts.h``; without it, the file is checked.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import sys
from pathlib import Path
from string import Template

from tessera.report_page import page_style

HEADER = Path(__file__).resolve().parents[3] / "cpp_server" / "src" / "front" / "page_texts.h"
REWRITE = "make page-texts"
_HERE = Path(__file__).parent
_PIECE_BYTES = 8_000
"""The most bytes of one C++ string; standard C++ promises room for 65,536."""

_HEADER = Template("""\
// Generated from serving/server/front by `$rewrite`; not to be edited.
//
// What the status pages of both servers have in common.
// clang-format off
#pragma once

namespace tessera {

inline constexpr const char* kPageStyle =
$style;

inline constexpr const char* kRequestForm =
$form;

inline constexpr const char* kPageScript =
$script;

inline constexpr const char* kPagePolicy =
    "$policy";

}  // namespace tessera
""")


def request_form() -> str:
    """The part of the page from which a request is sent."""
    return (_HERE / "status_form.html").read_text(encoding="utf-8")


def page_script() -> str:
    """What fills the form, sends it, and keeps the figures fresh."""
    return (_HERE / "status_page.js").read_text(encoding="utf-8")


def page_policy() -> str:
    """The Content-Security-Policy: nothing but this style and this script, which asks this server alone."""
    style, script = (_hash(text) for text in (page_style(), page_script()))
    return (
        f"default-src 'none'; style-src '{style}'; script-src '{script}'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def header() -> str:
    """The text of ``page_texts.h``."""
    return _HEADER.substitute(
        rewrite=REWRITE,
        style=_literal(page_style()),
        form=_literal(request_form()),
        script=_literal(page_script()),
        policy=page_policy(),
    )


def _literal(text: str) -> str:
    """``text`` as C++ strings that follow one another."""
    assert ')page"' not in text
    pieces: list[str] = []
    for line in text.splitlines(keepends=True):
        if not pieces or len((pieces[-1] + line).encode()) > _PIECE_BYTES:
            pieces.append("")
        pieces[-1] += line
    return "\n".join(f'R"page({piece})page"' for piece in pieces)


def main() -> None:
    """Write or compare the generated file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file (default: compare)")
    if parser.parse_args().write:
        HEADER.write_text(header(), encoding="utf-8")
    elif not HEADER.exists() or HEADER.read_text(encoding="utf-8") != header():
        sys.exit(f"{HEADER.name} is not what serving/server/front has; run {REWRITE}")


if __name__ == "__main__":
    main()
