"""What the signals of a run mean, in plain words: `docs/diagnosis.md`."""
