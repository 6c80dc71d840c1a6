"""Pruned models as checkpoints of their own: static plans made physical, and masked ones saved whole."""
