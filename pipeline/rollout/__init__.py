"""Rollouts: a sampling engine, multi-turn episodes with tools, and the records that training reads."""
