"""What ``tessera doctor`` looks at: one function for each thing, which returns what it found."""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import tessera
from tessera.cpus import usable_cpus
from tessera.errors import UserError
from tessera.releases import (
    FBGEMM_OF_TORCH,
    PYTHONS,
    fbgemm_remedy,
    minor_of,
    pair_is_known,
    without_torch,
)
from tessera.serving.commands import serve
from tessera.serving.engine.installed import built_file
from tessera.serving.server.config import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT

Status = Literal["ok", "warning", "problem"]
PROBLEM: Status = "problem"
_FBGEMM = ("fbgemm_gpu_sparse_async_cumsum", "fbgemm_gpu_tbe_inference", "fbgemm_gpu_py")
_ENOUGH_FILES = 4096
_ENOUGH_BYTES = 2 << 30
_PATIENCE_S = 60


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        name: what was looked at.
        status: ``ok``, ``warning`` or ``problem``.
        found: what is there.
        remedy: what to do about it; empty where nothing has to be done.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Everything, in the order in which it is shown."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python", python),
        ("tessera", installed_tessera),
        ("torch", torch_release),
        ("operators", operators),
        ("fbgemm", fbgemm),
        ("tessera-server", cpp_server),
        ("cuda", cuda),
        ("cpus", cpus),
        ("memory", memory),
        ("huge pages", huge_pages),
        ("open files", open_files),
        ("gRPC port", lambda: port("gRPC port", "--port", DEFAULT_GRPC_PORT)),
        ("HTTP port", lambda: port("HTTP port", "--http-port", DEFAULT_HTTP_PORT)),
        ("settings", settings),
    ]
    return [_careful(name, check) for name, check in checks]


def _careful(name: str, check: Callable[[], Finding]) -> Finding:
    """What ``check`` finds; one that fails is a problem itself, and the others go on."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - the doctor is called where things are broken
        found = f"{type(error).__name__}: {error}"
        return Finding(name=name, status="problem", found=found, remedy="this check itself failed")


def python() -> Finding:
    """Whether this Python is one that Tessera is tested with."""
    found = f"{sys.version.split()[0]} ({sys.executable})"
    major, minor = sys.version_info[:2]
    if f"{major}.{minor}" in PYTHONS:
        return Finding(name="python", status="ok", found=found)
    remedy = f"install Python {PYTHONS[0]} to {PYTHONS[-1]}"
    return Finding(name="python", status="problem", found=found, remedy=remedy)


def installed_tessera() -> Finding:
    """Which tessera is imported, and whether its two distributions are of one version."""
    found = f"{tessera.__version__} ({Path(tessera.__file__).parent})"
    versions = {
        name: without_torch(metadata.version(name))
        for name in ("tessera-rec", "tessera-rec-client")
        if list(metadata.distributions(name=name))
    }
    if len(set(versions.values())) <= 1:
        return Finding(name="tessera", status="ok", found=found)
    both = " and ".join(f"{name} {version}" for name, version in versions.items())
    remedy = f"pip install tessera-rec-client=={versions['tessera-rec']}"
    return Finding(name="tessera", status="problem", found=f"{found}, of {both}", remedy=remedy)


def torch_release() -> Finding:
    """Whether torch is there and of a supported release."""
    releases = list(FBGEMM_OF_TORCH)
    supported = f"{releases[0]} to {releases[-1]}"
    try:
        import torch  # noqa: PLC0415 - one that does not load is what is looked for
    except (ImportError, OSError) as error:
        remedy = f"pip install torch, {supported}"
        return Finding(
            name="torch", status="problem", found=f"does not load ({error})", remedy=remedy
        )
    if minor_of(torch.__version__) in releases:
        return Finding(name="torch", status="ok", found=torch.__version__)
    remedy = f"Tessera is tested with {supported}"
    return Finding(name="torch", status="warning", found=torch.__version__, remedy=remedy)


def operators() -> Finding:
    """Whether the lookup operators load, and which instruction set they take."""
    from tessera.kernels.libraries import LibraryError, cpu_kernels  # noqa: PLC0415 - loads torch

    try:
        kernels = cpu_kernels()
    except LibraryError as error:
        # The line says what to do already.
        what, _, remedy = str(error).rpartition("; ")
        return Finding(name="operators", status="problem", found=what, remedy=remedy)
    found = f"load, with the kernels {kernels}"
    asked = os.environ.get("TESSERA_CPU_KERNELS", "")
    if asked:
        remedy = "unset it for the best that this processor has"
        found += f"; TESSERA_CPU_KERNELS is {asked!r}"
        return Finding(name="operators", status="warning", found=found, remedy=remedy)
    if kernels == "scalar":
        remedy = "a processor with AVX2 or AVX-512 is several times as fast"
        return Finding(name="operators", status="warning", found=found, remedy=remedy)
    return Finding(name="operators", status="ok", found=found)


def fbgemm() -> Finding:
    """Whether FBGEMM, which training and packaging use, is there and goes with torch."""
    import torch  # noqa: PLC0415 - loads for seconds

    from tessera.kernels.libraries import (  # noqa: PLC0415 - loads torch
        LibraryError,
        fbgemm_version,
        load_libraries,
    )

    version = fbgemm_version()
    if not version:
        remedy = "for training and packaging: pip install 'tessera-rec[cpu]' (or [cuda])"
        return Finding(name="fbgemm", status="warning", found="is not installed", remedy=remedy)
    names = [
        name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if list(metadata.distributions(name=name))
    ]
    if len(names) > 1:
        remedy = "both have the same files: pip uninstall them, and install one again"
        return Finding(name="fbgemm", status="problem", found=" and ".join(names), remedy=remedy)
    try:
        load_libraries(_FBGEMM)
    except LibraryError as error:
        # The line says what to do already.
        what, _, remedy = str(error).rpartition("; ")
        return Finding(name="fbgemm", status="problem", found=f"{version}: {what}", remedy=remedy)
    if not pair_is_known(torch.__version__, version):
        found = f"{version} loads, but was not made for torch {torch.__version__}"
        remedy = fbgemm_remedy(torch.__version__)
        return Finding(name="fbgemm", status="warning", found=found, remedy=remedy)
    return Finding(name="fbgemm", status="ok", found=version)


def cpp_server() -> Finding:
    """Where the C++ server is, and whether it starts."""
    name = "tessera-server"
    program = _cpp_program()
    if program is None:
        remedy = (
            "tessera serve answers without it; pip install tessera-rec-server, or make build-server"
        )
        return Finding(name=name, status="warning", found="is not installed", remedy=remedy)
    remedy = "install it and torch anew, of releases that go together (or make build-server)"
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name=name, status="problem", found=f"{program}: {error}", remedy=remedy)
    if done.returncode:
        said = (done.stderr.strip() or f"ended with {done.returncode}").splitlines()[-1]
        return Finding(name=name, status="problem", found=f"{program}: {said}", remedy=remedy)
    version = done.stdout.split()[-1]
    found = f"{version} ({program})"
    if version == tessera.__version__:
        return Finding(name=name, status="ok", found=found)
    remedy = f"tessera is {tessera.__version__}: install the same version of both"
    return Finding(name=name, status="warning", found=found, remedy=remedy)


def _cpp_program() -> str | None:
    """The program of the path, of this environment, or of the checkout."""
    if found := shutil.which("tessera-server"):
        return found
    found_file = built_file("bin", "tessera-server")
    return None if found_file is None else str(found_file)


def cuda(devices: Path = Path("/dev")) -> Finding:
    """Which GPUs torch can use; one that it cannot is a problem."""
    import torch  # noqa: PLC0415 - loads for seconds

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found = ", ".join(f"{each.name} ({_gib(each.total_memory)})" for each in names)
        return Finding(name="cuda", status="ok", found=found)
    if not list(devices.glob("nvidia[0-9]*")):
        return Finding(name="cuda", status="ok", found="no device; everything runs on CPUs")
    if torch.version.cuda is None:
        remedy = "install a torch with CUDA, and 'tessera-rec[cuda]'"
        found = f"a device, and a torch without CUDA ({torch.__version__})"
        return Finding(name="cuda", status="warning", found=found, remedy=remedy)
    remedy = f"see nvidia-smi: the driver has to be new enough for CUDA {torch.version.cuda}"
    return Finding(
        name="cuda", status="problem", found="a device that torch cannot use", remedy=remedy
    )


def cpus() -> Finding:
    """How many CPUs may be used."""
    usable, there = usable_cpus(), os.cpu_count() or 1
    found = f"{usable} of {there}"
    if usable < there:
        found += " (the affinity mask or a control group's quota)"
    if usable > 1:
        return Finding(name="cpus", status="ok", found=found)
    remedy = "the network and inference share it; give 2 at least"
    return Finding(name="cpus", status="warning", found=found, remedy=remedy)


def memory(meminfo: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")) -> Finding:
    """How much memory is left to processes here, and what a control group allows."""
    kibibytes = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), re.MULTILINE)
    assert kibibytes is not None
    left = int(kibibytes[1]) << 10
    found = f"{_gib(left)} free"
    for limit in (groups / "memory.max", groups / "memory" / "memory.limit_in_bytes"):
        text = limit.read_text().strip() if limit.is_file() else "max"
        if text.isdigit() and int(text) < 1 << 60:  # version 1 says "none" by a huge number
            found += f", {_gib(int(text))} allowed to the control group"
            left = min(left, int(text))
    if left >= _ENOUGH_BYTES:
        return Finding(name="memory", status="ok", found=found)
    remedy = f"torch and a small model need {_gib(_ENOUGH_BYTES)}"
    return Finding(name="memory", status="warning", found=found, remedy=remedy)


def huge_pages(
    setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled"),
) -> Finding:
    """Whether large tables can lie in huge pages."""
    name = "huge pages"
    if os.environ.get("TESSERA_HUGE_PAGES") == "0":
        found, remedy = "switched off by TESSERA_HUGE_PAGES=0", "unset it for faster lookups"
        return Finding(name=name, status="warning", found=found, remedy=remedy)
    chosen = re.search(r"\[(\w+)\]", setting.read_text()) if setting.is_file() else None
    if chosen is None:
        found, remedy = "this system has none", "lookups in large tables are slower"
        return Finding(name=name, status="warning", found=found, remedy=remedy)
    if chosen[1] != "never":
        return Finding(name=name, status="ok", found=chosen[1])
    remedy = f"as root: echo madvise > {setting}; lookups in large tables are slower without"
    return Finding(name=name, status="warning", found=chosen[1], remedy=remedy)


def open_files() -> Finding:
    """Whether a server may have many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (ulimit -n), {hard} at most"
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES:
        return Finding(name="open files", status="ok", found=found)
    remedy = "each connection takes one: ulimit -n 65536, or LimitNOFILE= of its systemd unit"
    return Finding(name="open files", status="warning", found=found, remedy=remedy)


def port(name: str, flag: str, number: int) -> Finding:
    """Whether a server with default flags could listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            found = f"127.0.0.1:{number}: {error.strerror}"
            remedy = f"stop what listens there, or give a server another {flag}"
            return Finding(name=name, status="warning", found=found, remedy=remedy)
    return Finding(name=name, status="ok", found=f"{number} is free")


def settings() -> Finding:
    """Whether the TESSERA_ variables, and the file that they name, are what servers read."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args([])
    given = sorted(name for name in os.environ if name.startswith("TESSERA_"))
    try:
        args.flag_sources.complete(args, os.environ)
    except UserError as error:
        what, _, remedy = str(error).rpartition("; ")
        # tessera-server has flags that tessera serve has not, so that this may be as it should be.
        found = f"tessera serve refuses them: {what}"
        return Finding(name="settings", status="warning", found=found, remedy=remedy)
    found = ", ".join(given) or "no TESSERA_ variable is set"
    return Finding(name="settings", status="ok", found=found)


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
