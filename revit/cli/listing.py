"""`revit models` and `revit recipes`: what there is."""

from __future__ import annotations

import difflib

from rich.console import Console
from rich.table import Table

from revit.cli.parser import Parser, UsageError
from revit.groups import Group
from revit.models import create_model, describe_model, list_models
from revit.models.budget import count_parameters
from revit.training.recipe import list_recipes, read_recipe

ABOUT = """The models that can be built by name. With a text, those whose name contains it, and how many parameters they have:
counting takes building, and the largest ones have hundreds of millions."""


def models(words: list[str]) -> int:
    parser = Parser("models", "[TEXT] [--group GROUP] [--in-chans N] [--num-classes N]", ABOUT)
    parser.add_argument("text", metavar="TEXT", nargs="?", type=str, default="", help="only names that contain this")
    parser.add_argument("--group", metavar="GROUP", type=str, default="p4m", help="group of which the parameters are counted")
    parser.add_argument("--in-chans", metavar="N", type=int, default=3, help="channels of the images")
    parser.add_argument("--num-classes", metavar="N", type=int, default=10, help="classes")
    options = parser.parse_args(words)
    group = Group.parse(options.group)
    names = list_models(options.text)
    if not names and not list_models(options.text, pretrained=True):
        near = difflib.get_close_matches(options.text, list_models(), n=3, cutoff=0.4)
        raise UsageError(f"no model has {options.text!r} in its name" + (f"; did you mean {', '.join(near)}?" if near else ""))
    table = Table(box=None)
    table.add_column("model")
    table.add_column(f"parameters ({group})" if options.text else "", justify="right")
    table.add_column("what it is")
    for name in names:
        count = ""
        if options.text:
            try:
                model = create_model(name, group=group, in_chans=options.in_chans, num_classes=options.num_classes)
                count = f"{count_parameters(model):,}"
            except ValueError:  # a plain transformer has no group but z2
                count = f"not on {group}"
        table.add_row(name, count, describe_model(name))
    console, trained = Console(), list_models(options.text, pretrained=True)
    console.print(table)
    if trained:
        console.print(f"with weights in the package (pretrained=True): {', '.join(trained)}", highlight=False, soft_wrap=True)
    return 0


def recipes(words: list[str]) -> int:
    Parser("recipes", "", "The recipes that `revit train` knows by name.").parse_args(words)
    table = Table(box=None)
    for column in ("recipe", "data", "group", "epochs", "what it is"):
        table.add_column(column, justify="right" if column == "epochs" else "left")
    for name, description in list_recipes().items():
        recipe = read_recipe(name)
        table.add_row(name, recipe["data"]["name"], recipe["model"]["group"], str(recipe["train"]["epochs"]), description)
    Console().print(table)
    return 0
