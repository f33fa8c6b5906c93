"""Writes docs/api.md: every public name with its signature and docstring. A test holds the page to what this makes.

python docs/write_api.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import revit
import revit.data
import revit.equivariance
import revit.evaluation
import revit.models

PAGE = Path(__file__).with_name("api.md")
PARTS: tuple[tuple[ModuleType, str], ...] = (
    (revit, "What most programs need: groups, turning, models by name, and the tools that check them."),
    (revit.nn, "Layers on feature maps `[B, C, G, H, W]`, for networks of your own."),
    (revit.models, "Models; build them with `create_model`."),
    (revit.data, "Datasets by name, and the description of images that a model must know."),
    (revit.evaluation, "Audits, scores, predictions and pictures, for any module."),
)
HEAD = """# API

Every public name, from its signature and docstring (made by `python docs/write_api.py`). The command line is explained by
`revit COMMAND --help`.
"""


def api_page() -> str:
    """The page as text. A name that several parts show is explained where it comes first."""
    seen: set[int] = set()
    lines = [HEAD]
    for module, about in PARTS:
        lines.append(f"## {module.__name__}\n\n{about}\n")
        for name in sorted(module.__all__, key=str.lower):
            value = getattr(module, name)
            if isinstance(value, ModuleType) or id(value) in seen:
                continue
            seen.add(id(value))
            lines.append(f"### `{module.__name__}.{name}`\n\n{_entry(name, value)}\n")
    return "\n".join(lines).rstrip() + "\n"


def _entry(name: str, value: object) -> str:
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value) and text.startswith(f"{name}("):  # what a dataclass writes for itself
        text = ""
    return f"```text\n{_signature(name, value)}\n```\n\n{_prose(text)}".rstrip()


def _signature(name: str, value: object) -> str:
    """One line if it is short, or one for each argument; types are those of the code, without quotes and module names."""
    if not callable(value):
        return name
    if inspect.isclass(value) and issubclass(value, Exception):
        return f"class {name}({value.__bases__[0].__name__})"
    if inspect.isclass(value) and getattr(value, "_is_protocol", False):
        return f"class {name}(Protocol)"
    signature = inspect.signature(value)
    kind = "class" if inspect.isclass(value) else "def"
    result = "" if inspect.isclass(value) or signature.return_annotation is signature.empty else signature.return_annotation
    arguments, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            arguments.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        arguments.append(_argument(parameter))
    tail = f") -> {_plain(str(result))}" if result else ")"
    line = f"{kind} {name}({', '.join(arguments)}{tail}"
    if len(line) <= 100:
        return line
    return f"{kind} {name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + tail


def _argument(parameter: inspect.Parameter) -> str:
    name = parameter.name
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        name = ("*" if parameter.kind is parameter.VAR_POSITIONAL else "**") + name
    if parameter.annotation is not parameter.empty:
        written = parameter.annotation
        name += f": {written.__name__ if isinstance(written, type) else _plain(str(written))}"
    if parameter.default is parameter.empty:
        return name
    shown = "..." if "<" in repr(parameter.default) else repr(parameter.default)  # what a factory makes
    return f"{name} = {shown}"


def _plain(text: str) -> str:
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text.replace("'", ""))


def _prose(text: str) -> str:
    """A docstring as Markdown: examples become blocks that tests leave to the doctests of the code."""
    blocks = []
    for block in text.split("\n\n"):
        if block.startswith(">>>"):
            blocks.append(f"```pycon\n{block}\n```")
        elif block.startswith("    "):
            blocks.append("```text\n" + inspect.cleandoc(block) + "\n```")
        elif block.startswith("Args:"):
            blocks.append(re.sub(r"^    (\w+): ", r"- `\1`: ", block.removeprefix("Args:\n"), flags=re.MULTILINE))
        else:
            blocks.append(_spans(block))
    return "\n\n".join(blocks)


def _spans(text: str) -> str:
    """Shapes such as [B, C*G, H, W] become code, and no other star or bracket is taken for markup."""
    parts = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"\[[^\]\n]*\]|\S*\*\S*\w", lambda found: f"`{found[0]}`", parts[i])
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(api_page())
