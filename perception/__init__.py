"""Training of lane and sign detectors on one or many ranks."""

__version__ = "0.1.0"
