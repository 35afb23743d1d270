"""The glossary of docs/architecture.md names places that exist, and both servers have the rooms."""

import re

import pytest

from tests import REPOSITORY

CPP = REPOSITORY / "cpp_server/src"


def glossary():
    """(word, place in Python, place in C++) of every row."""
    text = (REPOSITORY / "docs/architecture.md").read_text()
    section = text.partition("\n### In the servers\n")[2].partition("\n#")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    assert rows[0] == ["word", "meaning", "Python", "C++"]
    return [(word, python, cpp) for word, _, python, cpp in rows[2:]]


@pytest.mark.parametrize(("word", "python", "cpp"), glossary(), ids=lambda cell: cell.strip("`"))
def test_the_places_exist(word, python, cpp):
    assert word
    assert (REPOSITORY / python.strip("`")).exists()
    assert (CPP / cpp.strip("`")).exists()


def test_both_servers_have_the_same_rooms():
    rooms = {path.parent.name for path in (REPOSITORY / "serving/server").glob("*/__init__.py")}
    assert rooms == {
        "front",
        "request",
        "batching",
        "model",
        "metrics",
        "repository",
        "follow",
        "security",
        "observe",
    }
    assert rooms <= {path.name for path in CPP.iterdir()}


def test_what_has_a_word_is_called_by_it():
    """The words that the glossary replaced are in neither server."""
    replaced = re.compile(r"\b(Dialect|Gate|Arrivals|Ticket|Catalogue|StatusBoard|BatchQueue)\b")
    sources = [
        *(REPOSITORY / "serving/server").rglob("*.py"),
        *CPP.rglob("*.h"),
        *CPP.rglob("*.cc"),
    ]
    assert len(sources) > 100
    assert [str(path) for path in sources if replaced.search(path.read_text())] == []
