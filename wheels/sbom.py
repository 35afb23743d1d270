"""The bill of materials of a distribution: CycloneDX 1.6 in JSON.

CycloneDX and not SPDX, because what reads these files looks for vulnerable versions, for which CycloneDX was made: a
component has one package URL and there is one graph of what needs what, where SPDX describes licences file by file.

A bill names
* the distribution itself;
* every distribution that it needs at run time, directly or through others, in the version that is installed in the
  environment which builds it.  pip may install other versions within the ranges that the bill gives beside them (the
  property ``tessera:requirement``), so that for a host that runs Tessera its own environment is what counts; what
  extras add is left out;
* what lies inside the wheel and comes from elsewhere: the shared libraries of Debian's packages in
  tessera-rec-server, in just these versions, with the SHA-256 of each file.

It is written beside the wheel, NAME-VERSION.cdx.json, and into it, as .dist-info/sboms/NAME.cdx.json (PEP 770).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Component = dict[str, Any]

_LONGEST_LICENCE_NAME = 100  # where some distributions put the whole text


@dataclass(frozen=True, kw_only=True)
class Bundled:
    """A file of the wheel that comes from a package of the system.

    Attributes:
        path: in the wheel.
        file: where it lies now.
        package: of Debian, that it comes from.
    """

    path: str
    file: Path
    package: str


def write_bill(
    folders: Iterable[Path],
    *,
    name: str,
    version: str,
    licence: str,
    description: str,
    dependencies: list[str],
    own: Mapping[str, tuple[str, list[str]]] | None = None,
    bundled: Iterable[Bundled] = (),
) -> None:
    """Write the bill of a distribution.

    Args:
        folders: each gets a file: of the wheel, whose files have no version in their names, and of what is published.
        name: the distribution's.
        version: its version.
        licence: its SPDX identifier.
        description: one sentence.
        dependencies: what it needs at run time, as pip reads it.
        own: version and dependencies of other distributions of this checkout, by their names.
        bundled: what comes from elsewhere and lies in the wheel.
    """
    itself: Component = {
        "type": "library",
        "bom-ref": _pypi_url(name, version),
        "name": name,
        "version": version,
        "description": description,
        "licenses": [{"license": {"id": licence}}],
        "purl": _pypi_url(name, version),
    }
    graph = _Graph(own or {})
    direct = graph.add(dependencies)
    content = json.dumps(_bill(itself, direct, graph, list(bundled)), indent=1)
    inside, beside = folders
    inside.mkdir(exist_ok=True)
    (inside / f"{name}.cdx.json").write_text(content + "\n")
    (beside / f"{name}-{version}.cdx.json").write_text(content + "\n")


def _bill(
    itself: Component, direct: list[str], graph: _Graph, bundled: list[Bundled]
) -> dict[str, Any]:
    libraries = [_library(package, files) for package, files in _by_package(bundled).items()]
    refs = {itself["bom-ref"]: sorted({*direct, *(one["bom-ref"] for one in libraries)})}
    refs |= graph.needs | {one["bom-ref"]: [] for one in libraries}
    bill: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": "",
        "version": 1,
        "metadata": {
            "timestamp": _timestamp(),
            "tools": {
                "components": [
                    {
                        "type": "application",
                        "name": "wheels/build.py",
                        "version": itself["version"],
                    }
                ]
            },
            "component": itself,
        },
        "components": [*graph.components.values(), *libraries],
        "dependencies": [{"ref": ref, "dependsOn": needs} for ref, needs in sorted(refs.items())],
    }
    # The same content has the same number, a different one another.
    digest = hashlib.sha256(json.dumps(bill, sort_keys=True).encode()).digest()
    bill["serialNumber"] = f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=4)}"
    return bill


class _Graph:
    """What distributions need, as it is installed here.

    Attributes:
        components: by package URL.
        needs: the package URLs that each needs itself.
    """

    def __init__(self, own: Mapping[str, tuple[str, list[str]]]) -> None:
        self.components: dict[str, Component] = {}
        self.needs: dict[str, list[str]] = {}
        self._own = own

    def add(self, requirements: list[str]) -> list[str]:
        """Add what these ask for on this machine, and what that needs; returns the package URLs of the former."""
        found = []
        for line in requirements:
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            url = self._add(canonicalize_name(wanted.name), wanted.extras)
            if url is None:
                continue
            found.append(url)
            asked = {"name": "tessera:requirement", "value": str(wanted)}
            properties = self.components[url].setdefault("properties", [])
            if asked not in properties:
                properties.append(asked)
        return sorted(set(found))

    def _add(self, name: str, extras: set[str]) -> str | None:
        if name in self._own:
            version, needs = self._own[name]
            return self._add_component(name, version, {}, needs)
        try:
            about = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            sys.exit(f"wheels/sbom.py: {name} is needed and not installed here; run make install")
        needs = []
        for line in about.requires or []:
            wanted = Requirement(line)
            # An empty extra stands for none.
            if wanted.marker is None or any(
                wanted.marker.evaluate({"extra": extra}) for extra in {"", *extras}
            ):
                wanted.marker = None
                needs.append(str(wanted))
        return self._add_component(name, about.version, _licence(about.metadata), needs)

    def _add_component(self, name: str, version: str, more: Component, needs: list[str]) -> str:
        url = _pypi_url(name, version)
        if url not in self.components:
            self.components[url] = {
                "type": "library",
                "bom-ref": url,
                "name": name,
                "version": version,
                "purl": url,
                **more,
            }
            self.needs[url] = []  # one that needs itself ends here
            self.needs[url] = self.add(needs)
        return url


def _licence(about: Any) -> Component:
    """The licence that a distribution's metadata name, as SPDX has it where they do."""
    if expression := about.get("License-Expression"):
        return {"licenses": [{"expression": expression}]}
    name = (about.get("License") or "").strip()
    if not name or "\n" in name or len(name) > _LONGEST_LICENCE_NAME:
        kinds = [
            line for line in about.get_all("Classifier") or [] if line.startswith("License ::")
        ]
        name = kinds[0].rpartition(":: ")[2] if kinds else ""
    return {"licenses": [{"license": {"name": name}}]} if name else {}


def _by_package(bundled: list[Bundled]) -> dict[str, list[Bundled]]:
    found: dict[str, list[Bundled]] = {}
    for one in sorted(bundled, key=lambda one: (one.package, one.path)):
        found.setdefault(one.package, []).append(one)
    return found


def _library(package: str, files: list[Bundled]) -> Component:
    query = ["dpkg-query", "--show", "--showformat", "${Version}\t${Architecture}", package]
    told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    version, _, architecture = told.partition("\t")
    url = f"pkg:deb/{_system('ID')}/{package}@{quote(version, safe='')}?arch={architecture}"
    url += f"&distro={_system('ID')}-{_system('VERSION_ID')}"
    return {
        "type": "library",
        "bom-ref": url,
        "name": package,
        "version": version,
        "purl": url,
        "components": [
            {
                "type": "file",
                "bom-ref": f"{url}#{one.path}",
                "name": one.path,
                "hashes": [
                    {
                        "alg": "SHA-256",
                        "content": hashlib.sha256(one.file.read_bytes()).hexdigest(),
                    }
                ],
            }
            for one in files
        ],
    }


def _system(key: str) -> str:
    """A value of /etc/os-release."""
    found = re.search(rf'^{key}="?([^"\n]*)"?$', Path("/etc/os-release").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


def _pypi_url(name: str, version: str) -> str:
    return f"pkg:pypi/{canonicalize_name(name)}@{quote(version, safe='')}"


def _timestamp() -> str:
    """Now, or what SOURCE_DATE_EPOCH says: RFC 3339 in UTC."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    at = datetime.fromtimestamp(int(given), timezone.utc) if given else datetime.now(timezone.utc)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
