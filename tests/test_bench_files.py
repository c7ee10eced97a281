"""Files that are not what a command of the benchmark reads are refused in a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.bench_rows import make_row, write_rows

from bench import accuracy, regret, report, run, stability, tune, tune_tables

ROOT = Path(__file__).parents[1]
STABILITY = ROOT / "bench/results/stability/h200-2026-11-30-d8bfe18.jsonl"
README = ROOT / "README.md"
ROWS_OF_THE_GRID = "rows of bench.run or bench.tune"

Main = Callable[[Sequence[str]], int]


def refusal(main: Main, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a command ends with."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def good(tmp_path: Path) -> str:
    return str(write_rows(tmp_path / "good.jsonl", [make_row()]))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", f"must hold {ROWS_OF_THE_GRID}, got none"),
        (b"\n\n", f"must hold {ROWS_OF_THE_GRID}, got none"),
        (b"# moe_ext\n", f"must hold {ROWS_OF_THE_GRID}, got '# moe_ext' in line 1"),
        (b"\n[1, 2]\n", f"must hold {ROWS_OF_THE_GRID}, got '[1, 2]' in line 2"),
        (b'{"op": 1}\n', f"must hold {ROWS_OF_THE_GRID}, got '{{\"op\": 1}}' in line 1"),
        (b"\x89PNG\xff", "must hold text, got bytes that are none"),
    ],
    ids=["empty", "blank", "words", "a list", "another row", "a picture"],
)
def test_a_report_of_another_file(
    content: bytes, said: str, good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    line = refusal(report.main, [good, str(path)], capsys)
    assert line == f"python -m bench.report: {path} {said}"


def test_a_long_line_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(report.main, [str(STABILITY)], capsys)
    assert f'{STABILITY} must hold {ROWS_OF_THE_GRID}, got \'{{"op": ' in line
    assert line.endswith("...' in line 1")
    assert len(line) < len(str(STABILITY)) + 200


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (report.main, []),
        (report.main, ["--compare"]),
        (report.main, ["--peers"]),
        (report.main, ["--readme"]),
        (tune.main, ["--read"]),
        (stability.main, ["--read"]),
        (accuracy.main, ["--read"]),
        (regret.main, ["--read"]),
        (tune_tables.main, []),
    ],
)
def test_a_missing_file(
    main: Main,
    arguments: list[str],
    good: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(tmp_path / "missing")
    before = [good] if main is report.main else []
    line = refusal(main, [*before, *arguments, path], capsys)
    assert path in line
    assert "No such file" in line


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Is a directory" in refusal(report.main, [str(tmp_path)], capsys)


@pytest.mark.parametrize(
    ("main", "rows"),
    [
        (tune.main, ROWS_OF_THE_GRID),
        (stability.main, "rows of bench.stability"),
        (accuracy.main, "rows of bench.accuracy"),
        (regret.main, "rows of bench.regret"),
    ],
)
def test_other_commands_that_read_rows(
    main: Main, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(main, ["--read", str(README)], capsys)
    assert line.endswith(f"{README} must hold {rows}, got '# moe_ext' in line 1")
    strange = tmp_path / "strange.jsonl"
    strange.write_text('{"op": "strange"}\n')
    assert f"must hold {rows}" in refusal(main, ["--read", str(strange)], capsys)


def test_other_files_of_a_report(
    good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(report.main, [good, "--compare", str(README)], capsys)
    assert f"{README} must hold {ROWS_OF_THE_GRID}" in line
    line = refusal(report.main, [good, "--peers", str(README)], capsys)
    assert f"{README} must be a CSV with the columns peer, op, " in line
    page = tmp_path / "page.md"
    page.write_text("no marks")
    for option, mark in (("--readme", "bench:begin"), ("--layer-readme", "bench-layer:begin")):
        line = refusal(report.main, [good, option, str(page)], capsys)
        assert f"{page} must hold <!-- {mark} -->" in line
        assert page.read_text() == "no marks"


@pytest.mark.parametrize(
    "content",
    [
        b'{"op": "dispatch_regret_ca',
        b"[1, 2]\n",
        b"\x89PNG\xff",
        b'{"op": "dispatch_regret_case", "number": 1}\n',
        b"[" * 100_000,
        (make_row().to_json() + "\n").encode(),
    ],
    ids=["cut off", "a list", "a picture", "columns are missing", "deep", "a row of bench.run"],
)
def test_no_rows_of_the_regret(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert f"{path} must hold " in refusal(regret.main, ["--read", str(path)], capsys)


def test_tables_of_another_file(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(tune_tables.main, [str(README)], capsys)
    assert line.endswith(f"{README} must hold {ROWS_OF_THE_GRID}, got '# moe_ext' in line 1")


@pytest.mark.parametrize("main", [run.main, tune.main, regret.main])
def test_rows_that_cannot_be_written_are_refused_before_any_work(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    for path, got in ((missing / "x.jsonl", f"no folder {missing}"), (tmp_path, "a folder")):
        line = refusal(main, ["--dry-run", "--out", str(path)], capsys)
        assert line.endswith(f": {path} must be a file to append rows to, got {got}")
    assert not missing.exists()
