"""Decode GEMMs: one to four rows, reading only the weights of groups that some row executes."""
