"""The list of row tiles of a reordering, and lists of tiles of other sizes."""
