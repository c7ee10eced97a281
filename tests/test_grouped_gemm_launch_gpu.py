"""Where the C++ op decides: kinds of kernels, remembered choices, outputs of its own, refusals."""

from __future__ import annotations

import itertools
import sys
import threading

import moe_ext
import pytest
import torch
from moe_ext import _library
from moe_ext.reference import grouped_gemm_reference
from support.inputs import offs_of
from support.tolerance import assert_same_bits

pytestmark = pytest.mark.gpu

RUN = sys.modules["moe_ext._run"]
FP8 = torch.float8_e4m3fn
DEVICE = "cuda"
GROUPS, K = 3, 288
MASKED, OFFS_READY, FP32_OUT, FAST, REMEMBER = 1, 2, 4, 8, 16
# No other test has problems of so many rows with this k, and each call here has its own.
FRESH_ROWS = itertools.count(401)

# (dtype, n, columns of scale_a or None, shape of scale_b after the groups or None, what else is
# said, and the dispatcher's name of the kernels). Columns: 0 one for the tensor, 1 per row.
LAYOUTS = {
    "bf16": (torch.bfloat16, 256, None, None, {}, "promoted"),
    "none": (FP8, 256, None, None, {}, "promoted"),
    "tensor": (FP8, 256, 0, (), {}, "promoted"),
    "fast": (FP8, 256, 0, (), {"accumulate": "fast"}, "fast"),
    "row_and_channel": (FP8, 256, 1, (256,), {}, "promoted"),
    "channel_of_three_dimensions": (FP8, 256, 1, (256, 1), {}, "promoted"),
    "group_of_three_dimensions": (FP8, 256, 1, (1, 1), {}, "promoted"),
    "blocks": (FP8, 256, 3, (2, 3), {}, "block"),
    "blocks_of_a_alone": (FP8, 256, 3, None, {}, "block"),
    "blocks_of_b_alone": (FP8, 256, None, (2, 3), {}, "block"),
    "blocks_and_rows": (FP8, 256, 1, (2, 3), {}, "block"),
    "blocks_and_groups": (FP8, 256, 3, (), {}, "block"),
    "blocks_of_four_dimensions": (FP8, 256, 3, (1, 2, 3), {}, "block"),
    "one_block_of_n": (FP8, 64, 3, (1, 3), {}, "block"),
    "short_block": (FP8, 200, 3, (2, 3), {}, "block"),
    "segments": (FP8, 256, 3, (2, 1, 3), {"n_segments": 2}, "block"),
    "short_segments": (FP8, 192, 3, (2, 3), {"n_segments": 2}, "block_swapped"),
    "n_offset": (FP8, 256, 3, (3, 3), {"scale_b_offset": (64, 0)}, "block_swapped"),
    "k_offset": (FP8, 256, 3, (2, 4), {"scale_b_offset": (0, 100)}, "shifted"),
    "both_offsets": (FP8, 256, None, (3, 4), {"scale_b_offset": (9, 100)}, "shifted"),
}


def integers(*shape):
    return torch.randint(-4, 5, shape, device=DEVICE)


def powers(*shape):
    """Scales that keep integers whole."""
    return 2.0 ** torch.randint(0, 3, shape, device=DEVICE)


def problem(name, masked=False):
    """Operands and options of a problem that nothing has been chosen for yet."""
    dtype, n, a_columns, b_shape, more, _ = LAYOUTS[name]
    rows = next(FRESH_ROWS)
    shape = (GROUPS, rows) if masked else (rows,)
    a, b = integers(*shape, K).to(dtype), integers(GROUPS, n, K).to(dtype)
    if masked:
        offs = torch.full((GROUPS,), rows, dtype=torch.int32, device=DEVICE)
    else:
        offs = offs_of((rows - 30, 0, 30), DEVICE)
    options = dict(more)
    if a_columns is not None:
        options["scale_a"] = powers(*shape, a_columns) if a_columns else powers()
    if b_shape is not None:
        options["scale_b"] = powers(GROUPS, *b_shape)
    return (a, b, offs), options


def reference(args, options, **more):
    known = {key: value for key, value in options.items() if key != "accumulate"}
    return grouped_gemm_reference(*args, **known, **more)


@pytest.fixture
def choices(monkeypatch):
    """What the dispatcher was asked for, and its answers."""
    asked = []
    select = RUN.select

    def noted(*key):
        index = select(*key)
        asked.append((*key, index))
        return index

    monkeypatch.setattr(RUN, "select", noted)
    return asked


@pytest.mark.parametrize("masked", [False, True], ids=["contiguous", "masked"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_kernel_is_chosen_once_for_a_problem(name, masked, choices):
    """The C++ op takes only a kernel of the kind it found itself, and finds it again."""
    args, options = problem(name, masked)
    op = moe_ext.grouped_gemm_masked if masked else moe_ext.grouped_gemm
    first = op(*args, **options, out_dtype=torch.float32)
    (asked,) = choices
    again = op(*args, **options, out_dtype=torch.float32)
    assert choices == [asked]
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    rows, n = args[0][..., 0].numel(), args[1].shape[1]
    dtype = "bf16" if name == "bf16" else "fp8"
    assert asked[:-1] == (dtype, LAYOUTS[name][-1], rows, GROUPS, n, K, sm_count)
    expected = reference(args, options, out_dtype=torch.float32)
    for out in (first, again):
        assert_same_bits(out, expected)


@pytest.mark.parametrize("name", ["bf16", "tensor", "fast", "blocks", "short_segments", "k_offset"])
def test_the_choice_is_the_one_that_explain_tells(name, choices):
    args, options = problem(name)
    moe_ext.grouped_gemm(*args, **options)
    assert choices[0][-1] == explained(name, args, options).config_index


def explained(name, args, options):
    said = {key: options[key] for key in options if key not in ("scale_a", "scale_b")}
    return moe_ext.explain(
        dtype=args[0].dtype,
        num_rows=args[0].shape[0],
        num_groups=GROUPS,
        n=args[1].shape[1],
        k=K,
        block_scales=LAYOUTS[name][-1] in ("block", "block_swapped", "shifted"),
        sm_count=torch.cuda.get_device_properties(0).multi_processor_count,
        **said,
    )


@pytest.mark.parametrize("name", ["bf16", "fast", "blocks", "short_segments", "k_offset"])
def test_the_kernel_that_runs_is_the_chosen_one_both_times(name):
    args, options = problem(name)
    chosen = explained(name, args, options).config
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(2):
            moe_ext.grouped_gemm(*args, **options)
        torch.cuda.synchronize()
    events = [event.name for event in profile.events() if "grouped_gemm_kernel" in event.name]
    if not events:
        pytest.skip("the profiler sees no kernels here")
    assert len(events) == 2
    assert all(f"configs::{chosen}>" in event for event in events)


@pytest.mark.parametrize("name", ["tensor", "blocks"])
@pytest.mark.parametrize("max_rows", [1, 7])
def test_masked_scales_for_each_group(name, max_rows):
    (_, b, _), options = problem(name)
    a = integers(GROUPS, max_rows, K).to(FP8)
    counts = torch.full((GROUPS,), max_rows, dtype=torch.int32, device=DEVICE)
    of_groups = torch.tensor([1.0, 2.0, 4.0], device=DEVICE)
    options["scale_a"] = of_groups
    for _ in range(2):
        out = moe_ext.grouped_gemm_masked(a, b, counts, **options, out_dtype=torch.float32)
        expanded = options | {"scale_a": of_groups[:, None].expand(GROUPS, max_rows)}
        expected = reference((a, b, counts), expanded, out_dtype=torch.float32)
        assert_same_bits(out, expected)


def test_expected_rows_are_part_of_the_problem(choices):
    args, _ = problem("bf16", masked=True)
    rows = args[0].shape[1]
    for _ in range(2):
        for expected_rows in (None, 0, 5, 10**6):
            moe_ext.grouped_gemm_masked(*args, expected_rows=expected_rows)
    assert [key[2] for key in choices] == [3 * rows, 3, 15, 3 * rows]
    with pytest.raises(ValueError, match="`expected_rows` must not be negative, got -1"):
        moe_ext.grouped_gemm_masked(*args, expected_rows=-1)


def test_a_named_kernel_is_not_remembered(choices):
    args, _ = problem("bf16")
    for config in moe_ext.kernels():
        if (config.dtype, config.output) == ("bf16", "rows"):
            out = moe_ext.grouped_gemm(*args, config=config.id, out_dtype=torch.float32)
            assert_same_bits(out, reference(args, {}, out_dtype=torch.float32))
    assert choices == []
    moe_ext.grouped_gemm(*args)
    assert len(choices) == 1
    other = next(config.id for config in moe_ext.kernels() if config.dtype == "fp8")
    for wrong in (other, "nothing"):
        with pytest.raises(ValueError, match=r"^grouped_gemm: `config` must be one of swap_bf16"):
            moe_ext.grouped_gemm(*args, config=wrong)


@pytest.mark.parametrize("masked", [False, True], ids=["contiguous", "masked"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_output_is_an_ordinary_one(mode, masked):
    args, _ = problem("bf16", masked)
    op = moe_ext.grouped_gemm_masked if masked else moe_ext.grouped_gemm
    with mode():
        for dtype in (None, torch.bfloat16, torch.float32):
            for _ in range(2):
                out = op(*args, out_dtype=dtype, offs_ready=True)
                like = torch.empty_like(out)
                assert out.dtype is (dtype or torch.bfloat16)
                assert out.shape == (*args[0].shape[:-1], args[1].shape[1])
                assert out.device == args[0].device
                assert out.is_contiguous()
                assert not out.requires_grad
                assert out.is_inference() == like.is_inference()
                if not out.is_inference():
                    assert out._version == 0
    with torch.no_grad():
        out = op(args[0], args[1].requires_grad_(), args[2])
    assert not out.requires_grad


def test_out_is_written_and_counts_as_changed():
    args, options = problem("blocks")
    out = torch.zeros(args[0].shape[0], 256, device=DEVICE)
    for _ in range(2):
        version = out._version
        assert moe_ext.grouped_gemm_out(*args, **options, out=out.zero_()) is None
        assert out._version > version + 1
        assert_same_bits(out, reference(args, options, out_dtype=torch.float32))
    moe_ext.grouped_gemm_out(*args, **options, out=out, out_dtype=torch.float32)


def test_what_has_no_elements_is_not_launched(choices):
    (a, b, offs), _ = problem("bf16")
    assert moe_ext.grouped_gemm(a[:0], b, torch.zeros_like(offs)).shape == (0, 256)
    assert moe_ext.grouped_gemm(a, b[:, :0], offs).shape == (a.shape[0], 0)
    (a, b, counts), _ = problem("bf16", masked=True)
    out = moe_ext.grouped_gemm_masked(a[:, :0], b, torch.zeros_like(counts))
    assert out.shape == (GROUPS, 0, 256)
    assert choices == []


def test_no_columns_give_zeros_or_the_bias():
    (a, b, offs), _ = problem("bf16")
    bias = powers(GROUPS, 256)
    for _ in range(2):
        out = moe_ext.grouped_gemm(a[:, :0], b[..., :0], offs, bias=bias, out_dtype=torch.float32)
        assert_same_bits(out[:1], bias[:1])
        assert_same_bits(out[-1:], bias[2:])


@pytest.mark.parametrize("told", [False, True], ids=["first call", "later call"])
def test_refusals_have_the_documented_message(told):
    (a, b, offs), options = problem("blocks")
    if told:
        moe_ext.grouped_gemm(a, b, offs, **options)
    for change, message in (
        ({"offs": offs.long()}, "`offs` must be int32"),
        ({"b": b[..., :16]}, "`b` must have shape"),
        ({"scale_a": options["scale_a"][:-1]}, "`scale_a` must have shape"),
        ({"scale_b": options["scale_b"][:, :1]}, "`scale_b` must have shape"),
        ({"scale_b_offset": (0, 128)}, "`scale_b_offset` must be"),
        ({"scale_b_offset": (0, 0, 0)}, "`scale_b_offset` must be"),
        ({"n_segments": 3}, "`n_segments` must be"),
        ({"accumulate": "fast"}, '`accumulate` must be "promoted" with scales per block'),
        ({"accumulate": "slow"}, "`accumulate` must be"),
        ({"out_dtype": torch.float16}, "`out_dtype` must be"),
        ({"bias": torch.zeros(GROUPS, 8, device=DEVICE)}, "`bias` must have shape"),
        ({"a": a[None]}, "`a` must have shape"),
    ):
        call = {"a": a, "b": b, "offs": offs, **options, **change}
        with pytest.raises(ValueError, match=f"^grouped_gemm: {message}"):
            moe_ext.grouped_gemm(**call)


def test_too_large_an_output_is_torchs_own_error():
    rows, n = 1 << 20, 1 << 17
    a = torch.zeros(rows, 16, device=DEVICE).bfloat16()
    b = torch.zeros(1, n, 16, device=DEVICE).bfloat16()
    with pytest.raises(torch.OutOfMemoryError):
        moe_ext.grouped_gemm(a, b, offs_of((rows,), DEVICE), out_dtype=torch.float32)


def test_the_op_itself_takes_no_kernel_of_another_kind():
    args, options = problem("blocks")
    kernels = _library.device_kernels(0)
    scales = options["scale_a"], options["scale_b"]
    launch = kernels.grouped_gemm_launch_with
    with pytest.raises(ValueError, match="`config` must be given for a problem not met before"):
        kernels.grouped_gemm_launch(*args, *scales)
    expected = reference(args, options, out_dtype=torch.float32)
    for config in moe_ext.kernels():
        call = (*args, *scales, None, None, FP32_OUT, 1, 0, 0, -1, config.index)
        if (config.accumulate, config.output) == ("block", "rows"):
            assert_same_bits(launch(*call), expected)
        else:
            with pytest.raises(ValueError, match=r"`config` must be a kernel for these|`a` must"):
                launch(*call)
    for index in (len(moe_ext.kernels()), 2**40):
        with pytest.raises(ValueError, match="`config` must be in"):
            launch(*args, *scales, None, None, FP32_OUT, 1, 0, 0, -1, index)
    with pytest.raises(ValueError, match="`config` must be given for a problem not met before"):
        kernels.grouped_gemm_launch(*args, *scales)


def test_the_memo_is_bounded():
    most = 8192
    index = next(config.index for config in moe_ext.kernels() if config.dtype == "bf16")
    a = torch.zeros(most + 2, 16, device=DEVICE).bfloat16()
    b, offs = a[None, :8], offs_of((1,), DEVICE)
    kernels = _library.device_kernels(0)
    for rows in range(1, most + 2):
        arguments = (a[:rows], b, offs, None, None, None, None, REMEMBER)
        kernels.grouped_gemm_launch_with(*arguments, 1, 0, 0, -1, index)
    kernels.grouped_gemm_launch(a[: most + 1], b, offs)
    with pytest.raises(ValueError, match="not met before"):
        kernels.grouped_gemm_launch(a[:1], b, offs)
    moe_ext.grouped_gemm(a[:1], b, offs)
    kernels.grouped_gemm_launch(a[:1], b, offs)


def test_threads_choose_and_remember_at_the_same_time():
    (a, b, offs), options = problem("blocks")
    failures = []

    def work(seed):
        try:
            for step in range(60):
                rows = a.shape[0] - (7 * seed + step) % 90
                ends = offs.clamp(max=rows)
                scale_a = options["scale_a"][:rows]
                scale_b = options["scale_b"]
                call = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": torch.float32}
                out = moe_ext.grouped_gemm(a[:rows], b, ends, **call)
                assert_same_bits(out, expected[:rows])
        except Exception as error:
            failures.append(error)

    # Rows past the shortest problem belong to the same group in all of them.
    offs[:] = torch.tensor([100, 100, a.shape[0]], device=DEVICE)
    expected = reference((a, b, offs), options, out_dtype=torch.float32)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
