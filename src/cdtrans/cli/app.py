"""The program: a table of verbs, and its exit codes.

0: done. 1: internal error, a bug in cdtrans. 2: bad input, or a machine that lacks something. 3: a verdict against the
user: adaptation did harm, `check` says stop, or a run of `bench` or `ablate` failed. 130: interrupted."""

import gc
import io
import os
import platform
import re
import sys
import traceback
import warnings
from collections.abc import Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import typer

from cdtrans.cli import tables
from cdtrans.cli.options import Verb, print_json, show_all_flags, verb_command
from cdtrans.config import HELP, SETTINGS, TABLE_DEFAULTS, read_recipe
from cdtrans.errors import CdtransError, Interrupted, SettingsError, printable, shortened
from cdtrans.runtime import package_version

CHECK_SETTINGS = (  # settings that decide which images a run would see, and through which backbone
    *("root", "crop", "resize", "max_bad", "backbone", "weights", "pretrained"),
    *("seed", "device", "precision", "encode_batch", "pixels", "cache"),
)
OF_EACH_RUN = {"root", "seed", "source_model", "source_classes", "answers"}  # a benchmark sets them run by run
# Settings that differ between the rows of Table 6 (all CDTrans) and of Table 5.
LOSS_SETTINGS = {"loss_source", "loss_source_target", "loss_target"}
PAIRING_SETTINGS = {"method", "pairing", "center_aware", "target_class"}
NOT_IN_ROWS = {"answers", "source_classes", "effort"}  # rows have a source and no target labels
COMPLETION = "_CDTRANS_COMPLETE"

# typer bundles its own copy of click, so the class is found through one that every version of typer exports.
CommandLineError: type[Any] = typer.BadParameter.__mro__[2]  # click's ClickException


def predictions_to_stdout(given: dict[str, Any], json: bool) -> bool:
    """Send the predictions to standard output if no file is given."""
    if given["csv"] is None and given["parquet"] is None:
        if json:
            raise SettingsError("json-without-file", "With --json, give --csv FILE or --parquet FILE.")
        given["csv"] = sys.stdout.buffer
        return True
    return json


run_verb = partial(Verb, show=tables.show_run, against=lambda result: result.harm)
study_verb = partial(Verb, show=tables.show_study, against=lambda result: bool(result.failed))
VERBS = {  # their help lines are in help.yaml
    "adapt": run_verb("cdtrans.run.pipeline:adapt"),
    "check": Verb(
        "cdtrans.run.check:check",
        tables.show_check,
        settings=CHECK_SETTINGS,
        against=lambda result: result.state == "stop",
    ),
    "eval": Verb("cdtrans.measure.measured:evaluate", tables.show_evaluation),
    "predict": Verb(
        "cdtrans.serving.predict:predict",
        lambda result, screen, given: None,  # it has written its result
        prepare=predictions_to_stdout,
    ),
    "export": Verb("cdtrans.serving.export:export", tables.show_export),
    "push": Verb("cdtrans.serving.export:push", tables.show_push),
    "choose": Verb("cdtrans.run.choose:choose"),
    "report": Verb(
        "cdtrans.reporting.page:report",
        lambda file, screen, given: screen.result(f"Report: {file}"),
        as_json=lambda file: {"report": str(file)},
    ),
    "demo": Verb(
        "cdtrans.run.demo:demo",
        tables.show_demo,
        settings=SETTINGS.keys() - {"recipe"},
        defaults={**read_recipe("demo"), "seed": 0},
        against=lambda result: result.harm,
    ),
    "cache": Verb("cdtrans.cli.lists:list_cache", tables.show_cache),
    "ask": Verb("cdtrans.run.ask:ask", tables.show_questions, settings=CHECK_SETTINGS),
    "answer": Verb("cdtrans.measure.measured:answer", tables.show_answers),
    "methods": Verb(
        "cdtrans.cli.lists:describe_methods", tables.show_methods, as_json=lambda methods: {"methods": methods}
    ),
    "bench": study_verb(
        "cdtrans.studies.benchmark:bench",
        settings=SETTINGS.keys() - OF_EACH_RUN,
        texts=HELP["bench"],
        defaults=TABLE_DEFAULTS,
    ),
    "ablate losses": study_verb(
        "cdtrans.studies.ablation:ablate_losses",
        settings=SETTINGS.keys() - LOSS_SETTINGS - {"method"} - NOT_IN_ROWS,
        defaults={"recipe": "authors", **TABLE_DEFAULTS},
    ),
    "ablate pseudo-labels": study_verb(
        "cdtrans.studies.ablation:ablate_pseudo_labels",
        settings=SETTINGS.keys() - PAIRING_SETTINGS - NOT_IN_ROWS,
        defaults={"recipe": "authors", **TABLE_DEFAULTS},
    ),
    # a run of an ablation as a process of its own
    "ablate with-labels": run_verb("cdtrans.paper.pair_labels:adapt_with_labels", hidden=True),
}


def run_program() -> None:
    """Exit with one of the codes above; an error is one sentence, the traceback only with --debug."""
    if COMPLETION in os.environ:  # the shell asks for completions
        program: Any = typer.main.get_command(build_program(os.environ.get("COMP_WORDS", "").split()))
        for verb in program.commands.values():
            show_all_flags(verb)
        program.main(prog_name="cdtrans")
    debug = "--debug" in sys.argv
    if not debug:
        warnings.filterwarnings("ignore")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like standard error: names may hold bytes that are not text
    code = _exit_code(sys.argv[1:], debug)
    if not reports_leaks():
        gc.freeze()  # otherwise Python's last garbage collection goes through all of torch, which takes a second
    sys.exit(code)


def build_program(words: Collection[str] | None = None) -> typer.Typer:
    """The program with the verbs among these words (None: with all). Other verbs are only listed: making their flags
    would import them."""
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help="Labelled source images and unlabelled target images in, a target classifier out.")(_program)
    ablate = typer.Typer(no_args_is_help=True, help="Rerun the paper's ablations.")
    for name, verb in VERBS.items():
        group, _, word = name.rpartition(" ")
        function = verb_command(verb) if words is None or word in words else lambda: None  # only listed
        (ablate if group else app).command(word, help=HELP["verbs"][name], hidden=verb.hidden)(function)
    app.add_typer(ablate, name="ablate")
    return app


def _show_versions(wanted: bool) -> None:
    if wanted:
        beside = ", ".join(f"{name} {package_version(name)}" for name in ("torch", "timm"))
        typer.echo(f"cdtrans {package_version('cdtrans')} (Python {platform.python_version()}, {beside})")
        raise typer.Exit


def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_versions, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def reports_leaks() -> bool:
    """Whether Triton is bound by nanobind (from torch 2.15 on), which prints whatever is not collected in the end."""
    triton = sys.modules.get("triton._C.libtriton")
    return triton is not None and any(type(value).__module__ == "nanobind" for value in vars(triton).values())


def _exit_code(words: Sequence[str], debug: bool) -> int:
    try:
        require_words(words)
        # not app(): typer would keep Ctrl-C and a closed pipe to itself
        program = typer.main.get_command(build_program(words))
        with program.make_context("cdtrans", list(words)) as context:
            program.invoke(context)
        sys.stdout.flush()  # here, where a closed pipe is expected, and not when Python ends
        return 0
    except typer.Exit as error:  # after --help, or a verdict
        return error.exit_code
    except CommandLineError as error:
        return _fail_usage(error, debug)
    except CdtransError as error:
        if debug and error.details:
            print(error.details, file=sys.stderr)
        return _fail(2, error.code, str(error), debug)
    except Interrupted as error:
        sentence = "Interrupted; the state is saved. Run the same command again to resume."
        return _fail(error.exit_code, error.code, sentence, debug)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(130, "interrupted", "Interrupted.", debug)
    except BrokenPipeError:  # the reader has closed the pipe, as in `cdtrans predict ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drops what is still buffered
        return 141
    except OSError as error:  # a disk or permission error without a message of its own
        where = f"'{error.filename}': " if error.filename else ""
        sentence = f"{where}{error.strerror or error}; check the path, its permissions and the disk."
        return _fail(2, "system-error", sentence, debug)
    except Exception as error:
        # Main memory; GPU memory is handled where it is used. torch has no exception type for it.
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            sentence = "This computer does not have enough memory for this; use smaller images (--crop) or batches."
            return _fail(2, "out-of-memory", sentence, debug)
        sentence = f"Internal error, {type(error).__name__}: {error}. Run it again with --debug and report it."
        return _fail(1, "internal-error", sentence, debug)


def require_words(arguments: Sequence[str]) -> None:
    """Refuse an empty argument, most likely an unset shell variable: it would mean the current folder, or not given."""
    for before, word in pairwise(["", *arguments]):
        flag, equals, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if not value and (equals or not word):
            after = f" after {flag}" if flag.startswith("--") else ""
            sentence = f"An argument{after} is empty, perhaps an unset shell variable; give a value."
            raise SettingsError("argument-empty", sentence)


def _fail_usage(error: Any, debug: bool) -> int:
    """A wrong flag or argument; `cdtrans` alone prints the help."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    wrong = re.sub(r"\. Did you mean (.*\?)$", r" (did you mean \1)", error.format_message().rstrip("."))
    help_command = f"; see '{context.command_path} --help'" if context else ""
    return _fail(2, "usage", f"{wrong}{help_command}.", debug)


def _fail(exit_code: int, code: str, sentence: str, debug: bool) -> int:
    """One sentence on standard error; with --json also an object on standard output."""
    if debug:
        traceback.print_exc()
    sentence = shortened(printable(sentence))
    print(f"error: {sentence}", file=sys.stderr)
    if "--json" in sys.argv:
        print_json({"error": {"code": code, "message": sentence}})
    return exit_code
