"""What is done to a model's layers before they train: recomputed, cut in tiles, compiled, attention without masks."""
