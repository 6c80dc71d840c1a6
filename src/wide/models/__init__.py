"""Hugging Face models, routed in place."""
