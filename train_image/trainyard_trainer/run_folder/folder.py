"""What the folder of a run holds."""

from __future__ import annotations

from trainyard_trainer.storage import ASIDE, REQUESTS, Folder, open_filesystem, parent


class RunFolder(Folder):
    """The paths of a run's files. Nothing else composes one."""

    @classmethod
    def open(
        cls, path: str, name: str, endpoint: str | None = None, *, requests: int = REQUESTS
    ) -> RunFolder:
        filesystem, base = open_filesystem(path, endpoint, requests=requests)
        return cls(filesystem, f"{base}/{name}", endpoint=endpoint)

    @property
    def name(self) -> str:
        """The run's."""
        return self.root.rpartition("/")[2]

    def sibling(self, name: str) -> RunFolder:
        """The folder of another run beside it."""
        return RunFolder(self.filesystem, f"{parent(self.root)}/{name}", endpoint=self.endpoint)

    @property
    def data(self) -> str:
        """The data set, where the run had to prepare it."""
        return f"{self.root}/data"

    @property
    def run(self) -> str:
        return f"{self.root}/run.json"

    @property
    def attempts(self) -> str:
        return f"{self.root}/attempts.jsonl"

    @property
    def starts(self) -> str:
        """Where each group of workers has started from, and once more with how long it took."""
        return f"{self.root}/starts.jsonl"

    @property
    def failures(self) -> str:
        """When workers failed, and of what."""
        return f"{self.root}/failures.jsonl"

    @property
    def workers(self) -> str:
        """Where each rank runs: in which pod, as which process."""
        return f"{self.root}/workers.json"

    @property
    def metrics(self) -> str:
        return f"{self.root}/metrics.jsonl"

    @property
    def progress(self) -> str:
        return f"{self.root}/progress.json"

    @property
    def summary(self) -> str:
        return f"{self.root}/summary.json"

    @property
    def report(self) -> str:
        return f"{self.root}/report.html"

    @property
    def model(self) -> str:
        return f"{self.root}/model.pt"

    def trees(self, file: str) -> str:
        """The model of `gradient_boosting`, in its library's own format."""
        return f"{self.root}/{file}"

    @property
    def model_facts(self) -> str:
        """What is known of the model: its network, its classes, and how images become its input."""
        return f"{self.root}/model.json"

    @property
    def checkpoints(self) -> str:
        return f"{self.root}/checkpoints"

    @property
    def lease(self) -> str:
        """Who may write: see `lease.py`."""
        return f"{self.root}/lease"

    @property
    def set_aside(self) -> str:
        """While its files are being set aside, where they go: see `set_aside.py`."""
        return f"{self.root}/set-aside.txt"

    def events(self, number: int) -> str:
        """A file of TensorBoard, which reads them in the order of their names."""
        return f"{self.root}/tensorboard/events.out.tfevents.{number:04}.trainyard"

    def stop(self, attempt: int, group: int = 0) -> str:
        """Asks the attempt's workers to save and leave; with a group those of that one alone."""
        who = f"a{attempt}.{group}" if group else f"a{attempt}"
        return f"{self.root}/lease/{who}.stop"

    def log(self, attempt: int) -> str:
        return f"{self.root}/logs/attempt-{attempt}.log"

    def sweep(self) -> None:
        """Remove what killed writers left behind. Only while nobody writes but a living lease."""
        for file in self.files():
            if file.endswith(ASIDE) and not file.startswith("lease/"):
                self.delete(f"{self.root}/{file}")
