"""Every page that Tessera writes: one style, nothing from elsewhere, as wide as its window, readable in light and dark."""

import dataclasses
import re
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.report_page import page_colours, page_style
from tessera.serving.package.manifest import TableInfo
from tessera.serving.packaging.type_report import CHOSEN, SAME_TABLES, Choice, TypeReport, as_html
from tessera.training.comparison.runs import Curve, RunSummary
from tessera.training.comparison.table import Comparison
from tessera.training.data.columns import LabelColumn
from tessera.training.distributed.planner import save_picture
from tessera.training.distributed.planner.plan_page import bytes_text
from tessera.training.distributed.planner.rank_bars import share_text
from tessera.training.trainer.report import render_report
from tessera.training.trainer.run_facts import Changed, RunFacts, changed_keys
from tessera.training.trainer.split_metrics import SplitMetrics
from tessera.training.tuning.metric import parse_metric
from tessera.training.tuning.result import render_report as render_search
from tessera.training.tuning.settings import Search
from tessera.training.tuning.space import parse_dimension
from tessera.training.tuning.study import TrialRecord
from tests.browser import needs_chromium, with_browser
from tests.training.test_planner import PlannedTables, planner, tables

WIDTHS = (400, 1200)
LONG = "a_very_long_name_" * 6


def training_page():
    random = np.random.default_rng(0)
    metrics = SplitMetrics([LabelColumn(name="label")], [1.0], 500)
    metrics.update(
        torch.tensor(random.normal(size=(500, 1)), dtype=torch.float32),
        torch.tensor(random.integers(0, 2, (500, 1)), dtype=torch.float32),
    )
    rows = [
        {"step": f"{step}", "split": split, "loss": f"{9 / step}", "auc": f"{step / 999}"}
        | {"label": "", "samples": f"{step * 9}", "samples_per_second": "3"}
        for step in range(100, 900, 100)
        for split in ("train", "valid")
    ]
    found = metrics.compute().to_json()
    return render_report(
        facts=RunFacts(
            name="evening-run",
            source=f"table: /data/{LONG}.parquet",
            rows={"train": 8000, "valid": 500, "test": 0},
            started=datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc),
            hardware="a processor, 2 CPUs, 1 threads; torch 2",
            changed=[Changed(key=f"train.{LONG}", value="3", default="1")],
        ),
        folder=Path("runs/evening run"),
        config_yaml=f"data:\n  path: /data/{LONG}{LONG}\n",
        rows=rows,
        final={"step": 800, "samples": 7200, "malformed_rows": 0, "best_step": 700}
        | {"best_checkpoint": f"checkpoints/{LONG}.pt", "metric": "auc", "parameters": 123456}
        | {"valid": found, "test": None},
        metrics={"valid": metrics},
    )


def comparison_page():
    def run(name, rate):
        curve = Curve(samples=(1, 2), values=(0.5, 0.25))
        return RunSummary(
            name=name,
            status="finished",
            config={f"train.{LONG}": rate, "train.epochs": "1"},
            metrics={"valid.auc": 0.75},
            best_step=3,
            parameters=10,
            seconds=1.0,
            samples_per_second=2.0,
            data={"valid": "x"},
            curves={"train.loss": curve, "valid.auc": curve},
        )

    return Comparison([run("one", "0.1"), run(f"runs/{LONG}", "0.2")]).html()


def tuning_page():
    rate = f"train.{LONG}.learning_rate"
    space = (
        parse_dimension(rate, "log_uniform(1e-4, 1e-1)", "here"),
        parse_dimension("model.layers", [[64, 32], [128]], "here"),
        *(parse_dimension(f"model.size_{n}", "int(1, 9)", "here") for n in range(4)),
    )
    search = Search(space=space, metric=parse_metric("auc"), seed=0, prune="none", folder="/data")
    records = [
        TrialRecord(
            number=number,
            state="complete",
            values={own.key: 1e-3 * (number + 1) if own.key == rate else 3 for own in space}
            | {"model.layers": space[1].choices[number % 2]},
            value=0.7 + 0.01 * number,
            seconds=3.0,
        )
        for number in range(6)
    ]
    records.append(
        TrialRecord(
            number=6, state="failed", values={}, value=None, seconds=1.0, reason=f"no {LONG}"
        )
    )
    importances = {own.key: 1 / len(space) for own in space}
    return render_search(records, search, importances, name="learning-rates")


def types_page():
    def choice(name, dense, size, error):
        table = TableInfo(
            name=LONG,
            rows=10,
            dim=4,
            dtype="int8",
            bytes=size,
            bytes_fp32=4000,
            max_abs_error=error,
            rmse=error,
            relative_rmse=error,
        )
        return Choice(
            name=name, dense=dense, bytes=size, tables=(table,), evaluation=None, largest_change=0.1
        )

    kinds = {"int2": 3e-1, "int4": 6e-2, "int8": 4e-3, "fp8": 2e-2, "fp16": 2e-4, "bf16": 1e-3}
    choices = [choice(kind, "fp32", 1000 + len(kind), error) for kind, error in kinds.items()]
    # As packaged and with other dense layers, they have the same bytes and errors: labels at such points
    # used to lie on one another.
    choices += [choice(CHOSEN, "fp32", 1004, 4e-3), choice(SAME_TABLES, "bf16", 1004, 4e-3)]
    choices += [choice("fp32", "fp32", 4000, 0.0)]
    return as_html(
        TypeReport(model="ranker", choices=tuple(choices), impossible=(("int1", "no such type"),))
    )


def plan_page(folder):
    maker = planner(4, batch_size=64)
    maker.plan(tables(*[(1000 * (i + 1), 64) for i in range(15)]), [PlannedTables()])
    save_picture(maker.report, folder / "plan.html")
    save_picture(maker.report, folder / "plan.svg")
    return (folder / "plan.html").read_text()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The files of all pages by name."""
    folder = tmp_path_factory.mktemp("pages")
    texts = {
        "training": training_page(),
        "comparison": comparison_page(),
        "tuning": tuning_page(),
        "types": types_page(),
        "plan": plan_page(folder),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in texts}


class Links(HTMLParser):
    """What a page refers to, and the tags that it opens and does not close."""

    VOID = frozenset({"meta", "br", "input", "link", "img"})

    def __init__(self, text):
        super().__init__()
        self.links, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.links += [value for key, value in attributes if key in {"src", "href", "xlink:href"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.links += [value for key, value in attributes if key in {"src", "href", "xlink:href"}]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_every_page_has_the_one_style_and_needs_nothing_else(pages):
    for name, path in pages.items():
        text = path.read_text()
        found = Links(text)
        assert page_style() in text, name
        assert all(link.startswith("#") for link in found.links), (name, found.links)
        assert found.open == [], name
        assert "@import" not in text, name
        assert "<script" not in text, name
        assert text.count("<h1>") == 1, name
        # What is wide scrolls in a box of its own, also by the keyboard.
        assert len(re.findall("<table>", text)) == len(
            re.findall(
                '<div class="wide" tabindex="0" role="region" aria-label="[^"]+"><table>', text
            )
        ), name


def test_plots_follow_the_page_and_have_names(pages):
    known = set(re.findall(r"--(\w+):", page_colours()))
    for name, path in pages.items():
        text = path.read_text()
        used = set(re.findall(r"var\(--(\w+)", text))
        assert used <= known, (name, used - known)
        labels = re.findall(r'<svg role="img" aria-label="([^"]+)" fill="currentColor"', text)
        assert len(labels) == text.count("<svg") == len(set(labels)) > 0, name


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_texts_have_the_contrast_that_wcag_asks_for():
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6})", part))
        for part in page_colours().split("@media (prefers-color-scheme: dark)")
    )
    assert light.keys() == dark.keys()

    def contrast(one, other):
        lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)

    for colours in (light, dark):
        page = colours["page"]
        for text in ("ink", "soft", "link", "bad", "good", "wait"):
            assert contrast(colours[text], page) >= 4.5, (text, colours)
        for text in ("ink", "soft"):
            assert contrast(colours[text], colours["band"]) >= 4.5, text
        assert contrast(colours["ink"], colours["mark"]) >= 4.5
        for drawn in ("edge", "blue", "orange", "green", "grey"):
            assert contrast(colours[drawn], page) >= 3.0, (drawn, colours)


def test_a_training_report_says_what_ran_on_what(pages):
    text = " ".join(pages["training"].read_text().split())
    for part in (
        "<title>evening-run: training report</title>",
        f"<dd>table: /data/{LONG}.parquet</dd>",
        "train 8,000, valid 500, test 0",
        "2026-01-02 03:04:05 UTC",
        "<dd>40.0 min of training</dd>",
        "a processor, 2 CPUs",
        f"<td>train.{LONG}</td><td>3</td><td>1</td>",
        "tessera package-model &#39;runs/evening run&#39; --out &#39;evening run.pt&#39;",
        "tessera serve --model &#39;evening run.pt&#39;",
    ):
        assert part in text, part
    # The figures come before everything else.
    assert text.index("<b>") < text.index("<dl") < text.index("<table>")


def test_keys_without_their_default_are_found():
    @dataclasses.dataclass(frozen=True)
    class Part:
        kind: str
        rate: float = 0.1
        sizes: tuple[int, ...] = (1, 2)

    @dataclasses.dataclass(frozen=True)
    class Whole:
        path: str
        part: Part = Part("a")
        other: Part | None = None
        fields: dict[str, int] = dataclasses.field(default_factory=dict)

    def found(config):
        return [(own.key, own.value, own.default) for own in changed_keys(config)]

    assert found(Whole("x")) == [("path", "x", None)]
    assert found(Whole("x", Part("b", sizes=(3,)))) == [
        ("path", "x", None),
        ("part.kind", "b", "a"),
        ("part.sizes", "[3]", "[1, 2]"),
    ]
    # A part that is not there by default is compared with the defaults of what was chosen.
    assert found(Whole("x", other=Part("c", 0.2), fields={"k": 1})) == [
        ("path", "x", None),
        ("other.kind", "c", None),
        ("other.rate", "0.2", "0.1"),
        ("fields.k", "1", None),
    ]


def test_a_plan_tells_each_rank_s_share_and_each_table_s_type(pages):
    text = pages["plan"].read_text()
    for part in (
        "Sharding plan: 15 tables on 4 ranks",
        "estimated step, ms",
        "table_wise",
        ">t14<",
    ):
        assert part in text, part
    assert text.count('aria-label="share of the busiest rank\'s time"') == 4
    svg = (pages["plan"].parent / "plan.svg").read_text()
    assert svg.startswith("<svg ")
    assert page_colours() in svg
    assert "Sharding plan: 15 tables on 4 ranks" in svg
    assert [share_text(*pair) for pair in ((1, 0), (0, 5), (1, 3), (1, 7000))] == [
        *("-", "0%", "33%", "0.01%")
    ]
    assert [bytes_text(n) for n in (5, 2048, 3 << 20, 1.5 * 2**30)] == [
        *("5 B", "2 KiB", "3 MiB", "1.5 GiB")
    ]


OUTSIDE = """
[...document.querySelectorAll('body *')].filter((node) => {
  const box = node.getBoundingClientRect();
  const scrolls = node.parentElement.closest('.wide, pre, svg');
  return !scrolls && box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5);
}).map((node) => node.outerHTML.slice(0, 120))
"""
"""Elements that reach out of the window and are in no box that scrolls."""

OVERLAPS = """
[...document.querySelectorAll('svg')].flatMap((svg) => {
  const texts = [...svg.querySelectorAll('text')].map((t) => [t.textContent, t.getBoundingClientRect()]);
  return texts.flatMap(([one, a], place) => texts.slice(place + 1).filter(([, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.35 * Math.min(a.height, b.height)
  ).map(([other]) => `${one} | ${other}`));
})
"""
"""Pairs of texts of a plot that lie on one another; a line may be higher than its letters."""

CUT = """
[...document.querySelectorAll('svg')].flatMap((svg) => {
  const room = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter((text) => {
    const box = text.getBoundingClientRect();
    return box.left < room.left - 2 || box.right > room.right + 2;
  }).map((text) => text.textContent);
})
"""
"""Texts that are cut off at a plot's edge."""


@needs_chromium
def test_no_page_reaches_out_of_its_window_and_no_labels_lie_on_one_another(pages):
    async def look(page):
        found = []
        for name, path in pages.items():
            for width in WIDTHS:
                await page.open(path.as_uri(), width=width)
                assert await page.value("document.documentElement.scrollWidth") <= width, name
                assert await page.value(OUTSIDE) == [], (name, width)
                assert await page.value(OVERLAPS) == [], (name, width)
                assert await page.value(CUT) == [], (name, width)
                found.append(await page.value("getComputedStyle(document.body).backgroundColor"))
            await page.open(path.as_uri(), width=400, scheme="dark")
            found.append(await page.value("getComputedStyle(document.body).backgroundColor"))
        return set(found)

    assert with_browser(look) == {"rgb(255, 255, 255)", "rgb(22, 25, 29)"}
