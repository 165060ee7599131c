"""A training template for 🤗 Accelerate: long sequences on limited GPU memory."""

__version__ = "0.2.0"
