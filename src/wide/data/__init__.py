"""Text to tokens: sources of documents, tokenizers, packed blocks and deterministic batches."""
