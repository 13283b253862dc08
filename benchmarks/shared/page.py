"""The page of a run in a folder of results: machine, versions, commit, command, table, figure."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Origin:
    """Where figures come from."""

    machine: str
    versions: str
    commits: str

    def line(self) -> str:
        return "; ".join((self.machine, self.versions, self.commits))


def write_page(
    folder: Path, name: str, title: str, origin: Origin, tables: str, figure: bool = True
) -> Path:
    """Writes README.md, or ``name``.md if the folder has a README.md; returns the path.

    ``name`` is also the name of the CSV file and of the figure, without suffix.
    """
    path = folder / "README.md"
    if path.exists():
        path = folder / f"{name}.md"
    sections = {
        "Machine": origin.machine,
        "Versions": origin.versions,
        "Commit": origin.commits,
        "Command": f"```sh\n{shlex.join(['python', *sys.argv])}\n```",
        "Table": tables.strip(),
        "Figure": f"![{title}]({name}.png)" if figure else "None.",
        "What is out of line": "To be written.",
        "Raw data": f"[{name}.csv]({name}.csv)",
    }
    text = "".join(f"\n## {heading}\n\n{body}\n" for heading, body in sections.items())
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {title}\n{text}")
    return path
