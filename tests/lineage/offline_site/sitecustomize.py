"""First on PYTHONPATH in the end-to-end test, so that every Python process starts with it: `project.py` says how it is used.

- No network: connecting and looking up names fail, and leave a line in the file LINEAGE_ATTEMPTS.
- LINEAGE_READS: a file that gets one line per file that a stage script opens for reading.
- LINEAGE_PAUSE_AT: the name of a file; the process stops itself (SIGSTOP) when it opens it.
"""

import os
import signal
import socket
import sys
from typing import Any

LOOK_UPS = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
CONNECTIONS = ("socket.connect", "socket.sendto", "socket.sendmsg")


def refuse_network(event: str, args: tuple[Any, ...]) -> None:
    if event in LOOK_UPS or (event in CONNECTIONS and args[0].family != socket.AF_UNIX):
        with open(os.environ["LINEAGE_ATTEMPTS"], "a", encoding="utf-8") as file:
            file.write(f"{sys.orig_argv}: {event} {args[-1] if event in CONNECTIONS else args[0]}\n")
        raise ConnectionError(f"the network is cut in this test ({event})")


def record_reads(stage: str, records: str) -> None:
    """Hashing does not count as reading: the key of a run hashes whatever dvc.yaml declares."""
    log = os.open(records, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], (str, os.PathLike)) or args[2] & os.O_ACCMODE != os.O_RDONLY:
            return
        path = os.path.realpath(args[0])
        frame, hashing = sys._getframe(), False
        while frame.f_back is not None and not hashing:
            frame = frame.f_back
            hashing = frame.f_code.co_filename.endswith("pipeline/digests.py")
        if not hashing and path.startswith(os.getcwd()) and not os.path.isdir(path):
            os.write(log, f"{stage}\t{os.path.relpath(path)}\n".encode())

    sys.addaudithook(hook)
    announce_native_opens()


def announce_native_opens() -> None:
    """Arrow opens files from C++, where no hook sees it."""
    import pyarrow
    import pyarrow.parquet

    memory_map, open_parquet = pyarrow.memory_map, pyarrow.parquet.ParquetFile.__init__

    def announced_memory_map(path: Any, *args: Any) -> Any:
        sys.audit("open", path, "r", os.O_RDONLY)
        return memory_map(path, *args)

    def announced_open_parquet(self: Any, source: Any, *args: Any, **options: Any) -> None:
        sys.audit("open", source, "r", os.O_RDONLY)
        open_parquet(self, source, *args, **options)

    pyarrow.memory_map = announced_memory_map
    pyarrow.parquet.ParquetFile.__init__ = announced_open_parquet


def pause_at(name: str) -> None:
    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith(f"/{name}"):
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(hook)


sys.addaudithook(refuse_network)
is_stage = sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2].startswith("stages.")
if is_stage and "LINEAGE_READS" in os.environ:
    record_reads("@".join(sys.orig_argv[2:]).removeprefix("stages."), os.environ["LINEAGE_READS"])
if is_stage and "LINEAGE_PAUSE_AT" in os.environ:
    pause_at(os.environ["LINEAGE_PAUSE_AT"])
