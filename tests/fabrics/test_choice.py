"""Which fabric is taken, and what is said when none fits. Needs no GPU."""

import ctypes
import importlib.util
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import rank_processes
import torch

import megatron_ep as ep
from megatron_ep import _C
from megatron_ep.diagnosis import cuda_version
from megatron_ep.fabrics import cards as rdma
from megatron_ep.fabrics import choice, nvshmem_env, verbs

NETWORKS = list(choice.NETWORKS)


@pytest.fixture(autouse=True)
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this machine's network cards, with one in it, which libibverbs cannot use."""
    folder = tmp_path / "infiniband"
    (folder / "card").mkdir(parents=True)
    monkeypatch.setattr(rdma, "FOLDER", folder)
    monkeypatch.setattr(verbs, "usable", refuse("verbs"))
    monkeypatch.setattr(verbs, "try_direct", refuse("mlx5"))
    return folder


@pytest.fixture
def find_spec(monkeypatch: pytest.MonkeyPatch):
    """Call it to make a module look as if it was not there."""
    found = importlib.util.find_spec

    def hide(*names: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else found(name))

    monkeypatch.delenv(choice.VARIABLE, raising=False)
    return hide


def choose(hosts: str, wanted: Sequence[str | None], answers: Sequence[dict[int, str]] = ()) -> str:
    """What is chosen when all ranks answer what this process does, but for what some of them say."""
    questions = iter(answers)

    def gather(mine: str | None) -> list[str | None]:
        others = next(questions, {})
        return [others.get(rank, mine) for rank in range(len(hosts))]

    return choice.choose(hosts, wanted, gather).name


def refuse(name: str):
    def load(*_):
        raise ep.EPError(f"{name} lacks something")

    return load


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch):
    """Call it to let this process have these networks, and no others."""

    def have(*names: str) -> None:
        loads = {name: (lambda: None) if name in names else refuse(name) for name in NETWORKS}
        monkeypatch.setattr(choice, "NETWORKS", loads)
        monkeypatch.setattr(verbs, "usable", (lambda: ["a port"]) if "verbs" in names else refuse("verbs"))
        monkeypatch.setattr(verbs, "try_direct", (lambda gpu: None) if "mlx5" in names else refuse("mlx5"))

    return have


ALL = (*NETWORKS, "mlx5", "verbs", "tcp")


@pytest.mark.parametrize(
    ("hosts", "wanted", "have", "answers", "chosen"),
    [
        ("aa", None, (), (), "p2p"),
        ("aa", None, ALL, (), "p2p"),
        ("aa", "p2p", (), (), "p2p"),
        # the first that loads
        ("ab", None, NETWORKS, (), "nvshmem"),
        ("ab", None, ["nccl"], (), "nccl"),
        ("ab", None, [], (), "tcp"),
        ("ab", None, ["verbs"], (), "verbs"),
        # mlx5 by its name alone
        ("ab", None, ["mlx5"], (), "tcp"),
        ("ab", None, ["verbs", "mlx5"], (), "verbs"),
        # everywhere
        ("ab", None, ["verbs", "mlx5"], [{}, {}, {1: "no atomics"}], "tcp"),
        ("ab", None, NETWORKS, [{1: rdma.NO_CARD}] * 4, "tcp"),
        ("ab", None, NETWORKS, [{1: "no nvshmem"}], "nccl"),
        ("abc", None, NETWORKS, [{1: "no nvshmem"}, {0: "no nccl", 2: "no nccl"}], "tcp"),
        # what is asked for counts, on one machine too
        *((hosts, name, ALL, (), name) for name in ALL for hosts in ("ab", "aa")),
    ],
)
def test_choice(networks, hosts: str, wanted: str | None, have, answers, chosen: str) -> None:
    networks(*have)
    assert choose(hosts, [wanted] * len(hosts), answers) == chosen


def test_several_machines_without_a_card_take_the_host(networks, cards: Path) -> None:
    networks(*NETWORKS)
    (cards / "card").rmdir()
    assert choose("ab", [None] * 2) == "tcp"


@pytest.mark.parametrize(
    ("hosts", "wanted", "answers", "kind", "says"),
    [
        ("aba", ["p2p"] * 3, (), ep.EPError, "p2p connects the processes of one machine, but the ranks run on a, b"),
        ("a", ["pigeon"], (), ValueError, "'pigeon', must be one of p2p, nvshmem, nccl, mlx5, verbs, tcp$"),
        *(
            (
                hosts,
                ["ibgda"] * 2,
                (),
                ValueError,
                "'ibgda', must be .*: ibgda is called mlx5 now; for .* it is nvshmem$",
            )
            for hosts in ("aa", "ab")
        ),
        ("aa", [None, "pigeon"], (), ValueError, "is unset on rank 0, 'pigeon' on rank 1, must be one of p2p"),
        ("aaa", [None, "nccl", None], (), ep.EPError, "is unset on rank 0 and 2, 'nccl' on rank 1, must be the same"),
        ("ab", ["nvshmem"] * 2, [{1: "no nvshmem"}], ep.EPError, "^no nvshmem on rank 1$"),
        # and no other one instead
        *((hosts, ["nccl"] * 2, (), ep.EPError, "^nccl lacks something$") for hosts in ("aa", "ab")),
    ],
)
def test_what_cannot_be_chosen(networks, hosts: str, wanted, answers, kind: type[Exception], says: str) -> None:
    networks("nvshmem")
    with pytest.raises(kind, match=says):
        choose(hosts, wanted, answers)


def test_hosts_of_one_nvlink_domain_map_each_other_or_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "NETWORKS", {"nvshmem": lambda: None})

    def choose_with(lacking: str, wanted: str | None = None, hosts: Sequence[str] = ("a", "b")) -> choice.Choice:
        return choice.choose(hosts, [wanted] * 2, lambda mine: [mine] * 2, lambda: lacking)

    assert choose_with("") == choice.Choice("p2p", "2 machines of one NVLink domain")
    assert choose_with("", "p2p").name == "p2p"
    assert choose_with("", "nvshmem").name == "nvshmem"
    assert choose_with("not asked", None, "aa") == choice.Choice("p2p", "one machine")
    refused = choose_with("rank 1: NOT_PERMITTED")
    assert refused == choice.Choice("nvshmem", "2 machines of one NVLink domain, but rank 1: NOT_PERMITTED")
    with pytest.raises(ep.EPError, match="MEGATRON_EP_FABRIC=p2p: rank 1: NOT_PERMITTED"):
        choose_with("rank 1: NOT_PERMITTED", "p2p")


def test_why_a_fabric_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "NETWORKS", {"nvshmem": refuse("nvshmem"), "nccl": lambda: None})

    def reason(hosts: str, wanted: str | None = None) -> str:
        return choice.choose(hosts, [wanted] * len(hosts), lambda mine: [mine] * len(hosts)).reason

    assert reason("aa") == "one machine"
    assert reason("ab") == "2 machines; nvshmem lacks something"
    assert reason("aa", "nccl") == "MEGATRON_EP_FABRIC says so"
    monkeypatch.setattr(choice, "NETWORKS", {name: refuse(name) for name in NETWORKS})
    lacks = "; ".join(f"{name} lacks something" for name in (*NETWORKS, "verbs"))
    assert reason("ab") == f"2 machines; {lacks}"


def test_a_library_that_is_loaded_through_a_link(tmp_path: Path) -> None:
    source, library = tmp_path / "empty.cpp", tmp_path / "libthing.so.2.28.9"
    source.touch()
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    (tmp_path / "libthing.so.2").symlink_to(library)
    assert choice._loaded("libthing.so.2") is None
    ctypes.CDLL(str(tmp_path / "libthing.so.2"))
    assert choice._loaded("libthing.so.2") == choice._loaded("libthing.so.2.28.9") == library
    assert choice._loaded("libthing.so.28") is None


@pytest.mark.parametrize("cuda", ["12.8", "13.0"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_fabric_that_was_not_built(find_spec, monkeypatch: pytest.MonkeyPatch, name: str, cuda: str) -> None:
    monkeypatch.setattr(cuda_version, "of_torch", {"cuda": cuda}.get)
    find_spec(f"megatron_ep._{name}")
    package = f"nvidia-{name}-cu{cuda[:2]}"
    with pytest.raises(ep.EPError, match=f"{name} fabric was not built: it needs nvcc and the package {package}"):
        choice.NETWORKS[name]()
    assert package in choice.report()[name]


def built(name: str) -> None:
    if importlib.util.find_spec(f"megatron_ep._{name}") is None:
        pytest.skip(f"this build has no {name} fabric")


@pytest.mark.parametrize("name", NETWORKS)
def test_a_library_that_is_missing(find_spec, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    built(name)
    find_spec(f"nvidia.{name}")
    monkeypatch.setattr(choice, "_loaded", lambda library: None)
    with pytest.raises(ep.EPError, match=f"needs the package nvidia-{name}-cu1[23], whose library was not found"):
        choice.NETWORKS[name]()


@pytest.mark.parametrize(("name", "group"), [("nvshmem", "group"), ("nccl", "group")])
def test_a_network_loads_without_a_driver(name: str, group: str) -> None:
    built(name)
    assert hasattr(choice.NETWORKS[name](), group)
    assert choice.report()[name].startswith("built, loads with /")


def test_nvshmem_has_nothing_yet() -> None:
    built("nvshmem")
    nvshmem = choice.load_nvshmem()
    assert nvshmem.initialised_for() is None and nvshmem.spare(bytes=1 << 20) == []
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="cudaSetDevice: "):
            nvshmem.prepare(device=0, timeout=1.0)


def test_a_network_is_loaded_when_it_is_needed() -> None:
    script = (
        "import sys; from megatron_ep.fabrics import choice\n"
        "choice.choose('a', [None], lambda mine: [mine]); print(*sys.modules)"
    )
    done = rank_processes.run_one(["-c", script])
    modules = set(done.stdout.split())
    assert "megatron_ep.fabrics.choice" in modules and not {f"megatron_ep._{name}" for name in NETWORKS} & modules


def test_another_version_of_nccl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built("nccl")
    nccl = choice.load_nccl()
    assert nccl.library_version() == nccl.BUILT_FOR
    monkeypatch.setattr(nccl, "BUILT_FOR", 23104)
    with pytest.raises(ep.EPError, match=r"built for NCCL 2\.31\.4, but /.*libnccl\.so\.2[.\d]* is 2\.\d+\.\d+: build"):
        choice.load_nccl()


@pytest.mark.parametrize(
    ("found", "works"),
    [
        ((3, 4, 5), True),
        ((3, 4, 6), True),
        ((3, 8, 0), True),
        ((3, 4, 4), False),
        ((3, 3, 9), False),
        ((4, 0, 0), False),
    ],
)
def test_which_versions_of_nvshmem_are_taken(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int, int, int], works: bool
) -> None:
    module = SimpleNamespace(BUILT_FOR=(3, 4, 5), library_version=lambda: found)
    monkeypatch.setattr(choice, "_in_wheel", lambda package, library: Path("/lib") / library)
    monkeypatch.setattr(choice, "_load", lambda name, library: module)
    if works:
        assert choice.load_nvshmem() is module
        return
    number = ".".join(map(str, found))
    with pytest.raises(ep.EPError, match=rf"3\.x from 3\.4\.5 on, but /lib/libnvshmem_host\.so\.3 is {number}: build"):
        choice.load_nvshmem()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Call it to give this machine network cards, by name and driver, and whether they can be opened."""
    for name in [name for name in os.environ if name.startswith("NVSHMEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(rdma, "FOLDER", tmp_path / "infiniband")
    monkeypatch.setattr(nvshmem_env, "DEVICES", tmp_path / "dev")

    def has(usable: bool, **cards: str) -> None:
        for card, driver in cards.items():
            (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (tmp_path / "infiniband" / card / "device").mkdir(parents=True)
            (tmp_path / "infiniband" / card / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
        if usable:
            (tmp_path / "dev").mkdir()
            (tmp_path / "dev" / "uverbs0").touch()

    return has


def test_which_network_cards_ibgda_can_use(machine) -> None:
    assert nvshmem_env.cards() == []
    machine(True, mlx5_1="mlx5_core", mlx5_0="mlx5_core", rdmap3="efa")
    assert nvshmem_env.cards() == ["mlx5_0", "mlx5_1"]


def test_a_card_that_this_process_cannot_open_is_none(machine) -> None:
    machine(False, mlx5_0="mlx5_core")
    assert nvshmem_env.cards() == [] and choice.report()["nvshmem's ibgda"] == "no network card for it (driver mlx5)"


def test_the_environment_of_nvshmem_is_reported(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(True, mlx5_0="mlx5_core")
    monkeypatch.setenv("NVSHMEM_MAX_TEAMS", "9")
    assert choice.report()["nvshmem's ibgda"] == (
        "mlx5_0; between machines NVSHMEM_IB_ENABLE_IBGDA=1 NVSHMEM_IBGDA_NUM_RC_PER_PE=(a block each) "
        "NVSHMEM_IBGDA_RC_MAP_BY=cta NVSHMEM_MAX_TEAMS=9 NVSHMEM_DISABLE_NVLS=1"
    )
    monkeypatch.setenv("NVSHMEM_IBGDA_RC_MAP_BY", "sm")
    assert "must be cta: " in choice.report()["nvshmem's ibgda"]
    monkeypatch.setenv("NVSHMEM_IB_ENABLE_IBGDA", "0")
    assert choice.report()["nvshmem's ibgda"] == "off: NVSHMEM_IB_ENABLE_IBGDA is '0'"


@pytest.mark.parametrize(
    ("usable", "value", "warning"), [(True, "no", "IBGDA=no: a thread"), (False, None, "no network card here")]
)
def test_a_network_without_ibgda_is_warned_of(
    machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, usable: bool, value: str, warning: str
) -> None:
    machine(usable, mlx5_0="mlx5_core")
    if value:
        monkeypatch.setenv("NVSHMEM_IB_ENABLE_IBGDA", value)
    nvshmem_env.prepare(queue_pairs=4)
    [record] = caplog.records
    assert warning in record.getMessage() and record.levelname == "WARNING"


def has_gpu(monkeypatch: pytest.MonkeyPatch, cuda: str | None = "13.0", found: bool = True) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)


@pytest.mark.skipif(hasattr(_C, "cuda_launcher"), reason="this build has the CUDA backend")
def test_a_build_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpu(monkeypatch)
    with pytest.raises(ValueError, match=r"built without the CUDA backend: install the wheel \+cu1[23], or build"):
        ep.LocalCluster(1, 2, ep.Config(num_experts=2), device="cuda")
    why = _C.build_info()["without cuda"]
    assert why in ("MEGATRON_EP_CUDA was 0 when it was built", "no nvcc was found when it was built")
    facts = choice.report()
    assert facts["p2p"] == f"not built: {why}" and facts["chosen"] == f"none for GPUs, not built: {why}"
    assert "no nvcc" not in str(facts) or "no nvcc" in why


@pytest.mark.parametrize(("cuda", "says"), [(None, "was built without CUDA"), ("13.0", "finds no GPU on this machine")])
def test_a_gpu_that_is_missing_is_named_before_what_cannot_help(cuda, says, monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpu(monkeypatch, cuda, found=False)
    with pytest.raises(ValueError, match=f"^device is 'cuda', but torch .* {says}$"):
        ep.LocalCluster(1, 2, ep.Config(num_experts=2), device="cuda")


def test_an_extension_of_another_cuda_than_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_version, "of_torch", {"cuda": "12.8", "__version__": "2.9.1+cu128"}.get)
    has_gpu(monkeypatch)
    monkeypatch.setattr(_C, "build_info", lambda: {"cuda": "13.0"})
    monkeypatch.setattr(_C, "cuda_launcher", None, raising=False)
    said = r"built with CUDA 13.0, but torch 2.9.1\+cu128 with CUDA 12.8: install the wheel \+cu12, or build .* nvcc 12"
    with pytest.raises(ValueError, match=f"device is 'cuda', but megatron_ep was {said}"):
        ep.LocalCluster(1, 2, ep.Config(num_experts=2), device="cuda")
    assert choice.report()["p2p"].startswith("megatron_ep was built with CUDA 13.0")
