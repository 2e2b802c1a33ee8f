"""The folder of a run: the paths of all its files."""

from __future__ import annotations

from trainyard_trainer.run_files import names
from trainyard_trainer.run_files.lease import stop_file
from trainyard_trainer.storage import ASIDE, REQUESTS, StorageFolder, open_filesystem, parent


class RunFolder(StorageFolder):
    """The paths of a run's files. Nothing else composes one."""

    @classmethod
    def open(
        cls, path: str, name: str, endpoint: str | None = None, *, requests: int = REQUESTS
    ) -> RunFolder:
        filesystem, base = open_filesystem(path, endpoint, requests=requests)
        return cls(filesystem, f"{base}/{name}", endpoint=endpoint)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.root.rpartition("/")[2]

    def sibling(self, name: str) -> RunFolder:
        """The folder of another run beside it."""
        return RunFolder(self.filesystem, f"{parent(self.root)}/{name}", endpoint=self.endpoint)

    @property
    def data(self) -> str:
        """The data set, where the run had to prepare it."""
        return f"{self.root}/{names.DATA}"

    @property
    def data_versions(self) -> str:
        """The versions of the data sets that a run reads where they lie, if they have versions."""
        return f"{self.root}/{names.DATA_VERSIONS}"

    @property
    def initial_weights(self) -> str:
        """The address of the model of a hub from whose weights a run started, with its commit."""
        return f"{self.root}/{names.INITIAL_WEIGHTS}"

    @property
    def tokenizer(self) -> str:
        """The folder of the tokenizer with which a language model was trained."""
        return f"{self.root}/{names.TOKENIZER}"

    @property
    def run(self) -> str:
        return f"{self.root}/{names.RUN}"

    @property
    def attempts(self) -> str:
        return f"{self.root}/{names.ATTEMPTS}"

    @property
    def starts(self) -> str:
        """The file with each start of a worker group: its checkpoint and, in a second line, its duration."""
        return f"{self.root}/{names.STARTS}"

    @property
    def replacements(self) -> str:
        """The file with each replacement of lost workers whose group has kept its state."""
        return f"{self.root}/{names.REPLACEMENTS}"

    @property
    def failures(self) -> str:
        """When workers failed, and of what."""
        return f"{self.root}/{names.FAILURES}"

    @property
    def workers(self) -> str:
        """The file that names the pod and the process of each rank."""
        return f"{self.root}/{names.WORKERS}"

    @property
    def metrics(self) -> str:
        return f"{self.root}/{names.METRICS}"

    @property
    def progress(self) -> str:
        return f"{self.root}/{names.PROGRESS}"

    @property
    def summary(self) -> str:
        return f"{self.root}/{names.SUMMARY}"

    @property
    def report(self) -> str:
        return f"{self.root}/{names.REPORT}"

    @property
    def model(self) -> str:
        return f"{self.root}/{names.MODEL}"

    def trees(self, file: str) -> str:
        """The model of `gradient_boosting`, in its library's own format."""
        return f"{self.root}/{file}"

    @property
    def model_facts(self) -> str:
        """The file that describes the model: its network, and how a sample becomes its input."""
        return f"{self.root}/{names.MODEL_METADATA}"

    @property
    def checkpoints(self) -> str:
        return f"{self.root}/{names.CHECKPOINTS}"

    @property
    def lease(self) -> str:
        """The folder of the leases, which decide the attempt that may write: see `ownership/lease.py`."""
        return f"{self.root}/{names.LEASE}"

    @property
    def set_aside(self) -> str:
        """While its files are being set aside, where they go: see `set_aside.py`."""
        return f"{self.root}/{names.SET_ASIDE}"

    def events(self, number: int) -> str:
        """A file of TensorBoard, which reads them in the order of their names."""
        return f"{self.root}/tensorboard/events.out.tfevents.{number:04}.trainyard"

    def stop(self, attempt: int, group: int = 0) -> str:
        """Asks the attempt's workers to save and leave; with a group those of that one alone."""
        return f"{self.root}/{stop_file(attempt, group)}"

    def log(self, attempt: int) -> str:
        return f"{self.root}/{names.log_of(attempt)}"

    def sweep(self) -> None:
        """Remove what killed writers left behind. Only while nobody writes but a living lease."""
        for file in self.files():
            if file.endswith(ASIDE) and not file.startswith(f"{names.LEASE}/"):
                self.delete(f"{self.root}/{file}")
