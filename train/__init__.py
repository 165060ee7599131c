"""A training template for 🤗 Accelerate: long sequences on limited GPU memory."""

__version__ = "0.1.0"
