"""The arithmetic of tests/gpu/timeline.py on a trace made by hand."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu" / "timeline.py"
spec = importlib.util.spec_from_file_location("timeline", SCRIPT)
timeline = importlib.util.module_from_spec(spec)
spec.loader.exec_module(timeline)

NAMES = {
    "void ep::kernels::dispatch_kernel<ep::cuda::Joint<ep::P2p> >(ep::cuda::Joint<ep::P2p>)": "dispatch",
    "void ep::kernels::notify_kernel<ep::cuda::Joint<ep::P2p> >(ep::cuda::Joint<ep::P2p>)": "dispatch",
    "void ep::kernels::fused_dispatch_kernel<ep::cuda::Joint<ep::P2p> >(ep::cuda::Joint<ep::P2p>)": "dispatch",
    "void ep::kernels::combine_kernel<__nv_bfloat16, false, ep::cuda::Joint<ep::P2p> >()": "combine",
    "void ep::kernels::intra_rank_permute_kernel<ep::cuda::Joint<ep::P2p> >()": "dispatch",
    "void ep::kernels::intra_rank_reduce_kernel<float, ep::cuda::Joint<ep::P2p> >()": "combine",
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT": "product",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x>": "product",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "other",
    "void ep::kernels::low_latency_dispatch_kernel<ep::cuda::Joint<ep::P2p> >()": "other",
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items(), ids=range(len(NAMES)))
def test_kinds_of_kernels(name, kind):
    assert timeline.kind_of(name) == kind


def test_figures_of_a_trace(tmp_path):
    dispatch, _, _, combine, _, _, product, _, other, _ = NAMES
    kernels = [(0, 10, 7, dispatch), (4, 3, 13, product), (6, 8, 14, product), (20, 5, 13, combine), (22, 1, 7, other)]
    events = [
        {"cat": "kernel", "ph": "X", "name": name, "ts": start, "dur": took, "tid": 1, "args": {"stream": stream}}
        for start, took, stream, name in kernels
    ]
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "noise"}]}).encode()))
    read = timeline.read(trace)
    assert len(read) == 5
    figures = timeline.summary(read)
    assert figures == {
        **{"all": 19, "dispatch": 10, "combine": 5, "product": 10, "other": 1},
        **{"dispatch beside products": 6, "combine beside products": 0},
    }
    assert "beside products        6 = 40%" in timeline.line("name", figures)
    timeline.draw(read, tmp_path / "picture.svg", "a <title>")
    picture = (tmp_path / "picture.svg").read_text()
    assert picture.count("<rect") == 4 + 5 and "stream 13" in picture and "a &lt;title&gt;" in picture
    assert "stream 14<" in picture and ">product<" in picture and "0.02 ms" in picture
