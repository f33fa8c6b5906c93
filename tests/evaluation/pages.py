"""A small audit whose numbers are known, and a page about it."""

import math

from PIL import Image

from revit.evaluation.audit import Audit, StageErrors
from revit.evaluation.audit_page import Picture, verdict_of, write_page
from revit.evaluation.generalisation import Agreement, ByAngle, RandomTurns
from revit.groups import Group

EVIL = "<script>alert('x')</script>\" & $title"


def make_audit(group="p4m", *, error=1e-7, kept=1.0, samples=1024, claimed=None, names=("lift", EVIL, "logits")):
    """An audit with one relative error at all stages and elements but the identity; the largest is twice as large."""
    group = Group.parse(group)
    others = group.order - 1
    stages = {
        name: StageErrors(
            "invariant" if name == "logits" else "features",
            (0.0,) + (3 * error,) * others,
            (0.0,) + (error,) * others,
            (0.0,) + (2 * error,) * others,
            None if name == "logits" else (0.0,) + (0.5 * error,) * others,
            None if name == "logits" else (0.0,) + (0.25 * error,) * others,
        )
        for name in names
    }
    return Audit(
        group=group.name,
        samples=samples,
        elements=tuple(map(group.element_name, range(group.order))),
        exact=tuple(map(group.is_exact_element, range(group.order))),
        stages=stages,
        claimed=tuple(names) if claimed is None else claimed,
        consistency=(1.0,) + (kept,) * others,
        tolerance=5e-5,
    )


def make_pictures(folder):
    """A wide and a small still, a film and one that was never drawn."""
    Image.new("RGB", (1300, 500), "navy").save(folder / "stages.png")
    Image.new("RGB", (600, 600), "teal").save(folder / "angles.png")
    frames = [Image.new("RGB", (470, 160), colour) for colour in ("red", "green", "blue")]
    frames[0].save(folder / "film.gif", save_all=True, append_images=frames[1:], duration=100, loop=0)
    return [
        Picture(folder / "film.gif", f"A film of {EVIL}", f'It is "red" {EVIL}'),
        Picture(folder / "stages.png", "Stages", "Navy"),
        Picture(folder / "angles.png", "Angles", "Teal"),
        Picture(folder / "none.png", "Attention", "Nothing"),
    ]


def make_page(folder, *, audit=None, **changes):
    """Writes `page.html` with names of strangers in every place."""
    audit = make_audit() if audit is None else audit
    good, bad = Agreement(99.99999, 0.001, 0.0123, 0.0456), Agreement(87.5, 0.5, math.nan, 0.75)
    options = {
        "title": f"Audit of {EVIL}",
        "facts": {
            "data": EVIL,
            EVIL: "x",
            "command": "revit audit " + "a" * 300,
            "versions": {"torch": "2.6", "python": "3.11"},
        }
        | {"batch_size": 16, "size": [28, 28], "parameters": 135324, "commit": None},
        "random": RandomTurns(64, 8, 0.5, 7, good, bad),
        "by_angle": ByAngle(32, (0.0, 45.0, 90.0), (good, bad, good), (good, good, bad)),
        "pictures": make_pictures(folder),
        "verdict": verdict_of(audit),
    }
    write_page(folder / "page.html", audit=audit, **{**options, **changes})
    return folder / "page.html"
