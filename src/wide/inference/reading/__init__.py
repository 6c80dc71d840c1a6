"""A Hugging Face model as the weights and numbers that the engine computes with."""
