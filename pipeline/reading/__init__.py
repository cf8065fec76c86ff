"""What people ask of the record of runs. One module per question."""
