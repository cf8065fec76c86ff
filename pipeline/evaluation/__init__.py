"""Every model on the same held-out panel: tasks, intervals, verdicts against the parent, and the report."""
