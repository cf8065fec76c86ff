"""What happened: run folders, metrics, samples, resumable states, and the feeder that carries them to MLflow.

The trainer's side imports neither MLflow nor pandas; the feeder is a process of its own.
"""
