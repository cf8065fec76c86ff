"""Rollouts: a sampling engine, multi-turn episodes with tools, and the records that training reads."""

from pipeline.rollout.records import Completion, RolloutEngine, StopReason, Trajectory, Turn, pad_trajectories

__all__ = ["Completion", "RolloutEngine", "StopReason", "Trajectory", "Turn", "pad_trajectories"]
