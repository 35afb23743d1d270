"""Builds the wheels and source archives of the distributions, from this checkout.

    python wheels/build.py --out dist [--only client] [--server build/cpp/release] [--no-label]

    tessera-rec-client   tessera.serving.client and what it imports; numpy, grpcio, protobuf, xxhash
    tessera-rec          everything else of tessera.*, with the lookup operators; needs tessera-rec-client of its
                         version, so that no file belongs to two distributions
    tessera-rec-server   tessera-server and tessera-load, the C++ programs, and libtessera-engine.so, with the libraries that the
                         system may lack

Each is laid out in a folder of its own with a pyproject.toml of its own, and built there by setuptools.  What
holds machine code gets the tag of this machine's processor and of the oldest glibc that the code runs with
(manylinux_2_N), and needs the release of torch (2.N) that it was compiled against: torch's C++ interface
changes between releases.  The version is ``tessera.__version__`` everywhere, which `make wheels` takes from git's tag
first (docs/releasing.md); a program that was built with another one is refused.  What needs one release of torch has that
in its version, as a local version of PEP 440 (0.1.0+torch2.13): so the wheels of one version for several releases of torch
have names of their own and may lie in one index, where pip takes the one that goes with the torch that it installs.
--no-label leaves it out, for an index that takes no local versions, as PyPI.  Of each distribution the folder has one
version afterwards: files of others are removed.

Each gets a bill of materials, NAME-VERSION.cdx.json beside its wheel and in it (sbom.py tells what it names).

tessera-rec and tessera-rec-client also get a source archive.  A wheel made of tessera-rec's compiles the operators,
for which it needs cmake, a C++20 compiler and that torch.  The server has none: it is built by
cpp_server/build.sh, which takes Debian's libraries.

Needs the checkout's environment with `make build` done.  --only may be given several times.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from client_modules import client_modules
from sbom import Bundled, write_bill

from tessera import __version__
from tessera.releases import FBGEMM_OF_TORCH, after, minor_of, with_torch

ROOT = Path(__file__).resolve().parent.parent
OPERATORS = ROOT / "kernels" / "lib" / "libtessera_ops.so"
# Of `ldd`: what every glibc system of manylinux has, and what comes with torch's wheel.
_OF_SYSTEM = re.compile(r"^(linux-vdso|ld-linux|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+))[-.]")
_LINE = re.compile(r"^\s*(\S+) => (\S+)")
_SHIPPED = {".py", ".pyi", ".yaml", ".html", ".css", ".js", ".md", ".typed"}
_SOURCES = {".cpp", ".h", ".cu", ".cuh", ".txt", ".cmake"}
_CLIENT = ("numpy", "grpcio", "protobuf", "xxhash")
UNKNOWN = "0.0"
"""What pyproject.toml calls the version where neither git nor an archive of it tells one."""


def main() -> int:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {"client": build_client, "full": build_full, "server": build_server}
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder (default: dist)")
    parser.add_argument("--only", action="append", choices=names, help="(default: all three)")
    parser.add_argument(
        "--server",
        type=Path,
        default=ROOT / "build" / "cpp" / "release",
        metavar="FOLDER",
        help="where cpp_server/build.sh has built (default: build/cpp/release)",
    )
    parser.add_argument(
        "--no-label",
        action="store_true",
        help="leave torch's release out of the versions, for an index that takes no local versions, as PyPI, and so has "
        "one release of torch for each version (default: 0.1.0+torch2.13)",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if __version__ == UNKNOWN:
        sys.exit("wheels/build.py: the checkout has no version; run make version")
    for name in args.only or names:
        with tempfile.TemporaryDirectory(prefix="tessera-wheel-") as folder:
            names[name](Path(folder), args)
    remove_others(args.out, no_label=args.no_label)
    for path in sorted(args.out.iterdir()):
        print(f"{path}  {path.stat().st_size:,} bytes")
    return 0


def remove_others(out: Path, *, no_label: bool) -> None:
    """Remove the files of other versions: whoever installs ``tessera_rec-*.whl`` means one of them."""
    for path in sorted(out.iterdir()):
        match = re.match(r"tessera-rec(-client|-server)?-(\d.*)", path.name.replace("_", "-"))
        if match is None:
            continue
        version = __version__ if match[1] == "-client" else version_with_code(no_label=no_label)
        if not re.match(rf"{re.escape(version)}(-py3-|\.tar\.gz$|\.cdx\.json$)", match[2]):
            print(f"{path}  is of another version, and was removed")
            path.unlink()


def version_with_code(*, no_label: bool) -> str:
    """The version of what holds machine code, which needs the installed torch's release."""
    return __version__ if no_label else with_torch(__version__, torch_release())


def build_client(folder: Path, args: argparse.Namespace) -> None:
    """The distribution of clients, which loads no torch."""
    for path in tracked("tessera", "kernels", "serving"):
        if module_of(path) in CLIENT_MODULES or path.name == "py.typed" or is_stub(path):
            copy(path, folder)
    (folder / "tessera" / "_version.py").write_text(f'__version__ = "{__version__}"\n')
    about: dict[str, Any] = {
        "name": "tessera-rec-client",
        "version": __version__,
        "description": "Clients of Tessera's servers: scores over gRPC, without torch.",
        "dependencies": client_dependencies(),
    }
    describe(folder, **about)
    list_parts(folder, args.out, about)
    build(folder, args.out, "--sdist", "--wheel")


def build_full(folder: Path, args: argparse.Namespace) -> None:
    """The distribution of training, packaging and serving, with the operators."""
    if not OPERATORS.exists():
        sys.exit(
            f"wheels/build.py: {OPERATORS.relative_to(ROOT)} is missing; run make build-kernels"
        )
    for path in tracked("tessera", "training", "serving", "kernels"):
        if path.suffix in _SHIPPED | _SOURCES and not (
            module_of(path) in CLIENT_MODULES or path.name == "py.typed" or is_stub(path)
        ):
            copy(path, folder)
    fbgemm = fbgemm_requirement()
    ours = project()
    extras = {
        name: list(lines) for name, lines in ours["optional-dependencies"].items() if name != "dev"
    }
    extras["cpu"], extras["cuda"] = [f"fbgemm-gpu-cpu{fbgemm}"], [f"fbgemm-gpu{fbgemm}"]
    dependencies = [line for line in ours["dependencies"] if name_of(line) != "torch"]
    about: dict[str, Any] = {
        "name": "tessera-rec",
        "version": version_with_code(no_label=args.no_label),
        "description": ours["description"],
        "dependencies": [
            f"tessera-rec-client=={__version__}",
            torch_requirement(),
            *dependencies,
        ],
    }
    describe(
        folder,
        **about,
        extras=extras,
        scripts=ours["scripts"],
        build_requires=["cmake>=3.25,<5", torch_requirement()],
        data=["*.yaml", "*.html", "*.css", "*.js", "*.md", "lib/*.so"],
    )
    (folder / "MANIFEST.in").write_text(
        "graft tessera\nglobal-exclude *.so *.pyc\ninclude setup.py\n"
    )
    build(folder, args.out, "--sdist")
    library = folder / "tessera" / "kernels" / "lib" / OPERATORS.name
    library.parent.mkdir()
    shutil.copy(OPERATORS, library)
    list_parts(folder, args.out, about)
    build(folder, args.out, "--wheel", tag=platform_tag([library]))


def build_server(folder: Path, args: argparse.Namespace) -> None:
    """The distribution of the C++ server: it and the load generator, their libraries and their licences."""
    programs = [args.server / name for name in ("tessera-server", "tessera-load")]
    for program in programs:
        if not program.exists():
            sys.exit(f"wheels/build.py: {program} is missing; run make build-server")
    program = programs[0]
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    if told.stdout != f"tessera-server {__version__}\n":
        sys.exit(
            f"wheels/build.py: {program} tells {told.stdout.strip() or told.stderr.strip()!r}, and the wheels are of "
            f"{__version__}; run make build-server"
        )
    package = folder / "tessera_rec_server"
    shutil.copytree(ROOT / "wheels" / "server" / "tessera_rec_server", package)
    installed = ["--component", "wheel", "--strip", "--prefix", str(package)]
    run("cmake", "--install", str(args.server), *installed)
    licences = folder / "licences"
    licences.mkdir()
    bundled = []
    for path in {path: None for program in programs for path in libraries_of(program)}:
        to = package / "lib" / path.name
        shutil.copy(path, to)
        owner = copy_licence(path, licences)
        bundled.append(Bundled(path=str(to.relative_to(folder)), file=to, package=owner))
    about: dict[str, Any] = {
        "name": "tessera-rec-server",
        "version": version_with_code(no_label=args.no_label),
        "description": "The C++ server of Tessera's packages, beside the torch wheel.",
        "dependencies": [torch_requirement()],
    }
    list_parts(folder, args.out, about, bundled)
    describe(
        folder,
        **about,
        scripts={
            "tessera-server": "tessera_rec_server:main",
            "tessera-load": "tessera_rec_server:load",
        },
        data=["bin/*", "lib/*", "include/*"],
        licences=["licences/*"],
    )
    code = [*(package / "bin").iterdir(), *(package / "lib").iterdir()]
    build(folder, args.out, "--wheel", tag=platform_tag(code))


def list_parts(
    folder: Path, out: Path, about: dict[str, Any], bundled: Iterable[Bundled] = ()
) -> None:
    """Write a distribution's bill of materials, for its wheel and beside it."""
    write_bill(
        (folder / "sboms", out),
        **about,
        licence=project()["license"],
        own={"tessera-rec-client": (__version__, client_dependencies())},
        bundled=bundled,
    )


def client_dependencies() -> list[str]:
    """What the distribution of clients needs."""
    return [line for line in project()["dependencies"] if name_of(line) in _CLIENT]


def describe(
    folder: Path,
    *,
    name: str,
    version: str,
    description: str,
    dependencies: list[str],
    extras: dict[str, list[str]] | None = None,
    scripts: dict[str, str] | None = None,
    build_requires: list[str] | None = None,
    data: list[str] | None = None,
    licences: list[str] | None = None,
) -> None:
    """Write a distribution's pyproject.toml and what goes with it."""
    ours = project()
    requires = ["setuptools>=77", *(build_requires or [])]
    tables = {
        "build-system": {"requires": requires, "build-backend": "setuptools.build_meta"},
        "project": {
            "name": name,
            "version": version,
            "description": description,
            "readme": "README.md",
            "license": ours["license"],
            "license-files": ["LICENSE", *(licences or [])],
            "requires-python": ours["requires-python"],
            "dependencies": dependencies,
        },
        "project.optional-dependencies": extras or {},
        "project.scripts": scripts or {},
        "tool.setuptools": {"include-package-data": False},
        "tool.setuptools.packages.find": {"include": ["tessera*"]},
        "tool.setuptools.package-data": {"*": [*(data or []), "*.pyi", "py.typed"]},
    }
    (folder / "pyproject.toml").write_text(toml_text(tables))
    shutil.copy(ROOT / "wheels" / "setup.py", folder)
    shutil.copy(ROOT / "LICENSE", folder)
    (folder / "README.md").write_text(f"# {name}\n\n{description}\n\nPart of Tessera.\n")


def build(folder: Path, out: Path, *what: str, tag: str = "") -> None:
    """Build with setuptools of this Python, which every source archive says it needs."""
    if tag:
        (folder / "setup.cfg").write_text(f"[bdist_wheel]\nplat_name = {tag}\n")
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--skip-dependency-check",
        *what,
        "--outdir",
        str(out),
        str(folder),
    )


def run(*command: str) -> None:
    """Run ``command`` without its output, which is shown where it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nwheels/build.py: this failed: {' '.join(command)}")


def tracked(*folders: str) -> list[Path]:
    """The files of ``folders`` that are in git or about to be, relative to the root."""
    command = [
        "git",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *folders,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (Path(name) for name in done.stdout.split("\0") if name)
    return [path for path in paths if (ROOT / path).is_file() and not (ROOT / path).is_symlink()]


def installed_path(path: Path) -> Path:
    """Where a file of the checkout lies in site-packages: training/ is tessera/training/."""
    return path if path.parts[0] == "tessera" else Path("tessera") / path


def module_of(path: Path) -> str:
    """The dotted name of a Python file; empty for another file."""
    if path.suffix != ".py":
        return ""
    return ".".join(installed_path(path).with_suffix("").parts).removesuffix(".__init__")


def is_stub(path: Path) -> bool:
    """Whether it describes the types of one of the client's modules."""
    return path.suffix == ".pyi" and module_of(path.with_suffix(".py")) in CLIENT_MODULES


def copy(path: Path, folder: Path) -> None:
    """Put a file of the checkout where it is imported from."""
    to = folder / installed_path(path)
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / path, to)


def project() -> dict[str, Any]:
    """The table [project] of the checkout."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    table: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def name_of(requirement: str) -> str:
    """``numpy`` of ``numpy>=1.26,<3``."""
    return re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0]


def torch_release() -> str:
    """``2.13`` of the installed torch 2.13.0, which has to be one that Tessera is made for."""
    release = minor_of(metadata.version("torch"))
    if release not in FBGEMM_OF_TORCH:
        sys.exit(
            f"wheels/build.py: torch {metadata.version('torch')} is installed, and wheels are made for torch "
            f"{', '.join(FBGEMM_OF_TORCH)}; install one of these (make TORCH_VERSION=...)"
        )
    return release


def torch_requirement() -> str:
    """The releases of torch that the machine code loads with."""
    return f"torch>={torch_release()},<{after(torch_release())}"


def fbgemm_requirement() -> str:
    """The releases of fbgemm-gpu that were made for that torch."""
    fbgemm = FBGEMM_OF_TORCH[torch_release()]
    return f">={fbgemm},<{after(fbgemm)}"


def platform_tag(code: list[Path]) -> str:
    """Return manylinux_2_N of the newest glibc symbol that ``code`` asks for."""
    minors = [int(n) for path in code for n in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
    machine = sysconfig.get_platform().rpartition("-")[2]
    return f"manylinux_2_{max(minors)}_{machine}"


def libraries_of(program: Path) -> list[Path]:
    """The shared libraries that ``program`` loads and neither the system nor torch's wheel has."""
    listing = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True)
    found = []
    for line in listing.stdout.splitlines():
        match = _LINE.match(line)
        if match is None or _OF_SYSTEM.match(match[1]):
            continue
        if not match[2].startswith("/"):
            sys.exit(f"wheels/build.py: {program} needs {match[1]}, which was not found")
        if "site-packages" not in Path(match[2]).parts:
            found.append(Path(match[2]))
    return found


def copy_licence(library: Path, folder: Path) -> str:
    """Put the licence of a Debian library beside the others, as their terms ask for; its package's name."""
    for path in (library, library.resolve(), Path("/usr") / library.resolve().relative_to("/")):
        owner = subprocess.run(
            ["dpkg", "-S", str(path)], capture_output=True, text=True, check=False
        )
        if owner.returncode == 0:
            package = owner.stdout.split(":")[0]
            shutil.copy(f"/usr/share/doc/{package}/copyright", folder / f"{package}.txt")
            return package
    sys.exit(f"wheels/build.py: the licence of {library} was not found (dpkg -S)")


def toml_text(tables: dict[str, dict[str, object]]) -> str:
    """TOML of texts, lists of texts and booleans, whose JSON is TOML as well."""
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


CLIENT_MODULES = client_modules(ROOT)

if __name__ == "__main__":
    raise SystemExit(main())
