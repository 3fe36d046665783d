"""Double-Forward and the strength schedule inside other people's training loops.

    memnorm.integrations.lightning      a callback for Lightning's Trainer
    memnorm.integrations.transformers   a callback for Hugging Face's Trainer
    memnorm.integrations.accelerate     a call beside `accelerator.prepare`

Each module imports its library, and nothing else of memnorm imports the module.
"""
