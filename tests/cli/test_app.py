"""The command line in this process: verbs, flags, messages, exit codes and the promised JSON keys."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import typer
from rich.console import Console

import cdtrans.runtime.screen
from cdtrans.cli import app
from cdtrans.cli.options import COMMON as COMMON_SETTINGS, NOT_FLAGS, help_line
from cdtrans.cli.tables import class_table, confusion_table
from cdtrans.config import SETTINGS, TABLE_DEFAULTS, compose
from cdtrans.errors import DataError, Interrupted, printable
from cdtrans.inputs.pixels import open_pixels
from cdtrans.measure.measured import score_predictions
from cdtrans.methods import METHODS, method_class
from cdtrans.record.outcome import Choice, Interval, Measured, Outcome, Scores, Verdict
from cdtrans.run.check import Check
from cdtrans.run.demo import DemoResult
from cdtrans.run.pipeline import Result
from cdtrans.runtime.screen import Screen
from cdtrans.studies.study import BenchResult
from cdtrans.trust.preflight import Finding
from commands import Ended
from support import says
from tiny_task import CLASSES, draw

COMMON = {"--json", "--quiet", "-q", "--debug", "-h", "--help"}
ALL = {"--help-all"}  # only verbs with settings have it
SCORING = {"--root", "--model", "--device", "--max-bad"}
PAIRS = {"--labels", "--out", "--config", "--force", "--jobs"}
FLAGS = {  # flags of each verb, beside those of every verb and the settings
    **{"adapt": {"--out", "--config", "--force", "--target"}, "demo": {"--out"}, "eval": SCORING},
    **{"check": {"--config", "--model", "--no-model"}, "export": {"--out", "--to", "--model"}},
    **{"push": {"--private", "--model"}, "report": set(), "choose": set(), "methods": set(), "answer": set()},
    "predict": SCORING
    | {"--csv", "--parquet", "--top", "--abstain", "--keep", "--accuracy", "--unknown", "--all-classes"},
    **{"ask": {"--budget", "--out", "--seed", "--force", "--config"}, "cache": {"--cache", "--clear", "--root"}},
    "bench": PAIRS - {"--labels"} | {"--data", "--seeds", "--tasks", "--allow-incomplete", "--start"},
    **{"ablate losses": PAIRS, "ablate pseudo-labels": PAIRS},
}


Run = Callable[..., Ended]
Asked = dict[str, Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Run:
    """run("eval", folder, ...) -> how `cdtrans eval folder ...` ended."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["cdtrans", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            app.run_program()
        assert isinstance(end.value.code, int)
        return Ended(end.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], Asked]:
    """answering(VERB, RESULT) -> the arguments that its public function gets, which now returns the result, or raises
    it."""

    def answering(verb: str, result: Any) -> Asked:
        asked: Asked = {}
        original = resolve_name(app.VERBS[verb].function)

        @functools.wraps(original)
        def function(**given: Any) -> Any:
            asked.clear()
            asked.update(given)
            if isinstance(result, BaseException):
                raise result
            return result

        monkeypatch.setattr(sys.modules[original.__module__], original.__name__, function)
        return asked

    return answering


@pytest.fixture
def called(answering) -> Asked:
    """The arguments that `cdtrans adapt` gives to the pipeline, which does nothing here."""
    return answering("adapt", Result(Path("runs/x"), outcome()))


def outcome(kind: Any = "better", choice: Any = "adapted") -> Outcome:
    estimates: Any = {"source": None, "adapted": Interval(0.6, 0.9)}
    epoch = 7 if choice == "adapted" else 0
    return Outcome(Verdict(kind, ()), True, Choice(choice, epoch), 7, estimates, 40, "consensus")


def one_sentence(text: str) -> str:
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert text.endswith((".\n", "?\n"))
    assert "Traceback" not in text
    return text.removeprefix("error: ").rstrip("\n")


def command_of(name: str) -> Any:
    """The command of a verb, such as 'ablate losses'."""
    command: Any = typer.main.get_command(app.build_program(name.split()))
    for word in name.split():
        command = command.commands[word]
    return command


def dashed(names: Iterable[str]) -> set[str]:
    return {f"--{name.replace('_', '-')}" for name in names}


def test_every_setting_has_a_help_line_that_a_person_can_read() -> None:
    lines = [help_line(name, {}, compose({})) for name in SETTINGS]
    assert not [line for line in lines if "MISSING" in line or "{}" in line]


class TestHelp:
    def test_the_verbs(self, run: Run) -> None:
        ended = run("--help")
        assert (ended.code, ended.err) == (0, "")
        names = [name for name in app.VERBS if " " not in name]
        expected = ["adapt", "check", "eval", "predict", "export", "push", "choose", "report", "demo", "cache"]
        assert names == [*expected, "ask", "answer", "methods", "bench"]
        assert all(re.search(rf"^. {name} ", ended.out, re.MULTILINE) for name in [*names, "ablate"])
        assert run("-h").out == ended.out

    def test_the_version_and_those_it_runs_with(self, run: Run) -> None:
        versions = [f"{name} {version(name)}" for name in ("cdtrans", "torch", "timm")]
        ended = run("--version")
        assert (ended.code, ended.err) == (0, "")
        assert says(ended.out, *versions, "(Python 3.")

    def test_a_bare_command_shows_the_help(self, run: Run) -> None:
        ended = run()
        assert ended.code == 2
        assert "Usage: cdtrans" in ended.out + ended.err
        assert "error" not in ended.err

    @pytest.mark.parametrize("name", [name for name, verb in app.VERBS.items() if not verb.hidden])
    def test_the_flags_of_a_verb(self, name: str) -> None:
        """The parameters of its public function, those of every verb, and settings."""
        settings = dashed(set(app.VERBS[name].settings) - set(NOT_FLAGS)) | {"--set"}
        switches = {f"--no-{flag[2:]}" for flag in settings}
        flags = {flag for p in command_of(name).params for flag in (*p.opts, *p.secondary_opts) if flag[0] == "-"}
        has_settings = "--help-all" in flags
        assert FLAGS[name] | COMMON - {"-h", "--help"} <= flags
        extra = settings | switches | {"--help-all"} if has_settings else set()
        assert flags - FLAGS[name] - COMMON - {"--no-model"} <= extra
        assert not has_settings or settings - {"--set"} <= flags
        assert has_settings == (name in ("adapt", "check", "demo", "ask", "bench") or name.startswith("ablate"))

    def test_every_setting_is_a_flag_with_its_help(self) -> None:
        for name in ("adapt", "demo", "bench"):
            verb, helps = app.VERBS[name], {p.name: p.help for p in command_of(name).params if p.opts[0][0] == "-"}
            for setting in set(verb.settings) - set(NOT_FLAGS):
                assert helps[setting].startswith(verb.texts.get(setting, SETTINGS[setting].metadata["help"])), setting
        assert helps["method_args"], "--set"
        assert not {"seed", "root", "source_model", "answers"} & helps.keys(), "a benchmark sets them run by run"

    def test_the_defaults_of_each_verb(self) -> None:
        """Help texts name the defaults that hold there."""
        adapt, demo, bench, losses, pairs = (
            {p.name: p.help for p in command_of(name).params if p.opts[0][0] == "-"}
            for name in ("adapt", "demo", "bench", "ablate losses", "ablate pseudo-labels")
        )
        assert "(default: cotraining; authors: cdtrans)" in adapt["method"]
        assert "(two_way, one_way_source, one_way_target; default: two_way)" in adapt["pairing"]
        assert "(default: 0.15)" in demo["drop_path"]
        assert "(default: 0)" in demo["seed"]
        assert TABLE_DEFAULTS == {"guard": False, "report": False}
        assert all("(default: false)" in helps[name] for helps in (bench, losses, pairs) for name in TABLE_DEFAULTS)
        assert "default: authors)" in pairs["recipe"]
        assert not {"effort", "method"} & losses.keys()  # its rows are of CDTrans

    def test_the_first_page_of_adapt_has_what_people_use(self, run: Run) -> None:
        shown = {p.opts[0] for p in command_of("adapt").params if p.opts[0][0] == "-" and not p.hidden}
        own = {"--out", "--config", "--force", "--help-all"}
        assert shown - COMMON == own | dashed(COMMON_SETTINGS)
        assert len(shown - COMMON) + len({"--no-guard"}) == 15
        first, whole = run("adapt", "--help").out, run("adapt", "--help-all").out
        assert "--layer-decay" not in first
        assert "--layer-decay" in whole
        assert "--[no-]pretrained" in whole

    @pytest.mark.parametrize("how", ["--help", "--help-all"])
    @pytest.mark.parametrize("verb", ["adapt", "check", "bench", "demo"])
    def test_no_line_is_cut_at_80_columns(self, run: Run, verb: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        text = run(verb, how).out
        assert "…" not in text
        assert max(map(len, text.splitlines())) == 80, "and the width is used"

    def test_completion_knows_every_flag(self) -> None:
        words = {"_CDTRANS_COMPLETE": "complete_bash", "COMP_WORDS": "cdtrans adapt --layer", "COMP_CWORD": "2"}
        program = str(Path(sys.executable).with_name("cdtrans"))
        ended = subprocess.run([program], env=os.environ | words, capture_output=True, text=True)
        assert ended.stdout.split() == ["--layer-decay"]


class TestWrongUse:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["adapt", "a", "b", "--epochz", "3"], ["--epochz", "--epochs", "'cdtrans adapt --help'"]),
            (["evil"], ["'evil'", "did you mean 'eval'?", "'cdtrans --help'"]),
            (["eval"], ["RUN", "'cdtrans eval --help'"]),
            (["check", "a", "b", "--epochs", "3"], ["--epochs"]),
            (["predict", "run", "images", "--top", "0"], ["'top'", "1"]),
            (["predict", "run", "images", "--abstain", "2"], ["'abstain'"]),
            (["predict", "run", "images", "more"], ["more"]),
            (["predict", "run", "images", "--json"], ["--csv FILE"]),
            (["adapt", "a", "b", "--epochs", "many"], ["--epochs", "integer"]),
            (["adapt", "a", "b", "--crop", "1.5"], ["'crop' must be a whole number or auto, not '1.5'"]),
            (["adapt", "a", "b", "--target", "c"], ["'target' is given twice"]),
            (["adapt"], ["No source was given"]),
            (["adapt", "a", "b", "--set", "pairing=two_way", "--set", "pairing=two_way"], ["'pairing'", "twice"]),
            (["demo", "--seed", "-1"], ["'seed'"]),
            (["bench", "office31"], ["--data"]),
            (["bench", "office31", "--data", "d", "--jobs", "0"], ["'jobs'"]),
            (["adapt", "", "target"], ["empty", "shell variable"]),
            (["adapt", "source", "target", "--source-model="], ["empty", "--source-model"]),
            (["predict", "run", "images", "--csv", "", "--quiet"], ["empty", "--csv"]),
        ],
        ids=lambda value: " ".join(value),
    )
    def test_one_sentence_and_exit_2(self, run: Run, arguments: list[str], expected: list[str]) -> None:
        ended = run(*arguments)
        assert ended.code == 2
        assert says(one_sentence(ended.err), *expected)
        assert ("error" in ended.out) == ("--json" in arguments)


class TestExitCodes:
    @pytest.mark.parametrize(
        ("error", "code", "name"),
        [
            (DataError("no-source", "It is so."), 2, "no-source"),
            (Interrupted(signal.SIGINT), 130, "interrupted"),
            (Interrupted(signal.SIGTERM), 143, "interrupted"),
            (KeyboardInterrupt(), 130, "interrupted"),
            (PermissionError(13, "Permission denied", "/x/y"), 2, "system-error"),
            (MemoryError(), 2, "out-of-memory"),
            (RuntimeError("[enforce fail] DefaultCPUAllocator: no memory"), 2, "out-of-memory"),
            (ZeroDivisionError("oops"), 1, "internal-error"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
    )
    def test_an_error(self, run: Run, answering, error: BaseException, code: int, name: str) -> None:
        answering("adapt", error)
        ended = run("adapt", "a", "b")
        assert (ended.code, ended.out) == (code, "")
        sentence = one_sentence(ended.err)
        ended = run("adapt", "a", "b", "--json")
        assert json.loads(ended.out) == {"error": {"code": name, "message": sentence}}
        assert (ended.code, one_sentence(ended.err)) == (code, sentence)
        ended = run("adapt", "a", "b", "--debug")
        assert ended.code == code
        assert "Traceback (most recent call last)" in ended.err

    @pytest.mark.parametrize(
        ("verb", "arguments", "result", "code"),
        [
            ("adapt", ["a", "b"], Result(Path("r"), outcome("harm", "source")), 3),
            ("adapt", ["a", "b"], Result(Path("r"), outcome("unknown")), 0),
            ("check", ["a", "b"], Check((Finding("stop", "a", "b", "c"),), None, "it is Sunday"), 3),
            ("check", ["a", "b"], Check((Finding("warning", "a", "b", "c"),), None, "it is Sunday"), 0),
            ("demo", [], DemoResult(Path("r"), 0.5, 0.5, True), 3),
            ("bench", ["office31", "--data", "d"], BenchResult(Path("o"), "t.md", 4, 3, ("A>W",), {}), 3),
            ("bench", ["office31", "--data", "d"], BenchResult(Path("o"), "t.md", 4, 3, (), {}), 0),
        ],
    )
    def test_a_verdict_against_you_is_3(self, run: Run, answering, verb: str, arguments, result, code: int) -> None:
        answering(verb, result)
        for flags in ([], ["--json"], ["--quiet"]):
            ended = run(verb, *arguments, *flags)
            assert ended.code == code, ended.err

    def test_the_end_leaves_no_report_of_leaks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """nanobind, which binds newer Tritons, reports what is left uncollected; others say nothing."""
        triton, function = ModuleType("triton._C.libtriton"), type("nb_func", (), {"__module__": "nanobind"})
        monkeypatch.setitem(sys.modules, "triton._C.libtriton", triton)
        frozen: list[bool] = []
        monkeypatch.setattr(app.gc, "freeze", lambda: frozen.append(True))
        monkeypatch.setattr(app, "_exit_code", lambda words, debug: 0)
        for expected in ([True], [True]):
            with pytest.raises(SystemExit):
                app.run_program()
            assert frozen == expected
            triton.get_something = function()


class TestAdapt:
    def test_only_what_was_given_is_passed_on(self, run: Run, called: Asked) -> None:
        """A flag that was not given must not hide the value of the YAML file."""
        assert run("adapt", "a", "b").code == 0
        assert called.pop("screen").quiet is False
        own = {"out": None, "config": None, "force": False}
        assert called == {"source": Path("a"), "target": Path("b")} | own
        assert run("adapt", "--target", "b", "--force").code == 0
        assert (called["source"], called["target"], called["force"]) == (None, Path("b"), True)

    def test_every_flag_arrives_in_its_kind(self, run: Run, called: Asked) -> None:
        flags = "--epochs 3 --lr 1e-3 --no-pretrained --crop 64 --mutual-pairs once --detach-teacher --config c.yaml"
        assert run("adapt", "a", "b", *flags.split()).code == 0
        expected = {"epochs": 3, "lr": 1e-3, "pretrained": False, "crop": "64", "mutual_pairs": "once"}
        assert called.items() >= (expected | {"detach_teacher": True, "config": Path("c.yaml")}).items()

    def test_options_of_a_method_are_read_as_yaml_reads_them(self, run: Run, called: Asked) -> None:
        options = ("trade_off=0.5", "kind=soft", "balanced=true", "some-name=3", "list=[1, 2]", "odd=a: b: c", "no=")
        flags = [word for option in options for word in ("--set", option)]
        assert run("adapt", "a", "b", "--method", "dann", *flags).code == 0
        read = {"trade_off": 0.5, "kind": "soft", "balanced": True, "some_name": 3, "list": [1, 2], "odd": "a: b: c"}
        assert (called["method"], called["method_args"]) == ("dann", read | {"no": None})

    def test_what_is_printed(self, run: Run, called: Asked) -> None:
        keys = {"run", "chosen_epoch", "harm", "explanation", "estimate", "target_labels"}
        keys |= {"contradiction", "premise", "class_set"}
        values = json.loads(run("adapt", "a", "b", "--json").out)
        assert values.keys() == keys
        assert (values["run"], values["chosen_epoch"], values["estimate"]) == ("runs/x", 7, [0.6, 0.9])
        loud, quiet = run("adapt", "a", "b"), run("adapt", "a", "b", "--quiet")
        assert says(loud.out, "runs/x", "epoch 7", "cdtrans predict runs/x IMAGES")
        assert says(quiet.out, "runs/x", "epoch 7", "60% to 90%", "if every image")
        assert (quiet.out.count("\n"), quiet.err, loud.err) == (1, "", "")


class TestCheck:
    def test_only_what_was_given_is_passed_on(self, run: Run, answering) -> None:
        asked = answering("check", Check((), None, "it is Sunday"))
        assert run("check", "a", "b").code == 0
        assert asked.keys() == {"source", "target", "config", "model", "screen"}
        assert run("check", "a", "b", "--no-model", "--weights", "w", "--max-bad", "0.2").code == 0
        assert (asked["model"], asked["weights"], asked["max_bad"]) == (False, "w", 0.2)

    def test_the_table_and_the_json(self, run: Run, answering) -> None:
        finding = Finding("stop", "[b]names", "The class is empty", "Remove it.", {"d": 1})
        answering("check", Check((finding,), None, "it is Sunday"))
        ended = run("check", "a", "b")
        assert says(ended.out, "stop", "[b]names", "The class is empty.", "Remove it.", "it is Sunday", "Do not start")
        assert "it is Sunday" not in run("check", "a", "b", "--quiet").out
        ended = run("check", "a", "b", "--json")
        row = {"state": "stop", "subject": "[b]names", "found": "The class is empty", "advice": "Remove it."}
        expected = {"state": "stop", "findings": [row | {"details": {"d": 1}}], "backbone": None}
        assert json.loads(ended.out) == expected | {"skipped": "it is Sunday"}
        assert ended.out.count("\n") == 1


def of_model(scores: Scores, names: tuple[str, ...]) -> Measured:
    return Measured("adapted", names, sum(scores.images), None, False, {"adapted": scores})


class TestEval:
    def test_the_tables_and_the_json(self, run: Run, finished) -> None:
        ended = run("eval", finished.run, finished.answers, "--json")
        assert (ended.code, ended.out.count("\n")) == (0, 1), ended.err
        values = json.loads(ended.out)
        assert values.keys() >= {"accuracy", "class_mean_accuracy", "per_class", "confusion", "classes", "images"}
        assert values["images"] == sum(map(sum, values["confusion"])) == 21
        assert values["accuracy"] == sum(values["confusion"][k][k] for k in range(3)) / 21
        shown = run("eval", finished.run, finished.answers, "--quiet")
        assert shown.err == ""
        assert says(shown.out, "21 labelled images", f"{values['accuracy']:.1%}", *CLASSES, "confusion matrix")

    def test_a_long_name_is_not_cut(self) -> None:
        """Two that begin alike would look the same."""
        names = tuple(f"{'an_endless_name_of_a_class_' * 3}{k}" for k in range(12))
        scores = score_predictions(np.arange(12), np.roll(np.arange(12), 1), 12)
        for table in (class_table, confusion_table):
            console = Console(width=80)
            with console.capture() as shown:
                console.print(table(of_model(scores, names)))
            assert "…" not in shown.get(), table.__name__

    def test_classes_without_an_image_are_counted(self) -> None:
        names = tuple(f"name-{k}" for k in range(31))
        console = Console(width=80)
        with console.capture() as shown:
            console.print(class_table(of_model(score_predictions(np.arange(5), np.arange(5), 31), names)))
        assert says(shown.get(), "name-4", "26 classes have no image here")
        assert "name-5" not in shown.get()

    @pytest.mark.parametrize("names", [("a\nerror: fake", "b\x1b[2J"), ("[/blue]", ":smile:"), ("caf\udce9", "[b]x")])
    def test_a_class_is_one_line_and_no_markup_whatever_it_is_called(self, run: Run, answering, names) -> None:
        answering("eval", of_model(score_predictions(np.array([0, 1]), np.array([0, 0]), 2), names))
        out = run("eval", "run", "labelled").out
        assert says(out, *(printable(name) for name in names))
        assert "\x1b" not in out

    @pytest.mark.parametrize("classes", [12, 13])
    def test_a_confusion_matrix_that_does_not_fit_is_not_shown(self, run: Run, answering, classes: int) -> None:
        labels = np.arange(classes)
        answering("eval", of_model(score_predictions(labels, labels, classes), tuple(f"class-{k}" for k in labels)))
        shown = run("eval", "run", "labelled").out
        assert ("of 13 classes is in --json" in shown) == (classes == 13)


def test_choose(run: Run, finished, tmp_path: Path) -> None:
    copy = shutil.copytree(finished.run, tmp_path / "run")
    ended = run("choose", copy, "source")
    assert (ended.code, ended.err) == (0, "")
    assert says(ended.out, "now uses the source-only model", "changes it back")
    assert "model: source-only" in run("predict", copy, finished.task.target, "--csv", tmp_path / "p.csv").out
    values = json.loads(run("choose", copy, "adapted", "--json").out)
    epoch = json.loads((finished.run / "result.json").read_text())["choice"]["epoch"]
    assert values == {"run": str(copy), "chosen_model": "adapted", "chosen_epoch": epoch, "changed": True}
    assert says(run("choose", copy, "adapted").out, "already uses the adapted model")
    assert run("choose", tmp_path / "nowhere", "adapted").code == 2


class TestPredict:
    def test_the_promised_json(self, run: Run, finished, tmp_path: Path) -> None:
        file = tmp_path / "p.csv"
        ended = run("predict", finished.run, finished.task.target, "--csv", file, "--abstain", "1", "--json")
        counts = {"images": 21, "kept": 0, "abstained": 21, "no_class": 0, "skipped": 0}
        counts |= {"threshold": 1.0, "expected_accuracy": None}
        assert json.loads(ended.out) == {"csv": str(file), "parquet": None} | counts
        assert file.read_text().count("\n") == 22

    def test_shares_out_of_range(self, run: Run, finished) -> None:
        for flags in (["--keep", "0"], ["--keep", "nan"], ["--accuracy", "95"], ["--accuracy", "0"]):
            ended = run("predict", finished.run, finished.task.target, *flags)
            assert (ended.code, ended.out) == (2, "")

    def test_images_of_no_class(self, run: Run, finished) -> None:
        for flags, labels in ((["1"], {"blue", "green", "red"}), (["0", "--all-classes"], {"none of these classes"})):
            ended = run("predict", finished.run, finished.task.target, "--unknown", *flags)
            header, *lines = ended.out.splitlines()
            assert (ended.code, header, len(lines)) == (0, "path,label,probability,no_class", 21)
            assert {line.split(",")[1] for line in lines} <= labels
        for cut, told in (("auto", "cdtrans ask"), ("1.1", "at most 1"), ("high", "a number or auto")):
            ended = run("predict", finished.run, finished.task.target, "--unknown", cut)
            assert (ended.code, ended.out) == (2, "")
            assert says(one_sentence(ended.err), "--unknown", told)

    def test_standard_output_holds_the_table_alone(self, run: Run, finished, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(cdtrans.runtime.screen, "SILENCE_SECONDS", 0.0)
        (tmp_path / "list.txt").write_text("00.png\n" * 30)
        ended = run("predict", finished.run, tmp_path / "list.txt", "--root", finished.task.target, "--top", 2)
        assert ended.code == 0, ended.err
        assert ended.out.splitlines()[0] == "path,label,probability,label_1,probability_1,label_2,probability_2"
        assert len(ended.out.splitlines()) == 31
        assert "predicting: 30/30" in ended.err

    def test_warnings_and_errors_go_to_standard_error(self, run: Run, finished, tmp_path: Path) -> None:
        bad = tmp_path / "images" / "bad.png"
        draw(tmp_path / "images" / "good.png", 0, 0)
        bad.write_bytes(b"")
        for flags in ([], ["--quiet"]):
            ended = run("predict", finished.run, bad.parent, "--max-bad", "0.5", *flags)
            assert len(ended.out.splitlines()) == 2
            assert says(ended.err, "warning", str(bad), "empty file")
        ended = run("predict", finished.run, bad.parent, "--csv", tmp_path / "p.csv")
        assert ended.code == 2
        assert "1 of 2 files" in one_sentence(ended.err.splitlines(keepends=True)[-1])
        assert not (tmp_path / "p.csv").exists()


def test_report(run: Run, finished, tmp_path: Path) -> None:
    copy = shutil.copytree(finished.run, tmp_path / "run")
    assert json.loads(run("report", copy, "--json").out) == {"report": str(copy / "report.html")}
    ended = run("report", copy, "--quiet")
    assert (ended.out, ended.err) == (f"Report: {copy / 'report.html'}\n", "")
    assert "<h1" in (copy / "report.html").read_text(encoding="utf-8")


def test_demo(run: Run, answering) -> None:
    asked = answering("demo", DemoResult(Path("there"), 0.5555, 0.7777, False))
    ended = run("demo", "--json", "--out", "there", "--seed", 3, "--epochs", 2)
    expected = {"source_only_accuracy": 0.5555, "adapted_accuracy": 0.7777, "run": "there", "harm": False}
    assert json.loads(ended.out) == expected
    assert (asked["seed"], asked["epochs"], asked["out"]) == (3, 2, Path("there"))
    assert says(run("demo", "--quiet").out, "55.5", "77.8%", "there")


class TestMethods:
    def test_a_line_for_each_and_the_options_of_one(self, run: Run, tmp_path: Path) -> None:
        lines = {line.split()[0]: line for line in run("methods").out.splitlines() if line.split()}
        for name in METHODS:
            kind = method_class(name)
            assert says(lines[name], (kind.__doc__ or "").splitlines()[0].rstrip("."), kind.paper, kind.backbones)
        assert says(run("methods", "mrkld_lrent").out, "Zou et al. 2019", "label_entropy", "0.25", "--set")
        assert says(run("methods", "rpll").out, "no options")
        head = "from cdtrans.methods.base import Method\nclass Mine(Method):\n    'My idea.'\n"
        (tmp_path / "mine.py").write_text(f"{head}    def losses(self, batch, progress): return {{}}\n")
        assert says(run("methods", f"{tmp_path / 'mine.py'}:Mine").out, "My idea.")

    def test_the_promised_json(self, run: Run) -> None:
        ended = run("methods", "--json")
        assert (ended.err, ended.out.count("\n")) == ("", 1)
        rows = json.loads(ended.out)["methods"]
        assert [row["name"] for row in rows] == list(METHODS)
        for row in rows:
            assert row.keys() == {"name", "summary", "paper", "title", "backbones", "cost", "options"}
            assert all(option.keys() == {"name", "default", "help"} for option in row["options"])
        assert json.loads(run("methods", "mcd", "--json").out)["methods"] == [r for r in rows if r["name"] == "mcd"]


def test_cache(run: Run, tmp_path: Path) -> None:
    place, top = tmp_path / "own", tmp_path / ("office" * 15)
    assert "Nothing is cached" in run("cache", "--cache", place).out
    for name in ("amazon", "dslr"):
        file = draw(top / name / "a.png", kind=0, seed=1)
        open_pixels([file], root=file.parent, size=8, cache=place, screen=Screen(quiet=True), name="source")
    stores = json.loads(run("cache", "--cache", place, "--json").out)["stores"]
    assert {(store["root"], store["size"], store["images"]) for store in stores} == {
        (str(top / name), 8, 1) for name in ("amazon", "dslr")
    }
    assert "…" not in run("cache", "--cache", place).out, "a long path is not cut"
    for flags in ((), ("--clear",)):
        shown = run("cache", "--cache", place, "--root", top, *flags)
        assert says(shown.out, "Nothing is cached", str(top / "amazon"), str(top / "dslr"), "not affected")
        values = json.loads(run("cache", "--cache", place, "--root", top, *flags, "--json").out)
        assert (values["stores"], values["freed"]) == ([], 0)
        assert values["below"] == [str(top / name) for name in ("amazon", "dslr")]
    freed = json.loads(run("cache", "--cache", place, "--clear", "--json").out)["freed"]
    assert freed == sum(store["bytes"] for store in stores)
    assert "Nothing is cached" in run("cache", "--cache", place).out


def test_bench(run: Run, answering) -> None:
    result = BenchResult(Path("out"), "table.md", asked=4, finished=3, failed=("A>W seed 1",), numbers={})
    asked = answering("bench", result)
    ended = run("bench", "office31", "--data", "d", "--tasks", "A>W", "--jobs", "2", "--lr", "0.1", "--no-pretrained")
    assert says(ended.out, "3 of 4 runs", "out/table.md")
    asked.pop("screen")
    defaults = {"seeds": "3", "out": None, "config": None, "start": None, "force": False, "allow_incomplete": False}
    given = {"name": "office31", "data": Path("d"), "tasks": "A>W", "jobs": 2, "lr": 0.1, "pretrained": False}
    assert asked == defaults | given
    assert json.loads(run("bench", "office31", "--data", "d", "--json").out)["failed"] == ["A>W seed 1"]
