"""Double-Forward and the strength schedule in other training libraries.

    memnorm.integrations.lightning      a callback for Lightning's Trainer
    memnorm.integrations.transformers   a callback for Hugging Face's Trainer
    memnorm.integrations.accelerate     a call after `accelerator.prepare`

Each module imports its library; no other module of memnorm imports it.
"""
