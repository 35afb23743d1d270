"""Plots as SVG for pages of HTML, in the page's own colours, light or dark; or as pictures that stand alone."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from html import escape

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tessera.report_page import page_colours

# Told apart by readers with any colour vision, and in print (after Okabe and Ito 2008).
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#888888"
YELLOW, SKY = "#b58900", "#4c9ed9"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, GREY)
"""Colours for things without an order."""

INK, LINES = "#010101", "#dddddd"
_OF_PAGE = {
    INK: "currentColor",
    LINES: "var(--lines, #dddddd)",
    BLUE: "var(--blue, #0072b2)",
    ORANGE: "var(--orange, #d55e00)",
    GREEN: "var(--green, #009e73)",
    PURPLE: "var(--purple, #cc79a7)",
    YELLOW: "var(--yellow, #b58900)",
    SKY: "var(--sky, #4c9ed9)",
    GREY: "var(--grey, #888888)",
}
"""Colours that a page gives itself, as properties of these names (``page_colours.css``)."""

SIZE = (5.2, 3.4)
"""Inches of a plot: its letters have 10 pixels where a page is 400 wide, and 16 at most."""


def svg_of(
    x_label: str,
    y_label: str,
    draw: Callable[[Axes], None],
    *,
    size: tuple[float, float] = SIZE,
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

    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        prepare(axes)
        draw(axes)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if legend:
            axes.legend(frameon=False)

    return svg_figure(f"{x_label} {y_label}", fill, size=size)


def prepare(axes: Axes) -> None:
    """Give ``axes`` the look that all plots have; before anything is drawn."""
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color=LINES, linewidth=0.6)
    axes.set_axisbelow(True)


def svg_figure(name: str, fill: Callable[[Figure], None], *, size: tuple[float, float]) -> str:
    """A figure as an ``<svg>`` element.

    Args:
        name: what it shows, for readers who hear the page; no two figures of a page may have it alike.
        fill: puts axes on the figure and draws.
        size: inches.
    """
    with styled(name):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        fill(figure)
        stream = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with warnings.catch_warnings():
            # Texts stay texts, for which the reader's browser has the letters.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            figure.savefig(stream, format="svg", metadata=no_metadata)
    text = stream.getvalue()
    text = text[text.index("<svg") :]  # without the XML prolog, which HTML does not have
    # Text without a colour of its own is black, whatever the page's is.
    head = f'<svg role="img" aria-label="{escape(name)}" fill="currentColor" '
    text = text.replace("<svg ", head, 1)
    for colour, own in _OF_PAGE.items():
        text = text.replace(colour, own)
    return text


def short(text: str, most: int = 28) -> str:
    """``text`` with at most so many characters: the end of a name or path tells more than its beginning."""
    return text if len(text) <= most else f"…{text[1 - most :]}"


def styled(name: str) -> AbstractContextManager[None]:
    """A context in which matplotlib has the settings for a figure called ``name``."""
    return mpl.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": name,  # keeps ids apart from those of the page's other figures
            "font.family": "sans-serif",
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "hatch.linewidth": 0.8,
        }
    )


def alone(svg: str) -> str:
    """An ``<svg>`` element as the text of a file, which follows the reader's choice of light or dark by itself."""
    colours = (
        f"<style>{page_colours()}svg {{ background: var(--page); color: var(--ink); }}</style>"
    )
    end = svg.index(">") + 1
    return f"{svg[:end]}{colours}{svg[end:]}"
