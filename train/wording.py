"""Names of train/outputs_log.py that train/memory still imports from here; delete this file after the last of them."""

from train.outputs_log import count, duration, gib, percent

__all__ = ["count", "duration", "gib", "percent"]
