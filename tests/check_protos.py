"""Generate the messages in ``serving/protocol`` from ``protos/`` (``--write``), or check them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "serving" / "protocol"
MODULE_SUFFIXES = ("_pb2.py", "_pb2.pyi")
# The default pool takes each message's name once a process (serving/protocol/pool.py).
DEFAULT_POOL_IMPORT = (
    "from google.protobuf import descriptor_pool as _descriptor_pool\n",
    "from tessera.serving.protocol.pool import POOL as _POOL\n",
)


def generate(folder: Path) -> dict[str, str]:
    """Run protoc on every file of ``protos/``; returns file name -> text."""
    protos = sorted((ROOT / "protos").glob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"-I{ROOT / 'protos'}",
            f"--python_out={folder}",
            f"--pyi_out={folder}",
            *map(str, protos),
        ]
    )
    if status:
        sys.exit(f"protoc failed with status {status}")
    return {path.name: _in_own_pool(path.read_text()) for path in sorted(folder.iterdir())}


def _in_own_pool(text: str) -> str:
    """A module of messages that registers them where no other module's names are."""
    return text.replace(*DEFAULT_POOL_IMPORT).replace("_descriptor_pool.Default()", "_POOL")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the files (default: compare)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = generate(Path(folder))
    if args.write:
        for name, text in texts.items():
            (TARGET / name).write_text(text)
        return
    present = {path.name for path in TARGET.iterdir() if path.name.endswith(MODULE_SUFFIXES)}
    stale = [
        name
        for name in sorted(present | set(texts))
        if name not in texts or name not in present or (TARGET / name).read_text() != texts[name]
    ]
    if stale:
        sys.exit(
            f"serving/protocol is not what protos/ generates: {', '.join(stale)}; run make protos"
        )


if __name__ == "__main__":
    main()
