"""Rewards of sampled text, as named terms: rules, answer verification, reward-model scores (docs/rewards.md)."""
