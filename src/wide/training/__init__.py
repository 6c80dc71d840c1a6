"""Training: the objective, the loop, resumable checkpoints, and the two stages."""
