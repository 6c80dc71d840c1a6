"""The pattern sort of reorder: rows by their pattern over super-blocks of groups."""
