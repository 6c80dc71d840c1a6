"""What a run says, once however many processes it has."""

import os


def is_main_process() -> bool:
    """Return whether this process is the one that speaks and writes (rank 0 under torchrun)."""
    return os.environ.get("RANK", "0") == "0"


def num_processes() -> int:
    """Return the number of processes of the run (1 without torchrun)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def say(text: str = "") -> None:
    """Print a line from the main process, at once."""
    if is_main_process():
        print(text, flush=True)
