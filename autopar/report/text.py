"""Plain text for people: amounts with units, and tables that need no colour and fit 110 columns."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 110
_RULED = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)


def format_bytes(count: int) -> str:
    """Return a number of bytes in decimal units: ``12.9 GB``."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(amount) < 999.5:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.3f} PB"


def exact_bytes(count: int) -> str:
    """Return a number of bytes that can be used as it stands, with its unit behind: ``21566 bytes (21.6 kB)``."""
    plain = f"{count} byte" if count == 1 else f"{count} bytes"
    return plain if abs(count) < 1000 else f"{plain} ({format_bytes(count)})"


def format_seconds(seconds: float) -> str:
    """Return a time in the unit that suits it: ``12.3 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:,.0f} {unit}" if seconds >= 1000 else f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


def format_share(part: float, whole: float) -> str:
    """Return what share of ``whole`` is ``part``: ``18 %``."""
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def format_shape(shape: Sequence[int]) -> str:
    """Return a shape as text: ``4096 x 512``; a tensor without dims is a ``scalar``."""
    return " x ".join(str(size) for size in shape) or "scalar"


def format_count(count: int, noun: str) -> str:
    """Return ``1 op``, ``2 ops``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Return a table as lines of text; ``right`` names the columns that are flush right.

    Long cells wrap; nothing is cut off and nothing is read as markup.
    """
    rows = [tuple(row) for row in rows]
    names_fit = max((len(row[0]) for row in rows), default=0) <= WIDTH // 2
    grid = Table(box=_RULED, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for index, header in enumerate(headers):
        flush_right = header in right
        grid.add_column(
            Text(header),
            justify="right" if flush_right else "left",
            overflow="fold",
            no_wrap=flush_right or (index == 0 and names_fit),
        )
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    stream = io.StringIO()
    console = Console(
        file=stream, width=WIDTH - 2, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False
    )
    console.print(grid)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).rstrip()


def section(title: str, body: str) -> str:
    """Return a block of a report: its title, its lines indented by two, and an empty line before."""
    return "\n" + title + "\n" + "\n".join(f"  {line}" if line else "" for line in body.splitlines())
