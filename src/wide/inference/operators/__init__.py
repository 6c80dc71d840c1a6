"""What runs each product and attention of a layer: dense, or an operator that skips, as a table says."""
