"""What people do with a trained model: talk to it, take it elsewhere. One module per command of `python -m pipeline`."""
