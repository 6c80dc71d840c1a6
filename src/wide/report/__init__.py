"""Tables and figures of a run, drawn from its records alone."""
