"""Rows: validation, the embedded world, prepared and encoded sets, batches."""
