"""Moves the source of a TorchRec program to Tessera: its imports, and nothing else.

`moved` replaces the package `torchrec` by `tessera.training` in import statements and in strings
that are dotted paths of it (what `unittest.mock.patch` takes). Every other character stays.
`cells_as_source` makes a program of a notebook.
"""

import ast
import json
import re
from collections.abc import Iterator

LIBRARY = "torchrec"
HOME = "tessera.training"
_PATH = re.compile(rf"{LIBRARY}(\.\w+)+")


def moved(source: str) -> str:
    """Returns the Python source with `torchrec` imported from `tessera.training`.

    `import torchrec` binds the name `torchrec` as before, and `import torchrec.a.b` binds it too.

    Raises:
        SyntaxError: The source is not Python.
    """
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    text = source.encode()
    edits = []
    for node in ast.walk(ast.parse(source)):
        for new in _new_text(node, source):
            assert isinstance(node, ast.stmt | ast.expr)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            edits.append((begin, end, new.encode()))
    for begin, end, new_bytes in sorted(edits, reverse=True):
        text = text[:begin] + new_bytes + text[end:]
    return text.decode()


def _new_text(node: ast.AST, source: str) -> Iterator[str]:
    """Yields the text that takes the node's place, where the node names the library."""
    if isinstance(node, ast.Import) and any(_inside(alias.name) for alias in node.names):
        yield "import " + ", ".join(name for alias in node.names for name in _names(alias))
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and _inside(node.module or ""):
        segment = ast.get_source_segment(source, node)
        assert segment is not None
        yield re.sub(rf"^from(\s+){LIBRARY}\b", rf"from\1{HOME}", segment)
    elif (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _PATH.fullmatch(node.value)  # before its text is looked for, which takes long
    ):
        segment = ast.get_source_segment(source, node) or ""
        if segment[1:-1] == node.value:
            yield segment[0] + HOME + node.value.removeprefix(LIBRARY) + segment[-1]


def _inside(module: str) -> bool:
    """Says whether the module is the library or one of its modules."""
    return module == LIBRARY or module.startswith(LIBRARY + ".")


def _names(alias: ast.alias) -> list[str]:
    """Returns what stands for one name of an import statement."""
    given = f" as {alias.asname}" if alias.asname else ""
    if not _inside(alias.name):
        return [alias.name + given]
    path = HOME + alias.name.removeprefix(LIBRARY)
    if alias.asname:
        return [path + given]
    whole = f"{HOME} as {LIBRARY}"
    return [whole] if path == HOME else [whole, path]


def cells_as_source(notebook: str) -> str:
    """Returns the code cells of a notebook (its JSON text) as one program.

    Lines for the notebook's own shell (`!pip install ...`, `%matplotlib ...`) are left out.
    """
    cells = json.loads(notebook)["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    lines = [line for source in sources for line in source.splitlines()]
    return "\n".join(line for line in lines if not line.lstrip().startswith(("!", "%"))) + "\n"
