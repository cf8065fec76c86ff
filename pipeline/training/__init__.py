"""The training loops: optimizer step, resumable state, supervised and reinforcement loops.

Loops see models, batches and a `Recorder`; they know no path, no MLflow and no YAML.
"""
