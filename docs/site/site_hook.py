"""What MkDocs is told beside mkdocs.yml: pages from elsewhere in the repository, and links that hold on the site.

Pages are written to be read in the repository, so that their links are paths in it.  On the site

* a link to a page of the site, wherever its file lies, becomes one to that page;
* a link to any other file of the repository becomes one to a page that shows this file, and a link to a folder
  one to a list of its files;
* a notebook becomes a page;
* the names that a public package offers become pages of the API, with their docstrings.

A link to what does not exist is left as it is, and MkDocs, which is told to be strict, refuses it.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]

ELSEWHERE = {
    "tour.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "cpp-server.md": "cpp_server/README.md",
    "format.md": "serving/FORMAT.md",
    "kernels-notes.md": "kernels/NOTES.md",
    "load-tests.md": "load_tests/README.md",
    "tutorial.md": "docs/tutorial.ipynb",
}
"""By page of the site: the file of the repository that it shows."""

TITLES = {"tour.md": "The tour", "load-tests.md": "Load tests"}
"""Titles in the navigation that the page's own heading does not give."""

_DISTRIBUTED = "tessera.training.distributed"
API = {
    "training": (
        "Training",
        ("tessera.training", "tessera.training.optim", "tessera.training.data"),
    ),
    "distributed": (
        "Many ranks",
        (_DISTRIBUTED, f"{_DISTRIBUTED}.planner", f"{_DISTRIBUTED}.checkpoint"),
    ),
    "serving": ("Packaging", ("tessera.serving", "tessera.errors")),
    "client": ("Client", ("tessera.serving.client",)),
    "engine": ("Engine", ("tessera.serving.engine",)),
}
"""By page below ``api/``: its title and the packages whose public names it has."""

LANGUAGES = {".py": "python", ".h": "cpp", ".cc": "cpp", ".yaml": "yaml", ".json": "json"}
LANGUAGES |= {
    ".proto": "protobuf",
    ".service": "ini",
    ".Containerfile": "docker",
    ".md": "markdown",
}

# Code, where brackets are none of a link's; else the target of a link.
_LINKS = re.compile(
    r"(?P<code>^(?P<fence>```+).*?^(?P=fence)$|(?P<ticks>`+).+?(?P=ticks))|\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def relinked(markdown: str, change: Callable[[str], str]) -> str:
    """``markdown`` with the targets of its links, code aside, as ``change`` makes them."""

    def one(match: re.Match[str]) -> str:
        return match[0] if match["code"] else f"]({change(match['target'])})"

    return _LINKS.sub(one, markdown)


def site_page(path: str) -> str | None:
    """The site's page that shows ``path`` of the repository; None where there is no such file or folder."""
    for page, shown in ELSEWHERE.items():
        if shown == path:
            return page
    if not (ROOT / path).exists():
        return None
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def site_link(target: str, page: str, origin: str) -> str:
    """A link of ``page``, which shows the file ``origin`` of the repository, as it has to be on the site."""
    path = linked_path(target, origin)
    shown = None if path is None else site_page(path)
    if shown is None:
        return target
    _, mark, anchor = target.partition("#")
    return posixpath.relpath(shown, posixpath.dirname(page) or ".") + mark + anchor


def linked_path(target: str, origin: str) -> str | None:
    """The repository's path that a link of its file ``origin`` means; None for an address or an anchor alone."""
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))


def linked_sources(markdown: str, origin: str) -> set[str]:
    """The files and folders of the repository that ``markdown`` links to and that have no other page."""
    found = set()

    def look(target: str) -> str:
        path = linked_path(target, origin)
        if path is not None and (site_page(path) or "").startswith("source/"):
            found.add(path)
        return target

    relinked(markdown, look)
    return found


def source_page(path: str) -> str:
    """A page that shows a file, or lists those of a folder."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    place = ROOT / path
    if place.is_dir():
        rows = [f"- [{name}]({posixpath.basename(path)}/{name}.md)" for name in folder_files(place)]
        return head + "\n".join(rows) + "\n"
    fence = "`" * 6
    return f"{head}{fence}{LANGUAGES.get(place.suffix, 'text')}\n{place.read_text(encoding='utf-8')}\n{fence}\n"


def folder_files(folder: Path) -> list[str]:
    """The names of the sources in ``folder``, without those below it."""
    return sorted(one.name for one in folder.iterdir() if one.is_file() and one.suffix in LANGUAGES)


def notebook_page(text: str) -> str:
    """The cells of a notebook as Markdown, each with what it printed."""
    made = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            made.append(source)
            continue
        made.append(f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", ())) for output in cell["outputs"])
        if printed:
            made.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(made) + "\n"


def public_names(module: str) -> list[tuple[str, str]]:
    """What ``module`` offers: each name with the module that it comes from, in the order of the source."""
    place = ROOT / module.replace(".", "/")
    tree = ast.parse(
        (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()
    )
    if not place.is_dir():
        kinds = (ast.ClassDef, ast.FunctionDef)
        own = [node.name for node in tree.body if isinstance(node, kinds)]
        return [(module, name) for name in own if not name.startswith("_")]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tessera."):
            names = [alias.asname or alias.name for alias in node.names]
            found += [(node.module or "", name) for name in names if name not in _HELPERS]
    return found


_HELPERS = ("lazy_names", "offer_operators")


def api_pages() -> dict[str, str]:
    """The pages of the API by their names: every public name of `API`'s modules, where it first occurs."""
    pages, seen = {}, set()
    for page, (title, modules) in API.items():
        lines = [f"# API: {title}", ""]
        for module in modules:
            new = [one for one in public_names(module) if one not in seen]
            lines += [f"## {module}", "", *(f"::: {home}.{name}\n" for home, name in new)]
            seen |= set(new)
        pages[f"api/{page}.md"] = "\n".join(lines)
    return pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors as code hosts make them, since the links in the repository are written for those."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose files lie elsewhere, and those of the sources that pages link to."""
    sources = set()
    for file in files.documentation_pages():
        sources |= linked_sources(file.content_string, f"docs/{file.src_uri}")
    for page, origin in ELSEWHERE.items():
        text = (ROOT / origin).read_text(encoding="utf-8")
        if origin.endswith(".ipynb"):
            text = notebook_page(text)
        sources |= linked_sources(text, origin)
        if page in TITLES:
            text = f"---\ntitle: {TITLES[page]}\n---\n\n{text}"
        files.append(File.generated(config, page, content=text))
    for folder in [path for path in sources if (ROOT / path).is_dir()]:
        sources |= {f"{folder}/{name}" for name in folder_files(ROOT / folder)}
    for path in sorted(sources):
        files.append(File.generated(config, f"source/{path}.md", content=source_page(path)))
    for page, text in api_pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they hold on the site; pages that show sources or docstrings have none of ours."""
    del config, files
    uri = page.file.src_uri
    if uri.startswith(("source/", "api/")):
        return markdown
    origin = ELSEWHERE.get(uri, f"docs/{uri}")
    return relinked(markdown, lambda target: site_link(target, uri, origin))
