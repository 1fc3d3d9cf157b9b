"""Drawings of schedules as SVG, made from the text grids of `order.draw`."""

from html import escape

_ROW, _LEFT = 30, 58
_STYLE = """\
  .schedule text { font: 12px system-ui, sans-serif; fill: currentColor; }
  .schedule .cell { fill: #fff; text-anchor: middle; font-weight: 600; }
  .schedule .F { fill: #1565c0; } .schedule .B { fill: #b8510d; } .schedule .W { fill: #2e7d32; }
  .schedule .idle { fill: none; stroke: currentColor; stroke-opacity: .35; stroke-dasharray: 3 3; }
  @media (prefers-color-scheme: dark) { .schedule:root { color: #ddd; } }"""


def schedule_svg(drawing: str, title: str) -> str:
    """Return a text grid as SVG: a row for each ipu or core, a cell for each action (F, B or W), dashed if idle."""
    rows = [(name.strip(), cells.split()) for name, cells in (row.split("|") for row in drawing.splitlines())]
    cell_width = max(34, 10 + 8 * max(len(cell) for _, cells in rows for cell in cells))
    width, height = _LEFT + cell_width * max(len(cells) for _, cells in rows) + 4, _ROW * len(rows) + 4
    head = 'xmlns="http://www.w3.org/2000/svg" class="schedule"'
    svg = [f'<svg {head} viewBox="0 0 {width} {height}" width="{width}">']
    svg += [f"<title>{escape(title)}</title><style>\n{_STYLE}\n</style>"]
    for y, (name, cells) in enumerate(rows):
        svg.append(f'<text x="0" y="{y * _ROW + 20}">{name}</text>')
        for x, cell in enumerate(cells):
            css_class = cell[0] if cell != ".." else "idle"
            left, top = _LEFT + x * cell_width, y * _ROW + 3
            size = f'width="{cell_width - 3}" height="{_ROW - 5}"'
            svg.append(f'<rect class="{css_class}" x="{left}" y="{top}" {size} rx="4"/>')
            if cell != "..":
                middle = left + cell_width // 2 - 1
                svg.append(f'<text class="cell" x="{middle}" y="{top + 17}">{cell}</text>')
    return "\n".join([*svg, "</svg>"]) + "\n"
