"""The command line in this process: options, messages, exit codes and the promised JSON keys."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

import cdtrans.measure.evaluate
import cdtrans.run.check
import cdtrans.run.demo
import cdtrans.run.pipeline
import cdtrans.runtime.screen
import cdtrans.serving.classifier
import cdtrans.studies.benchmark
from cdtrans.cli import app as cli
from cdtrans.cli import entry
from cdtrans.cli.bench import TEXTS
from cdtrans.cli.options import COMMON as COMMON_SETTINGS
from cdtrans.cli.options import NOT_FLAGS
from cdtrans.cli.tables import class_table, confusion_table
from cdtrans.config import SETTINGS
from cdtrans.errors import CdtransError, Interrupted
from cdtrans.inputs.pixels import open_pixels
from cdtrans.measure.comparison import wilson
from cdtrans.measure.evaluate import Evaluation
from cdtrans.measure.metrics import score
from cdtrans.methods import METHODS, method_class
from cdtrans.record.model import set_temperature
from cdtrans.record.outcome import Choice, Estimate, Outcome, Verdict
from cdtrans.run.check import Check
from cdtrans.run.demo import DemoResult
from cdtrans.run.pipeline import Result
from cdtrans.runtime.screen import Screen
from cdtrans.studies.benchmark import BenchResult
from cdtrans.studies.folder import TABLE_DEFAULTS
from cdtrans.trust.findings import Finding
from support import says
from tiny_task import CLASSES, draw

COMMON = {"--json", "--quiet", "-q", "--debug", "-h", "--help"}
ALL = {"--help-all"}  # of verbs with settings
SCORING = {"--root", "--model", "--device", "--max-bad"}


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Run:
    """run("eval", folder, ...) -> how `cdtrans eval folder ...` ended."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["cdtrans", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            entry.main()
        assert isinstance(end.value.code, int)
        return Ended(end.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `cdtrans adapt` asks of the pipeline, which does nothing here."""
    values: dict[str, Any] = {}

    def adapt(**given: Any) -> Result:
        values.update(given)
        estimates: Any = {"source": None, "adapted": Estimate(0.6, 0.9)}
        outcome = Outcome(Verdict("better", ()), True, Choice("adapted", 7), 7, estimates, 40, "consensus")
        return Result(Path("runs/x"), outcome)

    monkeypatch.setattr(cdtrans.run.pipeline, "adapt", adapt)
    return values


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def adapt(**given: Any) -> None:
        raise error

    monkeypatch.setattr(cdtrans.run.pipeline, "adapt", adapt)


def one_sentence(text: str) -> str:
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert text.endswith(".\n")
    assert "Traceback" not in text
    return text.removeprefix("error: ").rstrip("\n")


def flags_of(run: Run, verb: str, how: str = "--help") -> set[str]:
    text = run(verb, how).out
    text = re.sub(r"--\[no-\]([\w-]+)", r"--\1 --no-\1", text)
    words = text.replace(",", " ").replace("/", " ").split()
    return {w for w in words if w.startswith("-") and len(w) > 1 and w.strip("-") and not w[1:].isdigit()}


OF_EACH_RUN = ("seed", "root", "backbone", "source_model", "source_classes", "target_labels")


class TestHelp:
    def test_the_verbs(self, run: Run) -> None:
        ended = run("--help")
        assert ended.code == 0
        assert ended.err == ""
        commands = ended.out.split("Commands")[1]
        verbs = [line.split()[1] for line in commands.splitlines() if line.startswith("│ ") and line[2] != " "]
        expected = ["adapt", "check", "eval", "predict", "export", "push", "choose", "report", "demo", "cache"]
        assert verbs == [*expected, "ask", "answer", "methods", "bench", "ablate"]
        assert run("-h").out == ended.out

    def test_the_version_and_those_it_runs_with(self, run: Run) -> None:
        ended = run("--version")
        assert (ended.code, ended.err) == (0, "")
        versions = [f"{name} {version(name)}" for name in ("cdtrans", "torch", "timm")]
        assert ended.out.startswith(versions[0] + " (Python 3.")
        assert ended.out.endswith(f", {versions[1]}, {versions[2]})\n")

    def test_a_bare_command_shows_the_help(self, run: Run) -> None:
        ended = run()
        assert ended.code == 2
        assert "Usage: cdtrans" in ended.out + ended.err
        assert "error" not in ended.err

    @pytest.mark.parametrize(
        ("verb", "own", "texts"),
        [("adapt", (), {}), ("demo", ("seed",), {}), ("bench", OF_EACH_RUN, TEXTS)],
    )
    def test_every_setting_is_a_flag_with_its_help(
        self, run: Run, verb: str, own: tuple[str, ...], texts: dict[str, str]
    ) -> None:
        text = " ".join(run(verb, "--help-all").out.replace("│", " ").split())
        for name, spec in SETTINGS.items():
            if name not in NOT_FLAGS and name not in own:
                dashed = name.replace("_", "-")
                assert f"--{dashed}" in text or f"--[no-]{dashed}" in text
                assert " ".join(texts.get(name, spec.metadata["help"]).split()) in text, name
        for words in ("cls, none; default: cls", "center, pair; default"):
            assert f"({words}" in text
        assert "(two_way, one_way_source, one_way_target; default: two_way)" in text
        assert "--set KEY=VALUE" in text
        assert "--method-args" not in text

    def test_defaults_of_the_runs_of_a_table(self, run: Run) -> None:
        """Help texts name the defaults that hold there: those of 'adapt' are others."""
        adapt, bench, losses, noise = (
            " ".join(run(*verb, "--help-all").out.replace("│", " ").split())
            for verb in (["adapt"], ["bench"], ["ablate", "losses"], ["ablate", "noise"])
        )
        assert "default: cotraining; authors: cdtrans" in adapt
        assert says(bench, "With one method: authors,", "(default: cdtrans; cotraining with --recipe best)")
        assert "default: best" not in bench + noise
        assert "(authors, best; default: authors)" in noise
        assert TABLE_DEFAULTS == {"guard": False, "report": False}
        for text in (bench, losses, noise):
            assert text.count("(default: false)") - text.count("source-target branch. (default: false)") == 2
        assert "--recipe" not in losses  # its rows are of CDTrans, so the best recipe's method cannot replace it
        assert "--effort" not in losses + noise

    def test_the_first_page_of_adapt_has_what_people_use(self, run: Run) -> None:
        settings = {f"--{name.replace('_', '-')}" for name in COMMON_SETTINGS} | {"--no-guard"}
        own = {"--out", "--config", "--force", "--help-all"}
        assert flags_of(run, "adapt") == COMMON | own | settings
        assert len(settings | own) == 15

    @pytest.mark.parametrize("how", ["--help", "--help-all"])
    @pytest.mark.parametrize("verb", ["adapt", "check", "bench", "demo"])
    def test_no_line_is_cut_at_80_columns(self, run: Run, verb: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        text = run(verb, how).out
        assert "…" not in text
        assert max(map(len, text.splitlines())) == 80, "and the width is used"

    def test_demo_shows_its_own_defaults(self, run: Run) -> None:
        text = run("demo", "--help-all").out
        lines = {flag: line for line in text.splitlines() for flag in re.findall(r"^│ (--\S+)", line)}
        own = {"--backbone": "vit_tiny_patch16_224", "--[no-]pretrained": "false", "--crop": "28", "--lr": "0.003"}
        own |= {"--source-fit": "train", "--neck": "batchnorm", "--epochs": "10; authors: 40"}
        for flag, default in own.items():
            assert f"default: {default})" in lines[flag]

    @pytest.mark.parametrize(
        ("words", "completed"), [("cdtrans pre", "predict"), ("cdtrans adapt --layer", "--layer-decay")]
    )
    def test_a_shell_completes_verbs_and_every_flag(self, words: str, completed: str) -> None:
        asked = {"_CDTRANS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        said = subprocess.run([sys.executable, "-m", "cdtrans"], env=os.environ | asked, capture_output=True, text=True)
        assert said.stdout.split() == [completed]

    def test_the_flags_of_the_other_verbs_are_a_promise(self, run: Run) -> None:
        assert flags_of(run, "eval") == COMMON | SCORING
        assert flags_of(run, "export") == COMMON | {"--out", "--to", "--model"}
        assert flags_of(run, "push") == COMMON | {"--private", "--model"}
        assert flags_of(run, "predict") == COMMON | SCORING | {
            "--csv",
            "--parquet",
            "--top",
            "--abstain",
            "--keep",
            "--accuracy",
            "--unknown",
        }
        assert flags_of(run, "report") == flags_of(run, "choose") == COMMON
        assert flags_of(run, "methods") == COMMON
        assert flags_of(run, "ask") == COMMON | {"--budget", "--out", "--seed", "--force"}
        assert flags_of(run, "answer") == COMMON
        settings = {f"--{name.replace('_', '-')}" for name in SETTINGS if name not in NOT_FLAGS} | {"--set"}
        shared = {f"--{name.replace('_', '-')}" for name in cli.CHECK_FLAGS} | {"--no-pretrained"}
        assert flags_of(run, "check", "--help-all") == COMMON | ALL | shared | {
            "--preset",
            "--config",
            "--model",
            "--no-model",
        }
        assert flags_of(run, "adapt", "--help-all") >= COMMON | settings | {
            "--out",
            "--preset",
            "--config",
            "--force",
            "--no-pretrained",
        }
        assert flags_of(run, "demo", "--help-all") >= COMMON | settings | {"--out", "--seed"}
        own = {"--data", "--seeds", "--tasks", "--jobs", "--out", "--config", "--allow-incomplete", "--force"}
        own |= {"--start"}
        of_each_run = {"--seed", "--root", "--source-model", "--source-classes", "--target-labels"}
        assert flags_of(run, "bench", "--help-all") >= COMMON | own | settings - of_each_run
        assert not of_each_run & flags_of(run, "bench")


class TestWrongUse:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["adapt", "a", "b", "--epochz", "3"], ["--epochz", "--epochs", "'cdtrans adapt --help'"]),
            (["evil"], ["No such command 'evil' (did you mean 'eval'?); see 'cdtrans --help'."]),
            (["frobnicate"], ["'frobnicate'", "'cdtrans --help'"]),
            (["eval"], ["RUN", "'cdtrans eval --help'"]),
            (["check", "a"], ["TARGET", "'cdtrans check --help'"]),
            (["check", "a", "b", "--epochs", "3"], ["--epochs"]),
            (["eval", "run"], ["LABELLED"]),
            (["predict", "run", "images", "--top", "0"], ["--top", "1"]),
            (["predict", "run", "images", "--abstain", "2"], ["--abstain"]),
            (["predict", "run", "images", "--keep", "0.8", "--accuracy", "0.9"], ["--keep", "cannot be combined"]),
            (["predict", "run", "images", "--abstain", "0", "--keep", "0.9"], ["--abstain", "cannot be combined"]),
            (["predict", "run", "images", "more"], ["more"]),
            (["adapt", "a", "b", "--epochs", "many"], ["--epochs", "integer"]),
            (["demo", "--seed", "-1"], ["--seed"]),
            (["predict", "run", "images", "--json"], ["--csv FILE"]),
        ],
        ids=lambda value: " ".join(value),
    )
    def test_one_sentence_and_exit_2(self, run: Run, arguments: list[str], expected: list[str]) -> None:
        ended = run(*arguments)
        assert ended.code == 2
        assert ended.out == ""
        for part in expected:
            assert part in one_sentence(ended.err)

    def test_a_value_out_of_range_or_of_another_kind(self, run: Run, finished, tmp_path: Path) -> None:
        places = ("adapt", finished.task.source, finished.task.target, "--out", tmp_path / "out")
        assert "'epochs' must be at least 1" in one_sentence(run(*places, "--epochs", 0).err)
        assert "'neck': known: batchnorm, none" in one_sentence(run(*places, "--neck", "xyz").err)
        known = "'pairing': known: two_way, one_way_source, one_way_target."
        assert known in one_sentence(run(*places, "--pairing", "xyz").err)
        assert says(one_sentence(run(*places, "--crop", "1.5").err), "'crop'", "whole number", "auto", "'1.5'")
        assert "did you mean 'digits'?" in run(*places, "--preset", "digit").err
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--method", "cdtrnas"], ["'cdtrnas'", "did you mean 'cdtrans'?"]),
            (["--method", "zzzzz"], ["'zzzzz'", "cdtrans, minent, bnm, mcc, dann"]),
            (["--method", "ground_truth"], ["'ground_truth'", "target labels", "cdtrans ablate"]),
            (["--method", "nowhere.py:Mine"], ["no file", "'nowhere.py'", "method"]),
            (["--method", "dann", "--set", "trade_of=1"], ["'dann'", "'trade_of'", "did you mean 'trade_off'?"]),
            (["--method", "dann", "--set", "trade_off=-1"], ["'trade_off'", "at least 0"]),
            (["--method", "dann", "--set", "trade_off=much"], ["'trade_off'", "a number", "'much'"]),
            (["--method", "dann", "--pairing", "two_way"], ["'dann'", "no option 'pairing'"]),
            (["--method", "rpll", "--set", "alpha=1"], ["'rpll'", "no option 'alpha'", "no options"]),
            (["--set", "center-awre=false"], ["'cdtrans'", "'center_awre'", "did you mean 'center_aware'?"]),
            (["--set", "center_aware"], ["--set", "KEY=VALUE", "'center_aware'"]),
            (["--set", "=3"], ["--set", "KEY=VALUE", "'=3'"]),
            (["--set", "pairing=two_way", "--set", "pairing=two_way"], ["--set", "'pairing'", "twice"]),
        ],
        ids=lambda value: " ".join(value),
    )
    def test_a_wrong_method_or_option_names_the_nearest_right_one(
        self, run: Run, finished, tmp_path: Path, flags: list[str], words: list[str]
    ) -> None:
        ended = run(*finished.task.adapt(tmp_path / "out", *flags))
        assert ended.code == 2
        assert says(ended.err, *words)
        assert ended.err.startswith("error: ")
        assert ended.err.count("\n") == 1
        assert not (tmp_path / "out").exists()

    def test_no_source_or_target(self, run: Run) -> None:
        ended = run("adapt")
        assert ended.code == 2
        assert "No source was given" in one_sentence(ended.err)


class TestFailures:
    @pytest.mark.parametrize(
        ("words", "where"),
        [
            (["adapt", "", "target"], ""),
            (["adapt", "source", "target", "--weights", ""], "--weights"),
            (["adapt", "source", "target", "--source-model="], "--source-model"),
            (["predict", "run", "images", "--csv", "", "--quiet"], "--csv"),
        ],
    )
    def test_an_unset_shell_variable_is_not_taken_for_something_else(
        self, run: Run, called: dict[str, Any], words: list[str], where: str
    ) -> None:
        ended = run(*words)
        assert ended.code == 2
        assert says(one_sentence(ended.err), "empty", "shell variable", where)
        assert not called

    def test_an_empty_value_of_an_option_is_a_value(self, run: Run, called: dict[str, Any]) -> None:
        assert run("adapt", "source", "target", "--set", "x=", "--set=y=").code == 0
        assert called["method_args"] == {"x": None, "y": None}

    @pytest.mark.parametrize(
        ("error", "code", "said"),
        [
            (CdtransError("It is so."), 2, "error: It is so.\n"),
            (Interrupted(signal.SIGINT), 130, "error: Interrupted; the state is saved."),
            (Interrupted(signal.SIGTERM), 143, "error: Interrupted; the state is saved."),
            (KeyboardInterrupt(), 130, "error: Interrupted.\n"),
            (
                PermissionError(13, "Permission denied", "/x/y"),
                2,
                "error: '/x/y': Permission denied; check the path, its permissions and the disk.\n",
            ),
            (MemoryError(), 2, "error: This computer does not have enough memory"),
            (
                RuntimeError("[enforce fail] DefaultCPUAllocator: no memory"),
                2,
                "error: This computer does not have enough",
            ),
            (ZeroDivisionError("oops"), 1, "error: Internal error, ZeroDivisionError: oops. Run it again with --debug"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
    )
    @pytest.mark.parametrize("debug", [False, True])
    def test_exit_codes(self, run: Run, monkeypatch, error: BaseException, code: int, said: str, debug: bool) -> None:
        failing(monkeypatch, error)
        ended = run("adapt", "a", "b", *(["--debug"] if debug else []))
        assert ended.code == code
        assert ended.out == ""
        assert said in ended.err
        assert ("Traceback (most recent call last)" in ended.err) == debug
        assert ended.err.startswith("error: ") or debug

    def test_with_json_an_error_prints_no_object(self, run: Run, monkeypatch) -> None:
        failing(monkeypatch, CdtransError("It is so."))
        assert run("adapt", "a", "b", "--json").out == ""


class TestAdapt:
    def test_only_what_was_said_is_passed_on(self, run: Run, called: dict[str, Any]) -> None:
        """A flag that was not given must not hide the value of the YAML file."""
        assert run("adapt", "a", "b").code == 0
        assert called.keys() == {"source", "target", "out", "preset", "config", "force", "screen"}
        assert called["source"] == Path("a")
        assert called["target"] == Path("b")
        assert called["out"] is called["preset"] is called["config"] is None
        assert called["force"] is False
        assert run("adapt", "a", "b", "--force").code == 0
        assert called["force"] is True

    def test_every_flag_arrives_in_its_kind(self, run: Run, called: dict[str, Any]) -> None:
        flags = "--epochs 3 --lr 1e-3 --no-pretrained --crop 64 --mutual-pairs once --detach-teacher --config c.yaml"
        assert run("adapt", "a", "b", *flags.split()).code == 0
        expected = {"epochs": 3, "lr": 1e-3, "pretrained": False, "crop": "64", "mutual_pairs": "once"}
        assert called.items() >= (expected | {"detach_teacher": True, "config": Path("c.yaml")}).items()

    def test_options_of_a_method_are_read_as_yaml_reads_them(self, run: Run, called: dict[str, Any]) -> None:
        options = ("trade_off=0.5", "kind=soft", "balanced=true", "some-name=3", "list=[1, 2]", "odd=a: b: c")
        flags = [word for option in options for word in ("--set", option)]
        assert run("adapt", "a", "b", "--method", "dann", *flags).code == 0
        assert called["method"] == "dann"
        read = {"trade_off": 0.5, "kind": "soft", "balanced": True, "some_name": 3, "list": [1, 2], "odd": "a: b: c"}
        assert called["method_args"] == read

    def test_the_promised_json(self, run: Run, called: dict[str, Any]) -> None:
        ended = run("adapt", "a", "b", "--json")
        assert json.loads(ended.out) == {
            "run": "runs/x",
            "chosen_epoch": 7,
            "harm": False,
            "explanation": "The guard judges that the adapted model is better than the source-only one.",
            "estimate": [0.6, 0.9],
            "target_labels": 0,
        }
        assert ended.out.count("\n") == 1

    def test_what_to_do_next_is_said_unless_quiet(self, run: Run, called: dict[str, Any]) -> None:
        loud, quiet = run("adapt", "a", "b"), run("adapt", "a", "b", "--quiet")
        assert "Next: cdtrans predict runs/x IMAGES --csv predictions.csv" in loud.out
        assert "Done: runs/x (chosen: the adapted model of epoch 7)\n" in loud.out
        assert quiet.out == "Done: runs/x (chosen: the adapted model of epoch 7, estimated accuracy 60% to 90%)\n"
        assert quiet.err == loud.err == ""

    def test_a_finished_run_is_not_run_again(self, run: Run, finished) -> None:
        ended = run(*finished.task.adapt(finished.run), "--json")
        assert ended.code == 0, ended.err
        assert says(ended.err, "expected accuracy", "of all images", "of the most confident", "--keep")
        result = json.loads((finished.run / "result.json").read_text())
        assert json.loads(ended.out) == {
            "run": str(finished.run),
            "chosen_epoch": result["chosen_epoch"],
            "harm": False,
            "explanation": result["guard"]["paragraph"],
            "estimate": [result["estimate"]["low"], result["estimate"]["high"]],
            "target_labels": 0,
        }
        assert "already finished" in ended.err


class TestCheck:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What `cdtrans check` asks; it gets the findings given under "findings"."""
        values: dict[str, Any] = {"findings": ()}

        def check(**given: Any) -> Check:
            values.update(given)
            return Check(values["findings"], None, "it is Sunday")

        monkeypatch.setattr(cdtrans.run.check, "check", check)
        return values

    def test_only_what_was_said_is_passed_on(self, run: Run, asked: dict[str, Any]) -> None:
        assert run("check", "a", "b").code == 0
        assert asked.keys() == {"findings", "source", "target", "preset", "config", "model", "screen"}
        assert asked["model"] is True
        assert run("check", "a", "b", "--no-model", "--weights", "w", "--max-bad", "0.2").code == 0
        assert (asked["model"], asked["weights"], asked["max_bad"]) == (False, "w", 0.2)

    @pytest.mark.parametrize(
        ("states", "code", "verdict"),
        [
            (["ok", "ok"], 0, "No problem was found; you can start a run."),
            (["warning", "ok"], 0, "You can start a run; read the warnings first."),
            (["ok", "stop", "warning"], 1, "Do not start a run; 'cdtrans adapt' would refuse it."),
        ],
    )
    def test_exit_codes_and_the_table(self, run: Run, asked: dict[str, Any], states, code: int, verdict: str) -> None:
        asked["findings"] = tuple(Finding(s, f"[b]{n}", f"Seen {n}", f"Do {n}.") for n, s in enumerate(states))
        ended = run("check", "a", "b")
        assert ended.code == code
        assert ended.err == ""
        for n, state in enumerate(states):
            (row,) = [line for line in ended.out.splitlines() if f"Seen {n}." in line]
            assert [cell.strip() for cell in row.split("│")[1:4]] == [state, f"[b]{n}", f"Seen {n}."]
            assert f"Do {n}." in ended.out
        assert "Not checked with a backbone: it is Sunday." in ended.out
        assert verdict in ended.out
        quiet = run("check", "a", "b", "--quiet")
        assert "Seen 0." in quiet.out
        assert verdict not in quiet.out

    def test_the_promised_json(self, run: Run, asked: dict[str, Any]) -> None:
        asked["findings"] = (Finding("stop", "a", "b", "c", {"d": 1}),)
        ended = run("check", "a", "b", "--json")
        assert ended.code == 1
        assert ended.out.count("\n") == 1
        assert json.loads(ended.out) == {
            "state": "stop",
            "findings": [{"state": "stop", "subject": "a", "found": "b", "advice": "c", "details": {"d": 1}}],
            "backbone": None,
            "skipped": "it is Sunday",
        }
        assert "it is Sunday" in ended.err

    def test_real_images(self, run: Run, finished) -> None:
        ended = run("check", finished.task.source, finished.task.target, "--config", finished.task.config, "--json")
        assert ended.code == 0, ended.err
        assert json.loads(ended.out)["state"] == "ok"

    def test_places_that_are_wrong(self, run: Run, finished, tmp_path: Path) -> None:
        ended = run("check", finished.task.source, tmp_path / "nowhere")
        assert ended.code == 2
        assert "does not exist" in one_sentence(ended.err)
        ended = run("check", finished.task.source, finished.task.source)
        assert "Source and target are the same" in one_sentence(ended.err)


class TestEval:
    def test_the_promised_json(self, run: Run, finished) -> None:
        ended = run("eval", finished.run, finished.answers, "--json")
        assert ended.code == 0, ended.err
        assert ended.out.count("\n") == 1
        values = json.loads(ended.out)
        assert values.keys() >= {"accuracy", "class_mean_accuracy", "per_class", "confusion", "classes", "images"}
        assert values["images"] == sum(map(sum, values["confusion"])) == 21
        assert values["accuracy"] == sum(values["confusion"][k][k] for k in range(3)) / 21
        assert values["classes"] == list(CLASSES)

    def test_the_tables(self, run: Run, finished) -> None:
        ended = run("eval", finished.run, finished.answers)
        values = json.loads(run("eval", finished.run, finished.answers, "--json").out)
        assert "21 labelled images" in ended.out
        assert says(ended.out.replace("\n", " "), "exact for this target", "new images like these")
        assert values["choice"] in ended.out.replace("\n", " ")
        assert values["comparison"]["sentence"] in ended.out.replace("\n", " ")
        for name, value in (
            ("chosen: adapted, epoch ", values["accuracy"]),
            ("source-only", values["source_only_accuracy"]),
            (f"adapted, epoch {values['adapted_epoch']}", values["adapted_accuracy"]),
            ("last epoch", values["last_epoch_accuracy"]),
            (f"best by labels, epoch {values['best_by_labels_epoch']}", values["best_by_labels_accuracy"]),
        ):
            (row,) = [line for line in ended.out.splitlines() if line[1:].strip().startswith(name)]
            low, high = wilson(round(21 * value), 21)
            assert f"{value:.1%} ({100 * low:.1f} to {100 * high:.1f})" in row
        worst = min(range(3), key=lambda k: values["confusion"][k][k])
        confusion = values["confusion"][worst]
        assert sum(confusion) > confusion[worst]  # else there is nothing to see
        taken_for = max(range(3), key=lambda k: confusion[k] * (k != worst))
        by_class, confused = [line for line in ended.out.splitlines() if line[1:].strip().startswith(CLASSES[worst])]
        assert f"{values['per_class'][CLASSES[worst]]:.1%}" in by_class
        assert f"{CLASSES[taken_for]} ({confusion[taken_for]})" in by_class
        low, high = values["per_class_interval"][CLASSES[worst]]
        assert f"({100 * low:.1f} to {100 * high:.1f})" in by_class
        assert [int(cell) for cell in confused.strip("│ ").split("│")[1:]] == confusion

    def test_a_long_name_is_not_cut(self) -> None:
        """Two that begin alike would look the same."""
        names = tuple(f"{'an_endless_name_of_a_class_' * 3}{k}" for k in range(12))
        scores = score(np.arange(12), np.roll(np.arange(12), 1), 12)
        for table in (class_table, confusion_table):
            console = Console(width=80)
            with console.capture() as shown:
                console.print(table(Evaluation(scores, names, (), None)))
            assert "…" not in shown.get(), table.__name__

    def test_a_class_is_one_line_whatever_it_is_called(self, run: Run, monkeypatch) -> None:
        names = ("a\nerror: fake", "b\x1b[2J")
        result = Evaluation(score(np.array([0, 1]), np.array([0, 0]), 2), names, (), None, model="adapted")
        monkeypatch.setattr(cdtrans.measure.evaluate, "evaluate", lambda *a, **k: result)
        out = run("eval", "run", "labelled").out
        assert out.count(r"a\nerror: fake") == 4  # a row and a column of one table, a row and a cell of the other
        assert r"b\x1b[2J" in out
        assert "\x1b" not in out

    @pytest.mark.parametrize("classes", [12, 13])
    def test_a_confusion_matrix_that_does_not_fit_is_not_shown(self, run: Run, monkeypatch, classes: int) -> None:
        labels = np.arange(classes)
        names = tuple(f"class-{k}" for k in labels)
        result = Evaluation(score(labels, labels, classes), names, (), None)
        monkeypatch.setattr(cdtrans.measure.evaluate, "evaluate", lambda *a, **k: result)
        shown = run("eval", "run", "key").out
        assert ("confusion matrix\n" in shown) == (classes == 12)
        assert ("The confusion matrix of 13 classes is in --json." in shown) == (classes == 13)

    def test_quiet_still_shows_the_result(self, run: Run, finished) -> None:
        ended = run("eval", finished.run, finished.answers, "--quiet")
        assert "chosen: adapted" in ended.out
        assert ended.err == ""

    def test_another_model_is_named(self, run: Run, finished) -> None:
        assert "source: source-only" in run("eval", finished.run, finished.answers, "--model", "source").out

    def test_class_names_are_not_markup(self, run: Run, finished, tmp_path: Path) -> None:
        copy = shutil.copytree(finished.run, tmp_path / "run")
        names = ["[/blue]", "[bold]green", ":smile:"]
        for file in (copy / "adapted" / "model.json", copy / "source" / "model.json"):
            file.write_text(json.dumps(json.loads(file.read_text()) | {"classes": names}))
        for k, n in product(range(3), range(4)):
            draw(tmp_path / f"{k}{n}.png", k, seed=n, shift=1.0)
        listed = tmp_path / "key.txt"
        listed.write_text("".join(f"{k}{n}.png {name}\n" for k, name in enumerate(names) for n in range(4)))
        ended = run("eval", copy, listed)
        assert ended.code == 0, ended.err
        for name in names:
            assert name in ended.out

    def test_a_class_name_that_is_no_text_is_shown_escaped(self, run: Run, finished, tmp_path: Path) -> None:
        copy = shutil.copytree(finished.run, tmp_path / "run")
        card = copy / "adapted" / "model.json"
        card.write_text(json.dumps(json.loads(card.read_text()) | {"classes": ["blue", "caf\udce9", "red"]}))
        draw(tmp_path / "key" / "caf\udce9" / "0.png", 1, 0)
        ended = run("eval", copy, tmp_path / "key")
        assert ended.code == 0, ended.err
        assert "caf\\udce9" in ended.out

    def test_an_unknown_class(self, run: Run, finished, tmp_path: Path) -> None:
        draw(tmp_path / "key" / "grean" / "0.png", 1, 0)
        ended = run("eval", finished.run, tmp_path / "key")
        assert ended.code == 2
        assert "'grean'" in ended.err
        assert ended.err.endswith("did you mean 'green'?\n")


class TestChoose:
    def test_the_sentence_the_json_and_the_errors(self, run: Run, finished, tmp_path: Path) -> None:
        copy = shutil.copytree(finished.run, tmp_path / "run")
        ended = run("choose", copy, "source")
        assert (ended.code, ended.err) == (0, "")
        assert says(ended.out, "now uses the source-only model", "changes it back")
        assert "model: source-only" in run("predict", copy, finished.task.target, "--csv", tmp_path / "p.csv").out
        values = json.loads(run("choose", copy, "adapted", "--json").out)
        epoch = json.loads((finished.run / "result.json").read_text())["chosen_epoch"]
        assert values == {"run": str(copy), "chosen_model": "adapted", "chosen_epoch": epoch, "changed": True}
        again = run("choose", copy, "adapted")
        assert again.code == 0
        assert says(again.out, "already uses the adapted model")
        ended = run("choose", tmp_path / "nowhere", "adapted")
        assert ended.code == 2
        assert "does not exist" in one_sentence(ended.err)


class TestPredict:
    def test_the_promised_json(self, run: Run, finished, tmp_path: Path) -> None:
        file = tmp_path / "p.csv"
        ended = run("predict", finished.run, finished.task.target, "--csv", file, "--abstain", "1", "--json")
        counts = {"images": 21, "kept": 0, "abstained": 21, "skipped": 0, "threshold": 1.0, "expected_accuracy": None}
        assert json.loads(ended.out) == {"csv": str(file), "parquet": None} | counts
        assert ended.out.count("\n") == 1
        assert file.read_text().count("\n") == 22

    def test_the_surest_part_of_the_images(self, run: Run, finished, tmp_path: Path) -> None:
        """By the confidences in the run's own target, which are the new images here."""
        file = tmp_path / "p.csv"
        ended = run("predict", finished.run, finished.task.target, "--csv", file, "--keep", "0.6", "--json")
        told = json.loads(ended.out)
        assert (told["images"], told["kept"], told["abstained"]) == (21, 13, 8)
        rows = list(csv.DictReader(file.open(newline="")))
        sure = sorted((float(row["probability"]) for row in rows if row["label"]), reverse=True)
        assert sure == sorted((float(row["probability"]) for row in rows), reverse=True)[:13]
        assert told["expected_accuracy"] == pytest.approx(sum(sure) / 13, abs=1e-5)
        assert says(ended.err, "62% of the run's own target images", "Kept 13 of 21", "expected to be right")
        one = run("predict", finished.run, finished.task.target / "00.png", "--keep", "1", "--unknown", "--quiet")
        assert (one.code, one.err) == (0, "")
        assert one.out.splitlines()[0] == "path,label,probability,no_class"
        assert one.out.splitlines()[1].split(",")[1] in CLASSES

    def test_as_many_as_are_expected_to_be_accurate(self, run: Run, finished, tmp_path: Path) -> None:
        copy, file = shutil.copytree(finished.run, tmp_path / "run"), tmp_path / "p.csv"
        sure = np.array([0.9, 0.8, 0.7, 0.6, 0.5])
        logits = np.log(np.stack([sure, (1 - sure) / 2, (1 - sure) / 2], axis=1))
        np.savez(copy / "logits.npz", adapted=logits)
        set_temperature(copy / "adapted", 1.0)
        ended = run("predict", copy, finished.task.target, "--csv", file, "--accuracy", "0.75", "--json")
        told = json.loads(ended.out)
        assert told["threshold"] == pytest.approx(0.55), "0.9, 0.8, 0.7 and 0.6 are 0.75 on average"
        rows = list(csv.DictReader(file.open(newline="")))
        assert [bool(row["label"]) for row in rows] == [float(row["probability"]) >= 0.55 for row in rows]
        assert told["kept"] == sum(bool(row["label"]) for row in rows)
        file.unlink()
        ended = run("predict", copy, finished.task.target, "--csv", file, "--accuracy", "0.95")
        assert ended.code == 2
        assert says(one_sentence(ended.err), "95.0%", "89.9%", "lower --accuracy")
        for flags in (["--keep", "0"], ["--keep", "nan"], ["--keep", "80"], ["--accuracy", "95"], ["--accuracy", "0"]):
            ended = run("predict", copy, finished.task.target, *flags)
            assert ended.code == 2
            assert "at most 1" in one_sentence(ended.err)
        assert not file.exists()

    def test_what_is_expected_of_an_unknown_accuracy_comes_with_a_warning(
        self, run: Run, finished, tmp_path: Path
    ) -> None:
        copy, images = shutil.copytree(finished.run, tmp_path / "run"), finished.task.target / "00.png"
        result = json.loads((copy / "result.json").read_text())
        result["estimates"]["adapted"] |= {"low": None, "high": None}
        (copy / "result.json").write_text(json.dumps(result))
        for flags in (["--keep", "0.6"], ["--accuracy", "0.1"], ["--abstain", "0.1"]):
            ended = run("predict", copy, images, "--quiet", *flags)
            assert ended.code == 0
            assert says(ended.err, "warning", "not calibrated", "cdtrans ask", "cdtrans answer")
        assert run("predict", copy, images, "--quiet").err == "", "nothing is expected"
        (copy / "answers.json").write_text(json.dumps({"result": {"recalibrated": True}}))
        assert run("predict", copy, images, "--quiet", "--keep", "0.6").err == "", "labels have calibrated it"
        ended = run("predict", copy, images, "--quiet", "--abstain", "0.1", "--model", "source")
        assert "not calibrated" in ended.err

    def test_a_run_without_confidences(self, run: Run, finished, tmp_path: Path) -> None:
        copy = shutil.copytree(finished.run, tmp_path / "run")
        ended = run("predict", copy, finished.task.target, "--keep", "0.5", "--model", "last")
        assert says(one_sentence(ended.err), "logits.npz", "'last'", "another --model")
        for damage in (b"", b"PK\3\4 cut short", None):
            (copy / "logits.npz").write_bytes(damage) if damage is not None else (copy / "logits.npz").unlink()
            ended = run("predict", copy, finished.task.target, "--keep", "0.5")
            assert ended.code == 2
            assert says(one_sentence(ended.err), "logits.npz", "cdtrans adapt")

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
            assert f"warning: skipped '{bad}': empty file" in ended.err
        ended = run("predict", finished.run, bad.parent, "--csv", tmp_path / "p.csv")
        assert ended.code == 2
        assert "error: 1 of 2 files cannot be read" in ended.err
        assert not (tmp_path / "p.csv").exists()

    def test_no_such_run(self, run: Run, tmp_path: Path) -> None:
        ended = run("predict", tmp_path / "nowhere", tmp_path)
        assert ended.code == 2
        assert "make one with 'cdtrans adapt" in one_sentence(ended.err)


class TestReport:
    def test_the_promised_json(self, run: Run, finished, tmp_path: Path) -> None:
        copy = shutil.copytree(finished.run, tmp_path / "run")
        ended = run("report", copy, "--json")
        assert ended.code == 0, ended.err
        assert json.loads(ended.out) == {"report": str(copy / "report.html")}
        assert ended.out.count("\n") == 1
        assert "<h1" in (copy / "report.html").read_text(encoding="utf-8")

    def test_quiet_still_says_where_it_is(self, run: Run, finished, tmp_path: Path) -> None:
        copy = shutil.copytree(finished.run, tmp_path / "run")
        ended = run("report", copy, "--quiet")
        assert ended.out == f"Report: {copy / 'report.html'}\n"
        assert ended.err == ""

    def test_an_unfinished_run(self, run: Run, finished, tmp_path: Path) -> None:
        copy = shutil.copytree(finished.run, tmp_path / "run")
        (copy / "result.json").unlink()
        ended = run("report", copy)
        assert ended.code == 2
        assert "holds no finished run" in one_sentence(ended.err)
        assert not (copy / "report.html").exists()


class TestDemo:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        values: dict[str, Any] = {}

        def demo(out: Path, **given: Any) -> DemoResult:
            values.update(given, out=out)
            return DemoResult(out, 0.5555, 0.7777, False)

        monkeypatch.setattr(cdtrans.run.demo, "demo", demo)
        return values

    def test_the_promised_json(self, run: Run, asked: dict[str, Any]) -> None:
        ended = run("demo", "--json", "--out", "there", "--seed", 3, "--epochs", 2)
        assert json.loads(ended.out) == {
            "source_only_accuracy": 0.5555,
            "adapted_accuracy": 0.7777,
            "run": "there",
            "harm": False,
        }
        assert asked.keys() == {"out", "seed", "screen", "epochs"}
        assert (asked["seed"], asked["epochs"]) == (3, 2)

    def test_the_table(self, run: Run, asked: dict[str, Any]) -> None:
        ended = run("demo", "--quiet")
        assert "55.5%" in ended.out.replace("55.6%", "55.5%")
        assert "77.8%" in ended.out
        assert "Run folder: runs/demo" in ended.out
        assert asked["seed"] == 0


class TestMethods:
    def test_a_line_for_each(self, run: Run) -> None:
        ended = run("methods")
        assert (ended.code, ended.err) == (0, "")
        lines = {line.split()[0]: line for line in ended.out.splitlines() if line.split()}
        for name in METHODS:
            summary = (method_class(name).__doc__ or "").splitlines()[0].rstrip(".")
            paper = method_class(name).paper or "(this project)"
            assert says(lines[name], summary, paper, method_class(name).backbones)

    def test_the_options_of_one(self, run: Run) -> None:
        ended = run("methods", "mrkld_lrent")
        assert ended.code == 0, ended.err
        assert says(ended.out, "Zou et al. 2019", "label_entropy", "0.25", "divergence", "--set")
        assert says(run("methods", "rpll").out, "no options")

    def test_where_one_comes_from(self, run: Run, tmp_path: Path) -> None:
        assert says(run("methods", "dann").out, ". Reference: Ganin et al. 2016, Domain-Adversarial Training")
        own = "best recipe, described in docs/results/recipe.md. Backbones: any."
        assert says(run("methods", "instant").out, f"frozen backbone. The start of this project's {own}")
        file = tmp_path / "mine.py"
        head = "from cdtrans.methods.base import Method\nclass Mine(Method):\n    'My idea.'\n"
        file.write_text(f"{head}    def losses(self, batch, progress): return {{}}\n")
        assert says(run("methods", f"{file}:Mine").out, "My idea. Backbones: any.")

    def test_the_promised_json(self, run: Run) -> None:
        ended = run("methods", "--json")
        assert (ended.err, ended.out.count("\n")) == ("", 1)
        rows = json.loads(ended.out)["methods"]
        assert [row["name"] for row in rows] == list(METHODS)
        for row in rows:
            assert row.keys() == {"name", "summary", "paper", "title", "backbones", "cost", "options"}
            assert all(option.keys() == {"name", "default", "help"} for option in row["options"])
            assert all(option["help"] for option in row["options"])
        (one,) = json.loads(run("methods", "mcd", "--json").out)["methods"]
        assert one == next(row for row in rows if row["name"] == "mcd")

    def test_a_wrong_name(self, run: Run) -> None:
        ended = run("methods", "dannn")
        assert ended.code == 2
        assert says(ended.err, "'dannn'", "did you mean 'dann'?")


class TestCache:
    def test_what_is_cached_is_listed_and_cleared(self, run: Run, tmp_path: Path) -> None:
        place = tmp_path / "own"
        assert run("cache", "--cache", str(place)).out == f"Nothing is cached in {place}.\n"
        images = draw(tmp_path / "images" / "a.png", kind=0, seed=1).parent
        open_pixels(
            sorted(images.iterdir()), root=images, size=8, cache=place, screen=Screen(quiet=True), name="source"
        )
        listed = json.loads(run("cache", "--cache", str(place), "--json").out)
        (store,) = listed["stores"]
        assert store == {"root": str(images), "size": 8, "images": 1, "bytes": store["bytes"]}
        assert store["bytes"] > 8 * 8 * 3
        assert str(images) in run("cache", "--cache", str(place)).out.replace("\n", "")
        other = run("cache", "--cache", str(place), "--clear", "--root", str(tmp_path / "other"), "--json")
        assert json.loads(other.out)["freed"] == 0
        cleared = json.loads(run("cache", "--cache", str(place), "--clear", "--json").out)
        assert cleared["freed"] == store["bytes"]
        assert "Nothing is cached" in run("cache", "--cache", str(place)).out

    def test_a_long_path_is_not_cut(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        images = draw(tmp_path / ("images" * 20) / "a.png", kind=0, seed=1).parent
        open_pixels(
            sorted(images.iterdir()), root=images, size=8, cache=tmp_path / "own", screen=Screen(quiet=True), name="x"
        )
        shown = run("cache", "--cache", str(tmp_path / "own")).out
        assert str(images) in "".join(line[1:].split("│")[0].strip() for line in shown.splitlines() if "│" in line)

    def test_stores_below_a_folder_are_named_and_not_cleared(self, run: Run, tmp_path: Path) -> None:
        place, top = tmp_path / "own", tmp_path / "office"
        for name in ("office/amazon", "office/dslr", "office-home"):
            file = draw(tmp_path / name / "a.png", kind=0, seed=1)
            for size in (8, 9):
                open_pixels([file], root=file.parent, size=size, cache=place, screen=Screen(quiet=True), name="source")
        asked = ("cache", "--cache", str(place), "--root", str(top))
        below = [str(top / "amazon"), str(top / "dslr")]
        for flags in ((), ("--clear",)):
            said = run(*asked, *flags).out.splitlines()
            assert said[:2] == [
                f"Nothing is cached in {place} for {top} itself.",
                f"Folders below it are cached separately and not affected by --root {top}: '{below[0]}', '{below[1]}'.",
            ]
            found = json.loads(run(*asked, *flags, "--json").out)
            assert (found["stores"], found["below"], found["freed"]) == ([], below, 0)
        assert len(json.loads(run("cache", "--cache", str(place), "--json").out)["stores"]) == 6
        assert "not affected" not in run("cache", "--cache", str(place)).out


class TestBench:
    def test_what_is_asked_for_reaches_the_benchmark(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = self.answered(monkeypatch, failed=())
        flags = ("--tasks", "A>W", "--jobs", "2", "--lr", "0.1", "--no-pretrained")
        ended = run("bench", "office31", "--data", "d", *flags)
        assert ended.code == 0
        assert "3 of 4 runs are finished: out/table.md" in ended.out
        screen = asked.pop("screen")
        assert isinstance(screen, Screen)
        defaults = {"backbone": "deit_small", "seeds": "3", "out": None, "config": None, "start": None}
        defaults |= {"force": False, "allow_incomplete": False}
        given = {"name": "office31", "data": Path("d"), "tasks": "A>W", "jobs": 2, "lr": 0.1, "pretrained": False}
        assert asked == defaults | given

    def test_a_failed_run_is_exit_1_also_as_json(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answered(monkeypatch, failed=("A>W seed 1",))
        ended = run("bench", "office31", "--data", "d", "--json")
        assert ended.code == 1
        assert json.loads(ended.out)["failed"] == ["A>W seed 1"]
        assert ended.err == ""

    @pytest.mark.parametrize("arguments", [["office31"], ["--data", "d"], ["office31", "--data", "d", "--jobs", "0"]])
    def test_wrong_use(self, run: Run, arguments: list[str]) -> None:
        ended = run("bench", *arguments)
        assert ended.code == 2
        one_sentence(ended.err)

    def answered(self, monkeypatch: pytest.MonkeyPatch, failed: tuple[str, ...]) -> dict[str, Any]:
        """Nothing is run; what was asked for comes back."""
        asked: dict[str, Any] = {}

        def bench(name: str, data: Path, **given: Any) -> BenchResult:
            asked.update({"name": name, "data": data}, **given)
            return BenchResult(Path("out"), "table.md", asked=4, finished=3, failed=failed, numbers={})

        monkeypatch.setattr(cdtrans.studies.benchmark, "bench", bench)
        return asked


def test_the_end_leaves_no_report_of_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """nanobind, which binds newer Tritons, reports what is left uncollected; others say nothing."""
    triton, function = ModuleType("triton._C.libtriton"), type("nb_func", (), {"__module__": "nanobind"})
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", triton)
    frozen: list[bool] = []
    monkeypatch.setattr(entry.gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(entry, "_exit_code", lambda debug: 0)
    for expected in ([True], [True]):
        with pytest.raises(SystemExit):
            entry.main()
        assert frozen == expected
        triton.get_something = function()
