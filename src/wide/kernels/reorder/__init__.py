"""Reorder: from a binary mask to lists of executing rows, or to rows in one order over all groups."""
