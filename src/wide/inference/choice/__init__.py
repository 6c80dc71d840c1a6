"""Which operators pay on a device at a model's sizes: measurements, and the table made of them."""
