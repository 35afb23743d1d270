"""Which modules the distribution of clients has: tessera.serving.client and all that it imports."""

from __future__ import annotations

import ast
from pathlib import Path


def client_modules(root: Path) -> frozenset[str]:
    """The dotted names of the clients' modules and protocols, and of what importing them imports."""
    waiting = [
        f"tessera.serving.{folder}.{path.stem}"
        for folder in ("client", "protocol")
        for path in (root / "tessera" / "serving" / folder).glob("*.py")
        if path.stem != "__init__"
    ]
    found: set[str] = set()
    while waiting:
        module = waiting.pop()
        path = _file_of(root, module)
        if module in found or path is None:
            continue
        found.add(module)
        waiting.append(module.rpartition(".")[0])
        for statement in ast.parse(path.read_text()).body:
            waiting += [name for name in _imports(statement) if name.split(".")[0] == "tessera"]
    return frozenset(found)


def _file_of(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if module and candidate.is_file():
            return candidate
    return None


def _imports(statement: ast.stmt) -> list[str]:
    """What a statement at the top of a module imports; of ``from a import b`` both a and a.b."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module:
        inside = [f"{statement.module}.{alias.name}" for alias in statement.names]
        return [statement.module, *inside]
    return []
