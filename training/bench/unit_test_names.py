"""Says which tests of a file use private names of the library that they test.

A test uses a private name if its own body, or a function or method of the same file that it calls,

* takes an attribute with a leading underscore of anything but `self`, `cls` and `super()`;
* uses a name with a leading underscore that the file imports from the library;
* has a string that is a dotted path of the library with such a name in it, as
  `unittest.mock.patch` takes it.

The names are looked at in the source, not in a run: a helper of another file is not followed.
"""

import ast
import re
from collections.abc import Iterator

LIBRARY = "torchrec"
_PRIVATE = re.compile(r"_(?!_).*")
_PRIVATE_PATH = re.compile(rf"{LIBRARY}(\.\w+)*\._(?!_)\w+(\.\w+)*")


def tests_of_private_names(source: str) -> set[str]:
    """Returns the tests of a file, as `Class.method` or `function`, that use private names.

    Raises:
        SyntaxError: The source is not Python.
    """
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIBRARY)
        for alias in node.names
        if _PRIVATE.fullmatch(alias.name)
    }
    bodies = dict(_functions(tree))
    private = {name for name, body in bodies.items() if _uses_private(body, imported)}
    while True:
        callers = {
            name
            for name, body in bodies.items()
            if name not in private and _called(name, body) & private
        }
        if not callers:
            return {name for name in private if name.rpartition(".")[2].startswith("test")}
        private |= callers


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yields the functions and methods of a file with their names."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def _uses_private(body: ast.AST, imported: set[str]) -> bool:
    """Says whether a function uses a private name itself."""
    return any(_is_private(node, imported) for node in ast.walk(body))


def _is_private(node: ast.AST, imported: set[str]) -> bool:
    """Says whether one expression is a private name."""
    if isinstance(node, ast.Attribute) and _PRIVATE.fullmatch(node.attr):
        owner = node.value
        if isinstance(owner, ast.Call):
            return getattr(owner.func, "id", "") != "super"
        return not (isinstance(owner, ast.Name) and owner.id in ("self", "cls"))
    if isinstance(node, ast.Name):
        return node.id in imported
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and _PRIVATE_PATH.fullmatch(text) is not None


def _called(name: str, body: ast.AST) -> set[str]:
    """Returns the functions of the file, and the methods of the same class, that a function names."""
    owner = name.rpartition(".")[0]
    called = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    methods = {
        f"{owner}.{node.attr}"
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls", owner)
    }
    return called | methods
