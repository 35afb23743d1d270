"""The keys of a config as text for a terminal, and as the page docs/config.md."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from tessera.errors import UserError
from tessera.training.config_reference.collect import NAME, KeyHelp, Section
from tessera.training.config_source import Key
from tessera.training.typed_config import nearest_key

WRITE_COMMAND = "make config-page"

_HEAD = f"""# Keys of a training config

<!-- Written by `{WRITE_COMMAND}` from the dataclasses that read a config; do not edit. -->

Every key that `tessera train --config FILE` knows, also shown by `tessera train --help-config [KEY]`. A file has the
sections below; `KEY=VALUE` on the command line changes a single key, and its value is YAML: `train.epochs=3`,
`'model.over_layers=[128, 64]'` (in quotes, as shells divide words at spaces and read brackets),
`'model.tables={{item: {{rows: 5000}}}}'`. In a key, `{NAME}` stands for a name of yours. A key without a default must be
given, if its section is used. The keys of a section with `arch:` or `format:` in its title are only for that one and come
beside those of the section `model` or `data`.
"""


def markdown(sections: Sequence[Section]) -> str:
    """The page, with a table for each section."""
    parts = [_HEAD]
    for section in sections:
        level = "##" if len(section.key) == 1 and section.variant is None else "###"
        parts.append(f"{level} {section.title}\n")
        if section.summary:
            parts.append(f"{section.summary}\n")
        if section.keys:
            rows = [
                f"| `{_own_name(section, key)}` | {_cell(_type(key))} | {_cell(_default(key))} |"
                f" {_cell(_sentence(key.meaning))} |"
                for key in section.keys
            ]
            head = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
            parts.append("\n".join([*head, *rows]) + "\n")
    return "\n".join(parts)


def _own_name(section: Section, key: KeyHelp) -> str:
    return ".".join(key.key[len(section.key) :])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _type(key: KeyHelp) -> str:
    words = key.type
    if key.choices:
        options = ", ".join(f"`{choice}`" for choice in key.choices)
        words = options if words == "text" else words.replace("a choice", options)
    return f"{words}; {key.unit}" if key.unit else words


def _default(key: KeyHelp) -> str:
    return "required" if key.default is None else f"`{key.default}`"


def _sentence(text: str) -> str:
    """``text`` with a capital first letter, if it begins with a word."""
    return text[:1].upper() + text[1:]


def terminal(sections: Sequence[Section], asked: str, *, width: int | None = None) -> str:
    """What ``--help-config ASKED`` prints; with an empty ``asked`` every section.

    Args:
        sections: all of them.
        asked: a key, a section, or ``arch=din`` behind a section's name for a variant alone;
            a mapping's names may be any names.
        width: columns of the terminal; None: as it says itself.

    Raises:
        UserError: there is no such key; the message says the nearest one.
    """
    columns = max(60, width or shutil.get_terminal_size().columns)
    found = _asked(sections, asked) if asked else list(sections)
    return "\n\n".join(_section_text(section, columns) for section in found)


def _asked(sections: Sequence[Section], asked: str) -> list[Section]:
    dotted, equals, name = asked.partition("=")
    key = tuple(dotted.split("."))
    if equals:
        variants = [s for s in sections if s.variant == (key[-1], name) and s.key == key[:-1]]
        if not variants:
            known = [
                f"{'.'.join((*s.key, s.variant[0]))}={s.variant[1]}" for s in sections if s.variant
            ]
            raise UserError(f"--help-config {asked}: give one of {', '.join(known)}")
        return variants
    whole = [section for section in sections if _fits(key, section.key[: len(key)])]
    alone = [
        Section(key=section.key, variant=section.variant, summary="", keys=(own,))
        for section in sections
        for own in section.keys
        if _fits(key, own.key)
    ]
    if not whole and not alone:
        keys = [own.key for section in sections for own in section.keys]
        keys += [section.key for section in sections]
        siblings = [other[-1] for other in keys if _fits(key[:-1], other[:-1])]
        near = nearest_key(key, siblings, list(dict.fromkeys(keys)))
        remedy = f"did you mean {near}?" if near else "leave the key out to see all"
        raise UserError(f"--help-config {asked}: no such key; {remedy}")
    return alone + whole


def _fits(asked: Key, key: Key) -> bool:
    """Whether ``asked`` is ``key``, whose ``NAME`` is any name."""
    return len(asked) == len(key) and all(
        part in (own, NAME) or own == NAME for part, own in zip(asked, key, strict=True)
    )


def _section_text(section: Section, width: int) -> str:
    lines = [section.title]
    for paragraph in filter(None, section.summary.split("\n\n")):
        lines += _wrapped(paragraph, width, indent=2)
    for key in section.keys:
        default = "required" if key.default is None else f"default {key.default}"
        words = key.type
        if key.choices:
            options = ", ".join(key.choices)
            words = (
                f"one of {options}"
                if words == "text"
                else words.replace("a choice", f"one of {options}")
            )
        facts = "; ".join(filter(None, [words, key.unit, default]))
        lines += ["", *_wrapped(f"{'.'.join(key.key)}  ({facts})", width, indent=2, further=6)]
        lines += _wrapped(_sentence(key.meaning), width, indent=6)
    return "\n".join(lines)


def _wrapped(text: str, width: int, *, indent: int, further: int | None = None) -> Iterable[str]:
    return textwrap.wrap(
        text.replace("`", ""),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if further is None else further),
        break_on_hyphens=False,
        break_long_words=False,
    )
