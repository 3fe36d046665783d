"""Double-Forward, the strength schedule and the monitor in other training libraries.

    memnorm.integrations.lightning      callbacks for Lightning's Trainer
    memnorm.integrations.transformers   callbacks for Hugging Face's Trainer
    memnorm.integrations.accelerate     a call after `accelerator.prepare`

Each module imports its library; no other module of memnorm imports it.
"""
