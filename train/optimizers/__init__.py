"""Optimizers that take less memory than AdamW with its state beside the weights; ``train.optim`` chooses among them."""
