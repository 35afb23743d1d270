"""docs/tutorial.ipynb says what its code does: every cell is run, and prints what is kept there."""

import json
from pathlib import Path

from tests import forked_program

NOTEBOOK = Path(__file__).resolve().parent.parent.parent / "docs" / "tutorial.ipynb"

# Runs the cells of a notebook in one namespace and writes what each prints as JSON.
RUN = """
import contextlib, io, json, sys, warnings

warnings.simplefilter("ignore")
with open(sys.argv[1]) as file:
    cells = json.load(file)
printed, names = [], {"__name__": "__main__"}
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


def test_every_cell_prints_what_the_notebook_shows(tmp_path):
    cells = code_cells()
    assert len(cells) > 15
    sources = ["".join(cell["source"]) for cell in cells]
    (tmp_path / "cells.json").write_text(json.dumps(sources))
    done = forked_program.run([tmp_path / "cells.json"], code=RUN)
    assert done.returncode == 0, done.stderr
    kept = ["".join(text for out in cell["outputs"] for text in out["text"]) for cell in cells]
    assert json.loads(done.stdout) == kept


def test_cells_are_numbered_as_they_were_run():
    assert [cell["execution_count"] for cell in code_cells()] == list(
        range(1, len(code_cells()) + 1)
    )
