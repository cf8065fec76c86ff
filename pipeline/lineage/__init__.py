"""What depends on what: code hashes, profiles and the graph of stages. Imports no torch."""
