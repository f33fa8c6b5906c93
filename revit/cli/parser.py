"""Reading the command line: one clear line for what is wrong, and the nearest names that exist."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from revit.data.augment import AugmentOptions
from revit.data.spec import DataOptions
from revit.training.recipe import ModelOptions, Recipe, RecipeError, TrainOptions, read_recipe

SECTIONS = {"model": ModelOptions, "data": DataOptions, "augment": AugmentOptions, "train": TrainOptions}


class UsageError(ValueError):
    """A command line that cannot be understood."""


class HelpFormatter(DefaultHelpFormatter):
    """Says a default where there is one, and nothing about Python types."""

    def _expand_help(self, action: argparse.Action) -> str:
        text = re.sub(
            r" \((?:required, )?type: .*?(?:, default: ([^()]*|.*?))?\)$", r" (default: \1)", super()._expand_help(action)
        )
        return re.sub(r" \((?:required|default: (?:null|None|))\)$", "", text).replace("(default: False)", "(default: false)")

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return re.sub(r", --[\w.]+\+ \S+$", "", super()._format_action_invocation(action))  # lists can grow: rarely wanted


class Parser(ArgumentParser):
    """A parser whose errors are exceptions with one line, and which suggests options."""

    def __init__(self, command: str, usage: str, description: str) -> None:
        super().__init__(
            prog=f"revit {command}",
            usage=f"revit {command} {usage}",
            description=description,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            default_env=False,
        )
        self.command = command

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        missing = re.search(r"arguments are required: (.*)", message)
        if missing:
            message = f"{', '.join(self._shown(name) for name in missing[1].split(', '))} is missing"
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        if unknown:
            message = self._unknown(unknown[1])
        bad = re.search(r'Parser key "([\w.]+)":\s*(.*)', message, flags=re.S)
        if bad:
            message = f"--{bad[1]}: {_plain(bad[2])}"
        hint = "" if unknown else f" (`revit {self.command} --help` explains)"
        raise UsageError(" ".join(message.split()) + hint)

    def _shown(self, name: str) -> str:
        """An argument as the usage line writes it."""
        for action in self._actions:
            if name in (action.dest, action.metavar):
                return action.option_strings[0] if action.option_strings else str(action.metavar)
        return name

    def _unknown(self, option: str) -> str:
        name = option.split("=")[0]
        options = [text for action in self._actions for text in action.option_strings if text.startswith("--")]
        # A forgotten section is the usual slip: --epochs for --train.epochs.
        short = [text for text in options if text.split(".")[-1] == name.lstrip("-")]
        near = short or difflib.get_close_matches(name, options, n=3, cutoff=0.6)
        return f"unknown option {name}; " + (
            f"did you mean {', '.join(near)}?" if near else f"see `revit {self.command} --help`"
        )

    def add_recipe_options(self) -> None:
        """Every option of every section, as --section.option."""
        for name in SECTIONS:
            self.add_section(name)

    def add_section(self, name: str, *, skip: frozenset[str] = frozenset()) -> None:
        """The options of one section. That a section could also be a file of its own is not advertised: recipes are."""
        self.add_class_arguments(SECTIONS[name], name, skip=set(skip))
        for action in self._actions:
            if action.option_strings == [f"--{name}"]:
                action.help = argparse.SUPPRESS

    def recipe_of(self, words: list[str]) -> str:
        """The recipe that a command line names, before its options are looked at."""
        return str(self.parse_args(words).recipe)

    def read_recipe_options(self, name: str, words: list[str]) -> tuple[Namespace, Recipe]:
        """The recipe, with what the command line changes of it."""
        values = read_recipe(name)
        known = {action.dest for action in self._actions}
        flat = {f"{section}.{option}": value for section, options in values.items() for option, value in options.items()}
        for option in flat:
            if option not in known:
                near = difflib.get_close_matches(option, known, n=1) or [f"revit {self.command} --help"]
                raise RecipeError(f"recipe {name}: unknown option {option}; did you mean {near[0]}?")
            if flat[option] is None and self.get_default(option) is not None:
                raise RecipeError(f"recipe {name}: {option} has no value; write one, or leave the option out")
            if _is_huge(flat[option]):
                raise RecipeError(f"recipe {name}: {option} has a number of more than 64 bits; write a smaller one")
        try:
            self.parse_object({"recipe": name, **values})
        except UsageError as error:
            raise RecipeError(f"recipe {name}: {error}") from error
        self.set_defaults(flat)
        options = self.parse_args(words)
        for option in known:
            if _is_huge(options.get(option)):
                raise UsageError(f"--{option}: a number of more than 64 bits; give a smaller one")
        return options, Recipe(**{section: kind(**vars(options[section])) for section, kind in SECTIONS.items()})


def _is_huge(value: Any) -> bool:
    """Whether an option is, or has in it, a whole number that neither torch nor a message can hold: 0xfff... has any length."""
    if isinstance(value, list):
        return any(map(_is_huge, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _plain(text: str) -> str:
    """A type error in the words of a user."""
    expected = re.search(r"Expected an? <class '(\w+)'>", text)
    got = re.search(r"Got value: (\S+)", text)
    if expected and got:
        return f"expected {_TYPES.get(expected[1], expected[1])}, got {got[1]!r}"
    if got:
        return f"got {got[1]!r}, which is of none of the types that it takes"
    return text


_TYPES: dict[Any, str] = {"int": "a whole number", "float": "a number", "bool": "true or false"}
