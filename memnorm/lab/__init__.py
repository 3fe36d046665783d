"""The lab: train, compare norms, rerun the paper, write reports. `pip install '.[lab]'` in a clone adds the command.

    spec ← store ← comparison ← report                     a run, its folder, reports
    spec ← models, data ← training ← runner ← grid ← cli   one run; many runs; the command line

Nothing outside this folder imports it.
"""
