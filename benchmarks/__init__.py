"""What the pipeline's speed is measured by; nothing here is imported by it."""
