"""Hold the conformance suite against a server at any address.

    python -m tests.conformance.packages FOLDER

writes the suite's two packages to FOLDER and prints with which flags a server has to be started
(both servers know them; another server needs the same models, names and limits), and how to run the
suite then.  Tests that need a server with flags of their own are left out.
"""

import argparse
from pathlib import Path

from tests.conformance.conformance_harness import LIMITS, MODELS
from tests.package_factory import make_package


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the packages are written")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    paths = [make_package(folder, name=name, **options)[0] for name, options in MODELS.items()]
    print("start the server with:")
    print(f"  --model {paths[0]} --model second={paths[1]} {' '.join(LIMITS)}")
    print("then:")
    print(
        "  pytest tests/conformance --address HOST:PORT --http-address HOST:PORT "
        f"--packages {folder}"
    )


if __name__ == "__main__":
    main()
