"""The answer of a rank that is asked where it stands, for each Python of a task; the image's own follows.

On `SIGNAL` faulthandler writes the stacks of all threads into a file in memory, also while a thread holds the
interpreter's lock. A byte in a pipe wakes a thread, which adds the last collectives of PyTorch's flight
recorder. The name of the file has the pipe's number, and the supervisor finds both in ``/proc/PID/fd``.
"""

import os
import sys

# Real-time: torch, NCCL and the engines use none. The supervisor's `hang_probe` has both too.
SIGNAL = 57
NAME = "slipway-rank-"
# A rank's helpers inherit it; torchrun's workers are ranks of their own, and a program may become another.
MARK = "SLIPWAY_ANSWERS"


def answer() -> None:
    """Let this process answer if it is a rank."""
    environment = os.environ
    rank = environment.get("RANK", "") + "/" + environment.get("TORCHELASTIC_RUN_ID", "")
    known, _, process = environment.get(MARK, "").rpartition(":")
    if "SLIPWAY_TAG" not in environment or (known == rank and process != str(os.getpid())):
        return
    import _signal  # type: ignore[import-not-found]
    import _thread
    import faulthandler
    import fcntl

    wake, pipe = os.pipe()
    file = os.memfd_create(NAME + str(pipe))
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)
    _signal.signal(SIGNAL, _signal.SIG_IGN)  # from the moment at which the interpreter ends
    faulthandler.register(SIGNAL, file, all_threads=True)
    environment[MARK] = f"{rank}:{os.getpid()}"
    _thread.start_new_thread(tell_collectives, (wake, file))


def tell_collectives(wake: int, file: int) -> None:
    """Write a line of JSON about each process group, as often as this is asked for."""
    while os.read(wake, 1):
        try:
            line = describe_collectives()
        except Exception as error:
            line = repr({"error": repr(error)})
        os.write(file, ("\n" + NAME + line + "\n").encode())


def describe_collectives() -> str:
    """Return by the name of each group the last collective that was begun, that was done, and its word."""
    import json

    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None:
        return "{}"
    # Without stacks, which would import much of torch.
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        record = json.loads(dump(True, False)) if dump is not None else {}
        if record.get("pg_status"):
            break
    else:
        return "{}"
    groups, words = {}, {}
    for entry in record.get("entries", ()):
        number = str(entry["pg_id"])
        groups[number] = entry["process_group"][0]
        if not entry.get("retired") and not entry.get("is_p2p"):
            words[number] = entry["profiling_name"]
    return json.dumps(
        {
            groups[number]: [
                int(status["last_enqueued_collective"]),
                int(status["last_completed_collective"]),
                words.get(number, ""),
            ]
            for number, status in record["pg_status"].items()
            if number in groups
        }
    )


try:
    answer()
except Exception:  # an old Python, or a system without such files: the task runs without
    pass

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
del sys.modules["sitecustomize"]
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
except ImportError as error:
    if getattr(error, "name", None) != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = type(sys)("sitecustomize")  # the import of this one goes on
