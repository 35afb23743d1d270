"""docs/tutorial.ipynb says what its code does: every cell is run, and prints what is kept there."""

import json
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parent.parent.parent / "docs" / "tutorial.ipynb"

# Runs the cells of a notebook in one namespace and writes what each prints as JSON.
RUN = """
import contextlib, io, json, sys

cells, printed, names = json.load(sys.stdin), [], {"__name__": "__main__"}
for number, source in enumerate(cells):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, f"cell {number}", "exec"), names)
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


def code_cells():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_every_cell_prints_what_the_notebook_shows():
    cells = code_cells()
    assert len(cells) > 15
    sources = ["".join(cell["source"]) for cell in cells]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN],
        input=json.dumps(sources),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kept = ["".join(text for out in cell["outputs"] for text in out["text"]) for cell in cells]
    assert json.loads(done.stdout) == kept


def test_cells_are_numbered_as_they_were_run():
    assert [cell["execution_count"] for cell in code_cells()] == list(
        range(1, len(code_cells()) + 1)
    )
