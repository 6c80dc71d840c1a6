"""`wide`: the entry point; chooses a command and turns errors into exit codes.

Exit codes: 0 done; 1 a WideError (message, nothing half-written); 2 the command line was not understood; 130 Ctrl-C.

A command is a module beside this one with `run(arguments)`, which raises a WideError with what to do, and a UsageError
where words, flags or their combination mean nothing.
"""

import argparse
import os
import re
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from wide.errors import UsageError, WideError, is_out_of_memory, nearest
from wide.runs.process import ends_first, num_processes
from wide.version import __version__

COMMANDS = {
    "prune": "train routers to a sparsity (stage 1) and, if asked, LoRA (stage 2), or run another method of the "
    "benchmark (--method); evaluate, save, report",
    "recover": "train LoRA and routers of an adapter (stage 2); evaluate, save, report",
    "eval": "perplexity and tasks of a model, pruned and dense",
    "compare": "a grid of methods, sparsities and seeds on one model and one text, as one table",
    "methods": "list the methods of the benchmark, what they remove, and where they come from",
    "generate": "continue a prompt, or chat",
    "serve": "an OpenAI-compatible server of one model, dense or pruned",
    "export": "an adapter and its base as one Hugging Face checkpoint; a static plan is cut out of the matrices",
    "bench": "time the operators against dense peers on a GPU, agreement first",
    "tune": "measure which operator pays at a model's own shapes on this GPU, for wide.optimize",
    "profile": "time a model on a GPU by public calls (forward, generate, generate_batch), routed and dense",
    "report": "draw reports again from the records of runs, comparisons and benches; several on one page",
    "inspect": "what a model can be pruned to, or what an adapter holds",
    "env": "versions, GPUs and tables of measurements, to be pasted into a report of a defect",
    "recipes": "list or show the configurations that ship with wide",
}
_COMPLETING = "_ARGCOMPLETE"
_MODULES = {"eval": "evaluate"}
# What gloo, NCCL and the store of torch.distributed say when a process has gone.
_LOST = re.compile("Dist(Backend|Network|Store)?Error|gloo|NCCL|Connection (closed|reset|refused)|[Bb]roken pipe")
_OUT_OF_MEMORY = (
    "the memory is full; use smaller batches (--train.micro_batch_size, --eval.batch_size, --batch_size), shorter "
    "sequences, --train.gradient_checkpointing true or --dtype bfloat16; checkpoints that were written are kept"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code; None stands for the arguments of the process, without its name."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if _COMPLETING in os.environ:
        given = _complete()
    if not given or given[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if given else 2
    if given[0] in ("-V", "--version"):
        print(f"wide {__version__}")
        return 0
    if given[0] not in COMMANDS:
        hint = nearest(given[0], COMMANDS, otherwise=".").replace("mean ", "mean wide ")
        return _fail(f"there is no command {given[0]!r}{hint} Commands: {', '.join(COMMANDS)}", code=2)
    return _guarded(given[0], given[1:])


def _complete() -> list[str]:
    """Answer a shell that asks for a command; return the words of one that is there, which answers for itself."""
    import argcomplete

    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")[1:]
    if len(words) < 2 or words[0] not in COMMANDS:
        commands = argparse.ArgumentParser(add_help=False)
        commands.add_argument("command", choices=list(COMMANDS))
        argcomplete.autocomplete(commands)
    os.environ[_COMPLETING] = "2"
    if words[0] in ("recipes", "methods"):
        # These two read plain words. They are answered for here: run, they would print.
        plain = argparse.ArgumentParser(add_help=False)
        plain.add_argument("what", choices=["list", "show"] if words[0] == "recipes" else ["list"])
        if words[1] == "show":
            from wide.cli.recipes import recipe_names

            plain.add_argument("name", choices=recipe_names())
        argcomplete.autocomplete(plain)
    # What is being completed, and files, are not read.
    return [word for word in words[:-1] if not word.startswith("--config")]


def _guarded(command: str, arguments: list[str]) -> int:
    debug = "--debug" in arguments
    # A place in the source says nothing to who types commands.
    warnings.formatwarning = lambda message, *_where, **_line: f"warning: {message}\n"
    # Remarks of the library on configurations are noise beside what a command says.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        module = import_module(f"wide.cli.{_MODULES.get(command, command)}")
        # Commands without flags take words, and have their help as text.
        usage, words = getattr(module, "USAGE", None), [word for word in arguments if word != "--debug"]
        if usage and {"-h", "--help"} & set(words):
            print(usage)
        else:
            module.run(words if usage else arguments)
    except WideError as error:
        if debug:
            raise
        return _fail(str(error), code=2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt as interrupt:
        if debug:
            raise
        # What is kept only the command knows.
        return _fail(f"interrupted: {interrupt}" if str(interrupt) else "interrupted", code=130)
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    except Exception as error:
        if debug:
            raise
        return _fail(_describe(error), code=1)
    return 0


def _fail(message: str, *, code: int) -> int:
    prefix = "wide" if code == 130 else "wide: error"
    if ends_first():
        print(f"{prefix}: {message}", file=sys.stderr, flush=True)
    if num_processes() > 1:
        # The interpreter's end would wait for what other processes still owe to NCCL.
        sys.stdout.flush()
        os._exit(code)
    return code


def _describe(error: Exception) -> str:
    """Say in a sentence what went wrong that wide did not foresee."""
    if is_out_of_memory(error):
        return _OUT_OF_MEMORY
    kept = "what was written before is kept (--debug shows where this happened)"
    if num_processes() > 1 and _LOST.search(f"{type(error).__name__}: {error}"):
        return (
            "another process of the run has ended, so this one cannot go on; the same command with --resume continues "
            "from the last checkpoint, with as many processes as you like"
        )
    if isinstance(error, OSError):
        # Full disks and missing permissions are no defects of wide.
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror or error}; {kept}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}; {kept}"


def _help() -> str:
    commands = "\n".join(f"  {name:<10}{text}" for name, text in COMMANDS.items())
    return f"""usage: wide COMMAND [FLAGS]

Token-wise dynamic width pruning of language models.

{commands}

  wide prune --config fitted-50 --model M --data D --output RUN

wide COMMAND --help explains the flags; a YAML file (--config) may have the same keys."""


if __name__ == "__main__":
    sys.exit(main())
