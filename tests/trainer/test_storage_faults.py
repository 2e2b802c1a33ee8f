"""A bucket that answers 503, cuts lines, or refuses keys for a while: what is written is there once."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from attempts import Attempts, wait_for
from ray.train.v2._internal.execution.controller.state import ResizingState
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from training import small_config

from tests.trainer.s3_proxy import Fault, Proxy, running_proxy
from tests.trainer.s3_server import ALL, CREDENTIALS, Server, running_server
from trainyard_trainer.config.storage import Storage
from trainyard_trainer.on_ray.controller.resize import SaveBeforeResize
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.log import Output, ProgressPrinter
from trainyard_trainer.tools.pods import probe

ADA = {"AWS_ACCESS_KEY_ID": "ada", "AWS_SECRET_ACCESS_KEY": "ada-secret"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A bucket `runs`, and a user who may do what a run does there."""
    with (
        running_server(tmp_path_factory.mktemp("s3") / "server") as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in (CREDENTIALS | ADA).items():
            patch.setenv(name, value)
        server.make_bucket("runs")
        server.add_user(*ADA.values())
        yield server


@pytest.fixture(autouse=True)
def allowed(server: Server) -> None:
    server.allow("runs", "ada", *ALL)


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with running_proxy(server.address) as proxy:
        yield proxy


@pytest.fixture
def folder(proxy: Proxy, request: pytest.FixtureRequest) -> RunFolder:
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:8]
    return RunFolder.open("s3://runs", name, f"http://{proxy.address}")


@pytest.mark.ci
@pytest.mark.parametrize("fault", ["503", "reset", "cut"])
def test_requests_that_fail_are_made_again_and_change_nothing(
    proxy: Proxy, folder: RunFolder, fault: Fault
) -> None:
    path = f"{folder.root}/file"
    data = bytes(range(256)) * 100
    proxy.fail(fault, times=2)
    folder.write(path, data)
    proxy.fail(fault, times=2)
    folder.append(path, data)
    proxy.fail(fault, times=2)
    assert folder.read(path) == data * 2
    proxy.fail(fault, times=2)
    assert folder.create(f"{folder.root}/claim", "mine")
    proxy.fail(fault, times=2)
    assert folder.files() == ["claim", "file"]
    assert proxy.struck == 10


def test_a_folder_goes_with_all_levels_though_the_server_keeps_folders_as_objects(
    server: Server, folder: RunFolder
) -> None:
    """pyarrow leaves an object for each folder of which it has deleted a file."""
    for name in ("a/b/c/one", "a/b/two", "a/three"):
        folder.write(f"{folder.root}/{name}", "x")
        folder.write(f"{folder.root}/{name}-gone", "x")
        folder.delete(f"{folder.root}/{name}-gone")
    folder.delete(folder.root)
    assert folder.files() == []
    assert not folder.exists(folder.root)


def test_a_folder_that_may_not_be_deleted_says_so(server: Server, folder: RunFolder) -> None:
    folder.write(f"{folder.root}/a/one", "x")
    server.allow("runs", "ada", *(action for action in ALL if action != "s3:DeleteObject"))
    with pytest.raises(OSError, match="Access Denied"):
        folder.delete(folder.root)


def test_keys_that_have_expired_are_waited_for_until_they_are_renewed(
    server: Server, folder: RunFolder, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    refused = threading.Event()

    def renew(seconds: float) -> None:
        refused.set()
        server.change_secret(*ADA.values())

    monkeypatch.setattr("trainyard_trainer.storage.time.sleep", renew)
    server.change_secret("ada", "another-secret")
    folder.outlast(lambda: folder.append(f"{folder.root}/log", "a line\n"))
    assert refused.is_set()
    assert folder.read(f"{folder.root}/log") == b"a line\n"
    said = capsys.readouterr().out
    assert said.startswith("storage: trying again for 120 s: ")
    assert "AWS Error ACCESS_DENIED" in said


class Leaving:
    """A worker group that leaves once it is asked to; it is looked at for the second time when the bucket is
    back."""

    def __init__(self, server: Server, folder: RunFolder) -> None:
        self.server, self.folder = server, folder
        self.looks = 0

    def poll_status(self, timeout: float) -> SimpleNamespace:
        self.looks += 1
        if self.looks == 2:
            self.server.allow("runs", "ada", *ALL)
        return SimpleNamespace(errors={}, finished=self.folder.exists(self.folder.stop(1, 1)))


def test_workers_are_asked_to_save_before_their_group_grows_once_the_bucket_is_back(
    server: Server, proxy: Proxy, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write(f"{folder.lease}/a1.1.json", "{}")
    server.allow("runs", "ada", *(action for action in ALL if action != "s3:PutObject"))
    storage = Storage(path="s3://runs", endpoint=f"http://{proxy.address}")
    callback, group = SaveBeforeResize(storage, folder.name, 1), Leaving(server, folder)
    callback.after_worker_group_start(group)
    callback.after_controller_state_update(
        None, ResizingState(ResizeDecision(num_workers=2, resources_per_worker={}))
    )
    assert group.looks == 3
    said = capsys.readouterr().out
    assert said.count("the workers cannot be asked to save a checkpoint yet: ") == 1


def test_patience_ends_with_the_bucket_s_own_words(
    server: Server, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard_trainer.storage.PATIENCE_S", 0.0)
    server.allow("runs", "ada", "s3:ListBucket")
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        folder.outlast(lambda: folder.write(f"{folder.root}/log", "a line\n"))


def test_a_log_that_could_not_be_kept_is_kept_later(
    server: Server, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder.log(1)
    with Output() as output:
        output.keep_in(folder, path)
        print("first")
        server.allow("runs", "ada", "s3:ListBucket")
        with pytest.raises(OSError, match="ACCESS_DENIED"):
            output.flush()
        print("second")
        server.allow("runs", "ada", *ALL)
    assert folder.read(path) == b"first\nsecond\n"


def test_a_log_whose_end_cannot_be_kept_is_no_error_of_the_program(
    server: Server, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with Output() as output:
        output.keep_in(folder, folder.log(1))
        print("lost")
        server.allow("runs", "ada", "s3:ListBucket")
    assert "warning: the end of this log is not in the run's folder" in capsys.readouterr().err


def test_progress_that_is_half_one_object_and_half_the_next_is_passed_over(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """An object that is replaced between two requests of one read."""
    whole = json.dumps({"attempt": 1, "step": 7})
    with Output() as output:
        for text in (whole + "99}", whole):
            folder.write(folder.progress, text)
            with ProgressPrinter(folder, output, attempt=1):
                pass  # it looks once more at its end
    assert capsys.readouterr().out == f"progress {whole}\n"


# A whole run.


@pytest.mark.slow
def test_a_run_whose_bucket_fails_again_and_again_delivers_the_same_bits_as_one_on_a_disk(
    server: Server, proxy: Proxy, attempts: Attempts
) -> None:
    """Every fault in turn, each once the run has made another step."""
    on_disk = small_config(attempts.storage, train__epochs=12)
    attempts.finish(on_disk, arguments=["--without-ray"])
    wanted = (attempts.storage / on_disk.name / "model.pt").read_bytes()

    in_bucket = on_disk.model_copy(
        update={"storage": Storage(path="s3://runs/same", endpoint=f"http://{proxy.address}")}
    )
    folder = server.folder / "objects/runs/same" / in_bucket.name
    process = attempts.start(in_bucket, arguments=["--without-ray"])

    def step() -> int:
        file = folder / "progress.json"
        return json.loads(file.read_text())["step"] if file.exists() else 0

    def another_step() -> bool:
        before = step()
        return bool(wait_for(lambda: step() > before or process.poll() is not None, 60))

    for fault in ("503", "reset", "cut"):
        assert another_step()
        struck = proxy.struck
        proxy.fail(fault)  # type: ignore[arg-type]
        proxy.await_struck(struck + 3)
        proxy.heal()
    assert another_step()
    server.change_secret("ada", "another-secret")
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("storage: trying again"):
            server.change_secret(*ADA.values())
    assert process.wait() == 0, said
    assert "storage: trying again for" in said
    assert (folder / "model.pt").read_bytes() == wanted
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
    assert json.loads((folder / "summary.json").read_text())["attempts"] == 1
    assert "storage: trying again" in (folder / "logs/attempt-1.log").read_text()


# What a probe says of a bucket that does not let a run do all that it needs.


@pytest.mark.parametrize(
    ("missing", "step", "said"),
    [
        ("s3:PutObject", "write", "ACCESS_DENIED during PutObject"),
        ("s3:GetObject", "read", "ACCESS_DENIED during HeadObject"),
        ("s3:ListBucket", "list", "ACCESS_DENIED during ListObjectsV2"),
        ("s3:DeleteObject", "delete", "Access Denied"),
    ],
)
def test_a_policy_that_lacks_an_action_fails_in_that_step(
    server: Server, missing: str, step: str, said: str
) -> None:
    server.allow("runs", "ada", *(action for action in ALL if action != missing))
    steps = probe.try_storage("s3://runs/probes", server.endpoint)
    assert list(steps)[-1] == step
    assert said in steps[step]
    assert set(list(steps.values())[:-1]) <= {"ok"}


@pytest.mark.parametrize(
    ("key", "secret", "said"),
    [("ada", "wrong", "SIGNATURE_DOES_NOT_MATCH"), ("nobody", "x", "INVALID_ACCESS_KEY_ID")],
)
def test_a_wrong_key_is_said_and_not_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch, key: str, secret: str, said: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{secret}-canary")
    steps = probe.try_storage("s3://runs/probes", server.endpoint)
    assert said in steps["write"]
    assert "canary" not in json.dumps(steps)
