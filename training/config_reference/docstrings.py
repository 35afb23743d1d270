"""What the docstrings of config dataclasses say: a summary, and a meaning for each field."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

_ENTRY = re.compile(r"^(?P<name>\w+)(?: \((?P<unit>[^)]+)\))?: (?P<meaning>.*)$")
_MODULE_TAG = re.compile(r"^``[^`]+``: (?P<meaning>.*)$", re.DOTALL)
_NAME_FIRST = re.compile(r"^`[\w.]+`; ")
_CODE = re.compile(r"``([^`]+)``")
_SECTION_ENDS = ("Raises:", "Attributes:", "Source:")


@dataclass(frozen=True, kw_only=True)
class FieldText:
    """What the ``Attributes:`` of a docstring say of a field: ``name (unit): meaning``."""

    meaning: str
    unit: str | None = None


def field_texts(cls: type) -> dict[str, FieldText]:
    """By field, what the class or the nearest of its bases says of it."""
    found: dict[str, FieldText] = {}
    for base in reversed(cls.__mro__):
        found |= _attributes(vars(base).get("__doc__") or "")
    return found


def summary(cls: type) -> str:
    """The paragraphs of a class's own docstring before its ``Attributes:``, as plain text."""
    lines = inspect.cleandoc(vars(cls).get("__doc__") or "").splitlines()
    end = next((n for n, line in enumerate(lines) if line in _SECTION_ENDS), len(lines))
    paragraphs = "\n".join(lines[:end]).strip().split("\n\n")
    return plain("\n\n".join(" ".join(part.split()) for part in paragraphs))


def variant_summary(cls: type) -> str:
    """The first sentence of the module of a variant, without the tag before it, and its class's own.

    A class's docstring often begins with the name of what it builds, which readers of YAML do not
    need.
    """
    module = inspect.getmodule(cls)
    first = ((module and module.__doc__) or "").strip().partition("\n\n")[0]
    match = _MODULE_TAG.match(" ".join(first.split()))
    about = _NAME_FIRST.sub("", summary(cls))
    parts = [plain(match["meaning"]) if match else "", about]
    return "\n\n".join(part[:1].upper() + part[1:] for part in parts if part)


def plain(text: str) -> str:
    """Docstring text as a reader of YAML expects it: null for None, single backticks for code."""
    return re.sub(r"(?<![\w`])None(?![\w`])", "null", _CODE.sub(r"`\1`", text))


def _attributes(text: str) -> dict[str, FieldText]:
    lines = inspect.cleandoc(text).splitlines()
    if "Attributes:" not in lines:
        return {}
    found: dict[str, FieldText] = {}
    name = None
    for line in lines[lines.index("Attributes:") + 1 :]:
        if line and not line.startswith(" "):
            break
        entry = _ENTRY.match(line[4:]) if len(line) > 4 and line[4] != " " else None
        if entry is not None:
            name = entry["name"]
            found[name] = FieldText(meaning=plain(entry["meaning"]), unit=entry["unit"])
        elif name is not None and line.strip():
            joined = f"{found[name].meaning} {line.strip()}"
            found[name] = FieldText(meaning=plain(joined), unit=found[name].unit)
    return found
