"""The report of an audit as one HTML file: no script, nothing from elsewhere, pictures inside; for screens, phones and paper.

Whatever is written comes through `html.escape`: names of classes, layers and files are those of strangers.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from revit.data.cache import whole_file
from revit.evaluation.audit import Audit
from revit.evaluation.audit_figures import short_number
from revit.evaluation.generalisation import Agreement, ByAngle, RandomTurns
from revit.groups import Group

_TYPES = {".png": "image/png", ".gif": "image/gif"}
_PHONE = 600  # pixels; wider pictures would be too small to read on a phone
_MARKS = {"passed": "✓ Passed", "failed": "✗ Failed", "undecided": "No exact element to decide by"}


@dataclass(frozen=True)
class Picture:
    """A PNG or GIF file for the page: the caption below it, and in words what it is, for those who cannot see it."""

    path: Path
    caption: str
    alt: str


def verdict_of(audit: Audit, tolerance: float | None = None) -> str:
    """What an audit found, in sentences for people who look at images and not at models."""
    limit = audit.tolerance if tolerance is None else tolerance
    group = Group.parse(audit.group)
    others = group.order - 1
    if others == 0:
        return f"Nothing was turned: the group {group} has no element but the identity."
    if not group.reflections:
        act, count = "Turning", _count(others, "turn")
    elif group.rotations == 1:
        act, count = "Mirroring", _count(others, "mirror")
    else:
        act, count = "Turning or mirroring", f"{others} turns and mirrors"
    measured = f"({_count(audit.samples, 'image')}, {count})"
    changed = sum(round((1 - share) * audit.samples) for share in audit.consistency[1:])
    if changed == 0:
        answer = f"{act} an image never changed the answer {measured}."
    else:
        cases = others * audit.samples
        share = _percent(changed / cases)
        answer = f"{act} an image changed the answer in {changed:,} of {cases:,} cases, {share} {measured}."
    broken = audit.broken_stage(limit)
    if broken is not None:
        error = f"largest error {short_number(audit.worst(broken))}, allowed {limit:g}"
        return f"{answer} The model does not turn with the image; the first stage that fails is {broken} ({error})."
    if not any(audit.exact[1:]):
        return f"{answer} No element of {group} moves pixels onto pixels, so every error contains that of interpolation."
    where = "" if all(audit.exact) else " wherever pixels move onto pixels"
    if set(audit.claimed) >= set(audit.stages):
        return f"{answer} Every stage of the model turns with the image{where}, with an error of at most {limit:g}."
    return f"{answer} The output stays the same{where}, with an error of at most {limit:g}."


def write_page(
    path: Path,
    *,
    title: str,
    facts: Mapping[str, object],
    audit: Audit,
    random: RandomTurns | None,
    by_angle: ByAngle | None,
    pictures: Sequence[Picture],
    verdict: str,
    tolerance: float | None = None,
) -> None:
    """Writes the report: the verdict, the pictures (those whose file was not drawn are left out), the tables, and how it was
    measured, as `facts` by their names. `tolerance` is the one of the verdict, if it is not the audit's."""
    limit = audit.tolerance if tolerance is None else tolerance
    figures = [_figure(picture) for picture in pictures if Path(picture.path).exists()]
    sections = [
        _section("Pictures", "".join(figures)) if figures else "",
        _section("Each stage", _stage_notes(audit, limit) + _stage_table(audit, limit)),
        _section("Each turn", _element_table(audit)),
        _section("Any angle", _agreement_table(random, by_angle)) if random is not None or by_angle is not None else "",
        _section("How it was measured", _facts(facts)),
    ]
    state = "failed" if audit.broken_stage(limit) is not None else "passed" if any(audit.exact[1:]) else "undecided"
    page = _PAGE.substitute(
        title=escape(title), verdict=escape(verdict), state=state, mark=_MARKS[state], body="\n".join(filter(None, sections))
    )
    with whole_file(Path(path)) as file:
        file.write(page.encode("utf-8", "replace"))


def _section(heading: str, body: str) -> str:
    name = heading.lower().replace(" ", "-")
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(heading)}</h2>\n{body}</section>'


def _figure(picture: Picture) -> str:
    """A picture inside the page; of a film readers who ask for no motion, and printers, get the first frame."""
    from PIL import Image

    path = Path(picture.path)
    if path.suffix.lower() not in _TYPES:
        raise ValueError(f"{path.name}: a page shows {' and '.join(_TYPES)} files, got {path.suffix or 'no suffix'!r}")
    content = path.read_bytes()
    still = ""
    with Image.open(io.BytesIO(content)) as image:
        width, height = image.size
        if getattr(image, "is_animated", False):
            frame = io.BytesIO()
            image.convert("RGB").save(frame, "PNG", optimize=True)
            source = _data_uri(frame.getvalue(), "image/png")
            still = f'<source media="(prefers-reduced-motion: reduce), print" srcset="{source}">'
    uri = _data_uri(content, _TYPES[path.suffix.lower()])
    # Pictures have 200 pixels an inch of paper and are shown somewhat larger than on it.
    shown = width if still else round(width * 96 / 150)
    tag = f'<img src="{uri}" alt="{escape(picture.alt)}" width="{width}" height="{height}" style="width: {shown}px">'
    body = f"<picture>{still}{tag}</picture>" if still else tag
    if shown > _PHONE:
        body = _scrolling(body, picture.alt)
    return f"<figure>{body}<figcaption>{escape(picture.caption)}</figcaption></figure>\n"


def _data_uri(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _stage_notes(audit: Audit, limit: float) -> str:
    return (
        "<p>How far the output of each stage for a turned image is from its turned output, over "
        f"{_count(audit.samples, 'image')} and all elements of {escape(audit.group)} but the identity. "
        f"Allowed is a largest error of {limit:g} under elements that move pixels onto pixels.</p>"
    )


def _stage_table(audit: Audit, limit: float) -> str:
    rows = []
    broken = audit.broken_stage(limit)
    for name, stage in audit.stages.items():
        absolute, deviation = stage.over_elements("absolute")
        relative, disc = stage.over_elements("relative")[0], stage.over_elements("disc_relative")[0]
        mean = f"{_number(absolute)} ± {_number(deviation)}" if absolute is not None else "–"
        note = f"{name} (first that fails)" if name == broken else name
        rows.append((note, stage.kind, mean, _number(relative), _number(audit.worst(name)), _number(disc)))
    heads = (
        "stage",
        "turns as",
        "absolute error, mean ± std",
        "relative error",
        "largest error, exact elements",
        "relative, disc",
    )
    return _table("Errors of each stage, in the order of computation", heads, rows)


def _element_table(audit: Audit) -> str:
    rows = []
    last = list(audit.stages.values())[-1]
    worst = {g: max(audit.stages.items(), key=lambda item: _order(item[1].relative[g])) for g in range(len(audit.elements))}
    for g, element in enumerate(audit.elements):
        name, stage = worst[g]
        kind = "identity" if g == 0 else "exact" if audit.exact[g] else "interpolated"
        same = _percent(audit.consistency[g])
        rows.append((element, kind, same, _number(last.relative[g]), f"{_number(stage.relative[g])} ({name})"))
    heads = ("turn", "pixels", "same answer", "relative error, output", "relative error, worst stage")
    return _table("What each element of the group changes", heads, rows)


def _agreement_table(random: RandomTurns | None, by_angle: ByAngle | None) -> str:
    rows: list[tuple[str, ...]] = []
    notes = []
    if random is not None:
        rows += [_agreement_row("random, full frame", random.frame), _agreement_row("random, central disc only", random.disc)]
        notes.append(
            f"Random: {_count(random.samples, 'image')}, each in {_count(random.versions, 'version')}, turned by any angle "
            f"and mirrored with probability {random.mirror:g} (seed {random.seed})."
        )
    if by_angle is not None:
        for label, found in (("full frame", by_angle.frame), ("central disc only", by_angle.disc)):
            worst = min(range(len(found)), key=lambda i: (found[i].consistency_percent, -_order(found[i].logit_error)))
            rows.append(_agreement_row(f"worst angle, {label}: {by_angle.degrees[worst]:g}°", found[worst]))
        notes.append(f"Worst angle: the lowest of {len(by_angle.degrees)} angles, {_count(by_angle.samples, 'image')} each.")
    heads = (
        "turned by",
        "same answer",
        "change of probability, predicted class",
        "the same, mean of classes",
        "relative change of logits",
    )
    return f"<p>{escape(' '.join(notes))}</p>" + _table("Answers under turns that no group contains", heads, rows)


def _agreement_row(label: str, found: Agreement) -> tuple[str, ...]:
    values = (found.top_class_difference, found.probability_difference, found.logit_error)
    return (label, _percent(found.consistency_percent / 100), *map(_number, values))


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls by itself where it is wider than the screen; the first cell of a row names it."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(text)}</td>" for text in row[1:]) + "</tr>"
        for row in rows
    )
    table = f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
    return _scrolling(table, caption)


def _scrolling(body: str, name: str) -> str:
    """Something wide that is moved by itself on a narrow screen, by finger or by arrow keys."""
    return f'<div class="wide" role="region" aria-label="{escape(name)}" tabindex="0">{body}</div>'


def _facts(facts: Mapping[str, object]) -> str:
    entries = (
        f"<dt>{escape(str(name).replace('_', ' '))}</dt><dd>{escape(_fact(value))}</dd>" for name, value in facts.items()
    )
    return "<dl>" + "\n".join(entries) + "</dl>"


def _fact(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_fact(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_fact, value))
    return "–" if value is None else f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _number(value: float | None) -> str:
    return "–" if value is None else short_number(value)


def _percent(share: float) -> str:
    """Two decimals that do not say 0 or 100 where it is not."""
    if 0 < share < 1:
        share = min(max(share, 0.0001), 0.9999)
    return f"{100 * share:.2f} %"


def _order(value: float) -> float:
    """For the largest error: what is no number is worse than all."""
    return math.inf if math.isnan(value) else value


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
:root { --text: #1a1a1a; --quiet: #555; --paper: #fff; --line: #d0d0d0; --good: #00664b; --bad: #a84300; }
@media (prefers-color-scheme: dark) {
  :root { --text: #eaeaea; --quiet: #b0b0b0; --paper: #16181b; --line: #43474d; --good: #4fd1a8; --bad: #ff9d5c; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; font: 1rem/1.5 system-ui, sans-serif; color: var(--text);
  background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0 1rem; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; }
.verdict { border-left: 0.4rem solid; padding: 0.25rem 0 0.25rem 1rem; margin: 0; font-size: 1.2rem; }
.passed { border-color: var(--good); } .passed strong { color: var(--good); }
.failed { border-color: var(--bad); } .failed strong { color: var(--bad); }
figure { margin: 1rem 0 1.75rem; }
img { max-width: 100%; height: auto; background: #fff; padding: 0.4rem; border: 1px solid var(--line); border-radius: 0.3rem; }
.wide img { min-width: 40rem; }
figcaption, caption, dt { color: var(--quiet); }
figcaption { max-width: 48rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; min-width: 36rem; }
table { overflow-wrap: normal; }
caption { text-align: left; padding: 0.25rem 0; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.9rem 0.25rem 0; border-bottom: 1px solid var(--line); }
tbody th { font-weight: 500; min-width: 9rem; max-width: 18rem; overflow-wrap: anywhere; }
td { white-space: nowrap; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: 0.25rem 1rem; margin: 0; }
dd { margin: 0; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .wide { overflow: visible; } .wide img, table { min-width: 0; font-size: 8pt; } td { white-space: normal; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; }
}
</style>
</head>
<body>
<main>
<h1>$title</h1>
<p class="verdict $state"><strong>$mark</strong><br>$verdict</p>
$body
</main>
</body>
</html>
""")
