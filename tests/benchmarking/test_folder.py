from pathlib import Path

from cdtrans.benchmarking.folder import with_table_defaults


def test_a_row_shows_what_its_method_did_and_has_no_report_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("report: true\nlr: 0.1\n")
    assert with_table_defaults({"lr": 0.2}, None) == {"guard": False, "report": False, "lr": 0.2}
    assert with_table_defaults({"guard": True}, None) == {"guard": True, "report": False}
    assert with_table_defaults({"lr": 0.2}, file) == {"guard": False, "lr": 0.2}, "a flag would win over the file"
