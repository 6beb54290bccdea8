"""What is tried next, and what ends early: suggestions, pruning, populations, the end of a search."""
