"""A run from base model to report in a folder: what `wide prune`, `wide recover` and `wide compare` share."""
