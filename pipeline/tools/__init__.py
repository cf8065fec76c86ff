"""The six simulated tools: schemas, argument checks, bounded arithmetic. No torch, no network, no clock."""
