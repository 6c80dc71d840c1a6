"""The command line: composes configurations and runs, computes nothing itself."""
