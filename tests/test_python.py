"""The functions for Python: the same as the verbs, with typed results."""

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from typing_extensions import Unpack

import cdtrans
import cdtrans.cli.app
import cdtrans.reporting.page
import cdtrans.run.check
import cdtrans.run.pipeline
import cdtrans.studies.benchmark
from cdtrans.config import FIELDS, HINTS, METHOD_FIELDS, PATHS, Settings
from cdtrans.errors import SettingsError
from cdtrans.record.outcome import Choice, Measured
from cdtrans.runtime.screen import html_table
from cdtrans.trust.preflight import Finding
from support import error_says, raises, says
from tiny_task import CLASSES, QUICK

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"


@pytest.fixture
def copy(finished, tmp_path: Path) -> Path:
    """A finished run that may be changed."""
    return Path(shutil.copytree(finished.run, tmp_path / "run"))


@pytest.fixture(scope="module")
def classifier(finished) -> cdtrans.Classifier:
    return cdtrans.load(finished.run, device="cpu")


def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *arguments: object) -> dict[str, Any]:
    """The object that `cdtrans ARGUMENTS --json` prints."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["cdtrans", *map(str, arguments), "--json"])
    with pytest.raises(SystemExit):
        cdtrans.cli.app.run_program()
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def test_the_public_names() -> None:
    """The packages are imported here, and no name of a package hides that of a function."""
    for name in cdtrans.__all__:
        public = getattr(cdtrans, name)
        assert public.__name__ == name
        assert public.__doc__, name
        assert public.__module__.startswith("cdtrans.")
    verbs = {"adapt", "answer", "ask", "bench", "check", "evaluate", "export", "load", "predict", "push", "report"}
    assert {name for name in cdtrans.__all__ if name.islower()} == verbs
    errors = {"SettingsError", "DataError", "RunError", "DeviceError", "MethodError", "CdtransError"}
    assert {name for name in cdtrans.__all__ if name.endswith("Error")} == errors
    assert cdtrans.__version__ == version("cdtrans")
    for name in set(cdtrans.__all__) - verbs - errors - {"Classifier", "Predictions"}:
        assert getattr(cdtrans, name).__dataclass_params__.frozen


def test_every_setting_is_a_typed_argument() -> None:
    """So that an editor completes them. Paths may also be Path objects."""
    typed = get_type_hints(Settings)
    assert typed.keys() == (FIELDS.keys() | METHOD_FIELDS.keys()) - {"source", "target"}
    for name, hint in typed.items():
        expected = {"dict[str, Any]": dict}.get(str(hint).replace("typing.", ""), hint)
        name_of_file = {"recipe": str}  # Config has the recipe that it changes
        assert expected == name_of_file.get(name, HINTS[name] | Path if name in PATHS else HINTS[name]), name
    for function in (cdtrans.adapt, cdtrans.check, cdtrans.bench):
        assert get_type_hints(function)["settings"] == Unpack[Settings]


def test_adapt_takes_its_places_in_order(finished) -> None:
    """The run is finished, so nothing is trained."""
    how = {"out": finished.run, "config": finished.task.config, "quiet": True}
    result = cdtrans.adapt(finished.task.source, finished.task.target, **how)
    assert result == cdtrans.adapt(source=finished.task.source, target=finished.task.target, **how)
    page = result._repr_html_()
    assert says(page, str(finished.run), f"epoch {result.chosen_epoch}", "{:.0%} to {:.0%}".format(*result.estimate))
    harm = dataclasses.replace(result.outcome.verdict, kind="harm")
    changes = {"verdict": harm, "choice": Choice("source", 0), "target_labels": 3, "estimates": {"source": None}}
    harmed = dataclasses.replace(result, outcome=dataclasses.replace(result.outcome, **changes))
    assert says(harmed._repr_html_(), "did harm", "source-only", "unknown", "<td>3</td>")


def test_check(finished, monkeypatch, capsys) -> None:
    places = finished.task.source, finished.task.target
    result = cdtrans.check(*places, config=finished.task.config, model=False, quiet=True)
    assert capsys.readouterr().out == ""
    assert (result.state, result.backbone) == ("ok", None)
    assert "No problem was found" in result.verdict
    assert result.summary() == told(
        monkeypatch, capsys, "check", *places, "--config", finished.task.config, "--no-model"
    )
    finding = Finding("stop", "<i>names</i>", "The class 'a&b' is empty", "Remove it.")
    page = cdtrans.Check((finding,), None, "there is a reason to stop without it")._repr_html_()
    assert says(page, "Do not start a run", "&lt;i&gt;names", "a&amp;b", "Remove it.", "reason to stop")


def test_evaluate(finished, copy: Path, monkeypatch, capsys) -> None:
    result = cdtrans.evaluate(str(copy), str(finished.answers), device="cpu", quiet=True)
    assert capsys.readouterr().out == ""
    assert isinstance(result, Measured)
    assert result.accuracy == result.scores.accuracy
    values = told(monkeypatch, capsys, "eval", copy, finished.answers, "--device", "cpu")
    assert json.loads(json.dumps(result.summary())) == values
    page = result._repr_html_()
    assert says(page, "21 labelled images", "source-only", "best by labels", f"{result.accuracy:.1%}")


def test_report(copy: Path, tmp_path: Path) -> None:
    assert cdtrans.report(str(copy), quiet=True) == copy / "report.html"
    assert "<h1" in (copy / "report.html").read_text(encoding="utf-8")
    with error_says("nowhere'", "not exist"):
        cdtrans.report(tmp_path / "nowhere")


class TestPredict:
    def test_the_predictions_are_in_the_result(self, finished, classifier, monkeypatch, capsys, tmp_path) -> None:
        result = cdtrans.predict(finished.run, finished.task.target, device="cpu", top=2, quiet=True)
        assert result.predictions == classifier.predict(finished.task.target, top=2)
        assert (result.images, result.kept, result.csv) == (21, 21, None)
        assert result.summary()["csv"] is None
        assert capsys.readouterr().out == ""
        file = tmp_path / "p.csv"
        values = told(monkeypatch, capsys, "predict", finished.run, finished.task.target, "--csv", file)
        assert result.summary() | {"csv": str(file)} == values

    def test_the_surest_part(self, finished, tmp_path: Path) -> None:
        how = {"keep": 0.6, "device": "cpu", "quiet": True}
        result = cdtrans.predict(finished.run, str(finished.task.target), **how)
        assert (result.images, result.kept, result.abstained) == (21, 13, 8)
        labels = [p.label for p in result.predictions]
        assert labels.count("") == 8
        assert all((p.label == "") == (p.probability < result.threshold) for p in result.predictions)
        written = cdtrans.predict(finished.run, finished.task.target, csv=tmp_path / "p.csv", **how)
        assert written == dataclasses.replace(result, csv=tmp_path / "p.csv", predictions=cdtrans.Predictions())
        assert says(written._repr_html_(), "13 of 21 labels kept", f"{written.expected_accuracy:.1%}", "p.csv")
        with open(tmp_path / "stream.csv", "wb") as stream:
            assert cdtrans.predict(finished.run, finished.task.target, csv=stream, **how).csv is None
        assert (tmp_path / "stream.csv").read_bytes() == (tmp_path / "p.csv").read_bytes()

    def test_wrong_values(self, finished, classifier) -> None:
        with error_says("must be a path", "load(run).predict"):
            cdtrans.predict(finished.run, [finished.task.target])
        with raises("argument-range"):
            cdtrans.predict(finished.run, finished.task.target, abstain=1.5)

    def test_as_a_table(self, finished) -> None:
        result = cdtrans.predict(finished.run, finished.task.target, unknown=1, device="cpu", quiet=True)
        page = result._repr_html_()
        assert says(
            page, "21 of 21 labels kept", "<th>no class</th>", "The first 20 of 21", str(result.predictions[0].path)
        )
        assert page.count("<tr>") == 21  # the first twenty, and the names of the columns
        assert "no class" not in cdtrans.load(finished.run, device="cpu").predict(finished.task.target)._repr_html_()
        odd = cdtrans.Predictions([cdtrans.Prediction(Path("<script>\udcff.png"), "a&b", 0.5, (("a&b", 0.5),))])
        assert says(odd._repr_html_(), "1 image<", "&lt;script&gt;", "\\udcff", "a&amp;b", "0.500")
        assert "<script>" not in odd._repr_html_()
        odd._repr_html_().encode()


def test_an_empty_table_and_sentences() -> None:
    assert html_table("t", ("a",), [], "", "One.") == "<div><p><b>t</b></p><p>One.</p></div>"


class TestClassifier:
    def test_probabilities(self, finished, classifier: cdtrans.Classifier) -> None:
        found = classifier.predict_proba(finished.task.target)
        predictions = classifier.predict(finished.task.target)
        assert found.shape == (21, 3)
        assert np.allclose(found.sum(axis=1), 1)
        assert classifier.classes_.tolist() == list(CLASSES)
        assert classifier.classes_[found.argmax(axis=1)].tolist() == [p.label for p in predictions]
        assert np.allclose(found.max(axis=1), [p.probability for p in predictions], atol=1e-6)
        assert classifier.predict_proba([]).shape == (0, 3)

    def test_features(self, finished, classifier: cdtrans.Classifier) -> None:
        found = classifier.embed(finished.task.target)
        assert found.shape == (21, 32)
        assert found.dtype == np.float32
        again = classifier.embed(sorted(finished.task.target.iterdir())[::-1])
        assert np.allclose(again[::-1], found, atol=1e-5)
        with torch.no_grad():
            logits = classifier.model.head(torch.from_numpy(found)).logits / classifier.card.temperature
        assert np.allclose(logits.softmax(dim=1), classifier.predict_proba(finished.task.target), atol=1e-5)
        assert classifier.embed(()).shape == (0, 32)

    def test_it_says_what_it_is(self, classifier: cdtrans.Classifier) -> None:
        text = repr(classifier)
        assert says(
            text, "Classifier adapted, epoch 4", "vit_tiny_patch16_224", "3 classes: blue, green, red;", "on cpu"
        )
        many = dataclasses.replace(classifier.card, classes=("a", "b", "c", "d"))
        assert "4 classes: a, b, c, ...;" in repr(cdtrans.Classifier(classifier.model, many, classifier.device))


class TestBench:
    def test_what_python_has_besides_text(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Tasks and seeds as lists, and places as text; nothing is run."""
        plans: list[Any] = []

        class Enough(Exception):
            pass

        def found(benchmark: Any, data: Path, tasks: Any, **how: Any) -> Any:
            plans.append((data, [task.name for task in tasks]))
            raise Enough

        monkeypatch.setattr(cdtrans.studies.benchmark, "find_benchmark", found)
        with pytest.raises(Enough):
            cdtrans.bench("office31", str(tmp_path), tasks=["A>W", "A>D"], pretrained=False, quiet=True)
        assert plans == [(tmp_path, ["A>W", "A>D"])]

    @pytest.mark.parametrize("how", [{"seed": 3}, {"root": "x"}])
    def test_what_a_benchmark_decides_itself(self, how: dict[str, Any], tmp_path: Path) -> None:
        with error_says(f"'{next(iter(how))}'"):
            cdtrans.bench("office31", tmp_path, **how)


@pytest.mark.slow
def test_the_guides_examples_run(finished, tmp_path: Path, monkeypatch, capsys) -> None:
    """The tiny task takes the place of photos, and its settings that of the defaults."""
    section = GUIDE.read_text(encoding="utf-8").split("## From Python\n")[1].split("\n## ")[0]
    snippets = re.findall(r"```python\n(.*?)```", section, re.S)
    assert len(snippets) == 3
    monkeypatch.chdir(tmp_path)
    for name, place in {"photos": finished.task.source, "snapshots": finished.task.target}.items():
        (tmp_path / name).symlink_to(place)
    (tmp_path / "new_images").mkdir()
    shutil.copy(finished.task.target / "00.png", tmp_path / "new_images" / "a.png")
    Image.open(tmp_path / "new_images" / "a.png").save(tmp_path / "new.jpg")
    for line in finished.answers.read_text().splitlines():
        file, label = line.split()
        (tmp_path / "labelled" / label).mkdir(parents=True, exist_ok=True)
        shutil.copy(finished.task.folder / file, tmp_path / "labelled" / label)
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(QUICK))
    for module, verb in ((cdtrans.run.pipeline, "adapt"), (cdtrans.run.check, "check")):
        monkeypatch.setattr(module, verb, partial(getattr(module, verb), config="quick.yaml", quiet=True))
    exec("\n".join(snippets), {})
    said = capsys.readouterr().out
    assert says(
        said,
        "No problem was found",
        "new_images/a.png",
        "report.html",
        "<Classifier",
        "(1, 32)",
        "['blue' 'green' 'red']",
    )


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: cdtrans.adapt(source=5, target="t"), "argument-kind"),
        (lambda: cdtrans.adapt("s", "t", epochs="ten"), "setting-kind"),
        (lambda: cdtrans.adapt("s", "t", efort="quick"), "setting-unknown"),
        (lambda: cdtrans.check("s", None), "argument-kind"),
        (lambda: cdtrans.load(None), "argument-kind"),
        (lambda: cdtrans.bench("office31", "d", jobs=0), "argument-range"),
        (lambda: cdtrans.predict("r", "i", top=0), "argument-range"),
        (lambda: cdtrans.evaluate("r", None), "argument-kind"),
        (lambda: cdtrans.export(None), "argument-kind"),
        (lambda: cdtrans.report(5), "argument-kind"),
        (lambda: cdtrans.ask("r", budget="x"), "argument-kind"),
        (lambda: cdtrans.answer("r", 5), "argument-kind"),
        (lambda: cdtrans.push("r", 5), "argument-kind"),
    ],
)
def test_a_wrong_argument_is_one_sentence(call: Callable[[], object], code: str) -> None:
    with raises(code, SettingsError) as caught:
        call()
    assert isinstance(caught.value, TypeError) == (code == "argument-kind")
