"""Pages of HTML that need nothing else: a template beside its code, with the head that all reports share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

import tessera

_HERE = Path(__file__).parent


def render_page(template: Path, **values: Any) -> str:
    """The page of a template, which extends ``report_page.html`` and is given ``version``, too."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader([template.parent, _HERE]),
    )
    return environment.get_template(template.name).render(version=tessera.__version__, **values)
