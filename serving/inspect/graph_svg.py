"""A picture of a graph: layers from top to bottom, drawn as SVG without any other program.

The steps are those of Sugiyama, Tagawa and Toda, "Methods for Visual Understanding of Hierarchical
System Structures" (1981): a layer per node by its longest way from an input, a point on every layer
that an edge passes, an order within layers by the mean place of the neighbours, then places that keep
that order and lie as near as possible to the neighbours'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from xml.sax.saxutils import escape

from tessera.serving.inspect.graph import Graph, Kind, Node, edges

_COLORS: dict[Kind, tuple[str, str]] = {
    "input": ("#e8eef7", "#5b7db1"),
    "lookup": ("#fdebd3", "#c9822b"),
    "dense": ("#dff0e1", "#4c9a58"),
    "other": ("#f4f4f4", "#8a8a8a"),
    "output": ("#f6e3ee", "#b0568a"),
}
_DARK_COLORS: dict[Kind, tuple[str, str]] = {
    "input": ("#1f2b40", "#7d9fd0"),
    "lookup": ("#3d2c14", "#d99a45"),
    "dense": ("#1b3422", "#6cb878"),
    "other": ("#2a2d31", "#9a9fa6"),
    "output": ("#3a2231", "#cf7fae"),
}
_MEANINGS: dict[Kind, str] = {
    "input": "input",
    "lookup": "embedding lookup",
    "dense": "dense layer or product",
    "other": "other operator",
    "output": "output",
}
_CHARACTER, _LINE, _PADDING = 6.7, 15.0, 9.0
_BETWEEN_NODES, _BETWEEN_LAYERS, _MARGIN = 24.0, 38.0, 24.0
_LONGEST_LINE = 44
_HEADER = 58.0
_SWEEPS = 12


@dataclass(kw_only=True)
class _Box:
    """A node, or the point (without lines) at which an edge passes a layer."""

    layer: int
    lines: tuple[str, ...] = ()
    node: Node | None = None
    above: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)
    x: float = 0.0

    @property
    def width(self) -> float:
        longest = max((len(line) for line in self.lines), default=0)
        return longest * _CHARACTER + 2 * _PADDING if self.lines else 8.0

    @property
    def height(self) -> float:
        return len(self.lines) * _LINE + 2 * _PADDING if self.lines else 0.0


def graph_svg(graph: Graph, *, title: str) -> str:
    """The text of an SVG file with ``title`` above; inputs that nothing takes are left out."""
    boxes, ways = _layers(graph)
    layers = _in_order(boxes)
    _place(layers, boxes)
    tops = _tops(layers, boxes)
    left = min(box.x - box.width / 2 for box in boxes)
    for box in boxes:
        box.x += _MARGIN - left
    legend = sum(len(text) * _CHARACTER + 40 for text in _MEANINGS.values())
    wide = max(box.x + box.width / 2 for box in boxes)
    width = max(wide, legend, len(title) * 9.0) + _MARGIN
    bottom = max(tops[box.layer] + box.height for box in boxes)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
            f'height="{bottom + _MARGIN:.0f}" viewBox="0 0 {width:.0f} {bottom + _MARGIN:.0f}">'
        ),
        _style(),
        (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/>'
            "</marker></defs>"
        ),
        '<rect class="page" width="100%" height="100%"/>',
        f'<text class="title" x="{_MARGIN}" y="24">{escape(title)}</text>',
        *_legend(),
        *(_edge([boxes[number] for number in way], tops) for way in ways),
        *(_node(box, tops[box.layer]) for box in boxes if box.node is not None),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _style() -> str:
    """Colours for light and dark, which a browser chooses for a picture by itself and for one in a page."""

    def colours(kinds: dict[Kind, tuple[str, str]], page: str, ink: str, edge: str) -> str:
        boxes = "".join(
            f".{kind}{{fill:{fill};stroke:{line}}}" for kind, (fill, line) in kinds.items()
        )
        return (
            f".page{{fill:{page}}}text{{fill:{ink}}}path{{stroke:{edge}}}.tip{{fill:{edge}}}{boxes}"
        )

    return (
        "<style>text{font:11px ui-monospace,Menlo,Consolas,monospace}"
        ".name{font-weight:bold}.title{font-size:15px;font-weight:bold}path{fill:none;stroke-width:1.3}"
        f"{colours(_COLORS, '#fff', '#222', '#9aa4b1')}.tip{{stroke:none}}"
        "@media (prefers-color-scheme: dark){"
        f"{colours(_DARK_COLORS, '#16191d', '#e6e6e6', '#7d8590')}.tip{{stroke:none}}}}</style>"
    )


def _layers(graph: Graph) -> tuple[list[_Box], list[list[int]]]:
    """Boxes with their layers and neighbours, and the boxes that each edge passes."""
    users: dict[int, list[int]] = {}
    for source, user in edges(graph):
        users.setdefault(source, []).append(user)
    depth: dict[int, int] = {}
    for node in graph.nodes:
        depth[node.number] = 1 + max((depth[source] for source in node.inputs), default=-1)
    shown = [node for node in graph.nodes if node.kind != "input" or node.number in users]
    for node in shown:
        # An input stands above the first operator that takes it, not at the very top.
        if node.kind == "input":
            depth[node.number] = min(depth[user] for user in users[node.number]) - 1
    boxes = [_Box(layer=depth[node.number], lines=_lines(node), node=node) for node in shown]
    index = {node.number: place for place, node in enumerate(shown)}
    ways = []
    for source, user in ((index[one], index[other]) for one, other in edges(graph)):
        way = [source]
        for layer in range(boxes[source].layer + 1, boxes[user].layer):
            way.append(len(boxes))
            boxes.append(_Box(layer=layer))
        way.append(user)
        ways.append(way)
        for one, next_one in pairwise(way):
            boxes[one].below.append(next_one)
            boxes[next_one].above.append(one)
    return boxes, ways


def _lines(node: Node) -> tuple[str, ...]:
    if node.kind in {"input", "output"}:
        return (node.name,)
    constants = [text for text in node.arguments if _tells(text)]
    own = [f"({', '.join(constants)})"] if constants else []
    return tuple(_cut(line) for line in (node.name, *own, *node.weights))


def _tells(argument: str) -> bool:
    """Whether an argument is a number or flag that an edge or a weight does not show."""
    return (
        not ("%" in argument or argument in {"None", "_", "?", "False"} or argument[:1].isalpha())
        or argument == "True"
    )


def _cut(line: str) -> str:
    # The end of a weight's name tells more than its beginning, and its shape most.
    return line if len(line) <= _LONGEST_LINE else f"…{line[-_LONGEST_LINE + 1 :]}"


def _in_order(boxes: Sequence[_Box]) -> list[list[int]]:
    """The boxes of each layer from left to right, with few crossings."""
    layers: list[list[int]] = [[] for _ in range(1 + max(box.layer for box in boxes))]
    for number, box in enumerate(boxes):
        layers[box.layer].append(number)
    place = {number: at for layer in layers for at, number in enumerate(layer)}
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            means = {}
            for number in layer:
                near = boxes[number].above if down else boxes[number].below
                spots = [place[other] for other in near]
                means[number] = sum(spots) / len(spots) if spots else place[number]
            layer.sort(key=means.__getitem__)
            place.update({number: at for at, number in enumerate(layer)})
    return layers


def _place(layers: Sequence[Sequence[int]], boxes: Sequence[_Box]) -> None:
    """Centres of the boxes: in order, apart, and near to their neighbours."""
    for layer in layers:
        _set(layer, boxes, [0.0] * len(layer))
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            wishes = []
            for number in layer:
                near = boxes[number].above if down else boxes[number].below
                spots = [boxes[other].x for other in near] or [boxes[number].x]
                wishes.append(sum(spots) / len(spots))
            _set(layer, boxes, wishes)


def _set(layer: Sequence[int], boxes: Sequence[_Box], wishes: Sequence[float]) -> None:
    """The places nearest to ``wishes`` (least squares) that keep order and distance.

    Without the least distances to the first box the places must not descend: this is isotonic
    regression, solved by pooling neighbours that violate the order.
    """
    offsets = [0.0]
    for left, right in pairwise(layer):
        apart = (boxes[left].width + boxes[right].width) / 2 + _BETWEEN_NODES
        offsets.append(offsets[-1] + apart)
    pools: list[tuple[float, int]] = []  # mean and size
    for wish, offset in zip(wishes, offsets, strict=False):
        mean, size = wish - offset, 1
        while pools and pools[-1][0] > mean:
            other, count = pools.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        pools.append((mean, size))
    places = [mean for mean, size in pools for _ in range(size)]
    for number, place, offset in zip(layer, places, offsets, strict=False):
        boxes[number].x = place + offset


def _tops(layers: Sequence[Sequence[int]], boxes: Sequence[_Box]) -> list[float]:
    tops, top = [], _HEADER + _MARGIN
    for layer in layers:
        tops.append(top)
        top += max(boxes[number].height for number in layer) + _BETWEEN_LAYERS
    return tops


def _edge(way: Sequence[_Box], tops: Sequence[float]) -> str:
    """A line from box to box that goes straight down where it passes between others."""
    first, last = way[0], way[-1]
    points = [(first.x, tops[first.layer] + first.height)]
    for box in way[1:-1]:
        points += [(box.x, tops[box.layer]), (box.x, tops[box.layer + 1] - _BETWEEN_LAYERS)]
    points.append((last.x, tops[last.layer] - 2))
    text = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        text += f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    return f'<path d="{text}" marker-end="url(#tip)"/>'


def _node(box: _Box, top: float) -> str:
    assert box.node is not None
    left = box.x - box.width / 2
    call = f"%{box.node.number} {box.node.name}({', '.join(box.node.arguments)})"
    parts = [
        f"<g><title>{escape(call)}</title>",
        (
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
            f'rx="5" class="{box.node.kind}"/>'
        ),
    ]
    for row, text in enumerate(box.lines):
        style = ' class="name"' if row == 0 else ""
        y = top + _PADDING + _LINE * row + 11
        parts.append(f'<text{style} x="{left + _PADDING:.1f}" y="{y:.1f}">{escape(text)}</text>')
    return "".join([*parts, "</g>"])


def _legend() -> list[str]:
    parts, left = [], _MARGIN
    for kind, meaning in _MEANINGS.items():
        parts.append(
            f'<rect x="{left:.1f}" y="38" width="14" height="14" rx="3" class="{kind}"/>'
            f'<text x="{left + 20:.1f}" y="49">{meaning}</text>'
        )
        left += len(meaning) * _CHARACTER + 40
    return parts
