"""Command lines from typed dataclasses: a flag per field, YAML files with the same names, help from the fields."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_origin

import jsonargparse

from memnorm.lab.errors import UsageError
from memnorm.lab.pretrained import sha256
from memnorm.lab.spec import RunSpec, hints, parse_yaml

TRUST = "--trust-config"
WORDS = {"int": "a whole number", "float": "a number", "dict": "a mapping such as {name: value}"}
jsonargparse.set_loader(
    "memnorm", lambda text: parse_yaml(text, jsonargparse.get_loader("yaml")), exceptions=(UsageError,)
)
T = TypeVar("T")
N = TypeVar("N", int, float)


class Formatter(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the examples, and adds the default to the help of a flag as one would write it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if not action.option_strings or default is None or default is False or default in (argparse.SUPPRESS, {}):
            return text
        if isinstance(default, (list, tuple)):
            default = ",".join(map(str, default))
        return f"{text} (default: {str(default).lower() if default is True else default})"


class Parser(jsonargparse.ArgumentParser):
    """Writes types in error messages as a user would."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        message = re.sub(r"a <class '(\w+)'>", lambda found: WORDS.get(found[1], found[1]), message)
        message = re.sub(r"a typing\.Literal\[(.*?)\]", lambda one: f"one of {one[1].replace(chr(39), '')}", message)
        super().error(message, ex)


def parser(command: str, what: str, examples: str, positional: str = "") -> jsonargparse.ArgumentParser:
    """A parser whose help begins with the command's purpose and examples."""
    made = Parser(
        prog=f"memnorm {command}",
        usage=f"memnorm {command} [options]" if not positional else f"memnorm {command} {positional} [options]",
        description=f"{what}\n\n{examples.strip()}",
        formatter_class=Formatter,
        print_config="--print-%s",
        parser_mode="memnorm",
    )
    made.allow_abbrev = False
    return made


def add_fields(target: Any, cls: type, skip: Collection[str] = (), defaults: Mapping[str, Any] | None = None) -> None:
    """Add a flag for each field of a dataclass; `defaults` override the dataclass's."""
    types = hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        default = (defaults or {}).get(field.name, default)
        flag = "--" + field.name.replace("_", "-")
        if default is False:
            target.add_argument(flag, action="store_true", help=field.metadata["help"])
        else:
            hint = _numbers if get_origin(types[field.name]) is tuple else types[field.name]
            target.add_argument(flag, type=hint, default=default, help=field.metadata["help"])


def _numbers(value: Any) -> list[float]:
    """A comma-separated list of numbers, or a list from a file."""
    return [float(one) for one in names(value.strip().strip("[]"))] if isinstance(value, str) else list(value)


def filled(cls: type[T], arguments: Any, skip: Collection[str] = ()) -> T:
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(cls) if field.name not in skip}  # type: ignore[arg-type]
    return cls(**{name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, jsonargparse.Namespace):
        return value.as_dict()
    return tuple(value) if isinstance(value, list) else value


def add_config(made: jsonargparse.ArgumentParser) -> None:
    made.add_argument("--config", action="config", help="YAML file with any of these settings; later flags override it")
    trust = "import a model or task package.module:factory that the file names: this runs its code"
    made.add_argument(TRUST, action="store_true", help=trust)


def add_places(target: Any) -> None:
    target.add_argument("--runs", type=Path, default=Path("runs"), help="folder that the runs are kept in")
    help = "folder of the data sets; default: $MEMNORM_DATA, else the user's cache"
    target.add_argument("--data-root", type=Path, default=None, help=help)
    target.add_argument("--download", action="store_true", help="get the data set if it is missing")


def filled_spec(arguments: Any, skip: Collection[str] = ()) -> RunSpec:
    """The specification with the values of its flags and the hash of the pretrained weights."""
    if arguments.pretrained is not None and arguments.pretrained_sha256 is None:
        arguments.pretrained_sha256 = sha256(arguments.pretrained)
    return filled(RunSpec, arguments, skip)


def parse(made: jsonargparse.ArgumentParser, words: Sequence[str]) -> Any:
    """The arguments. A model or task of the user's own is refused unless its name, or the trust in its file, is on the
    command line.
    """
    arguments = made.parse_args(words)
    for what in ("model", "task"):
        name = getattr(arguments, what, "")
        typed = [after for word, after in itertools.pairwise(words) if word == f"--{what}"]
        if ":" in name and not {TRUST, f"--{what}={name}"} & set(words) and name not in typed:
            raise UsageError(
                f"the config file names the {what} {name}, and importing it runs its code; add {TRUST} if you trust it"
            )
    return arguments


def names(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str, kind: Callable[[str], N], flag: str) -> list[N]:
    try:
        found = [kind(word) for word in names(text)]
    except ValueError:
        found = []
    if not found or not all(0 < one < float("inf") for one in found):
        raise UsageError(f"{flag} needs positive numbers separated by commas; got {text!r}")
    return found
