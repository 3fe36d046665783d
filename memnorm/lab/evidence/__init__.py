"""Our evidence: the studies, written down before they are run, and the queue of runs that they ask for. No torch here.

    study ← studies          study ← queue ← records, the command `memnorm evidence`, tools/evidence_pages.py
"""

from __future__ import annotations

from memnorm.lab.evidence.queue import Plan, chosen_rate, plan
from memnorm.lab.evidence.records import Records
from memnorm.lab.evidence.studies import MINIATURE, STUDIES
from memnorm.lab.evidence.study import Arm, Study

__all__ = ["MINIATURE", "STUDIES", "Arm", "Plan", "Records", "Study", "chosen_rate", "plan"]
