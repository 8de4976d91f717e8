"""Memory of this process, and a progress bar that shows it."""

import contextlib
import ctypes
import threading
from types import TracebackType

from tqdm import tqdm

_INTERVAL = 0.02


def anonymous_memory() -> int:
    """Anonymous resident memory of this process in bytes: what it allocated, without mapped files and page cache."""
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def release_memory() -> None:
    """Give freed memory back to the system: glibc keeps the copies of chunks otherwise, one more set for each batch."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Progress:
    """A bar of bytes, tensors, rate, memory and time left; silent when stderr is no terminal.

    Attributes:
      peak: largest anonymous memory seen so far, in bytes.
      tensors, nbytes: what has been reported done.
    """

    def __init__(self, what: str, *, total_bytes: int, total_tensors: int):
        self.peak = anonymous_memory()
        self.tensors = self.nbytes = 0
        self._total = total_tensors
        # disable=None: tqdm looks whether stderr is a terminal.
        self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc=what, disable=None, dynamic_ncols=True)
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Progress":
        self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._sampler.join()
        self._bar.close()

    def start_at(self, *, tensors: int, nbytes: int) -> None:
        """Count what an earlier run did, without counting it in the rate."""
        self.tensors, self.nbytes = tensors, nbytes
        self._bar.initial = self._bar.n = nbytes
        self._bar.last_print_n = nbytes
        self._bar.refresh()

    def advance(self, *, tensors: int, nbytes: int) -> None:
        """Report work done."""
        self.tensors += tensors
        self.nbytes += nbytes
        self._bar.set_postfix_str(
            f"{self.tensors:,}/{self._total:,} tensors, {anonymous_memory() / 2**30:.1f}GiB", refresh=False
        )
        self._bar.update(nbytes)

    def _sample(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self.peak = max(self.peak, anonymous_memory())
