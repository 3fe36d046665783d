"""The tables and single numbers of the pages, from the records: a method of `Values` per marker.

Arms are compared over the seeds that both have, in the same setting: `MBN-2/4` is the arm MBN-2 at batch size 4.
`recalibrated MBN-2` and `training MBN-2` are the same runs by another error. Runs that are missing leave gaps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from memnorm.lab.significance import Difference, Sample, holm, number, p_text, paired
from memnorm.lab.spec import RunSpec, arm_name
from memnorm.schedule import in_steps
from study.measurements import Measurements, markdown
from study.run import load
from study.studies import SETTINGS, STUDIES, Arm, Records

ERRORS = {"recalibrated ": "test_error_recalibrated", "training ": "train_error", "": "test_error"}
STUCK = 80.0  # percent, of ten classes: a run that ends there did not train
LEVEL = 0.05
WITH_FIGURE, FIGURES = ("micro-batches",), "docs/figures"  # as README links to them
# MBN-2 against BN, each setting once: of two studies that share runs, the one with more seeds
PLACES = (
    ("small-batch-resnet20", 8),
    ("small-batch-resnet20-tuned", 8),
    ("headline-resnet56", 8),
    ("ablation-resnet8", 8),
    ("tiny-batch-resnet8", 2),
    ("tiny-batch-resnet8", 4),
    ("cheaper-second-forward", 8),
)
PARTS = (
    ("the memory", "MBN-1", "BN"),
    ("the second forward, with the memory", "MBN-2", "MBN-1"),
    ("the second forward, without the memory", "BN-2", "BN"),
    ("the shift between the means (Eq. 6, not Eq. 4)", "MBN-2", "MBN-2 shift=False"),
    ("a growing λ instead of 0.1", "MBN-2", "MBN-2 λ=0.1"),
    ("a growing λ instead of 0.5", "MBN-2", "MBN-2 λ=0.5"),
    ("a growing λ instead of 0.9", "MBN-2", "MBN-2 λ=0.9"),
    ("recalibrated statistics, BN", "recalibrated BN", "BN"),
    ("recalibrated statistics, MBN-2", "recalibrated MBN-2", "MBN-2"),
)


class Values(Measurements):
    """What the markers of a page stand for: those of measurements, and these of runs."""

    def __init__(self, records: Records, measured: Mapping[str, Any]) -> None:
        super().__init__(measured)
        self._records = records

    # tables

    def arms(self, name: str) -> str:
        """Every arm of a study, compared with its baseline."""
        study, several = STUDIES[name], len(STUDIES[name].places) > 1
        paper = any(arm.printed for arm in study.arms)
        place = "setting" if any(arm.setting for arm in study.arms) else "batch"
        head = ["arm", *([place] if several else []), "learning rate", "test error in %", f"minus {study.baseline}"]
        head += ["p after Holm", "recalibrated", "change", "failed", *(["paper"] if paper else [])]
        corrected = self._corrected(name)
        rows = []
        for arm in study.arms:
            key, runs = arm.key, self.runs(arm)
            failed = sum(run["final"] is None or run["final"]["test_error"] >= STUCK for run in runs)
            again = self.error(name, f"recalibrated {key}")
            old = sum(run.get("recalibrated_with") == "memory" for run in runs)
            mark = "" if not old else " †" if old == len(runs) else f" † in {old} of {len(runs)}"
            rows.append(
                [
                    *[arm.label, *([arm.place] if several else []), self._rate(arm)],
                    *[self.error(name, key), _text(self._against(name, arm))],
                    *[self._p(name, arm, corrected), f"{again}{mark}"],
                    *[_text(self._gap(name, f"recalibrated {key}", key))],
                    *[f"{failed} of {len(runs)}", *([f"{arm.printed:.2f}"] if paper else [])],
                ]
            )
        return markdown(head, rows)

    def summary(self) -> str:
        """MBN-2 against BN in every setting."""
        head = ["CIFAR-10", "MBN-2 minus BN", "lower in", "p after Holm", "detectable", "both recalibrated"]
        rows = []
        for name, size in PLACES:
            gap, p = self._against_bn(name, size)
            least = gap.detectable(len(self._corrected(name)))
            again = self._gap(name, f"recalibrated MBN-2/{size}", f"recalibrated BN/{size}")
            found = "–" if least is None else "none" if least >= 100 else f"{least:.1f}"
            seeds = f"{gap.lower} of {gap.n}"
            rows.append([self._place(name, size), _text(gap), seeds, p_text(p) if p else "–", found, _text(again)])
        return markdown(head, rows)

    def along(self) -> str:
        """MBN-2 minus BN at the last evaluation before each milestone, and at the end."""
        head = ["CIFAR-10", "iteration", "λ", "training error", "test error", "test error − training error"]
        rows = []
        for name, size in PLACES:
            ours, base = self._arm(name, f"MBN-2/{size}"), self._arm(name, f"BN/{size}")
            for end in (*ours.spec.milestones, 1.0):
                step = in_steps(end, ours.spec.iterations)
                gaps = [self._gap_at(ours, base, step, *which) for which in (("train",), ("test",), ("test", "train"))]
                strength = next(iter(self._lines(ours, step).values()))["strength"]
                rows.append([self._place(name, size), f"{step:,}", f"{strength:g}", *map(_text, gaps)])
        return markdown(head, rows)

    def parts(self) -> str:
        """What single changes do in the study of ablations: the arm with the part minus the arm without it."""
        rows = [
            [what, f"{first} − {second}", self.gap("ablation-resnet8", first, second)] for what, first, second in PARTS
        ]
        return markdown(["what is added", "difference", "in points"], rows)

    def rates(self, name: str) -> str:
        """Held-out errors that chose the learning rates; the chosen one is bold."""
        tried = {
            tuple(trial.digest for trial in arm.trials()): arm for arm in reversed(STUDIES[name].arms) if arm.rates
        }
        several, rows = len({arm.setting for arm in tried.values()}) > 1, []
        for digests, arm in reversed(tried.items()):
            finals = [(self._records.get(digest) or {}).get("final") or {} for digest in digests]
            texts = ["–" if final.get(arm.error) is None else f"{final[arm.error]:.2f}" for final in finals]
            bold = [rate == arm.rate(self._records) for rate in arm.rates]
            cells = [f"**{one}**" if chosen else one for one, chosen in zip(texts, bold, strict=True)]
            rows.append([arm.label, *([arm.setting] if several else []), *cells])
        rates = next(iter(tried.values())).rates
        return markdown(
            ["held-out error in %", *(["setting"] if several else []), *(f"{rate:g}" for rate in rates)], rows
        )

    def probes(self, name: str) -> str:
        """What the probes of a study measured: means over the probes of a run, then over seeds; the drift before the
        first milestone.
        """
        head = ["arm", "learning rate", "cosine to the joint gradient", "drift per update in % of σ"]
        head += ["norm of the weights at the end"]
        rows = []
        for arm in STUDIES[name].arms:
            curves = [run["curve"] for run in self.runs(arm) if run["status"] == "finished"]
            first = in_steps(arm.spec.milestones[0], arm.spec.iterations)
            early = [[line for line in curve if line["iteration"] <= first] for curve in curves]
            found = [
                [_mean(line["probe_cosine"] for line in curve) for curve in curves],
                [_mean(100 * line["probe_drift"] for line in curve) for curve in early],
                [curve[-1]["probe_norm"] for curve in curves],
            ]
            rows.append([arm.label, self._rate(arm), *(_sample(one) for one in found)])
        return markdown(head, rows)

    def dice(self, name: str) -> str:
        """The Dice of grey and white matter, and what is missing of their mean compared with the baseline."""
        study, corrected = STUDIES[name], self._corrected(name)
        head = ["arm", "learning rate", "Dice of grey matter in %", "of white matter", "100 − mean Dice"]
        head += [f"minus {study.baseline}", "p after Holm"]
        rows = []
        for arm in study.arms:
            dice = [_sample(self._errors(arm, f"dice_{tissue}").values()) for tissue in ("grey", "white")]
            gap, p = _text(self._against(name, arm)), self._p(name, arm, corrected)
            rows.append([arm.label, self._rate(arm), *dice, self.error(name, arm.key), gap, p])
        return markdown(head, rows)

    def origin(self) -> str:
        """Where the runs of each study were made."""
        rows = []
        for name in dict.fromkeys(place[0] for place in PLACES):
            runs = [self._records[spec.digest] for spec in STUDIES[name].specs(self._records)]
            sessions = [one for run in runs for one in (*run["earlier_sessions"], run["environment"])]
            days = sorted({one["started"][:10] for one in sessions})
            layouts = {bool(one.get("channels_last")) for one in sessions}
            layout = "some" if len(layouts) > 1 else "yes" if True in layouts else "no"
            values = ["; ".join(sorted({one[key] for one in sessions})) for key in ("commit", "machine", "torch")]
            rows.append([f"`{name}`", str(len(runs)), *values, layout, " to ".join(dict.fromkeys((days[0], days[-1])))])
        return markdown(["study", "runs", "commits", "machine", "torch", "channels last", "dates"], rows)

    def checks(self, *digests: str) -> str:
        """Single runs, which support no comparison."""
        rows = []
        for record in (self._records[digest] for digest in digests):
            spec, where = RunSpec.from_dict(record["spec"]), record["environment"]
            cells = [spec.data, spec.model, spec.arm, spec.batch_size, f"{spec.iterations:,}"]
            rows.append([*map(str, cells), f"{record['final']['test_error']:.2f}", where["commit"]])
        return markdown(["data", "model", "norm", "batch", "iterations", "test error in %", "commit"], rows)

    def settings(self, error: str = "") -> str:
        """The study of defaults: mean errors on held-out images by arm and setting."""
        arms = STUDIES["defaults"].arms
        by_size = {size: name for name, size in SETTINGS.items()}
        cells: dict[str, dict[str, str]] = {}
        for arm in arms:
            values = list(self._errors(arm, ERRORS[f"{error} " if error else ""]).values())
            name = by_size[arm.spec.batch_size, arm.spec.accumulate]
            text = f"{Sample(values).mean:.2f} (n = {len(values)})" if values else "–"
            cells.setdefault(arm.label, {})[name] = text
        return markdown(["arm", *SETTINGS], [[label, *found.values()] for label, found in cells.items()])

    def shown(self, name: str, *ours: str) -> str:
        """BN and some arms in every setting of a study, below the figure of the study if it has one."""
        labels = ("BN", *ours)
        arms = [arm for arm in STUDIES[name].arms if arm.label in labels]
        places = dict(sorted({(arm.spec.batch_size, arm.spec.accumulate): arm.spec.batch for arm in arms}.items()))
        errors = {}
        for arm in arms:
            text = _sample(self._errors(arm, arm.error).values())
            errors[arm.label, arm.spec.batch] = text.replace("(n = ", "(n\u00a0=\u00a0")  # on one line
        names = ("BN", "two-way") if len(ours) == 1 else labels
        rows = [
            [shown, *(errors[label, place] for place in places.values())]
            for shown, label in zip(names, labels, strict=True)
        ]
        figure = f"![Test error against micro-batch size]({FIGURES}/{name}.svg)\n\n" if name in WITH_FIGURE else ""
        return figure + markdown(["images × micro-batches per update", *places.values()], rows)

    def card(self, norm: str) -> str:
        """What was measured of a norm: its cost, and its errors on the digits compared with BN's."""
        lines = [self.cost(norm)]
        for steps, errors in _on_digits().items():
            for name in (arm_name(norm, scheme) for scheme in ("single", "double")):
                if name in errors:
                    text = f"{name} {Sample(list(errors[name].values())).text} % test error"
                    gap = None if name == "BN" else paired(errors[name], errors["BN"])
                    less = "" if gap is None else f"; minus BN: {_text(gap)}"
                    lines.append(f"Digits, batch size 4, {steps:,} steps: {text}{less}.")
        if len(lines) > 1:
            lines.append("(Learning rate 0.1 or 0.01, whichever did better on held-out training images.)")
        return "\n".join(lines) + "\n"

    # single numbers

    def error(self, name: str, arm: str) -> str:
        """34.97 ± 1.30 (n = 5)."""
        return _sample(self.errors_of(name, arm).values())

    def gap(self, name: str, first: str, second: str) -> str:
        """−1.55 (−3.35 to 0.26, p = 0.076, n = 5)."""
        return _with_n(self._gap(name, first, second))

    def points(self, name: str, first: str, second: str) -> str:
        gap = self._gap(name, first, second)
        return "–" if gap is None else number(gap.mean)

    def spread(self, name: str, first: str, second: str) -> str:
        """The standard deviation of a paired difference over seeds."""
        one, other = self.errors_of(name, first), self.errors_of(name, second)
        return number(Sample([one[seed] - other[seed] for seed in one.keys() & other.keys()]).sd or 0.0)

    def off(self, name: str, arm: str) -> str:
        """Our error minus the one that the paper prints."""
        return number(Sample(list(self.errors_of(name, arm).values())).mean - (self._arm(name, arm).printed or 0.0))

    def holm(self, name: str, arm: str) -> str:
        """The p-value of an arm against its baseline, corrected for all comparisons of the study."""
        return p_text(self._corrected(name)[arm if "/" in arm else f"{arm}/{STUDIES[name].places[0]}"])

    def found(self, kind: str) -> str:
        """How many comparisons of MBN-2 with BN are significantly `less`, `more`, `open` or have `one` seed."""
        kinds = []
        for name, size in PLACES:
            gap, p = self._against_bn(name, size)
            kinds.append("one" if p is None else "open" if p >= LEVEL else "less" if gap.mean < 0 else "more")
        return str(kinds.count(kind) if kind != "all" else len(kinds))

    def drop(self, name: str, first: str, second: str) -> str:
        """How much the test error changes behind the last milestone: first arm minus second."""
        changes = []
        for arm in (self._arm(name, first), self._arm(name, second)):
            at = in_steps(arm.spec.milestones[-1], arm.spec.iterations)
            after = {run["spec"].get("seed", 0): _first_after(run, at) for run in self.runs(arm)}
            changes.append({seed: after[seed] - line["test_error"] for seed, line in self._lines(arm, at).items()})
        return _with_n(paired(*changes))

    def growth(self, name: str, first: str, second: str, small: str, large: str) -> str:
        """How much the error grows from a large to a small batch size: first arm minus second."""
        grown = []
        for label in (first, second):
            errors, least = self.errors_of(name, f"{label}/{small}"), self.errors_of(name, f"{label}/{large}")
            grown.append({seed: errors[seed] - least[seed] for seed in errors})
        return _with_n(paired(*grown))

    # from records to errors

    def _arm(self, name: str, key: str) -> Arm:
        arms = [arm for arm in STUDIES[name].arms if key in (arm.label, arm.key)]
        if len(arms) != 1:
            raise SystemExit(f"{name} has {len(arms)} arms {key}; a marker needs one: LABEL or LABEL/BATCH")
        return arms[0]

    def _rate(self, arm: Arm) -> str:
        rate = arm.rate(self._records)
        return "–" if rate is None else f"{arm.spec.but(learning_rate=rate).base_learning_rate:g}"

    def runs(self, arm: Arm) -> list[Mapping[str, Any]]:
        return [self._records[spec.digest] for spec in arm.runs(self._records) if spec.digest in self._records]

    def _errors(self, arm: Arm, metric: str) -> dict[int, float]:
        """By seed. A number that was measured with a fault is left out."""
        found = {}
        for run in self.runs(arm):
            faulty = metric == ERRORS["recalibrated "] and run.get("recalibrated_with") == "outdated statistics"
            if run["status"] == "finished" and not faulty and run["final"].get(metric) is not None:
                found[run["spec"].get("seed", 0)] = run["final"][metric]
        return found

    def errors_of(self, name: str, key: str) -> dict[int, float]:
        prefix = next(one for one in ERRORS if key.startswith(one))
        arm = self._arm(name, key.removeprefix(prefix))
        return self._errors(arm, ERRORS[prefix] if prefix else arm.error)

    def curves(self, arm: Arm) -> list[dict[int, float]]:
        """Test error by iteration, one per seed."""
        return [{line["iteration"]: line["test_error"] for line in run["curve"]} for run in self.runs(arm)]

    def _gap(self, name: str, first: str, second: str) -> Difference | None:
        return paired(self.errors_of(name, first), self.errors_of(name, second))

    def _against(self, name: str, arm: Arm) -> Difference | None:
        """The gap to the baseline in the same setting; None for the baseline itself."""
        baseline = STUDIES[name].baseline
        return None if arm.label == baseline else self._gap(name, arm.key, f"{baseline}/{arm.place}")

    def _lines(self, arm: Arm, step: int) -> dict[int, Mapping[str, Any]]:
        """The last evaluation of each run up to a step, by seed."""
        lines = {}
        for run in self.runs(arm):
            before = [line for line in run["curve"] if line["iteration"] <= step]
            if before and run["status"] == "finished":
                lines[run["spec"].get("seed", 0)] = before[-1]
        return lines

    def _gap_at(self, first: Arm, second: Arm, step: int, what: str, less: str = "") -> Difference | None:
        """The gap in one error at a step, or in how far it is above another."""
        errors = []
        for arm in (first, second):
            lines = self._lines(arm, step)
            errors.append({s: x[f"{what}_error"] - (x[f"{less}_error"] if less else 0) for s, x in lines.items()})
        return paired(*errors)

    def _corrected(self, name: str) -> dict[str, float]:
        """p-values against the baseline after Holm's correction. Arms with one seed are not tested."""
        study, found = STUDIES[name], {}
        for arm in (one for one in study.arms if one.label != study.baseline and one.seeds > 1):
            gap = self._against(name, arm)
            found[arm.key] = 1.0 if gap is None or gap.p is None else gap.p  # planned and not run yet: counted
        return dict(zip(found, holm(list(found.values())), strict=True))

    def _p(self, name: str, arm: Arm, corrected: Mapping[str, float]) -> str:
        """The corrected p-value against the baseline; a dash as long as fewer than two seeds can be compared."""
        gap = self._against(name, arm)
        return "–" if arm.key not in corrected or gap is None or gap.p is None else p_text(corrected[arm.key])

    def _against_bn(self, name: str, size: int) -> tuple[Difference, float | None]:
        gap, corrected = self._gap(name, f"MBN-2/{size}", f"BN/{size}"), self._corrected(name)
        assert gap is not None
        return gap, corrected.get(f"{'BN' if STUDIES[name].baseline == 'MBN-2' else 'MBN-2'}/{size}")

    def _place(self, name: str, size: int) -> str:
        arm = self._arm(name, f"MBN-2/{size}")
        model, chosen = arm.spec.model.replace("resnet", "ResNet-"), ", chosen learning rate" if arm.rates else ""
        return f"{model}, batch size {size}, {arm.spec.iterations:,} iterations{chosen}"


@functools.cache
def _on_digits() -> dict[int, dict[str, dict[int, float]]]:
    """Test errors on the digits by length of training, arm and seed, without the trials of learning rates."""
    found: dict[int, dict[str, dict[int, float]]] = {}
    for record in load("digits-norms").values():
        spec = RunSpec.from_dict(record["spec"])
        if record["status"] == "finished" and not spec.holdout:
            by_arm = found.setdefault(spec.iterations, {})
            by_arm.setdefault(spec.arm, {})[spec.seed] = record["final"]["test_error"]
    return dict(sorted(found.items()))


def _first_after(run: Mapping[str, Any], step: int) -> float:
    return next(line["test_error"] for line in run["curve"] if line["iteration"] > step)


def _text(gap: Difference | None) -> str:
    """−1.55 (−3.35 to 0.26, p = 0.076)."""
    if gap is None:
        return "–"
    interval = gap.interval()
    if interval is None or gap.p is None:
        return f"{number(gap.mean)} (n = {gap.n})"
    return f"{number(gap.mean)} ({number(interval[0])} to {number(interval[1])}, {p_text(gap.p)})"


def _sample(values: Iterable[float]) -> str:
    """34.97 ± 1.30 (n = 5)."""
    found = list(values)
    return Sample(found).text if found else "–"


def _mean(values: Iterable[float]) -> float:
    return Sample(list(values)).mean


def _with_n(gap: Difference | None) -> str:
    """−1.55 (−3.35 to 0.26, p = 0.076, n = 5)."""
    return _text(gap) if gap is None or gap.n == 1 else f"{_text(gap)[:-1]}, n = {gap.n})"
