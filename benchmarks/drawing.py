"""Build an SVG from text, rectangles, lines and arrows, in the colours of raafl's pictures."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

INK, FAINT = "#767c85", "#8a9099"
GREEN, BROWN, BLUE = "#00897b", "#c0642a", "#4a74d6"
WIDTH = 900.0


class Picture:
    """SVG under construction; lengths are in pixels, y points down."""

    def __init__(self, height: float, title: str) -> None:
        """Start an SVG with only its title, which screen readers read out."""
        self.height = height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" font-family="system-ui, sans-serif" '
            'role="img" aria-labelledby="title">',
            f'<title id="title">{escape(title)}</title>',
        ]

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 14,
        anchor: str = "start",
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        """Write one line of text; (x, y) is the anchor on the baseline, which is at the text's start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}"{weight}>{escape(text)}</text>'
        )

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, radius: float = 2, more: str = ""
    ) -> None:
        """Draw a filled rectangle with the top left corner at (x, y); ``more``: further attributes of the SVG element."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}"{more}/>'
        )

    def line(self, points: Iterable[tuple[float, float]], stroke: str, *, width: float = 1, more: str = "") -> None:
        """Draw a line through points; ``more``: further attributes of the SVG element."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}" stroke-linejoin="round"{more}/>'
        )

    def arrow(self, x: float, from_y: float, to_y: float, stroke: str) -> None:
        """Draw a vertical arrow at ``x`` from ``from_y`` to its tip at ``to_y``."""
        back = 9.0 if to_y < from_y else -9.0
        self.line([(x, from_y), (x, to_y + back)], stroke, width=2)
        self.parts.append(f'<path d="M{x:g} {to_y:g}l-5.5 {back:g}h11z" fill="{stroke}"/>')

    def svg(self) -> str:
        """Return the text of the SVG file."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"
