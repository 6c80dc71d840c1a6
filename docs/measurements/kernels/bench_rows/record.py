"""What was found: said at once, and kept in a file after every entry."""

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DEVICE = "cuda"


began = time.time()


def say(*words: object) -> None:
    print(f"{time.time() - began:6.1f}", *words, flush=True)


def device_name() -> str:
    try:
        return torch.cuda.get_device_name()
    except Exception as error:
        return f"{DEVICE} ({error})"


class Record:
    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds, self.entries, self.failed = path, seconds, [], []

    def add(self, **entry: Any) -> None:
        self.entries.append(entry)
        self.write()

    def write(self) -> None:
        head = {"device": device_name(), "torch": torch.__version__}
        content = {**head, "seconds": time.time() - began, "failed": self.failed, "entries": self.entries}
        self.path.write_text(json.dumps(content, indent=1) + "\n")

    def attempt(self, name: str, call: Callable[[], None]) -> bool:
        """Run an entry unless the time is over; return whether it ran through."""
        if time.time() - began > self.seconds:
            say("LEFT OUT, the time is over:", name)
            self.failed.append(f"{name}: left out, the time was over")
            return False
        try:
            call()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            return True
        except Exception as error:
            say("FAILED:", name)
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            self.failed.append(f"{name}: {type(error).__name__}: {str(error)[:500]}")
            try:
                self.write()
            except Exception:
                pass
            words = str(error).lower()
            if any(
                word in words
                for word in ("illegal", "misaligned", "unspecified launch", "assert triggered", "launch failed")
            ):
                say("the context is lost; this section ends")
                raise SystemExit(3) from error
            return False
