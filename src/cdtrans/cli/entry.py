"""The program as a shell sees it: exit codes, and errors in one sentence."""

import gc
import io
import os
import sys
import traceback
import warnings
from typing import Any

import typer

from cdtrans.cli.app import app
from cdtrans.cli.options import show_all_flags
from cdtrans.errors import CdtransError, Interrupted

# typer carries a copy of click of its own, so the class is found through the one that typer names in every version.
CommandLineError: type[Any] = typer.BadParameter.__mro__[2]  # click's ClickException

COMPLETION = "_CDTRANS_COMPLETE"


def main() -> None:
    """Exit 0, 2 for bad input, 130 for Ctrl-C; an error is one sentence, the traceback only with --debug."""
    if COMPLETION in os.environ:  # the shell asks what could come next
        program: Any = typer.main.get_command(app)
        for verb in program.commands.values():
            show_all_flags(verb)
        program.main(prog_name="cdtrans")
    debug = "--debug" in sys.argv
    if not debug:
        warnings.filterwarnings("ignore")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: names may hold bytes that are no text
    code = _exit_code(debug)
    gc.freeze()  # else Python looks through every object of torch for garbage before it ends, which takes a second
    sys.exit(code)


def _exit_code(debug: bool) -> int:
    try:
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
    except OSError as error:  # a disk or a permission that no room has a sentence of its own for
        where = f"'{error.filename}': " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; check the path, its permissions and the disk.", debug)
        return 2
    except Exception as error:
        _fail(f"Internal error, {type(error).__name__}: {error}. Run it again with --debug and report it.", debug)
        return 1


def _fail_usage(error: Any, debug: bool) -> None:
    """A flag or argument that is wrong; a bare `cdtrans` gets the help."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        help_command = f"; see '{context.command_path} --help'" if context else ""
        _fail(f"{error.format_message().rstrip('.')}{help_command}.", debug)


def _discard_output() -> None:
    """The reader has gone, as in `cdtrans predict ... | head`: what is still buffered goes nowhere, without a word."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(sentence: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"error: {sentence}", file=sys.stderr)
