"""The tables that documents show, from files of benchmarks."""

import json

from megatron_ep.bench import main as bench
from megatron_ep.bench.report import make_record

SIZES = "T=4096 H=7168 K=8 E=256"


def write(path, records, gpus=("none: no driver",)):
    environment = {"system": {"cpu": "a CPU"}, "packages": {"torch": "2.9"}, "cuda": {"gpus": list(gpus)}}
    path.write_text(json.dumps({"environment": environment, "records": records}))
    return str(path)


def test_tables(tmp_path, capsys):
    host = [
        make_record(case, "dispatch+combine", name, [seconds], 1e6)
        for case, name, seconds in (
            ("1x2", "ours", 0.1),
            ("1x2", "megatron_alltoall", 1.8),
            ("2x2", "ours", 0.2),
            ("2x2", "megatron_alltoall", 2.0),
        )
    ]
    gpus = [
        make_record(f"4 GPUs {SIZES}", "dispatch", "nccl_all_to_all", [0.0016], 2e8),
        make_record(f"4 GPUs {SIZES}", "copy", "to_a_neighbour", [0.0005], 2e8),
        *(
            make_record(f"1x4 sms={sms} {SIZES}", phase, "ours", [seconds], 2e8, num_sms=sms)
            for sms, phase, seconds in (
                (8, "dispatch", 0.0016),
                (24, "dispatch", 0.0008),
                (24, "dispatch (api)", 0.0001),
            )
        ),
    ]
    files = [
        write(tmp_path / "host.json", host),
        write(tmp_path / "gpus.json", gpus, [f"{i}, NVIDIA H200, 1, 2, 9.0" for i in range(4)]),
    ]
    assert bench.main(["tables", *files]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "host.json: a CPU, torch 2.9",
        "",
        "|  | dispatch+combine, ours | dispatch+combine, megatron_alltoall |",
        "|---|---|---|",
        "| 1x2 | 100 (0 GB/s) | 1800 (0 GB/s) |",
        "| 2x2 | 200 (0 GB/s) | 2000 (0 GB/s) |",
        "",
        "gpus.json: 4 x NVIDIA H200, torch 2.9",
        "",
        "|  | dispatch, nccl_all_to_all | copy, to_a_neighbour | dispatch, ours |",
        "|---|---|---|---|",
        f"| 4 GPUs {SIZES} | 1.60 (125 GB/s) | 0.50 (400 GB/s) |  |",
        f"| 1x4 sms=8 {SIZES} |  |  | 1.60 (125 GB/s) |",
        f"| 1x4 sms=24 {SIZES} |  |  | 0.80 (250 GB/s) |",
        "",
        "|  |  | command |",
        "|---|---|---|",
        "| host | 10 to 18 × Megatron's all-to-all over gloo | `megatron-ep bench` |",
        "| 4 x NVIDIA H200, 24 SMs | dispatch 250 GB/s of the 400 that a copy reaches; 2.0 × NCCL's all-to-all with "
        "its copies | `megatron-ep bench gpus` |",
    ]
    itself = [*gpus[:1], make_record(f"4 GPUs {SIZES}", "copy", "to_itself", [0.0005], 2e8), *gpus[2:]]
    assert bench.main(["tables", write(tmp_path / "own.json", itself, ["0, NVIDIA H200, 1, 2, 9.0"])]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "SMs | dispatch 250 GB/s; 2.0 × NCCL's all-to-all" in last, "a process that sees its own GPU alone"
    (tmp_path / "other").write_text("{}")
    assert bench.main(["tables", str(tmp_path / "other")]) == 2
