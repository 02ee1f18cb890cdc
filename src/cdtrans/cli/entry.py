"""The program's entry point: exit codes, and errors in one sentence."""

import gc
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import typer

from cdtrans.cli.app import app
from cdtrans.cli.options import show_all_flags
from cdtrans.errors import CdtransError, Interrupted, printable, shortened

# typer bundles its own copy of click, so the class is found through one that every version of typer exports.
CommandLineError: type[Any] = typer.BadParameter.__mro__[2]  # click's ClickException

COMPLETION = "_CDTRANS_COMPLETE"


def main() -> None:
    """Exit 0, 2 for bad input, 130 for Ctrl-C; an error is one sentence, the traceback only with --debug."""
    if COMPLETION in os.environ:  # the shell asks for completions
        program: Any = typer.main.get_command(app)
        for verb in program.commands.values():
            show_all_flags(verb)
        program.main(prog_name="cdtrans")
    debug = "--debug" in sys.argv
    if not debug:
        warnings.filterwarnings("ignore")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like standard error: names may hold bytes that are not text
    code = _exit_code(debug)
    if not reports_leaks():
        gc.freeze()  # otherwise Python's last garbage collection goes through all of torch, which takes a second
    sys.exit(code)


def reports_leaks() -> bool:
    """Whether Triton is bound by nanobind (from torch 2.15 on), which prints whatever is not collected in the end."""
    triton = sys.modules.get("triton._C.libtriton")
    return triton is not None and any(type(value).__module__ == "nanobind" for value in vars(triton).values())


def _exit_code(debug: bool) -> int:
    try:
        require_words(sys.argv[1:])
        # not app(): typer would keep Ctrl-C and a closed pipe to itself
        command = typer.main.get_command(app)
        with command.make_context("cdtrans", sys.argv[1:]) as context:
            command.invoke(context)
        sys.stdout.flush()  # here, where a closed pipe is expected, and not when Python ends
        return 0
    except typer.Exit as error:  # after --help
        return error.exit_code
    except CommandLineError as error:
        _fail_usage(error, debug)
        return 2
    except CdtransError as error:
        if debug and error.details:
            print(error.details, file=sys.stderr)
        _fail(str(error), debug)
        return 2
    except Interrupted as error:
        _fail("Interrupted; the state is saved. Run the same command again to resume.", debug)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _fail("Interrupted.", debug)
        return 130
    except BrokenPipeError:
        _discard_output()
        return 141
    except OSError as error:  # a disk or permission error without a message of its own
        where = f"'{error.filename}': " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; check the path, its permissions and the disk.", debug)
        return 2
    except Exception as error:
        if is_out_of_memory(error):
            _fail("This computer does not have enough memory for this; use smaller images (--crop) or batches.", debug)
            return 2
        _fail(f"Internal error, {type(error).__name__}: {error}. Run it again with --debug and report it.", debug)
        return 1


def require_words(arguments: Sequence[str]) -> None:
    """Refuse an empty argument, most likely an unset shell variable: it would mean the current folder, or not given."""
    for before, word in pairwise(["", *arguments]):
        flag, equals, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if not value and (equals or not word):
            after = f" after {flag}" if flag.startswith("--") else ""
            raise CdtransError(f"An argument{after} is empty, perhaps an unset shell variable; give a value.")


def is_out_of_memory(error: BaseException) -> bool:
    """Out of main memory; GPU memory is handled where it is used. torch has no exception type for it."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def _fail_usage(error: Any, debug: bool) -> None:
    """A wrong flag or argument; `cdtrans` alone prints the help."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        wrong = re.sub(r"\. Did you mean (.*\?)$", r" (did you mean \1)", error.format_message().rstrip("."))
        help_command = f"; see '{context.command_path} --help'" if context else ""
        _fail(f"{wrong}{help_command}.", debug)


def _discard_output() -> None:
    """The reader has closed the pipe, as in `cdtrans predict ... | head`: drop what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(sentence: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"error: {shortened(printable(sentence))}", file=sys.stderr)
