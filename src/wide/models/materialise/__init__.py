"""Static plans made physical: layers deleted, projections sliced, the residual stream rotated and cut."""
