"""How all pictures look: as wide as a printed column (85 mm) or page (170 mm), in Okabe and Ito's colours.

Everyone can tell these colours apart. No window, no global state: figures are drawn by Agg and take their name only when they
are whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revit.data.cache import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN, PAGE = 85, 170  # mm
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#595959"
SERIES_COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", "-.", ":")

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.5,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 3,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
}


@contextmanager
def figure_file(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of this size in mm, saved in the format of the path's suffix when the block ends well."""
    import matplotlib
    from matplotlib.figure import Figure

    path = Path(path)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a picture must not depend on the settings of whoever draws it
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(width / 25.4, height / 25.4), layout="constrained")
        yield figure
        with warnings.catch_warnings(), whole_file(path) as file:
            # Class names come in every script; a letter that the font lacks becomes a box, which is no reason to stop.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            figure.savefig(file, format=path.suffix.lstrip(".") or "png", bbox_inches="tight", pad_inches=0.02)


def one_line(text: object, limit: int) -> str:
    """One printable line: shortened in the middle, where names differ least, with file names of broken encoding mended."""
    line = " ".join(str(text).encode("utf-8", "replace").decode().split())
    line = "".join(letter if letter.isprintable() else "?" for letter in line)
    if len(line) <= limit:
        return line
    tail = (limit - 1) // 2
    return f"{line[: limit - 1 - tail]}…{line[len(line) - tail :]}"
