"""Plots as SVG for pages of HTML, in the page's own colours, light or dark."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Told apart by readers with any colour vision, and in print (Okabe and Ito 2008).
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#888888"
_INK, _LINES = "#010101", "#dddddd"
_OF_PAGE = {
    _INK: "currentColor",
    _LINES: "var(--lines, #dddddd)",
    BLUE: "var(--blue, #0072b2)",
    ORANGE: "var(--orange, #d55e00)",
    GREEN: "var(--green, #009e73)",
    PURPLE: "var(--purple, #cc79a7)",
}
"""Colours that a page may give itself, as properties of these names."""


def svg_of(
    x_label: str,
    y_label: str,
    draw: Callable[[Axes], None],
    *,
    size: tuple[float, float] = (6.4, 3.6),
    legend: bool = True,
) -> str:
    """What ``draw`` puts on axes with these labels, as an ``<svg>`` element.

    Args:
        x_label: what the horizontal axis shows; together with ``y_label`` it names the figure, so that no
            two figures of a page may have both alike.
        y_label: what the vertical axis shows.
        draw: the drawing.
        size: inches; a page shows it as wide as there is room.
        legend: whether there is one, of what was drawn with a label.
    """
    with mpl.rc_context(
        # The salt keeps ids apart from those of the page's other figures.
        {
            "svg.fonttype": "none",
            "svg.hashsalt": f"{x_label} {y_label}",
            "font.family": "sans-serif",
            "text.color": _INK,
            "axes.labelcolor": _INK,
            "axes.edgecolor": _INK,
            "xtick.color": _INK,
            "ytick.color": _INK,
        }
    ):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, color=_LINES, linewidth=0.6)
        axes.set_axisbelow(True)
        draw(axes)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if legend:
            axes.legend(frameon=False)
        stream = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with warnings.catch_warnings():
            # Texts stay texts, for which the reader's browser has the letters.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            figure.savefig(stream, format="svg", metadata=no_metadata)
    text = stream.getvalue()
    text = text[text.index("<svg") :]  # without the XML prolog, which HTML does not have
    # Text without a colour of its own is black, whatever the page's is.
    text = text.replace("<svg ", '<svg fill="currentColor" ', 1)
    for colour, own in _OF_PAGE.items():
        text = text.replace(colour, own)
    return text
