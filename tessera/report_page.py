"""Pages of HTML that need nothing else: one style for all of them, and what reports share.

``page.css`` is the style of every page that Tessera writes, and of both servers' status page; ``page_colours.css`` has
its colours.  ``report_page.html`` is
the frame that the template of a report extends, ``page_parts.html`` has the macros for its tables, and a template may
use these colours alone, so that a page follows the reader's choice of light or dark.  A page is as wide
as its window: what is wider (a table, a text in fixed width) scrolls in a box of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

import tessera

_HERE = Path(__file__).parent


def page_style() -> str:
    """The style of a page: ``page_colours.css`` and ``page.css``."""
    return page_colours() + (_HERE / "page.css").read_text(encoding="utf-8")


def page_colours() -> str:
    """The text of ``page_colours.css``, which a picture that stands alone needs, too."""
    return (_HERE / "page_colours.css").read_text(encoding="utf-8")


def render_page(template: Path, **values: Any) -> str:
    """The page of a template, which extends ``report_page.html`` and is given ``version``, too."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader([template.parent, _HERE]),
    )
    return environment.get_template(template.name).render(
        version=tessera.__version__, page_style=page_style(), **values
    )
