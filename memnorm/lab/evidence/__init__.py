"""Our evidence: the studies, written down before they are run, and the queue of runs that they ask for. No torch here.

Imports go from `study` to `studies` and to `queue`, from there to `findings` and `claims`; `records` is where runs are.
"""

from __future__ import annotations

from memnorm.lab.evidence.queue import Plan, chosen_rate, plan
from memnorm.lab.evidence.records import Records
from memnorm.lab.evidence.studies import MINIATURE, STUDIES
from memnorm.lab.evidence.study import Arm, Study

__all__ = ["MINIATURE", "STUDIES", "Arm", "Plan", "Records", "Study", "chosen_rate", "plan"]
