"""Draw the pictures of README.md and docs/algorithm.md: one packed stream over ranks.

Owners, fragments and who needs a state come from `make_plan`, so a picture cannot disagree with the
code. Run `python docs/pictures/draw.py` after a change; tests/test_docs.py compares the files.
"""

from __future__ import annotations

from pathlib import Path

from kda_cp.comm.plan import Fragment, Plan, make_plan

HERE = Path(__file__).parent
TOKEN, HEIGHT, GAP = 52, 40, 70  # width and height of a token, gap between ranks
LEFT, TOP = 96, 64
COLORS = ("#f2b872", "#86b6e8", "#9ccf98", "#d6a8d8", "#e8e08a")
INK, PALE, ARROW = "#1d2733", "#5d6875", "#b3261e"


def draw(plan: Plan, title: str) -> str:
    """Return the SVG of a plan: a row for each rank, a column for each token, states as arrows."""
    width = LEFT + plan.num_tokens * TOKEN + 40
    height = TOP + plan.ranks * (HEIGHT + GAP) - 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
        f"<title>{title}</title>",
        f'<defs><marker id="tip" markerWidth="6" markerHeight="6" refX="5" refY="3" orient="auto">'
        f'<path d="M0,0 L6,3 L0,6 z" fill="{ARROW}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for sequence, (start, stop) in enumerate(
        zip(plan.cu_seqlens, plan.cu_seqlens[1:], strict=False)
    ):
        parts.append(_text(_x(start) + 2, 26, f"document {sequence}", INK, anchor="start", size=14))
        parts.append(
            f'<rect x="{_x(start) + 1}" y="32" width="{(stop - start) * TOKEN - 2}" height="6" '
            f'rx="3" fill="{COLORS[sequence % len(COLORS)]}"/>'
        )
    for rank in range(plan.ranks):
        y = _y(rank)
        parts.append(_text(LEFT - 14, y + 26, f"rank {rank}", INK, anchor="end"))
        parts.append(
            f'<line x1="{LEFT}" x2="{_x(plan.num_tokens)}" y1="{y + HEIGHT}" y2="{y + HEIGHT}" '
            f'stroke="{PALE}" stroke-dasharray="2 5"/>'
        )
        for segment in plan.segments(rank):
            for token in range(segment.start, segment.stop):
                color = COLORS[segment.sequence % len(COLORS)]
                parts.append(
                    f'<rect x="{_x(token) + 1}" y="{y}" width="{TOKEN - 2}" height="{HEIGHT}" '
                    f'rx="4" fill="{color}"/>'
                )
                parts.append(_text(_x(token) + TOKEN / 2, y + 26, str(token), INK))
    for fragment in plan.fragments:
        if fragment.exits is not None:
            x = (_x(fragment.start) + _x(fragment.stop)) / 2
            parts.append(_text(x, _y(fragment.rank) + HEIGHT + 18, _map(fragment), PALE, size=14))
            parts += _arrow(fragment, plan.fragments[fragment.index + 1])
    return "\n".join([*parts, "</svg>", ""])


def _map(fragment: Fragment) -> str:
    n = fragment.index
    return f"A{n} S + b{n}" if fragment.full else f"b{n}"


def _arrow(source: Fragment, target: Fragment) -> list[str]:
    x, y0, y1 = _x(source.stop), _y(source.rank), _y(target.rank)
    down = y1 > y0
    start, stop = (y0 + HEIGHT, y1 - 2) if down else (y0, y1 + HEIGHT + 2)
    label = _text(x + 14, (start + stop) / 2 + 5, "S", ARROW, anchor="start", size=16)
    return [
        f'<path d="M{x - 10},{start} C{x - 10},{(start + stop) / 2} {x + 10},{(start + stop) / 2} '
        f'{x + 10},{stop}" fill="none" stroke="{ARROW}" stroke-width="2" marker-end="url(#tip)"/>',
        label,
    ]


def _text(
    x: float, y: float, text: str, color: str, *, anchor: str = "middle", size: int = 15
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{color}">{text}</text>'
    )


def _x(token: int) -> int:
    return LEFT + token * TOKEN


def _y(rank: int) -> int:
    return TOP + rank * (HEIGHT + GAP)


def pictures() -> dict[Path, str]:
    """Return the text of every picture, by its file."""
    contiguous = make_plan((0, 2, 9, 12), 3)
    zigzag = make_plan((0, 12), 3, layout="zigzag")
    return {
        HERE / "contiguous.svg": draw(contiguous, "Three documents over three ranks"),
        HERE / "zigzag.svg": draw(zigzag, "One document over three ranks, zigzag"),
    }


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")
