"""Errors of the command line: one line on stderr, 1 for what fails, 2 for arguments."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import moe_ext
import pytest
from moe_ext.precision import PrecisionPlan

pytest.importorskip("typer")
pytest.importorskip("safetensors")
from moe_ext.cli import main
from moe_ext.precision import PrecisionStats
from safetensors.torch import save_file
from support.cli import EXPERTS, Shell, prefix_of, write_model
from support.precision import layer_stats

ROOT = Path(__file__).parent.parent
PACKAGE = str(Path(moe_ext.__file__).parent.parent)


@pytest.fixture
def shell(capsys):
    return Shell(capsys)


@pytest.fixture
def stats(tmp_path):
    """A file of statistics of two experts."""
    path = tmp_path / "stats.safetensors"
    PrecisionStats({"a": layer_stats([(1.0, 2.0), (3.0, 4.0)])}).save(path)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "moe-ext: No such command 'nope'."),
        (["convert"], "moe-ext convert: Missing argument 'model_dir'."),
        (["plan", "x"], "moe-ext plan: Missing option '--out'."),
        (
            ["plan", "x", "--out", "y"],
            "moe-ext plan: Invalid value: one of --budget and --error-budget must be given, got "
            "neither",
        ),
        (
            ["plan", "x", "--out", "y", "--budget", "2%", "--error-budget", "30dB"],
            "moe-ext plan: Invalid value: one of --budget and --error-budget must be given, got "
            "both",
        ),
        (
            ["kernels", "--dtype", "int8"],
            "moe-ext kernels: Invalid value: --dtype must be one of bf16, fp8, got int8",
        ),
    ],
)
def test_arguments_that_are_none(shell, arguments, message):
    said = shell.fails(*arguments, code=2)
    assert said.lower() == message.lower()  # versions of typer write names of arguments both ways


GEMM = ("explain", "gemm", "--rows", 8, "--groups", 2, "-n", 64, "-k", 64)
LAYER = ("--top-k", 2, "--experts", 8, "--hidden", 256, "--intermediate", 128)
EXPLAIN = ("explain", "layer", "--tokens", 4, *LAYER)
CALIBRATE = ("calibrate", "lost", "lost", "--out", "stats")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*GEMM, "--dtype", "fp4"), "--dtype must be one of bf16, fp8, got fp4"),
        ((*EXPLAIN, "--dtype", "fp4"), "--dtype must be one of bf16, fp8, got fp4"),
        ((*EXPLAIN, "--dtype", "fp16"), "--dtype must be one of bf16, fp8, got fp16"),
        (
            ("bench", "layer", *LAYER, "--dtype", "fp16"),
            "--dtype must be one of bf16, fp8, got fp16",
        ),
        ((*EXPLAIN, "--activation", "tanh"), "--activation must be one of swiglu, "),
        (
            (*EXPLAIN, "--dtype", "fp8", "--scales", "row"),
            "--scales must be one of block, channel, tensor, got row",
        ),
        (
            (*GEMM, "--accumulate", "fast"),
            "--accumulate must be promoted but for fp8 with scales per tensor or channel, got fast "
            "with --dtype bf16",
        ),
        (
            (*GEMM, "--accumulate", "fast", "--dtype", "fp8", "--scales", "block"),
            "--accumulate must be promoted but for fp8 with scales per tensor or channel, got fast "
            "with --scales block",
        ),
        ((*GEMM, "--accumulate", "slow"), "--accumulate must be one of promoted, fast, got slow"),
        (
            (*GEMM, "--measure-on", "gpu"),
            "--measure-on must be a CUDA device, such as cuda:0, got gpu",
        ),
        (
            (*EXPLAIN, "--measure-on", "cpu"),
            "--measure-on must be a CUDA device, such as cuda:0, got cpu",
        ),
        ((*CALIBRATE, "--scales", "row"), "--scales must be one of block, channel, tensor, got r"),
        ((*CALIBRATE, "--activation", "tanh"), "--activation must be one of swiglu, "),
        (
            (*CALIBRATE, "--device", "meta"),
            "--device must be a device that can hold tensors here, got meta",
        ),
        ((*CALIBRATE, "--device", "gpu"), "--device must be a device of torch's, got gpu"),
        (
            ("convert", "lost", "--plan", "lost", "--out", "out", "--gate-up-layout", "mixed"),
            "--gate-up-layout must be one of concatenated, interleaved, got mixed",
        ),
    ],
    ids=str,
)
def test_texts_that_cannot_be_read(shell, arguments, message):
    said = shell.fails(*arguments, code=2)
    command = " ".join(arguments[: 2 if arguments[0] in ("explain", "bench") else 1])
    assert said.startswith(f"moe-ext {command}: Invalid value: {message}")


TYPED = {"--rows": 8, "--groups": 2, "-n": 64, "-k": 64}
WHOLE = "must be a whole number from"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"--rows": -1}, f"--rows {WHOLE} 0 to 2147482623, got -1"),
        ({"--groups": 0}, f"--groups {WHOLE} 1 to 4096, got 0"),
        ({"-n": 65}, "-n must be a multiple of 8, or of 4 for float32 results, got 65"),
        ({"-k": -8}, f"-k {WHOLE} 0 to 2147482623, got -8"),
        ({"--sm-count": 0}, f"--sm-count {WHOLE} 1 to 1024, got 0"),
    ],
    ids=str,
)
def test_values_that_no_gemm_has(shell, typed, message):
    arguments = [part for pair in (TYPED | typed).items() for part in pair]
    assert shell.fails("explain", "gemm", *arguments) == f"moe-ext: {message}"


LAYER_TYPED = dict(zip(LAYER[::2], LAYER[1::2], strict=True)) | {"--tokens": 4}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"--tokens": -1}, "--tokens must not be negative, got -1"),
        ({"--tokens": 2**22}, "--tokens times --top-k must be at most 4194304, got 8388608"),
        ({"--top-k": 33}, "--top-k must be 1 to 32, got 33"),
        ({"--experts": 5000}, "--experts must be 1 to 4096, got 5000"),
        ({"--hidden": 0}, "--hidden must be positive and a multiple of 8, got 0"),
        ({"--hidden": 12}, "--hidden must be positive and a multiple of 8, got 12"),
        ({"--hidden": 2**31}, f"--hidden must be at most 2147418111, got {2**31}"),
        ({"--intermediate": -8}, "--intermediate must not be negative, got -8"),
        ({"--intermediate": 12}, "--intermediate must be positive and a multiple of 8, got 12"),
        ({"--intermediate": 2**31}, f"--intermediate must be at most 1073709055, got {2**31}"),
        (
            {"--dtype": "fp8", "--hidden": 264},
            "--hidden must be a multiple of 16 for these weights, got 264",
        ),
        (
            {"--dtype": "fp8", "--intermediate": 136},
            "--intermediate must be a multiple of 16 for these weights, got 136",
        ),
        ({"--sm-count": -1}, f"--sm-count {WHOLE} 1 to 1024, got -1"),
    ],
    ids=str,
)
def test_values_that_no_layer_has(shell, typed, message):
    arguments = [part for pair in (LAYER_TYPED | typed).items() for part in pair]
    assert shell.fails("explain", "layer", *arguments) == f"moe-ext: {message}"


def test_a_folder_to_convert_to_is_named_as_it_was_typed(shell, tmp_path):
    write_model(tmp_path)
    PrecisionPlan.uniform({prefix_of(0): EXPERTS}).save(tmp_path / "plan.json")
    arguments = ("convert", tmp_path / "model", "--plan", tmp_path / "plan.json", "--out")
    said = shell.fails(*arguments, tmp_path / "model" / "out")
    assert said.startswith("moe-ext: --out must be outside of ")
    said = shell.fails(*arguments, tmp_path / "no" / "out")
    assert said == f"moe-ext: --out must be in a folder that is there, got {tmp_path / 'no/out'}"


def test_an_activation_that_calibrate_does_not_know_names_its_option(shell, tmp_path):
    write_model(tmp_path)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"gelu"'))
    arguments = ("calibrate", tmp_path / "model", tmp_path / "data.safetensors")
    said = shell.fails(*arguments, "--out", tmp_path / "stats")
    assert said.endswith('got "gelu"; --activation may say it')


def test_a_picture_is_named_as_one(shell, stats, tmp_path):
    for name in ("a.foo", "a", "a.svg"):
        said = shell.fails("report", stats, "--png", tmp_path / name, code=2)
        assert said.endswith(f"--png must be a file named *.png, got {tmp_path / name}")
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("command", [GEMM, EXPLAIN])
def test_there_is_one_prefix(shell, monkeypatch, command):
    def fail(op, device, argument):
        raise RuntimeError("moe_ext: torch must be a CUDA build to run the CUDA kernels, got cpu")

    monkeypatch.setattr("moe_ext._explain.cuda_device", fail)
    said = shell.fails(*command, "--measure-on", "cuda")
    assert said == "moe-ext: torch must be a CUDA build to run the CUDA kernels, got cpu"


@pytest.mark.parametrize("number", ["--tokens", "--top"])
def test_numbers_out_of_range(shell, stats, number):
    said = shell.fails("report", stats, number, -1, code=2)
    assert said.startswith(f"moe-ext report: Invalid value for '{number}'")


def test_without_a_command_there_is_help(shell):
    assert shell(code=2) == ""
    assert shell.fails("explain", code=2) == "moe-ext explain: Missing command."
    assert "calibrate" in shell("--help")
    assert shell("--version") == f"moe-ext {moe_ext.__version__}\n"


@pytest.mark.parametrize("end", ["/", "/.", "/.."])
def test_a_folder_s_name_is_not_written_to(shell, stats, tmp_path, end):
    """Before any work is done: the inputs are not there, and a `Path` has lost the slash."""
    out, lost = f"{tmp_path / 'name.d'}{end}", tmp_path / "lost"
    message = f"moe-ext: {out} must be a file to write, got a folder's name"
    assert shell.fails("plan", lost, "--budget", "2%", "--out", out) == message
    assert shell.fails("calibrate", lost, lost, "--out", out) == message
    assert shell.fails("report", lost, "--png", out) == message
    assert shell.fails("bench", "layer", *LAYER, "--plot", out) == message
    with pytest.raises(IsADirectoryError, match=r"must be a file to write, got a folder's name$"):
        PrecisionPlan.uniform({"a": 2}).save(out)
    assert set(tmp_path.iterdir()) == {stats}


def test_a_folder_is_not_written_to(shell, tmp_path):
    said = shell.fails("plan", tmp_path / "lost", "--budget", "2%", "--out", tmp_path)
    assert said == f"moe-ext: {tmp_path} must be a file to write, got a folder"


HUGE = "9" * 400


@pytest.mark.parametrize(
    "budget",
    ["2", "2 percent", "-1%", "MiB", "5XB", "", "1e3B", f"{HUGE}%", f"{HUGE}MiB"],
    ids=lambda budget: budget[:9],
)
def test_budgets_that_are_none(shell, tmp_path, budget):
    out, lost = tmp_path / "plan.json", tmp_path / "lost"  # said before a file is looked at
    said = shell.fails("plan", lost, f"--budget={budget}", "--out", out, code=2)
    assert said == (
        "moe-ext plan: Invalid value: --budget must be a share of FP8's bytes, as 2%, or bytes in "
        f"B, kB, MB, GB, KiB, MiB, GiB, as 512MiB, got {budget!r}"
    )
    said = shell.fails("plan", lost, f"--error-budget={budget}", "--out", out, code=2)
    wanted = "moe-ext plan: Invalid value: --error-budget must be signal over noise, as 30dB"
    assert said.startswith(wanted)
    assert not out.exists()


def test_files_that_are_not_there(shell, stats, tmp_path):
    path = tmp_path / "lost"
    assert shell.fails("report", path) == f"moe-ext: {path}: No such file or directory"
    said = shell.fails("report", stats, "--plan", path)
    assert said == f"moe-ext: {path}: No such file or directory"
    said = shell.fails("convert", path, "--plan", path, "--out", tmp_path / "out")
    assert said == f"moe-ext: {path}: No such file or directory"
    said = shell.fails("calibrate", path, path, "--out", tmp_path / "out")
    assert said == (
        f"moe-ext: calibrate_checkpoint: {path} must be a folder with a safetensors checkpoint, "
        "got none"
    )


def test_files_of_others(shell, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"w": layer_stats([(1.0, 1.0)]).error}, path)
    said = shell.fails("report", path)
    assert said.startswith("moe-ext: PrecisionStats.load: `format` must be")
    path.write_text("{}")
    said = shell.fails("plan", path, "--budget", "2%", "--out", tmp_path / "plan.json")
    assert said.startswith(
        f"moe-ext: PrecisionStats.load: {path} must be a whole safetensors file, g"
    )


def test_where_nothing_can_be_written(shell, stats, tmp_path):
    said = shell.fails("plan", stats, "--budget", "2%", "--out", tmp_path / "no/plan.json")
    assert said == (f"moe-ext: {tmp_path / 'no'} must be a folder to write plan.json in, got none")
    said = shell.fails("report", stats, "--png", tmp_path)
    assert said == f"moe-ext: {tmp_path} must be a file to write, got a folder"


def test_what_is_read_is_not_written_over(shell, stats, tmp_path):
    write_model(tmp_path)
    model, data = tmp_path / "model", tmp_path / "data.safetensors"
    weights = model / "model.safetensors"
    for out, given in ((weights, model), (data, data)):
        before = out.read_bytes()
        said = shell.fails("calibrate", model, data, "--out", out)
        assert said == f"moe-ext: {out} must be a file that is not read from, got one of {given}"
        assert out.read_bytes() == before
    before = stats.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(stats)
    for out in (stats, link):
        said = shell.fails("plan", stats, "--budget", "2%", "--out", out)
        assert said.endswith(f"must be a file that is not read from, got one of {stats}")
        said = shell.fails("report", stats, "--png", out)
        assert said.endswith(f"must be a file that is not read from, got one of {stats}")
    assert stats.read_bytes() == before


def test_devices_and_pipes_stay_what_they_are(shell, stats, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    said = shell.fails("plan", stats, "--budget", "2%", "--out", pipe)
    assert said == f"moe-ext: {pipe} must be a file to write, got a device, a pipe or a socket"
    with pytest.raises(OSError, match="must be a file to write"):
        PrecisionPlan.uniform({"a": 2}).save(pipe)
    assert pipe.is_fifo()


def test_a_link_is_written_through(shell, stats, tmp_path):
    target, link = tmp_path / "plan.json", tmp_path / "link.json"
    target.write_text("{}")
    link.symlink_to(target)
    shell("plan", stats, "--budget", "2%", "--out", link)
    assert link.is_symlink()
    assert PrecisionPlan.load(target).layers.keys() == {"a"}


REPORTS = {
    "another layer": (
        PrecisionPlan.uniform({"b": 2}),
        'report: plan and statistics must be of the same layers, got "a", which the plan has not',
    ),
    "one layer more": (
        PrecisionPlan.uniform({"a": 2, "b": 2}),
        'report: plan and statistics must be of the same layers, got "b", which the statistics '
        "have not",
    ),
    "another count": (
        PrecisionPlan.uniform({"a": 3}),
        'report: the plan must have 2 experts in "a", as the statistics, got 3',
    ),
    "other scales": (
        PrecisionPlan.uniform({"a": 2}, scales="tensor"),
        'report: the plan must have scales per block in gate_up of "a", as the statistics, got '
        "tensor",
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_plans_of_other_models(shell, stats, tmp_path, name):
    plan, message = REPORTS[name]
    plan.save(tmp_path / "plan.json")
    said = shell.fails("report", stats, "--plan", tmp_path / "plan.json")
    assert said == f"moe-ext: {message}"


def test_a_conversion_that_fails_leaves_nothing(shell, tmp_path, monkeypatch):
    write_model(tmp_path)
    PrecisionPlan.uniform({prefix_of(0): EXPERTS}).save(tmp_path / "plan.json")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("", (), {"free": 5})())
    arguments = ("convert", tmp_path / "model", "--plan", tmp_path / "plan.json")
    said = shell.fails(*arguments, "--out", tmp_path / "out")
    assert said.endswith("bytes free, got 5")
    assert not (tmp_path / "out").exists()


def test_a_fault_of_a_command_is_not_hidden(shell, stats, monkeypatch):
    monkeypatch.setattr("moe_ext.cli.report.layer_reports", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        shell("report", stats)


def test_an_interrupt_is_one_line(shell, stats, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_ext.cli.report.layer_reports", interrupt)
    assert shell.fails("report", stats) == "moe-ext: interrupted"


def test_without_matplotlib_the_error_says_what_to_install(shell, stats, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    said = shell.fails("report", stats, "--png", tmp_path / "x.png")
    assert said == (
        "moe-ext: report: the package `matplotlib` must be installed for pictures: "
        'pip install "moe-ext[cli]"'
    )


def run(*arguments, script="import sys; from moe_ext.cli import main; sys.exit(main())"):
    environment = {**os.environ, "PYTHONPATH": PACKAGE}
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages_one_line_says_what_to_install(package):
    script = (
        f"import sys; sys.modules[{package!r}] = None; from moe_ext.cli import main; "
        "sys.exit(main())"
    )
    done = run("doctor", script=script)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "moe-ext: the packages typer and rich must be installed for the command line, got no "
        f"{package}"
    )
    assert done.stderr.endswith(': pip install "moe-ext[cli]"\n')
    assert done.stderr.count("\n") == 1


def test_as_a_module_and_in_a_pipe(tmp_path):
    environment = {**os.environ, "PYTHONPATH": PACKAGE}
    command = [sys.executable, "-W", "ignore", "-m", "moe_ext", "report", str(tmp_path / "lost")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"moe-ext: {tmp_path / 'lost'}: No such file or directory\n"


def test_the_script_is_the_function():
    said = re.search(
        r'^moe-ext = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert getattr(importlib.import_module(said[1]), said[2]) is main


def test_progress_is_silent_in_pipes(tmp_path):
    write_model(tmp_path)
    arguments = [tmp_path / "model", tmp_path / "data.safetensors", "--out", tmp_path / "stats"]
    done = run("calibrate", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1


def test_the_package_imports_nothing_of_the_command_line():
    script = (
        "import sys, moe_ext; "
        "sys.exit(any(n.startswith(('typer', 'rich', 'moe_ext.cli')) for n in sys.modules))"
    )
    assert run(script=script).returncode == 0
