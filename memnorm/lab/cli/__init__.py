"""The command `memnorm`: a module for each subcommand, imported when it is called.

Results go to stdout, messages to stderr. Exit codes: 0 success, 1 a run failed, 2 wrong usage, 3 data missing (the
message holds the command that gets it), 130 interrupted after saving.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import memnorm
from memnorm.errors import MemnormError, OptionError
from memnorm.lab.errors import FAILED, INTERRUPTED, OK, USAGE, LabError
from memnorm.lab.signals import terminations_interrupt
from memnorm.text import visible

COMMANDS = {
    "demo": "train BN and two-way memory with micro-batches of 1 to 16, in two minutes",
    "train": "one run, from flags or a YAML file",
    "compare": "which norm is best for your model, your data and your batch size?",
    "reproduce": "the tables and figures of the paper",
    "report": "HTML, Markdown and CSV from stored runs",
    "data": "list, get and verify data sets",
    "bench": "what a layer and a training step cost on this machine, compared with batch norm",
    "check": "are the layers right on this device? float32, float16, bfloat16, compiled, trained",
    "info": "versions, device, threads, kernels, data folders",
}
EXAMPLES = """\
examples:
  memnorm demo
  memnorm compare --data path/to/images --model resnet18 --norms bn,mbn --batch-sizes 2,8 --seeds 3
  memnorm train --data cifar10 --model resnet20 --norm mbn --batch-size 8
  memnorm reproduce small-batch --scale reduced --list
"""
NEEDS = "memnorm {name} needs the lab's packages ({error}). Install them in a clone with: pip install '.[lab]'"


def program() -> NoReturn:
    """The entry point. A process of torchrun exits without Python's shutdown: torch's thread for collectives may still
    run, and would abort it.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files may be no UTF-8
    warnings.formatwarning = lambda message, *_where, **_more: f"memnorm: {visible(str(message))}\n"
    code = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return OK if words else USAGE
    if words[0] == "--version":
        print(f"memnorm {memnorm.__version__}")
        return OK
    if words[0] not in COMMANDS:
        return complain(f"there is no command {words[0]!r}; commands: {', '.join(COMMANDS)}", USAGE)
    return guarded(words[0], [_dashed(word) for word in words[1:]])


def _dashed(word: str) -> str:
    """A flag with dashes; it may be written with underscores."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    head, dot, rest = flag.partition(".")
    return head.replace("_", "-") + dot + rest + equals + value


def overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {about}" for name, about in COMMANDS.items())
    return (
        f"memnorm {memnorm.__version__}: batch normalization with a memory, and the lab to test it\n\n"
        f"{EXAMPLES}\ncommands:\n{commands}\n\n`memnorm COMMAND --help` says more.\n"
        "Exit codes: 0 success, 1 a run failed, 2 wrong usage, 3 data missing, 130 interrupted after saving."
    )


def plain_parser(command: str, description: str) -> argparse.ArgumentParser:
    """The parser of a subcommand that works without the lab's packages."""
    return argparse.ArgumentParser(
        prog=f"memnorm {command}",
        usage=f"memnorm {command} [options]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def guarded(name: str, words: list[str]) -> int:
    """Run a subcommand; errors become a message and an exit code."""
    try:
        command: Any = importlib.import_module(f"memnorm.lab.cli.{name}")
        with terminations_interrupt():
            return command.main(words)
    except LabError as error:
        return complain(str(error), error.exit_code)
    except OptionError as error:
        return complain(str(error), USAGE)
    except MemnormError as error:
        return complain(str(error), FAILED)
    except KeyboardInterrupt:
        return complain("interrupted; what was saved is kept, and the same command resumes from there", INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except ImportError as error:
        return complain(NEEDS.format(name=name, error=error), FAILED)


def complain(text: str, code: int) -> int:
    print(f"memnorm: {visible(text)}", file=sys.stderr)
    return code
