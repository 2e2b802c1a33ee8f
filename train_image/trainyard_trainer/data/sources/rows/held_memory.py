"""The memory of a process for the rows of a table: whole files, and row groups that are read again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from trainyard_trainer.data.sources.rows.row_source import TableRows
from trainyard_trainer.errors import ConfigError

GIB = 2**30

ALLOCATED_PER_FILLED = 2
"""Arrow's readers double a buffer that is full, so they allocate up to twice the bytes they fill."""

Group = tuple[str, int, tuple[str, ...]]
"""The file of a row group, its number in the file, and the columns that are read."""


class HeldMemory:
    """What a process holds of a table, up to a number of bytes."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}
        self._groups: OrderedDict[Group, tuple[TableRows, int]] = OrderedDict()

    def hold(self, path: str, num_bytes: int) -> None:
        """Count a file that is read as a whole, before or after it is read.

        Raises ConfigError if all of these files have more bytes than the process may hold.
        """
        with self._lock:
            self._files[path] = max(num_bytes, self._files.get(path, 0))
            total = sum(self._files.values())
        if total > self.limit_bytes:
            raise ConfigError(
                f"{path} is read as a whole, and the files of its table take {total / GIB:.3g} GiB or more "
                f"in each process that reads samples: data.memory_gib allows "
                f"{self.limit_bytes / GIB:.3g}.\n"
                "       Write the table as Parquet, of which a part is held, or raise data.memory_gib."
            )

    def group(self, key: Group, read: Callable[[], TableRows]) -> TableRows:
        """Return a row group, which is read unless it is held. Those that were used last stay."""
        if key not in self._groups:
            rows = read()
            self._groups[key] = rows, ALLOCATED_PER_FILLED * rows.table.get_total_buffer_size()
            while len(self._groups) > 1 and sum(self.sizes) > self.limit_bytes:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key][0]

    @property
    def sizes(self) -> list[int]:
        """The bytes that each held row group may take, the one that was used last at the end."""
        return [size for _, size in self._groups.values()]
