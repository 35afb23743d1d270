"""The site has every page, its hook makes links that hold, and links hold where the pages lie, too.

`make docs`, which `make check` runs, builds the site itself and refuses what does not hold in it.
"""

import importlib
import importlib.util
import re

import pytest
import yaml

from tests import REPOSITORY
from tests.tracked import tracked_files

CONFIG = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())


@pytest.fixture(scope="module")
def hook():
    pytest.importorskip("mkdocs", reason="MkDocs is not installed (extra docs)")
    path = REPOSITORY / "docs/site/site_hook.py"
    spec = importlib.util.spec_from_file_location("site_hook", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages_of(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from pages_of(below)


def test_the_navigation_has_every_page_once(hook):
    listed = list(pages_of(CONFIG["nav"]))
    assert len(listed) == len(set(listed))
    lying = {path.name for path in (REPOSITORY / "docs").glob("*.md")}
    made = set(hook.ELSEWHERE) | {f"api/{page}.md" for page in hook.API}
    assert set(listed) == lying | made


def test_every_page_that_git_holds_is_on_the_site(hook):
    held = {name for name in tracked_files() if name.endswith((".md", ".ipynb"))}
    shown = {f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")}
    assert held == shown | set(hook.ELSEWHERE.values())


def test_broken_links_end_the_build():
    links = CONFIG["validation"]["links"]
    assert {"not_found", "anchors", "absolute_links", "unrecognized_links"} <= links.keys()
    assert {*links.values(), *CONFIG["validation"]["nav"].values()} == {"warn"}
    assert "mkdocs --quiet build --strict" in (REPOSITORY / "Makefile").read_text()


@pytest.mark.parametrize(
    ("target", "page", "origin", "link"),
    [
        ("client.md#rows", "rest.md", "docs/rest.md", "client.md#rows"),
        ("../serving/FORMAT.md#commits", "rest.md", "docs/rest.md", "format.md#commits"),
        ("docs/rest.md", "tour.md", "README.md", "rest.md"),
        ("../docs/rest.md", "cpp-server.md", "cpp_server/README.md", "rest.md"),
        ("tutorial.ipynb", "torchrec.md", "docs/torchrec.md", "tutorial.md"),
        (
            "../protos/predictor.proto",
            "client.md",
            "docs/client.md",
            "source/protos/predictor.proto.md",
        ),
        ("openapi.yaml", "rest.md", "docs/rest.md", "openapi.yaml"),
        ("#shared-memory", "rest.md", "docs/rest.md", "#shared-memory"),
        ("https://optuna.org", "tuning.md", "docs/tuning.md", "https://optuna.org"),
        ("../nosuch.py", "rest.md", "docs/rest.md", "../nosuch.py"),
    ],
)
def test_links_as_they_are_on_the_site(hook, target, page, origin, link):
    assert hook.site_link(target, page, origin) == link


def test_code_has_no_links(hook):
    text = "[a `b](x)` c](y)\n```\nf[0](x)\n```\n``g[1](`x)`` [h](z)"
    changed = "[a `b](x)` c](Y)\n```\nf[0](x)\n```\n``g[1](`x)`` [h](Z)"
    assert hook.relinked(text, str.upper) == changed


def test_what_links_need_is_found(hook):
    text = (
        "[a](../kernels/row_types.py) [b](client.md) [c](#d) [e](https://f.org) `[g](../Makefile)`"
    )
    assert hook.linked_sources(text, "docs/x.md") == {"kernels/row_types.py"}


def test_a_source_and_a_folder_become_pages(hook):
    assert "``````python\n" in hook.source_page("kernels/row_types.py")
    listed = hook.source_page("serving/packaging/passes")
    assert "](passes/registry.py.md)" in listed
    assert "__pycache__" not in listed


def test_a_notebook_becomes_a_page(hook):
    page = hook.notebook_page((REPOSITORY / "docs/tutorial.ipynb").read_text())
    assert page.startswith("# Recommendation models with Tessera")
    assert "```python\nimport torch\n" in page
    assert "```text\nlooked up: (1, 2, 4)" in page


def test_the_api_has_every_public_name(hook):
    pages = "".join(hook.api_pages().values())
    listed = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert len(listed) == len(set(listed)) > 100
    for _, modules in hook.API.values():
        for name in modules:
            module = importlib.import_module(name)
            offered = getattr(module, "__all__", None) or [n for n in vars(module) if "Error" in n]
            found = {one for _, one in hook.public_names(name)}
            assert set(offered) - found == set(), name
    for full in listed:
        home, _, name = full.rpartition(".")
        assert getattr(importlib.import_module(home), name) is not None


def anchors_of(text):
    """The anchors of a page's headings, as code hosts make them."""
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    shown = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in shown}


def test_links_and_anchors_hold_where_the_pages_lie(hook):
    wrong, seen = [], 0
    for name in (name for name in tracked_files() if name.endswith(".md")):
        page = REPOSITORY / name

        def look(target, page=page, name=name):
            nonlocal seen
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", path):
                return target
            seen += 1
            other = (page.parent / path).resolve() if path else page
            known = not anchor or anchor in anchors_of(other.read_text())
            if not other.exists() or not known:
                wrong.append(f"{name}: {target}")
            return target

        hook.relinked(page.read_text(), look)
    assert not wrong, "\n".join(wrong)
    assert seen > 100
