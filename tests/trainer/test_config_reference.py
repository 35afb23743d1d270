"""The keys of a config as they are described: all of them, each with a meaning, the page current."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from tessera.cli import main
from tessera.errors import UserError
from tessera.training.config import ExperimentConfig
from tessera.training.config_reference.__main__ import PAGE
from tessera.training.config_reference.collect import collect
from tessera.training.config_reference.docstrings import field_texts, plain
from tessera.training.config_reference.render import WRITE_COMMAND, markdown, terminal
from tessera.training.typed_config import known_keys
from tests import REPOSITORY

# Made when the tests are collected: later ones may register architectures of their own.
SECTIONS = collect(ExperimentConfig)
KNOWN = set(known_keys(ExperimentConfig))


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == markdown(SECTIONS), (
        f"docs/config.md is not what the config dataclasses say: run {WRITE_COMMAND}"
    )
    target = WRITE_COMMAND.removeprefix("make ")
    assert f"\n{target}:" in (REPOSITORY / "Makefile").read_text()


def test_every_key_that_a_config_may_hold_is_described_and_no_other():
    described = {key.key for section in SECTIONS for key in section.keys}
    described |= {section.key for section in SECTIONS}
    registered = {key for key in described if {"transform", "trackers"} & set(key[:-1])}
    assert len(registered) > 12
    # A mapping's section stands under NAME, which known_keys has no key of its own for.
    assert {key for key in described if key[-1] != "NAME"} - registered == KNOWN


def test_every_key_has_a_meaning():
    without = [".".join(key.key) for s in SECTIONS for key in s.keys if not key.meaning]
    assert not without, f"describe in the Attributes of their dataclasses: {without}"
    assert [s.title for s in SECTIONS if not s.summary] == []


def test_no_word_of_python_s_is_left():
    texts = [s.summary for s in SECTIONS] + [key.meaning for s in SECTIONS for key in s.keys]
    assert [text for text in texts if re.search(r"\bNone\b|``|\bTrue\b|\bFalse\b", text)] == []


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Settings of a part.

    Attributes:
        size (rows): how large; None: as it comes.
    """

    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outer(Inner):
    """A section.

    More of it.

    Attributes:
        mode: ``a`` or ``b``,
            over two lines.
        parts: see `Inner`.
        free: anything at all.

    Raises:
        UserError: never.
    """

    mode: Literal["a", "b"] | None = None
    parts: dict[str, Inner] = field(default_factory=dict)
    free: tuple[Any, ...] = ()
    must: tuple[int, ...] = dataclasses.field()


@dataclass(frozen=True, kw_only=True)
class Root:
    """What a whole file holds."""

    outer: Outer


def test_what_is_read_of_a_dataclass():
    outer, inner = collect(Root)
    assert (outer.title, outer.summary) == ("outer", "A section.\n\nMore of it.")
    keys = {key.key[-1]: key for key in outer.keys}
    assert keys["mode"].choices == ("a", "b")
    assert keys["mode"].meaning == "`a` or `b`, over two lines."
    assert (keys["mode"].type, keys["mode"].default) == ("a choice or null", "null")
    assert keys["parts"].meaning == "see `outer.parts.NAME`."
    assert (keys["parts"].type, keys["parts"].default) == ("mapping NAME: section", "{}")
    assert (keys["must"].type, keys["must"].default) == ("list, each integer", None)
    assert keys["size"].unit == "rows"  # of the base
    assert inner.key == ("outer", "parts", "NAME")
    (size,) = inner.keys
    assert (size.key, size.meaning) == (
        ("outer", "parts", "NAME", "size"),
        "how large; null: as it comes.",
    )


def test_a_subclass_may_say_more_of_a_field():
    @dataclass(frozen=True, kw_only=True)
    class Other(Inner):
        """Other.

        Attributes:
            size (ids): another meaning.
        """

    assert field_texts(Other)["size"].unit == "ids"
    assert plain("``None`` and None") == "`None` and null"


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ("train.batch_size", ["train.batch_size  (integer; samples; default 1024)"]),
        ("model.tables.item.rows", ["model.tables.NAME.rows"]),
        ("train.schedule", ["train.schedule.kind", "one of constant, linear, cosine"]),
        ("model.arch=din", ["model, arch: din", "model.attention "]),
        ("data.columns.price.transform.clip", ["transform.clip.bounds", "required"]),
        ("data.format=table", ["data.split_column"]),
    ],
)
def test_what_is_asked_for_is_printed(asked, parts, capsys):
    assert main(["train", "--help-config", asked]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in parts)
    assert "train.seed" not in out


def test_every_section_is_printed_without_a_key(capsys):
    assert main(["train", "--help-config"]) == 0
    out = capsys.readouterr().out
    assert all(section.title in out for section in SECTIONS)


def test_the_width_of_the_terminal_is_kept():
    lines = terminal(SECTIONS, "train", width=70).splitlines()
    assert max(map(len, lines)) <= 70


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ("train.batchsize", "did you mean train.batch_size?"),
        ("batch_size", "did you mean train.batch_size?"),
        ("model.tables.item.row", "did you mean model.tables.item.rows?"),
        ("model.arch=don", "model.arch=din"),
        ("zzz", "leave the key out to see all"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(asked, remedy):
    with pytest.raises(UserError, match=re.escape(remedy)):
        terminal(SECTIONS, asked)
