"""Compare docs/config.md with the config dataclasses; ``--write`` writes it anew.

It runs in the checkout: ``python -m tessera.training.config_reference --write``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tessera.training.config import ExperimentConfig
from tessera.training.config_reference.collect import collect
from tessera.training.config_reference.render import WRITE_COMMAND, markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"


def main() -> int:
    """0: the page is current, or was written; 1: it is not current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write the page (default: compare)")
    text = markdown(collect(ExperimentConfig))
    if parser.parse_args().write:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print(f"docs/config.md does not fit the config dataclasses: run {WRITE_COMMAND}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
