"""An SVG, and the colours of raafl's pictures."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

INK, FAINT = "#767c85", "#8a9099"
GREEN, BROWN, BLUE = "#00897b", "#c0642a", "#4a74d6"
WIDTH = 900.0


class Picture:
    """An SVG that grows; lengths in pixels, y downwards."""

    def __init__(self, height: float, title: str) -> None:
        """Begin with nothing but the title, which is what is read out."""
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
        """Write one line of text.

        Args:
            x: horizontal position of the anchor, in pixels.
            y: vertical position of the baseline, in pixels.
            text: to write.
            size: size of the font, in pixels.
            anchor: start, middle or end.
            fill: colour.
            bold: whether the font is bold.
        """
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}"{weight}>{escape(text)}</text>'
        )

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, radius: float = 2, more: str = ""
    ) -> None:
        """Draw a filled rectangle.

        Args:
            x: horizontal position of the left side, in pixels.
            y: vertical position of the top, in pixels.
            width: width in pixels.
            height: height in pixels.
            fill: colour.
            radius: radius of the corners, in pixels.
            more: further attributes of the SVG element.
        """
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}"{more}/>'
        )

    def line(self, points: Iterable[tuple[float, float]], stroke: str, *, width: float = 1, more: str = "") -> None:
        """Draw a line through points.

        Args:
            points: x and y in pixels.
            stroke: colour.
            width: width in pixels.
            more: further attributes of the SVG element.
        """
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}" stroke-linejoin="round"{more}/>'
        )

    def arrow(self, x: float, from_y: float, to_y: float, stroke: str) -> None:
        """Draw an upright arrow.

        Args:
            x: horizontal position, in pixels.
            from_y: vertical position of the start, in pixels.
            to_y: vertical position of the tip, in pixels.
            stroke: colour.
        """
        back = 9.0 if to_y < from_y else -9.0
        self.line([(x, from_y), (x, to_y + back)], stroke, width=2)
        self.parts.append(f'<path d="M{x:g} {to_y:g}l-5.5 {back:g}h11z" fill="{stroke}"/>')

    def svg(self) -> str:
        """Return the whole file's text."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"
