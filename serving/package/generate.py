"""Generate what the C++ reader of packages is compiled with (``--write``), or check it.

Written is ``cpp_server/src/package/format_rules.h``: the operators that a graph may call, the rules of the
fields of manifests and commits, and the limits of sizes, so that both readers refuse the same packages and
commits.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from string import Template

from tessera.serving.package.commit import (
    COMMIT_FORMAT_VERSION,
    MAX_COMMIT_JSON_BYTES,
    MAX_COMMIT_MARKS,
    MAX_COMMIT_NUMBER,
    MAX_PATCHED_ROW,
    REFUSALS,
    Commit,
)
from tessera.serving.package.fields import rules
from tessera.serving.package.layout import MAX_DIRECTORY_BYTES
from tessera.serving.package.manifest import (
    FORMAT_VERSION,
    MAX_MANIFEST_BYTES,
    MAX_MANIFEST_MARKS,
    OLDEST_FORMAT_VERSION,
    Manifest,
)
from tessera.serving.package.operators import ALLOWED_OPERATORS
from tessera.serving.package.pickle_depth import DICT_OPCODES, MAX_DEPTH, MAX_OPCODES
from tessera.serving.package.scripted_source import MAX_CODE_BYTES
from tessera.serving.package.storages import (
    ELEMENT_BYTES,
    MAX_PICKLE_BYTES,
    MAX_REMEMBERED,
    PLAIN_NAMES,
)
from tessera.serving.package.time_limit import DEFAULT_LOAD_TIMEOUT_S, MAX_LOAD_TIMEOUT_S

HEADER = Path(__file__).resolve().parents[2] / "cpp_server" / "src" / "package" / "format_rules.h"
REWRITE = "make package-rules"

_HEADER = Template("""\
// Generated from serving/package by `$rewrite`; not to be edited.
//
// What a package may hold; the Python files say why.
// clang-format off
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

namespace tessera {

inline constexpr int kOldestFormatVersion = $oldest_version;
inline constexpr int kFormatVersion = $format_version;
inline constexpr std::uint64_t kMaxManifestBytes = $manifest_bytes;
inline constexpr std::ptrdiff_t kMaxManifestMarks = $manifest_marks;
inline constexpr int kCommitFormatVersion = $commit_version;
inline constexpr std::int64_t kMaxCommitNumber = $commit_number;
inline constexpr std::uint64_t kMaxCommitJsonBytes = $commit_bytes;
inline constexpr std::ptrdiff_t kMaxCommitMarks = $commit_marks;
inline constexpr std::int64_t kMaxPatchedRow = $patched_row;
inline constexpr std::uint64_t kMaxDirectoryBytes = $directory_bytes;
inline constexpr std::uint64_t kMaxPickleBytes = $pickle_bytes;
inline constexpr std::uint64_t kMaxCodeBytes = $code_bytes;
inline constexpr std::size_t kMaxRemembered = $remembered;
inline constexpr std::size_t kMaxOpcodes = $opcodes;
inline constexpr std::size_t kDictOpcodes = $dict_opcodes;
inline constexpr std::size_t kMaxPickleDepth = $depth;
inline constexpr double kDefaultLoadTimeoutS = $load_timeout;
inline constexpr double kMaxLoadTimeoutS = $max_load_timeout;

// Bytes of one element, by the name of its storage.
inline constexpr std::array<std::pair<std::string_view, std::int64_t>, $storage_count> kElementBytes = {{
$storages
}};

// What a pickle may name beside storages and the archive's own classes, sorted.
inline constexpr std::array<std::string_view, $name_count> kPickleNames = {
$names
};

// What a graph may call, sorted.
inline constexpr std::array<std::string_view, $operator_count> kAllowedOperators = {
$operators
};

// The manifest's fields in each version of the format, the oldest first: a word, or an object with
// the kind of rule and what it needs.
inline constexpr std::array<std::string_view, $rules_count> kManifestRules = {
$rules
};

// The fields of a commit's last record, likewise.
inline constexpr std::string_view kCommitRules =
$commit_rules;

// Why a server stops at a commit.
inline constexpr std::array<std::string_view, $refusal_count> kCommitRefusals = {
$refusals
};

}  // namespace tessera
""")


def header() -> str:
    """The text of ``format_rules.h``."""
    versions = range(OLDEST_FORMAT_VERSION, FORMAT_VERSION + 1)
    return _HEADER.substitute(
        rewrite=REWRITE,
        oldest_version=OLDEST_FORMAT_VERSION,
        format_version=FORMAT_VERSION,
        manifest_bytes=MAX_MANIFEST_BYTES,
        manifest_marks=MAX_MANIFEST_MARKS,
        directory_bytes=MAX_DIRECTORY_BYTES,
        pickle_bytes=MAX_PICKLE_BYTES,
        code_bytes=MAX_CODE_BYTES,
        remembered=MAX_REMEMBERED,
        opcodes=MAX_OPCODES,
        dict_opcodes=DICT_OPCODES,
        depth=MAX_DEPTH,
        load_timeout=DEFAULT_LOAD_TIMEOUT_S,
        max_load_timeout=MAX_LOAD_TIMEOUT_S,
        storage_count=len(ELEMENT_BYTES),
        storages="\n".join(
            f'    {{"torch.{kind}Storage", {size}}},' for kind, size in ELEMENT_BYTES.items()
        ),
        name_count=len(PLAIN_NAMES),
        names=_texts(name.replace(" ", ".") for name in PLAIN_NAMES),
        operator_count=len(ALLOWED_OPERATORS),
        operators=_texts(ALLOWED_OPERATORS),
        rules_count=len(versions),
        rules="\n".join(f"{_rules(Manifest, version)}," for version in versions),
        commit_version=COMMIT_FORMAT_VERSION,
        commit_number=MAX_COMMIT_NUMBER,
        commit_bytes=MAX_COMMIT_JSON_BYTES,
        commit_marks=MAX_COMMIT_MARKS,
        patched_row=MAX_PATCHED_ROW,
        commit_rules=_rules(Commit, COMMIT_FORMAT_VERSION),
        refusal_count=len(REFUSALS),
        refusals=_texts(REFUSALS),
    )


def _rules(kind: type, version: int) -> str:
    """The rules of one version as the lines of one C++ string."""
    text = json.dumps(rules(kind, version))
    lines = textwrap.wrap(text, 90, break_on_hyphens=False, drop_whitespace=False)
    return "\n".join(f'    R"({line})"' for line in lines)


def _texts(names: Iterable[str]) -> str:
    listed = " ".join(f'"{name}",' for name in sorted(names))
    return textwrap.indent(textwrap.fill(listed, 94, break_on_hyphens=False), "    ")


def main() -> None:
    """Write or compare the generated file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file (default: compare)")
    if parser.parse_args().write:
        HEADER.write_text(header())
    elif not HEADER.exists() or HEADER.read_text() != header():
        sys.exit(f"{HEADER.name} is not what serving/package generates; run {REWRITE}")


if __name__ == "__main__":
    main()
