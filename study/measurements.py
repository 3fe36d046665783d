"""The tables and single numbers of the pages from measurements (`results/*.json`): a method of `Measurements` per
marker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from memnorm import norms
from memnorm.lab.bench.clock import Target
from memnorm.lab.significance import Sample, number

Row = Mapping[str, Any]


class Measurements:
    """What the markers of a page stand for, as far as measurements tell."""

    def __init__(self, measured: Mapping[str, Any]) -> None:
        self._measured = measured

    # costs

    def step(self, batch: str, arm: str) -> str:
        """A training step of ResNet-20 in steps of BN."""
        return f"{self._bench(batch, arm)['ratio']:.2f}"

    def backward(self, batch: str) -> str:
        """Time of the backward pass of BN in forward passes."""
        parts = self._bench(batch, "BN")["milliseconds of"]
        return f"{parts['backward'] / parts['forward']:.2f}"

    def evaluation(self) -> str:
        return f"{geometric_mean([row['eval']['ratio'] for row in self._measured['bench']['layer']['shapes']]):.2f}"

    def machine(self) -> str:
        where, bandwidth = self._measured["bench"]["where"], self._measured["bench"]["layer"]["copy bandwidth"]
        return (
            f"{where['machine']}, {where['threads']} threads, float32, torch {where['torch']}, kernels: "
            f"{where['kernels']}, commit {where['commit']}, {where['started'][:10]}. A copy moves "
            f"{bandwidth / 1e9:.0f} GB/s.\n"
        )

    def bounds(self) -> str:
        """Every bound on costs, and what was measured."""
        bench = self._measured["bench"]
        targets = [Target(**one) for part in ("layer", "step", "data", "rest") for one in bench[part]["targets"]]
        rows = [
            (
                *(one.what, f"{one.value:.3g} {one.unit}", f"{one.must:.3g}"),
                *("" if one.good is None else f"{one.good:g}", one.verdict),
            )
            for one in targets
        ]
        return markdown(["what", "measured", "must be at most", "good", ""], rows)

    def layers(self) -> str:
        """The cost of a layer by shape and memory layout."""
        head = ["shape", "layout", "BN, ms", "training", "quartiles", "noise floor", "forward", "eval", "of bandwidth"]
        rows = [
            (
                *("×".join(map(str, row["shape"])), row["layout"], f"{row['BN milliseconds']:.2f}"),
                *(f"**{row['train']['ratio']:.2f}**", _quartiles(row["train"]), _quartiles(row["noise"])),
                *(f"{row['forward']['ratio']:.2f}", f"{row['eval']['ratio']:.2f}"),
                f"{100 * row['of bandwidth']:.0f} %",
            )
            for row in self._measured["bench"]["layer"]["shapes"]
        ]
        return markdown(head, rows)

    def steps(self) -> str:
        """The cost of a training step by network and batch size."""
        head = ["network", "batch", "", "ms", "to BN", "quartiles", "forward, ms", "backward", "update"]
        rows = [
            (
                *(network["model"], network["batch_size"], arm["name"], f"{arm['milliseconds']:.1f}"),
                *(f"**{arm['ratio']:.2f}**", _quartiles(arm)),
                *(f"{one:.1f}" for one in arm["milliseconds of"].values()),
            )
            for network in self._measured["bench"]["step"]["networks"]
            for arm in network["arms"]
        ]
        return markdown(head, rows)

    def processes(self) -> str:
        """What the ways of training in several processes cost."""
        record = self._measured["distributed"]
        names = {"bn": "BN", "bn again": "BN again: the noise", "local": "MBN-2, nothing special"}
        names |= {"exchange": "MBN-2, `exchange_memory`", "sync": "MBN-2, `sync=True`"}
        rows = [
            (names[mode], found["collectives"], f"{found['steps_per_second']:.1f}")
            for mode, found in record["modes"].items()
        ]
        where = record["where"]
        about = (
            f"{record['model']}, batch size {record['batch_size_per_process']} in each of {record['processes']} "
            f"processes on one machine over gloo, median of {record['rounds']} rounds; collectives for gradients and "
            f"DDP's buffers included (torch {where['torch']}, {where['machine']}, {where['threads']} thread per "
            "process; `benchmarks/distributed_costs.py`). A network between machines makes each collective dearer."
        )
        return f"{markdown(['', 'collectives per step', 'steps per second'], rows)}\n\n{about}"

    # norms

    def cards(self) -> str:
        return ", ".join(f"[{name}]({name}.md)" for name in norms.available()) + ".\n"

    def norms(self) -> str:
        """Every norm with its costs and properties."""
        head = ["norm", "train", "eval", "batch 1", "keeps BN weights", "folds", "Double-Forward", "learning rate"]
        rows = []
        for name in norms.available():
            entry = norms.get(name)
            rows.append(
                [
                    *(f"`{name}`", *(f"{self._cost(name, what)['ratio']:.2f}" for what in ("train", "eval"))),
                    *("any" if entry.batch_one else "images", "yes" if entry.keeps_weights else "no"),
                    *("yes" if entry.folds else "no", entry.double_forward, entry.learning_rate, entry.state),
                ]
            )
        return markdown([*head, "state"], rows)

    def papers(self) -> str:
        return markdown(["norm", "paper"], [(f"`{name}`", norms.get(name).paper) for name in norms.available()])

    def costs(self) -> str:
        """How the costs of norms were measured."""
        record = self._measured["norm-costs"]
        where, floor = record["where"], self._cost("bn again", "train")
        return (
            f"ResNet-20 (NormProp: NIN), batch size {record['batch_size']}, median of {record['rounds']} interleaved "
            f"rounds; BN against BN gave {floor['ratio']:.2f} ({_quartiles(floor)}); "
            f"commit {where['commit']}, torch {where['torch']}, {where['machine']}, {where['threads']} threads\n"
        )

    def cost(self, norm: str) -> str:
        train, evaluation = (self._cost(norm, what) for what in ("train", "eval"))
        return (
            f"A training step takes {train['ratio']:.2f} times BN's (middle half of the rounds: {_quartiles(train)}), "
            f"a forward in eval mode {evaluation['ratio']:.2f} times ([how and where](README.md))."
        )

    def _cost(self, norm: str, what: str) -> Mapping[str, float]:
        model = "nin" if norm == "normprop" else "resnet20"
        found: Mapping[str, float] = self._measured["norm-costs"]["costs"][f"{model}/{norm}"][what]
        return found

    # tests

    def tests(self) -> str:
        """The last run of all tests."""
        return markdown(["", ""], list(self._measured["test-full"].items()))

    def torch(self) -> str:
        """A row for each version of torch that the tests of the layers have run with."""
        records = self._measured["test-torch"]
        versions = sorted(records, key=lambda version: [int(part) for part in version.split(".")])
        rows = [(version, records[version]["result"], records[version]["date"]) for version in versions]
        return markdown(["PyTorch", "tests of the layers", "date"], rows)

    def ecosystem(self) -> str:
        """How many models of other libraries train with two-way memory and return, and which do not."""
        record = self._measured["ecosystem"]
        reasons = ("no batch norm", "over 90 M parameters", "fails without memnorm")
        lines = [f"| library | trained and returned | {' | '.join(reasons)} |", "|---|---|---|---|---|"]
        by_library: dict[str, dict[str, str]] = {}
        for row in record["rows"]:  # several tests of one model count as one, which fails if one of them does
            found = by_library.setdefault(row["library"], {})
            if found.get(row["test"]) != "failed":
                found[row["test"]] = row["outcome"]
        for library, found in by_library.items():
            counts = Counter(found.values())
            name = f"{library} {record['versions'].get(library, '')}".strip()
            others = " | ".join(str(counts[reason]) for reason in reasons)
            lines.append(f"| {name} | {counts['passed']} of {counts['passed'] + counts['failed']} | {others} |")
        for outcome in ("failed", *reasons[1:]):
            tests = [
                (library, test) for library, found in by_library.items() for test in found if found[test] == outcome
            ]
            lines += ["", f"{outcome[0].upper()}{outcome[1:]}: {', '.join(map(' '.join, tests)) or 'none'}."]
        losses = [
            (row["test"], row["batch"], f"{sum(row['losses'][:3]) / 3:.2f}", f"{sum(row['losses'][-3:]) / 3:.2f}")
            for row in record["rows"]
            if "losses" in row
        ]
        header = ["detector", "images per batch", "mean loss of the first three steps", "of the last three"]
        lines += ["", markdown(header, losses)]
        versions = f"torch {record['versions']['torch']}, Python {record['versions']['Python']}"
        lines += ["", f"Run on {record['date']} at commit {record['commit']} ({versions}, {record['machine']})."]
        return "\n".join(lines)

    # other measurements

    def late(self, what: str) -> str:
        """The continuation of trained networks, in the lab and with the equations written out."""
        record = self._measured["late_and_literal"]
        if what == "apart":
            return f"{max(run['apart'] for run in record['runs']):.0e}"
        if what == "unequal":
            return str(sum(run["lab"]["test_error"] != run["literal"]["test_error"] for run in record["runs"]))
        return f"{len(record['runs'])}" if what == "networks" else f"{record[what]:,}"

    def recalibration(self, what: str) -> str:
        """Error of networks recalibrated with the old memory minus that without."""
        gaps = [run["with_memory"] - run["without"] for run in self._measured["recalibration"]["runs"]]
        if what == "networks":
            return str(len(gaps))
        return number({"mean": Sample(gaps).mean, "least": min(gaps), "most": max(gaps)}[what])

    def where(self, record: str, key: str) -> str:
        return str(self._measured[record]["where"][key])

    def _bench(self, batch: str, arm: str) -> Mapping[str, Any]:
        networks = self._measured["bench"]["step"]["networks"]
        arms = next(one["arms"] for one in networks if (one["model"], one["batch_size"]) == ("resnet20", int(batch)))
        return next(one for one in arms if one["name"] == arm)


def _quartiles(row: Row) -> str:
    return f"{row['low']:.2f} to {row['high']:.2f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *rows))
