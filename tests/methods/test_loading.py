"""Methods by name, and methods in a file of the user's own."""

import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from cdtrans.config import make_config
from cdtrans.methods import METHODS, method_class, require_method
from cdtrans.methods.base import Method
from cdtrans.run.resolve import resolve
from cdtrans.studies.recipes import OWN_START
from commands import warm
from support import error_says, says
from tiny_task import Task, log_lines, make_task, tree

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs" / "methods.md"
FILE = re.search(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL).group(1)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    task = make_task(tmp_path_factory.mktemp("own"), source_epochs=1, epochs=2)
    (task.folder / "my_file.py").write_text(FILE, encoding="utf-8")
    return task


class TestTable:
    @pytest.mark.parametrize("name", METHODS)
    def test_every_entry_is_a_method_that_says_what_it_is(self, name: str) -> None:
        method = method_class(name)
        assert issubclass(method, Method)
        assert method.paper or name in OWN_START
        assert method.title
        assert len((method.__doc__ or "").splitlines()[0]) <= 60
        assert is_dataclass(method.Options)
        assert all(f.metadata.get("help") for f in fields(method.Options)), "an option without a help line"
        assert not method.uses_target_labels

    @pytest.mark.slow
    def test_the_verb_lists_them(self, tmp_path: Path) -> None:
        ended = warm().run(["methods", "--json"], tmp_path)
        rows = json.loads(ended.out)["methods"]
        assert [row["name"] for row in rows] == list(METHODS)
        one = json.loads(warm().run(["methods", "mcd", "--json"], tmp_path).out)["methods"][0]
        assert [option["name"] for option in one["options"]][:2] == ["trade_off", "balance"]
        shown = warm().run(["methods"], tmp_path)
        assert all(name in shown.out for name in METHODS)
        assert says(warm().run(["methods", "mcd"], tmp_path).out, "trade_off", "Saito", "--set")


class TestWrongNames:
    def test_a_misspelt_method_gets_the_nearest(self) -> None:
        with error_says("'dannn'", "'dann'"):
            require_method("dannn")

    @pytest.mark.parametrize("name", ["ground_truth", "sampled_pairs"])
    def test_methods_with_target_labels_are_not_for_adapt(self, name: str) -> None:
        with error_says(name, "target labels", "ablate"):
            require_method(name)

    def test_a_misspelt_option_gets_the_nearest(self) -> None:
        with error_says("dann", "'trade_of'", "'trade_off'"):
            resolve(make_config({"method": "dann", "method_args": {"trade_of": 1}, "crop": 16, "resize": 18}))

    def test_an_option_of_another_method_is_refused(self) -> None:
        with error_says("dann", "'pairing'", "trade_off"):
            resolve(make_config({"method": "dann", "pairing": "two_way", "crop": 16, "resize": 18}))

    @pytest.mark.parametrize(("value", "word"), [(-1, "at least 0"), ("much", "number"), (None, "number")])
    def test_a_wrong_value_says_what_would_be_right(self, value: object, word: str) -> None:
        with error_says("'trade_off'", word):
            resolve(make_config({"method": "dann", "method_args": {"trade_off": value}, "crop": 16, "resize": 18}))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--method", "dannn"], ["'dannn'", "'dann'"]),
            (["--method", "dann", "--set", "trade_off"], ["KEY=VALUE"]),
            (["--method", "dann", "--set", "trade_off=1", "--set", "trade_off=2"], ["trade_off", "twice"]),
            (["--method", "dann", "--set", "ramps=1"], ["'ramps'", "'ramp'"]),
        ],
    )
    def test_the_shell_gets_one_sentence_and_exit_2_and_no_folder(
        self, task: Task, flags: list[str], words: list[str], tmp_path: Path
    ) -> None:
        ended = warm().run(task.adapt(tmp_path / "run", *flags), tmp_path / "logs")
        assert ended.code == 2
        assert says(ended.err, *words)
        assert len(ended.err.strip().splitlines()) == 1
        assert not (tmp_path / "run").exists()


class TestOwnFile:
    @pytest.mark.slow
    def test_the_example_of_the_guide_runs_resumes_and_serves_its_teacher(self, task: Task, tmp_path: Path) -> None:
        flags = ["--method", "my_file.py:MinimumEntropy", "--set", "weight=0.3"]
        how = {"folder": task.folder}  # relative to where the command is given
        ended = warm().run(task.adapt(tmp_path / "run", *flags), tmp_path / "logs", **how)
        assert ended.code == 0, ended.err
        losses = [line for line in log_lines(tmp_path / "run") if line.get("stage") == "adaptation"]
        assert all("loss_entropy" in line for line in losses)
        config = make_config({"method": str(task.folder / "my_file.py") + ":MinimumEntropy"})
        assert method_class(config.method).paper == "Grandvalet & Bengio 2004"
        crash = {"name": "state.pt", "when": "after", "nth": 7}
        out = task.adapt(tmp_path / "killed", *flags)
        assert warm().run(out, tmp_path / "logs", crash=crash, **how).code == -9
        assert warm().run(out, tmp_path / "logs", **how).code == 0
        assert tree(tmp_path / "killed") == tree(tmp_path / "run")

    @pytest.mark.slow
    def test_predicting_needs_the_file_no_more(self, task: Task, tmp_path: Path) -> None:
        own = tmp_path / "gone.py"
        own.write_text(FILE, encoding="utf-8")
        flags = ["--method", f"{own}:MinimumEntropy", "--epochs", "1"]
        assert warm().run(task.adapt(tmp_path / "run", *flags), tmp_path / "logs").code == 0
        own.unlink()
        ended = warm().run(["predict", str(tmp_path / "run"), str(task.target)], tmp_path / "logs")
        assert ended.code == 0, ended.err
        assert len(ended.out.splitlines()) == 1 + 21

    @pytest.mark.parametrize(
        ("text", "name", "words"),
        [
            ("", "MyMethod", ["has no method 'MyMethod'", "subclass"]),
            ("from cdtrans.methods.base import Method\nclass MyMethods(Method): pass\n", "MyMethod", ["'MyMethods'"]),
            ("MyMethod = 3\n", "MyMethod", ["has no method"]),
            ("raise KeyError('x')\n", "MyMethod", ["cannot be imported", "KeyError"]),
            ("class MyMethod(\n", "MyMethod", ["cannot be imported", "SyntaxError"]),
        ],
    )
    def test_a_file_without_it_is_one_sentence(self, tmp_path: Path, text: str, name: str, words: list[str]) -> None:
        (tmp_path / "file.py").write_text(text)
        with error_says("file.py", *words):
            method_class(f"{tmp_path / 'file.py'}:{name}")

    def test_a_file_that_does_not_exist(self, tmp_path: Path) -> None:
        with error_says("no file", "nothing.py", "method"):
            require_method(f"{tmp_path / 'nothing.py'}:MyMethod")
