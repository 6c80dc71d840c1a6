"""What a model is worth: perplexity, zero-shot accuracy, and how much it skips on the text that it is judged by."""
