"""The graph that inspect shows: its nodes against the module, its picture against its own rules."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tessera.cli import main
from tessera.serving.inspect.graph import Graph, Node, edges, graph_text, read_graph
from tessera.serving.inspect.graph_svg import graph_svg
from tessera.serving.package import opening
from tessera.serving.package.torchscript import expected_deprecation
from tests.package_factory import make_package
from tests.packaging.backends import EACH_BACKEND

SVG = "{http://www.w3.org/2000/svg}"


class Small(nn.Module):
    """Two outputs, a weight, a branch, a list and numbers that only count."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor, unused: Tensor) -> dict[str, Tensor]:
        z = torch.cat([self.dense(x), y], dim=1)
        if z.size(0) > 1:
            z = torch.relu(z)
        return {"wide": z, "narrow": z[: x.size(0) // 2].sum(1)}


@pytest.fixture(scope="module")
def small() -> Graph:
    with expected_deprecation():
        return read_graph(torch.jit.script(Small()))


def test_a_graph_has_what_computes_and_not_what_counts(small: Graph) -> None:
    names = [node.name for node in small.nodes]
    assert names == [
        *("x", "y", "unused", "linear", "cat", "if (relu)", "slice", "sum"),
        *("wide", "narrow"),
    ]
    by_name = {node.name: node for node in small.nodes}
    assert by_name["linear"].arguments == ("%0", "dense.weight", "dense.bias")
    assert by_name["linear"].weights == ("dense.weight [2 x 3] float32", "dense.bias [2] float32")
    assert by_name["linear"].kind == "dense"
    assert by_name["cat"].inputs == (1, 3)
    assert by_name["cat"].arguments == ("[%3, %1]", "1")
    assert by_name["if (relu)"].inputs == (4,)
    assert by_name["wide"].inputs == (5,)
    assert by_name["narrow"].inputs == (7,)


def test_the_text_has_a_line_per_node_and_weight(small: Graph) -> None:
    lines = graph_text(small).splitlines()
    assert "%0   input x" in lines
    assert "%4   cat([%3, %1], 1)" in lines
    assert "%8   output wide = %5" in lines
    assert len(lines) == len(small.nodes) + 2


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_inspect_prints_and_draws_a_packages_graph(
    backend: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "LARGE_BYTES", 2000)
    package, _ = make_package(tmp_path, backend=backend)
    assert main(["inspect", str(package), "--graph"]) == 0
    text = capsys.readouterr().out
    assert "input float_features" in text
    assert "output default = %" in text
    # The table's own size, though it was not loaded.
    assert re.search(r"lookup_rows \[2\d{4}\] uint8", text)
    svg = tmp_path / "graph.svg"
    assert main(["inspect", str(package), "--svg", str(svg)]) == 0
    text = capsys.readouterr().out
    assert f"drew {svg}" in text
    assert "quantization error" in text
    drawn = "".join(ET.fromstring(svg.read_text()).itertext())
    for part in ("model, version 1", "float_features", "default", "embedding lookup"):
        assert part in drawn
    assert "id_score_list_features_weights" not in drawn
    assert main(["inspect", str(package), "--svg", str(tmp_path)]) == 2
    assert "cannot be written: Is a directory" in capsys.readouterr().err


def test_a_damaged_package_is_not_opened_for_its_graph(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray(package.read_bytes())
    content[content.index(b"def forward")] ^= 1
    path = tmp_path / "m.pt"
    path.write_bytes(content)
    assert main(["inspect", str(path), "--graph"]) == 2
    assert "was changed: SHA-256" in capsys.readouterr().err


def node(number: int, inputs: list[int], name: str = "op") -> Node:
    kind = "other" if inputs else "input"
    return Node(
        number=number,
        name=name,
        kind=kind,
        arguments=tuple(f"%{n}" for n in inputs),
        weights=(),
        inputs=tuple(sorted(set(inputs))),
    )


def test_a_picture_has_colours_for_light_and_dark() -> None:
    graph = Graph(nodes=(node(0, []), node(1, [0])))
    root = ET.fromstring(graph_svg(graph, title="any"))
    style = root.findtext(f"{SVG}style") or ""
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    shapes = [*root.iter(f"{SVG}rect"), *root.iter(f"{SVG}text"), *root.iter(f"{SVG}path")]
    assert not any({"fill", "stroke", "style"} & shape.attrib.keys() for shape in shapes)
    for name in {shape.attrib["class"] for shape in root.iter(f"{SVG}rect")}:
        assert f".{name}{{fill:" in light
        assert f".{name}{{fill:" in dark
    assert "text{fill:" in light
    assert "text{fill:" in dark


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(2, 25))
    nodes = []
    for number in range(count):
        sources = st.lists(st.integers(0, number - 1), max_size=3) if number else st.just([])
        name = draw(st.text("ab<&>\"'", min_size=1, max_size=30))
        nodes.append(node(number, draw(sources), name))
    nodes.append(node(count, [count - 1]))
    return Graph(nodes=tuple(nodes))


@settings(max_examples=60)
@given(graph=graphs())
def test_boxes_stand_apart_and_edges_go_down(graph: Graph) -> None:
    root = ET.fromstring(graph_svg(graph, title="any"))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes: dict[int, tuple[float, float, float, float]] = {}
    for group in root.iter(f"{SVG}g"):
        title, shape = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None
        assert shape is not None
        number = int((title.text or "").split()[0].removeprefix("%"))
        boxes[number] = tuple(float(shape.attrib[k]) for k in ("x", "y", "width", "height"))
    taken = {source for source, _ in edges(graph)}
    shown = [n for n in graph.nodes if n.kind != "input" or n.number in taken]
    assert boxes.keys() == {n.number for n in shown}
    for x, y, wide, high in boxes.values():
        assert 0 <= x < x + wide <= width
        assert 0 <= y < y + high <= height
    rows: dict[float, list[tuple[float, float]]] = {}
    for x, y, wide, _ in boxes.values():
        rows.setdefault(y, []).append((x, x + wide))
    for row in rows.values():
        assert all(left[1] < right[0] for left, right in pairwise(sorted(row)))
    for source, user in edges(graph):
        assert boxes[source][1] + boxes[source][3] < boxes[user][1]
    curves = [path for path in root.iter(f"{SVG}path") if "marker-end" in path.attrib]
    assert len(curves) == len(list(edges(graph)))
