"""Draws trace-over-stages.svg, the figure of docs/ranks.md: `python docs/figures/draw_stages.py`."""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 900, 440
INK, FAINT, FORWARD, BODY, FETCH = "#1f2933", "#7b8794", "#dbe7f5", "#fdf0d5", "#b3261e"
BOX, GAP = 62, 6
STAGES = {0: (150, 70), 1: (470, 230)}  # where the first layer of each stage is drawn


def text(
    x: float, y: float, words: str, size: int = 13, color: str = INK, anchor: str = "start", mono: bool = False
) -> str:
    family = "ui-monospace, monospace" if mono else "system-ui, sans-serif"
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}" font-family="{family}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = INK) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{stroke}"/>'


def arrow(points: str, color: str = INK, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    head = "fetch" if color == FETCH else "ink"
    return (
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"{dash} marker-end="url(#{head})"/>'
    )


def marker(name: str, color: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{color}"/></marker>'
    )


def stage(number: int, layers: range, said: dict[int, str]) -> list[str]:
    """One stage: its layers above, its body below, and what the body does at which layer."""
    x, y = STAGES[number]
    width = len(layers) * (BOX + GAP) - GAP
    parts = [text(x - 12, y + 20, "forward", 12, FAINT, "end"), text(x - 12, y + 64, "body", 12, FAINT, "end")]
    parts.append(text(x + BOX + GAP, y - 12, f"pipeline stage {number}", 14))
    parts.append(box(x, y + 46, width, 28, BODY))
    for i, layer in enumerate(layers):
        left = x + i * (BOX + GAP)
        parts += [box(left, y, BOX, 32, FORWARD), text(left + BOX / 2, y + 21, f"layer {layer}", 12, anchor="middle")]
        if layer in said:
            parts += [
                arrow(f"{left + BOX / 2},{y + 32} {left + BOX / 2},{y + 46}"),
                text(left + 4, y + 65, said[layer], 12),
            ]
    return parts


def draw() -> str:
    x0, y0 = STAGES[0]
    x1, y1 = STAGES[1]
    early = x0 + BOX + GAP + BOX / 2  # layer 1
    late = x1 + 2 * (BOX + GAP) + BOX / 2  # layer 6
    end0 = x0 + 4 * (BOX + GAP) - GAP
    parts = [
        text(x0, 30, "early = model.layers_output[1]", 13, mono=True),
        text(x1, 30, "model.layers_output[6] += early", 13, mono=True),
        *stage(0, range(4), {1: "read"}),
        *stage(1, range(4, 8), {6: "use"}),
        arrow(f"{end0},{y0 + 16} {x1 + BOX / 2},{y0 + 16} {x1 + BOX / 2},{y1 - 2}"),
        text(x1 + BOX / 2 + 8, y0 + 20, "hidden states are sent on", 12),
        text(x1 + BOX / 2 + 8, y0 + 36, "before the body waits", 12),
        text(x1 + 6, y1 + 65, "early: remote", 12, FAINT),
        box(early - 68, y0 + 104, 136, 28, "#ffffff"),
        text(early, y0 + 122, "published copy", 12, anchor="middle"),
        arrow(f"{early},{y0 + 74} {early},{y0 + 102}"),
        arrow(f"{late},{y1 + 74} {late},{y1 + 100} {early},{y1 + 100} {early},{y0 + 134}", FETCH),
        text(early + 46, y1 + 93, "fetch of this one value, when it is used", 12, FETCH),
        arrow(
            f"{early + 30},{y0 + 132} {early + 30},{y1 + 120} {late + 18},{y1 + 120} {late + 18},{y1 + 76}", FETCH, True
        ),
        text(early + 46, y1 + 136, "the value comes back", 12, FETCH),
        box(20, 388, 860, 34, "#ffffff"),
        text(
            450,
            410,
            "client: merges the saves of all stages; each value comes from the stage that computed it",
            13,
            anchor="middle",
        ),
        arrow(f"{x0 + 14},{y0 + 74} {x0 + 14},386"),
        arrow(f"{x1 + 4 * (BOX + GAP) - 20},{y1 + 74} {x1 + 4 * (BOX + GAP) - 20},386"),
        text(x0 + 4, 376, "saves", 12, FAINT, "end"),
        text(x1 + 4 * (BOX + GAP) - 30, 376, "saves", 12, FAINT, "end"),
    ]
    body = "\n".join(parts)
    defs = f"<defs>{marker('ink', INK)}{marker('fetch', FETCH)}</defs>"
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n{defs}\n{background}\n{body}\n</svg>\n'


if __name__ == "__main__":
    Path(__file__).with_name("trace-over-stages.svg").write_text(draw())
