"""The lab: train, compare norms, rerun the paper, write reports. `pip install memnorm[lab]` brings the command.

    spec ← store ← report                           what a run is, where it is kept, what is told about it: no torch
    spec ← models, data ← train ← grid ← commands   one run; many runs; the command line

Nothing outside this folder imports it.
"""
