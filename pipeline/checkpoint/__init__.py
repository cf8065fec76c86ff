"""Checkpoints on disk: plain weights in `files`, adapters in `lora`, the reward model in `reward`.

Three modules, so that a stage depends on no kind of checkpoint that it does not read.
"""
