#!/usr/bin/env python3
"""Draw docs/dev/one-allgather.svg from the tables of docs/dev/one-allgather.md.

tools/draw_one_allgather.py
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parent.parent / "docs" / "dev"
PAGE, PICTURE = DOCS / "one-allgather.md", DOCS / "one-allgather.svg"


class Step(NamedTuple):
    """One row of a table of the page."""

    number: str
    room: str
    file: str
    function: str  # with its class, if it has one


ROW = re.compile(r"^\| (\d+) \| ([a-z_/]+) \| `([^`]+)` \| `([^`]+)` \| .+ \|$", re.MULTILINE)


def section(title: str) -> str:
    """The text below the heading of the page that starts with ``title``."""
    found = re.search(rf"^## {title}.*?(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{PAGE.name} has no section '{title}'")
    return found[0]


def steps(title: str) -> list[Step]:
    """The steps in the section that starts with ``title``."""
    return [Step(*row) for row in ROW.findall(section(title))]


WIDTH = 1120
LEFT, RIGHT, BOX_WIDTH, BOX_HEIGHT = 130, 776, 322, 34
PITCH = 46  # from one box to the next
SIDE_HEIGHT, WIRE_HEIGHT, GAP = 88, 60, 8
DOWN, BACK, SIDE, DRIVE = "#2f6db5", "#2f7d45", "#7a8699", "#b07a1a"

STYLE = """<style>
  text { font-family: "DejaVu Sans", Verdana, Arial, sans-serif; fill: #1b2430; }
  .card { fill: #ffffff; stroke: #8a94a3; }
  .band { fill: #f1f4f8; }
  .room { font-size: 15px; font-weight: bold; fill: #44526a; }
  .head { font-size: 16px; font-weight: bold; }
  .small { font-size: 12.5px; fill: #44526a; }
  .step { font-size: 13px; font-family: "DejaVu Sans Mono", Consolas, monospace; }
  .down { fill: #dbe9fb; stroke: #2f6db5; }
  .back { fill: #dff1e2; stroke: #2f7d45; }
  .side { fill: #ffffff; stroke: #7a8699; stroke-dasharray: 4 3; }
  .drive { fill: #fdf0d5; stroke: #b07a1a; }
  .n { font-size: 12.5px; font-weight: bold; fill: #ffffff; text-anchor: middle; }
  .arrow { fill: none; stroke-width: 2.2; }
  .ad { stroke: #2f6db5; marker-end: url(#md); }
  .ab { stroke: #2f7d45; marker-end: url(#mb); }
  .as { stroke: #7a8699; stroke-dasharray: 4 3; marker-end: url(#ms); stroke-width: 1.6; }
  .ag { stroke: #b07a1a; stroke-width: 1.8; marker-end: url(#mg); }
  .mid { text-anchor: middle; }
</style>"""

MARKER = (
    '  <marker id="m{}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="4.5" '
    'markerHeight="4.5" orient="auto-start-reverse">'
    '<path d="M0 0 L10 5 L0 10 z" fill="{}"/></marker>'
)


class Band(NamedTuple):
    """A room from the left edge to the right edge, or the wire."""

    top: int
    height: int

    def places(self, count: int) -> list[int]:
        """The upper edges of ``count`` boxes, from the top to the bottom of the band."""
        first, last = self.top + 10, self.top + self.height - 10 - BOX_HEIGHT
        if count == 1:
            return [last]
        return [first + (last - first) * i // (count - 1) for i in range(count)]


class Drawing:
    """The lines of an SVG file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def text(self, kind: str, x: float, y: float, text: str) -> None:
        """One line of text."""
        self.lines.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def box(self, kind: str, x: float, y: float, width: float, height: float) -> None:
        """A rectangle."""
        self.lines.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" '
            f'width="{width:g}" height="{height:g}" rx="5"/>'
        )

    def dot(self, x: float, y: float, radius: int, colour: str) -> None:
        """A filled circle."""
        self.lines.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius}" fill="{colour}"/>')

    def arrow(self, kind: str, path: str) -> None:
        """A line with a head."""
        self.lines.append(f'<path class="arrow {kind}" d="{path}"/>')

    def step(self, kind: str, x: int, y: int, step: Step, colour: str) -> None:
        """A box with the number of the step and its function."""
        self.box(kind, x, y, BOX_WIDTH, BOX_HEIGHT)
        self.dot(x + 19, y + BOX_HEIGHT / 2, 11, colour)
        self.text("n", x + 19, y + BOX_HEIGHT / 2 + 4.5, step.number)
        self.text("step", x + 37, y + BOX_HEIGHT / 2 + 5, step.function)

    def band(self, name: str, band: Band) -> None:
        """A room, with its name at the left."""
        self.box("band", 12, band.top, WIDTH - 24, band.height)
        self.text("room", 22, band.top + 24, name)


def lay_out(down: list[Step], back: list[Step]) -> dict[str, Band]:
    """The bands by room, from the top to the bottom; 'side' is the one beside patterns."""
    bands = {}
    top = 46
    for room in ("torch", "group", "collectives", "peers", "side", "fabric", "fabric/rail", "wire"):
        count = max(sum(s.room == room for s in way) for way in (down, back))
        height = {"side": SIDE_HEIGHT, "wire": WIRE_HEIGHT}.get(room, PITCH * count + 8)
        bands[room] = Band(top, height)
        top += height + GAP
    return bands


def draw_down(d: Drawing, way: list[Step], placed: dict[str, int]) -> None:
    """The boxes of the call; ``placed`` has the upper edge of each by its function."""
    for step in way:
        d.step("down", LEFT, placed[step.function], step, DOWN)
    for a, b in pairwise(way):
        x = LEFT + 150 if a.room != "peers" or b.room != "fabric" else LEFT + BOX_WIDTH - 40
        d.arrow("ad", f"M{x} {placed[a.function] + BOX_HEIGHT} V{placed[b.function] - 1}")


def draw_back(d: Drawing, way: list[Step], placed: dict[str, int]) -> None:
    """The boxes of the arrival; ``placed`` has the upper edge of each by its function."""
    for step in way:
        d.step("back", RIGHT, placed[step.function], step, BACK)
    for a, b in pairwise(way):
        x = RIGHT + 150 if a.room != "fabric" or b.room != "peers" else RIGHT + 40
        d.arrow("ab", f"M{x} {placed[a.function]} V{placed[b.function] + BOX_HEIGHT + 1}")


def place(way: list[Step], bands: dict[str, Band]) -> dict[str, int]:
    """The upper edge of each box by its function, for steps from the top to the bottom."""
    placed: dict[str, int] = {}
    for room, band in bands.items():
        here = [s.function for s in way if s.room == room]
        if here:
            placed.update(zip(here, band.places(len(here)), strict=True))
    return placed


def draw_sides(d: Drawing, start: int, progress: int, band: Band) -> None:
    """The rooms beside the way: patterns and intranode."""
    y = band.top + 34
    middle = y + BOX_HEIGHT // 2
    d.box("band", 12, band.top, 442, band.height)
    d.text("room", 22, band.top + 24, "patterns")
    d.text("small", LEFT, band.top + 20, "which shards go to which rank")
    d.box("side", LEFT, y, 200, BOX_HEIGHT)
    d.text("step", LEFT + 14, y + 22, "gather_flows")
    d.arrow("as", f"M{LEFT} {start + 17} H{LEFT - 10} V{middle} H{LEFT - 1}")
    d.box("band", RIGHT - 98, band.top, WIDTH - 12 - RIGHT + 98, band.height)
    d.text("room", RIGHT - 92, band.top + 24, "intranode")
    d.text("small", RIGHT + 76, band.top + 20, "pieces for rank 3, same host")
    d.box("side", RIGHT + 76, y, 224, BOX_HEIGHT)
    d.text("step", RIGHT + 90, y + 22, "Outbox::publish")
    edge = RIGHT + BOX_WIDTH
    d.arrow("as", f"M{edge} {progress + 17} H{edge + 9} V{middle} H{RIGHT + 301}")


def draw_driver(d: Drawing, bands: dict[str, Band], places: tuple[int, int, int]) -> None:
    """The engine, between the two ways, with an arrow to each box in ``places``."""
    x, width, top = 500, 130, 102
    bottom = bands["fabric/rail"].top + bands["fabric/rail"].height
    middle = x + width / 2
    d.box("drive", x, top, width, bottom - top)
    d.text("room mid", middle, 330, "progress")
    d.text("step mid", middle, 356, "Engine::wait")
    words = ("on the waiting", "thread, calls in", "turn what it", "points to")
    for i, line in enumerate(words):
        d.text("small mid", middle, 386 + 17 * i, line)
    for y in places:
        d.arrow("ag", f"M{x + width} {y + BOX_HEIGHT // 2} H{RIGHT - 8}")
    for y, line in zip(
        places, ("once it is over", "of each fragment", "Endpoint::progress"), strict=True
    ):
        d.text("small mid", (x + width + RIGHT) / 2 - 4, y + BOX_HEIGHT // 2 - 8, line)


def draw_wire(d: Drawing, band: Band) -> None:
    """The chunks on the wire, from the lowest box of one way to that of the other."""
    left, right = LEFT + 150, RIGHT + 150
    box = band.top - GAP - 10
    d.arrow("ad", f"M{left} {box} V{band.top + 30} H{right} V{box + 1}")
    middle = (left + right) / 2
    words = "fi_writedata: chunks of 64 KiB, from the input tensor of rank 0"
    d.text("small mid", middle, band.top + 22, words)
    d.text("small mid", middle, band.top + 48, "into the output tensor of rank 2")


def draw_legend(d: Drawing, y: int) -> None:
    """What the colours mean, and what the picture leaves out."""
    d.dot(41, y - 4, 10, DOWN)
    d.text("small", 58, y, "step of the call, in the order of the page")
    d.dot(361, y - 4, 10, BACK)
    d.text("small", 378, y, "step of the arrival")
    d.box("drive", 541, y - 14, 20, 18)
    d.text("small", 570, y, "drives; bytes do not pass through it")
    d.arrow("as", f"M841 {y - 4} h24")
    d.text("small", 874, y, "asks, or passes pieces on")
    notes = (
        "A room stands above the rooms that it may call. The page lists the calls that go against "
        "the direction of their way.",
        "Not drawn: READY and grant, from rank 2 to rank 0 before the first chunk, and the first "
        "32 KiB, which travel as messages.",
    )
    for i, line in enumerate(notes):
        d.text("small", 30, y + 34 + 20 * i, line)


def picture() -> str:
    """The SVG file."""
    down, back = steps("Down"), steps("Back")
    bands = lay_out(down, back)
    height = bands["wire"].top + bands["wire"].height + 100
    d = Drawing()
    d.lines += [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-labelledby="title">',
        '<title id="title">One AllGather: down through the rooms on rank 0, over the wire, back up '
        "on rank 2</title>",
        STYLE,
        "<defs>",
        *(MARKER.format(*m) for m in (("d", DOWN), ("b", BACK), ("s", SIDE), ("g", DRIVE))),
        "</defs>",
    ]
    d.box("card", 1, 1, WIDTH - 2, height - 2)
    d.text("head", LEFT, 32, "rank 0, host a: the call goes down")
    d.text("head", RIGHT, 32, "rank 2, host b: the arrival goes up")
    for room, band in bands.items():
        if room != "side":
            d.band(room, band)
    calls, arrivals = place(down, bands), place(back[::-1], bands)
    draw_sides(d, calls["AllGather::start"], arrivals["AllGather::progress"], bands["side"])
    draw_down(d, down, calls)
    draw_back(d, back, arrivals)
    driven = ("TensorOperation::on_done", "AllGather::progress", "Rail::poll")
    draw_driver(d, bands, (arrivals[driven[0]], arrivals[driven[1]], arrivals[driven[2]]))
    draw_wire(d, bands["wire"])
    draw_legend(d, bands["wire"].top + bands["wire"].height + 30)
    return "\n".join([*d.lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
