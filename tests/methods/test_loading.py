"""Methods by name, and methods in a file of the user's own."""

import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import timm

from cdtrans.config import make_config
from cdtrans.methods import METHODS, method_class, require_method
from cdtrans.methods.base import Method
from cdtrans.network.network import Head, Network, feature_dim
from cdtrans.record.record import RunRecord
from cdtrans.run.pipeline import require_source
from cdtrans.studies.recipes import OWN_START
from commands import warm
from support import raises, says
from tiny_task import log_lines, make_task

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs" / "methods.md"
FILE = re.search(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL).group(1)  # type: ignore[union-attr]
BASE = "from cdtrans.methods.base import Method\n"


@pytest.mark.parametrize("name", METHODS)
def test_every_entry_is_a_method_that_says_what_it_is(name: str) -> None:
    method = method_class(name)
    assert issubclass(method, Method)
    assert method.paper or name in OWN_START
    assert method.title
    assert len((method.__doc__ or "").splitlines()[0]) <= 60
    assert is_dataclass(method.Options)
    assert all(f.metadata.get("help") for f in fields(method.Options)), "an option without a help line"
    assert not method.uses_target_labels


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("dannn", "method-unknown"),
        ("ground_truth", "method-needs-labels"),
        ("nothing.py:MyMethod", "no-method-file"),
        ("nothing.py", "method-unknown"),
    ],
)
def test_a_wrong_name(name: str, code: str) -> None:
    with raises(code):
        require_method(name)


def test_only_some_methods_work_without_source_images() -> None:
    config = make_config({"method": "dann"})
    require_source(method_class("shot"), config)
    with raises("no-source"):
        require_source(method_class("dann"), config)


@pytest.mark.parametrize(
    ("name", "backbone"),
    [
        *((name, "test_resnet") for name in ("cdtrans", "ssrt", "pmtrans", "tvt")),
        *((name, "test_vit") for name in ("cdan_tn", "mstn_dsbn", "dcan")),
        ("tvt", "test_vit"),  # it has no class token
    ],
)
def test_a_backbone_that_a_method_cannot_work_with(name: str, backbone: str) -> None:
    args = {"global_pool": "avg"} if backbone == "test_vit" else {}
    model = timm.create_model(backbone, num_classes=0, **args)
    with raises("backbone-misfit"):
        method_class(name).check(Network(model, Head(feature_dim(model), 3, "none")), backbone)


class TestOwnFile:
    """Promises for files of your own; test_contract.py has those of all methods, with the guide's example."""

    def test_predicting_needs_the_file_no_more(self, tmp_path: Path) -> None:
        task, own = make_task(tmp_path / "task", source_epochs=1, epochs=1), tmp_path / "gone.py"
        own.write_text(FILE, encoding="utf-8")
        command = task.adapt(tmp_path / "run", "--method", "gone.py:MinimumEntropy", "--set", "weight=0.3")
        assert warm().run(command, tmp_path / "logs", folder=tmp_path).code == 0  # relative to where it is given
        assert method_class(f"{own}:MinimumEntropy").paper == "Grandvalet & Bengio 2004"
        own.unlink()
        ended = warm().run(["predict", str(tmp_path / "run"), str(task.target)], tmp_path / "logs")
        assert ended.code == 0, ended.err
        assert len(ended.out.splitlines()) == 1 + 21

    @pytest.mark.parametrize(
        ("text", "code", "words"),
        [
            ("", "method-not-in-file", ["MyMethod", "subclass"]),
            (BASE + "class MyMethods(Method): pass", "method-not-in-file", ["'MyMethods'"]),
            ("MyMethod = 3\n", "method-not-in-file", []),
            ("\nraise KeyError('x')\n", "method-file-fails", ["line 2", "KeyError"]),
            ("class MyMethod(\n", "method-file-fails", ["line 1", "SyntaxError"]),
            ("import sys\n\nsys.exit(0)\n", "method-file-fails", ["line 3", "SystemExit: 0"]),
            ("raise BaseException('y')\n", "method-file-fails", ["line 1", "BaseException: y"]),
            (BASE + "class MyMethod(Method): pass", "method-no-step", []),
        ],
    )
    def test_a_file_that_cannot_be_used(self, tmp_path: Path, text: str, code: str, words: list[str]) -> None:
        (tmp_path / "file.py").write_text(text)
        with raises(code) as error:
            method_class(f"{tmp_path / 'file.py'}:MyMethod")
        assert says(str(error.value), "file.py", *words)

    @pytest.mark.parametrize(
        ("method", "words", "trained"),
        [
            ("raise ValueError('no\\nluck')", ["line 5", "ValueError: no luck"], True),
            ("raise SystemExit(0)", ["line 5", "SystemExit"], True),
            ("raise BaseException", ["line 5", "BaseException"], True),
            ("return helper(batch)", ["line 5", "NameError"], True),
            ("return None", ["losses", "line 4", "returns None"], True),
            ("return {}", ["losses", "line 4", "{}"], True),
            ("return {'a': 0.5}", ["line 4", "float as 'a'"], True),
            ("return {'a': batch.x_s}", ["line 4", "shape [8, 3, 16, 16] as 'a'"], True),
            ("return {'a': batch.x_s.mean()}", ["line 4", "no gradient"], True),
            ("w = self.network.head.classifier.weight; y = w.exp(); y += 1; return {'a': y.sum()}", ["inplace"], True),
            ("pass\n    def __init__(self, *given): self.x = 1 / 0", ["line 6", "ZeroDivisionError"], False),
            ("pass\n    def plan(self, *given): return [][1]", ["line 6", "IndexError"], True),
            ("pass\n    def train_step(self, *given): return 3", ["train_step", "line 6", "returns 3"], True),
        ],
    )
    def test_a_fault_is_named_by_its_line(self, tmp_path: Path, method: str, words: list[str], trained: bool) -> None:
        """Its `__init__` runs before stage 1 is trained."""
        task, own = make_task(tmp_path / "task", epochs=1, source_epochs=1), tmp_path / "own.py"
        own.write_text(f"{BASE}\nclass Own(Method):\n    def losses(self, batch, progress):\n        {method}\n")
        command = task.adapt(tmp_path / "run", "--method", f"{own}:Own", "--json")
        ended = warm().run(command, tmp_path / "logs")
        assert (ended.code, json.loads(ended.out)["error"]["code"][:7]) == (2, "method-"), ended.err
        assert says(ended.err.splitlines()[-1], "own.py", *words)
        assert RunRecord(tmp_path / "run").has_model("source") == trained


def test_a_run_can_be_tried_with_a_few_steps(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task", batch_size=2)
    ended = warm().run(task.adapt(tmp_path / "run", "--max-steps", "2"), tmp_path / "logs")
    assert ended.code == 0, ended.err
    epochs = [line for line in log_lines(tmp_path / "run") if line["event"] == "epoch"]
    assert [(line["stage"], line["epoch"]) for line in epochs] == [("source", 1), ("adaptation", 1)]
    assert "source 1/1" in ended.out
