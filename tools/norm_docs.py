"""The generated parts of docs/norms/: the table of all norms, and what was measured of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from performance import table

from memnorm import norms
from memnorm.lab.significance import Sample, difference
from memnorm.lab.spec import arm_name

Errors = Mapping[str, Mapping[int, float]]  # by arm and seed
MEASURED = re.compile(r"<!-- measured -->.*?(?=\n## )", re.DOTALL)


def cost_of(costs: Mapping[str, Any], name: str, what: str) -> Mapping[str, float]:
    model = "nin" if name == "normprop" else "resnet20"
    return costs["costs"][f"{model}/{name}"][what]


def parts(costs: Mapping[str, Any]) -> dict[str, str]:
    """The generated parts of docs/norms/README.md."""
    head = ["norm", "train", "eval", "batch 1", "keeps BN weights", "folds", "Double-Forward", "learning rate", "state"]
    return {
        "cards": ", ".join(f"[{name}]({name}.md)" for name in norms.available()) + ".",
        "norms": table(head, [_row(name, costs) for name in norms.available()]),
        "costs": about(costs),
        "papers": table(["norm", "paper"], [(f"`{name}`", norms.get(name).paper) for name in norms.available()]),
    }


def _row(name: str, costs: Mapping[str, Any]) -> list[str]:
    entry = norms.get(name)
    return [
        f"`{name}`",
        *(f"{cost_of(costs, name, what)['ratio']:.2f}" for what in ("train", "eval")),
        "any" if entry.batch_one else "images",
        "yes" if entry.keeps_weights else "no",
        "yes" if entry.folds else "no",
        entry.double_forward,
        entry.learning_rate,
        entry.state,
    ]


def about(costs: Mapping[str, Any]) -> str:
    where, floor = costs["where"], cost_of(costs, "bn again", "train")
    return (
        f"ResNet-20 (NormProp: NIN), batch size {costs['batch_size']}, median of {costs['rounds']} interleaved rounds; "
        f"BN against BN gave {floor['ratio']:.2f} ({floor['low']:.2f} to {floor['high']:.2f}); "
        f"commit {where['commit']}, torch {where['torch']}, {where['machine']}, {where['threads']} threads"
    )


def cards(folder: Path, costs: Mapping[str, Any], errors: Mapping[int, Errors]) -> dict[Path, str]:
    """Every card with its measurements filled in; `errors` by the steps of the training."""
    found = {}
    for name in norms.available():
        path = folder / f"{name}.md"
        text = measured(name, costs, errors)
        found[path] = MEASURED.sub(lambda _, text=text: f"<!-- measured -->\n{text}\n", path.read_text())
    return found


def measured(name: str, costs: Mapping[str, Any], errors: Mapping[int, Errors]) -> str:
    train, evaluation = (cost_of(costs, name, what) for what in ("train", "eval"))
    lines = [
        f"A training step takes {train['ratio']:.2f} times BN's (middle half of the rounds: {train['low']:.2f} to "
        f"{train['high']:.2f}), a forward in eval mode {evaluation['ratio']:.2f} times ([how and where](README.md)).",
    ]
    arms = [arm_name(name, scheme) for scheme in ("single", "double")]
    for steps, found in errors.items():
        lines += [f"Digits, batch size 4, {steps:,} steps: {against_bn(arm, found)}." for arm in arms if arm in found]
    if len(lines) > 1:
        lines.append("(Learning rate 0.1 or 0.01, whichever did better on held-out training images.)")
    return "\n".join(lines)


def against_bn(arm: str, errors: Errors) -> str:
    text = f"{arm} {Sample(list(errors[arm].values())).text} % test error"
    if arm == "BN":
        return text
    gap = difference(errors[arm], errors["BN"])
    interval = gap.interval()
    span = f", 95 % interval {interval[0]:+.2f} to {interval[1]:+.2f}" if interval else ""
    return f"{text}; {gap.mean:+.2f} against BN{span}"
