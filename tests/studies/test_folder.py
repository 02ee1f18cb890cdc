from pathlib import Path

import pytest

from cdtrans.studies.folder import owned, with_table_defaults
from support import error_says


@pytest.mark.parametrize("kind", ["a benchmark", "an ablation"])
def test_one_process_starts_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The ranks of torchrun would each start all of them, as ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with error_says(kind, "one process", "--jobs"), owned(tmp_path / "out", "record.json", {}, kind):
        pass
    assert not (tmp_path / "out").exists()


def test_a_row_shows_what_its_method_did_and_has_no_report_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("report: true\nlr: 0.1\n")
    assert with_table_defaults({"lr": 0.2}, None) == {"guard": False, "report": False, "lr": 0.2}
    assert with_table_defaults({"guard": True}, None) == {"guard": True, "report": False}
    assert with_table_defaults({"lr": 0.2}, file) == {"guard": False, "lr": 0.2}, "a flag would win over the file"
