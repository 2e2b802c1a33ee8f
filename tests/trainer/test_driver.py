"""What the driver can tell without Ray: where a run fits, what it says, how it ends."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from training import open_folder, small_config

from trainer import __main__
from trainer.config import CONFIG_VARIABLE, Scaling
from trainer.driver import aside, missing_capacity
from trainer.errors import RunError
from trainer.output import Output

CPU_RUN = Scaling(num_workers=2, use_gpu=False, cpus_per_worker=2)
GPU_RUN = Scaling(num_workers=16, use_gpu=True, cpus_per_worker=6)


@pytest.mark.parametrize(
    ("nodes", "scaling"),
    [
        ([{"CPU": 5}], CPU_RUN),
        ([{"CPU": 2}, {"CPU": 2}, {"CPU": 1}], CPU_RUN),
        ([{"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 8}], GPU_RUN),
    ],
)
def test_workers_and_data_fit(nodes: list[dict[str, float]], scaling: Scaling) -> None:
    assert missing_capacity(nodes, scaling) == ""


@pytest.mark.parametrize(
    ("nodes", "scaling", "numbers"),
    [
        ([{"CPU": 4}], CPU_RUN, "need 5 CPUs; its 1 nodes have 4 CPUs and 0 GPUs"),
        ([{"CPU": 1}] * 9, CPU_RUN, "places for 0 workers"),
        ([{"CPU": 64, "GPU": 8}], GPU_RUN, "need 97 CPUs and 16 GPUs; its 1 nodes have 64 CPUs"),
        ([{"CPU": 99}], GPU_RUN, "and 0 GPUs, with places for 0 workers"),
        ([], CPU_RUN, "its 0 nodes have 0 CPUs"),
    ],
)
def test_a_cluster_that_is_too_small_is_refused_with_the_numbers(
    nodes: list[dict[str, float]], scaling: Scaling, numbers: str
) -> None:
    assert numbers in missing_capacity(nodes, scaling)


def test_output_goes_to_three_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = open_folder(small_config(tmp_path))
    copy = tmp_path / "copy"
    with Output(str(copy)) as output:
        print("before")
        output.keep_in(folder, folder.log(1))
        print("after", file=sys.stderr)
        output.flush()
        print("last")
    assert folder.read(folder.log(1)) == b"before\nafter\nlast\n"
    assert copy.read_text() == "before\nafter\nlast\n"
    assert capsys.readouterr() == ("before\nlast\n", "after\n")


def test_output_goes_on_where_no_copy_can_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Output(str(tmp_path / "none" / "copy")):
        print("text")
    assert capsys.readouterr().out == "text\n"
    assert __main__.LOG_VARIABLE == "TRAINYARD_LOG"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "TRAINYARD_CONFIG is not set"),
        ("{", "not a valid config"),
        ('{"name": "UPPER", "extra": 1}', "name: String should match"),
    ],
)
def test_a_config_that_is_none_ends_with_2(
    text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {} if text is None else {CONFIG_VARIABLE: text}
    assert __main__.main(environment) == 2
    assert message in capsys.readouterr().err


def test_a_storage_that_cannot_be_used_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    config = small_config(tmp_path / "file")
    assert __main__.main({CONFIG_VARIABLE: config.model_dump_json()}) == 1
    assert "file cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__global_batch_size": 63, "scaling__num_workers": 2}, "Use 62 or 64"),
        ({"train__global_batch_size": 2000}, "more than the 1438 training samples"),
        ({"train__model__name": "resnet-18"}, "Did you mean resnet18"),
        ({"train__model__in_channels": 3}, "digits has 1 channel"),
        ({"storage__path": "gs://bucket"}, "neither a folder nor s3://"),
    ],
)
def test_a_config_that_cannot_be_ends_with_2_and_no_attempt(
    tmp_path: Path,
    changes: dict[str, object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = small_config(tmp_path, **changes)
    assert __main__.main({CONFIG_VARIABLE: config.model_dump_json()}) == 2
    assert message in capsys.readouterr().err
    if config.storage.path == str(tmp_path):
        folder = open_folder(config)
        assert not folder.exists(folder.attempts)
        assert not folder.exists(folder.run)


def test_a_signal_that_another_thread_got_ends_the_wait() -> None:
    def stop(signum: int, frame: object) -> None:
        raise RunError("stopped")

    before = signal.signal(signal.SIGUSR1, stop)
    enough = threading.Event()

    def work() -> None:
        time.sleep(0.2)  # until the other thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        enough.wait(60)

    try:
        with pytest.raises(RunError, match="stopped"):
            aside(work)
    finally:
        signal.signal(signal.SIGUSR1, before)
        enough.set()
