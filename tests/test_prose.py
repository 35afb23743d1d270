"""Plain English in docstrings, comments, errors and pages: phrases that readers stumbled over.

Three kinds: "is no X" for "is not an X"; docstrings and comments without a sentence, which tell no
more than the name beside them; and entries that only point ("x: likewise.").
"""

import ast
import re

import pytest

from tests import REPOSITORY
from tests.statements import statements
from tests.tracked import tracked_files

SUFFIXES = (".py", ".cc", ".h", ".cu", ".cuh", ".md", ".proto")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")

# "There is no table" is plain English, and so are "is no longer" and "is no faster than".
IS_NO = re.compile(
    r"(?<!\bthere )\b(?:is|are|was|were) no (?!longer\b|\w+ than\b|(?:fast|slow|larg|small|long)er\b|better\b)\S+",
    re.IGNORECASE,
)
POINTER = re.compile(r": (?:likewise|see there)\b|\bsee there\b", re.IGNORECASE)
STUB = re.compile(
    r"""(?x)
    \W* \w \W*                                                   # R.
    | `{1,2} [^`]* `{1,2} \W*                                    # ``[B, D]``.
    | (?: The | A | An | One | All | Each | Every | Whole ) \s \S+    # The tables.
    | (?: Its | Their ) (?: \s \S+ ){1,4}                         # Its outputs.
    | (?: Of | Those | Back \s to | Without ) \s (?s: .* )          # Of the vectors.
    | The \s (?: same | other | reverse | opposite | rest ) (?: \s (?: of | for | way ) .{0,20} )?
    | See \s (?: there | above | below | the \s module ) .{0,20}    # See there.
    | Likewise .{0,20}
    """
)


def plain_lines(text):
    """The lines without what marks a comment, a quotation or a string."""
    return [
        re.sub(r"^\s*(?:#+|//+|>|[rf]?\"+)?\s*|[\s\\\"]+$", "", line) for line in text.split("\n")
    ]


def phrases(text):
    """Line and phrase of what is wrong in any text, also where the phrase goes over a line's end."""
    lines = plain_lines(text)
    joined = " ".join(lines)
    ends = [len(line) + 1 for line in lines]
    for pattern in (IS_NO, POINTER):
        for match in pattern.finditer(joined):
            position, number = match.start(), 0
            while position >= ends[number]:
                position -= ends[number]
                number += 1
            yield number + 1, match[0]


def docstrings(text):
    """Line and text of every docstring of a Python file, and of strings below a name."""
    for node in statements(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in node.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(words))):
                        yield statement.lineno, words


def lone_comments(text):
    """Line and text of every comment of C++ that fills one line, between lines of another kind."""
    lines = ["", *text.split("\n"), ""]
    for number in range(1, len(lines) - 1):
        before, here, after = (line.strip() for line in lines[number - 1 : number + 2])
        if here.startswith("//") and not before.startswith("//") and not after.startswith("//"):
            yield number, here


def stubs(name, text):
    found = docstrings(text) if name.endswith(".py") else lone_comments(text)
    for line, words in found:
        sentence = re.sub(r"^[/\s]+", "", words).strip()
        if STUB.fullmatch(sentence.rstrip(".")):
            yield line, sentence


@pytest.mark.parametrize(
    "text",
    [
        "'x' is no plan",
        "# ids that are\n    # no rows",
        "f'{x} is no {kind}'",
        'f"{a} is "\n"no number"',
        "This was no one",
    ],
)
def test_is_no_is_found(text):
    assert list(phrases(text))


@pytest.mark.parametrize(
    "text",
    [
        "there is no plan",
        "is no longer",
        "it is no faster",
        "are no wider than",
        "is not a plan",
        "is\n\nno plan",
    ],
)
def test_plain_english_is_left_alone(text):
    assert not list(phrases(text))


@pytest.mark.parametrize(
    "text",
    [
        "R.",
        "``[B, D]``.",
        "Its outputs.",
        "See there.",
        "Of the vectors.",
        "Back to ones.",
        "The tables.",
    ],
)
def test_a_stub_is_found(text):
    assert list(stubs("a.py", f'def f():\n    """{text}"""\n')) == [(2, text)]
    assert list(stubs("a.h", f"int a;\n// {text}\nint b;\n")) == [(2, text)]


@pytest.mark.parametrize(
    "text",
    [
        "Refuse it.",
        "The rows of this rank.",
        "The same batch on ``device``.",
        "Whether it fits.",
        "See `Owner`.",
    ],
)
def test_a_sentence_is_no_stub(text):
    assert not list(stubs("a.py", f'def f():\n    """{text}"""\n'))


def test_the_tree_is_written_in_plain_sentences():
    found = []
    for name in tracked_files():
        path = REPOSITORY / name
        own = name == "tests/test_prose.py"  # it quotes them
        if path.is_symlink() or not name.endswith(SUFFIXES) or GENERATED.search(name) or own:
            continue
        text = path.read_text()
        places = list(phrases(text))
        if not name.endswith(".md"):
            places += stubs(name, text)
        found += [f"{name}:{line}: {words}" for line, words in sorted(places)]
    assert not found, "\n".join(found)
