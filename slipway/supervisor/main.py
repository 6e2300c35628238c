"""The supervisor's way through a job: claim, chain, rendezvous, image, tasks, and how they ended."""

import contextlib
import io
import os
import re
import sys
import time
from typing import IO, TYPE_CHECKING, Dict, NoReturn, Optional, Sequence

from slipway.common.files import read_json
from slipway.common.node import marks, settings
from slipway.common.node.settings import LOCAL, SLURM
from slipway.supervisor.job import Job, Leave, Unusable, print_traceback
from slipway.supervisor.nodes import SickNodes
from slipway.supervisor.tasks import Signalled, Signals, run_before

if TYPE_CHECKING:
    from slipway.supervisor.link import Link

# The script keeps the environment that it was submitted in there, as `env -0` prints it.
_ENVIRONMENT_FD = 9
# The script could not read that file, which has the value of a variable.
_UNREADABLE = "SLIPWAY_UNREADABLE"

# The exit code of a job that was signalled before its tasks had one: as if by SIGTERM.
_ENDED_EARLY = 143
# In seconds, between two looks for the end of an earlier link.
_LONGEST_PAUSE = 30

_LINK = r"[1-9][0-9]{0,5}\Z"
_LEAVES = "leaves without doing anything: {}"
_USAGE = "usage: supervisor.pyz TAG [LINK] [TAG] -- COMMAND ...  or  supervisor.pyz point TAG [TAG]"


def main(arguments: Sequence[str]) -> NoReturn:
    """Keep a job from its beginning to its end; exit with its code.

    Parameters
    ----------
    arguments
        The tag that the script was rendered with; the script's arguments, which are the number of the link
        and the tag again, or nothing by hand; ``--``; and the command of the tasks.
    """
    code = 1
    try:
        code = _main(arguments)
    except Exception:
        print_traceback()
    finally:
        # Python's own way out changes the code where a full disk cannot take the last words.
        os._exit(code)


def _main(arguments: Sequence[str]) -> int:
    # Names may hold characters that the locale cannot print.
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, "utf-8", "surrogateescape", line_buffering=True)
    # Python before 3.9 buffers it up to the end, which `os._exit` skips.
    sys.stderr = io.TextIOWrapper(sys.stderr.buffer, "utf-8", "surrogateescape", line_buffering=True)
    _forget_locale()
    directory = os.path.dirname(os.path.abspath(sys.argv[0]))
    if arguments[:1] == ["health"] and len(arguments) == 2:
        from slipway.supervisor.health import answer  # late: jobs themselves need none of it

        return answer(arguments[1])
    if arguments[:1] == ["stacks"] and len(arguments) == 2:
        from slipway.supervisor.hang_probe import print_ranks  # late: on other nodes alone

        print_ranks(arguments[1])
        return 0
    is_point = arguments[:1] == ["point"] and len(arguments) > 1
    if not is_point and "--" not in arguments[1:-1]:
        print(_USAGE, file=sys.stderr)
        return 2
    try:
        if is_point:
            from slipway.supervisor.sweep_point import run_point  # late: most jobs are no sweep's

            run_point(directory, arguments[1:])
        signals = Signals()
        end = list(arguments).index("--")
        job = _job(directory, arguments[0], arguments[1:end])
        if not job.by_hand:
            _claim(job)
        return _run_link(job, arguments[end + 1 :], signals)
    except Leave as leave:
        _say(str(leave))
        return leave.code
    except Unusable as error:
        _say(str(error), sys.stderr)
        return 1


def _job(directory: str, tag: str, arguments: Sequence[str]) -> Job:
    """Return the job that this process keeps.

    Raises
    ------
    Leave
        If the directory is another launch's by now.
    Unusable
        If its settings cannot be read, or this is no job of Slurm's.
    """
    environment = _submitted_environment()
    path = os.path.join(directory, settings.NAME)
    try:
        content = settings.from_json(settings.decode_file_names(read_json(path)))
    except (OSError, ValueError) as error:
        raise Unusable(f"{path} cannot be used: {error}") from error
    if content.tag != tag:
        raise Leave(_LEAVES.format(f"{directory} is another launch by now, {content.tag}"), code=1)
    by_hand = not arguments or arguments[-1] != tag
    link = 1
    if by_hand:  # no link of this launch's chain
        content = content._replace(chain=content.chain._replace(links=1))
    elif len(arguments) == 2 and re.match(_LINK, arguments[0]):
        link = int(arguments[0])
    claimant, task, attempt = str(os.getpid()), "", "0"
    if content.scheduler != LOCAL and not os.environ.get("SLURM_JOB_ID"):
        raise Unusable("it runs in no job of Slurm's: SLURM_JOB_ID is not set")
    if content.scheduler == SLURM:
        claimant = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ["SLURM_JOB_ID"]
        task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
        attempt = os.environ.get("SLURM_RESTART_COUNT") or "0"  # a requeued job has several
    identity = claimant + ("_" + task if task else "")
    return Job(
        id=identity,
        attempt=f"{identity}.{attempt}",
        claimant=claimant,
        link=link,
        by_hand=by_hand,
        directory=directory,
        settings=content,
        began=int(time.time()),
        environment=environment,
    )


def _submitted_environment() -> Dict[str, str]:
    """Return the environment in which the job was submitted, before the script exported anything."""
    try:
        with open(_ENVIRONMENT_FD, "rb") as stream:
            text = os.fsdecode(stream.read())
        _reap_printer()
    except OSError:  # not started by a script
        return dict(os.environ)
    return dict(entry.partition("=")[::2] for entry in text.split("\0") if entry)


def _reap_printer() -> None:
    """Take the ``env`` of the script, which has just ended, off the list of processes."""
    with contextlib.suppress(ChildProcessError):
        for _ in range(20):
            if os.waitpid(-1, os.WNOHANG)[0]:
                return
            time.sleep(0.001)


def _forget_locale() -> None:
    """Take back the ``LC_CTYPE`` that Python sets for itself in a plain C locale: it is not the tasks'."""
    try:
        with open("/proc/self/environ", "rb") as stream:
            environment = stream.read().split(b"\0")
    except OSError:
        return
    if "LC_CTYPE" in os.environ and not any(entry.startswith(b"LC_CTYPE=") for entry in environment):
        del os.environ["LC_CTYPE"]


def _claim(job: Job) -> None:
    """Claim the job's link: where Slurm's answer was lost, there may be two jobs of it.

    Raises
    ------
    Leave
        If another job has it, or the chain has ended.
    """
    # The first that begins has it, unless the launcher has said which.
    holder = marks.claim(job.directory, job.claimant, job.link)
    if holder != job.claimant:
        name = marks.JOB if job.link == 1 else f"{marks.JOB}.{job.link}"
        raise Leave(_LEAVES.format(f"{job.marks}/{name} says {marks.quote(holder)}"))
    path = os.path.join(job.marks, marks.CHAIN_ENDED)
    if os.path.lexists(path):
        end = marks.chain_end(job.directory)
        why = f": {end.sentence}" if end else ""
        # A job that waits for the success of this one waits for that of the run.
        done = any(attempt.verdict == "done" for attempt in marks.read_attempts(job.directory))
        raise Leave(_LEAVES.format(path + why), code=0 if done else 1)


def _run_link(job: Job, command: Sequence[str], signals: Signals) -> int:
    """Run one link: submit its successor, run the tasks, and judge the end.

    Raises
    ------
    Leave
        If the chain is over.
    """
    from slipway.supervisor.link import Link
    from slipway.supervisor.slurm import Slurm
    from slipway.supervisor.starts import Starts
    from slipway.supervisor.time_limit import TimeLimit

    slurm = Slurm(job)
    link, limit = Link(job, slurm), TimeLimit(job, slurm)
    starts = Starts(job, slurm, link, limit)
    with contextlib.suppress(OSError):
        marks.make_directory(job.directory)
    try:
        _wait_for_turn(job, signals)
        _wait_for_earlier_links(job, link, signals)
        with job.best_effort("what came before is not known"):
            link.begin()
        if job.settings.scheduler == SLURM and job.settings.save_signal:
            limit.ask()
            signals.turn = limit.turn
        signals.check()
        if os.environ.get(_UNREADABLE):
            raise OSError(f"{os.environ[_UNREADABLE]} cannot be read, which has the value of a variable")
        starts.run(command, signals)
    except Signalled:
        starts.code = _ENDED_EARLY
    except SickNodes as sick:
        starts.give_up(sick)
    except OSError as error:
        job.say(str(error), sys.stderr)
    except Leave:
        raise
    except Exception:
        print_traceback()
    why = settings.why_lost(job.directory, job.settings.tag)
    if why:
        link.later.abandon()
        raise Leave(f"saves nothing and leaves no word of its end: {why}", code=1)
    with job.best_effort("how it ended is not known"):
        ending, goes_on = link.end(starts.code, starts.hosts, signals.first, starts.verdict, starts.judged)
        if starts.hosts and ending.rule != "ended_by_user":
            from slipway.supervisor.watching import tell_end

            tell_end(job, ending, goes_on)
    return starts.code


def _wait_for_turn(job: Job, signals: Signals) -> None:
    """Wait for the job of this run before, as Slurm's singleton does, and lock out the next one."""
    if job.settings.scheduler != LOCAL or not job.settings.singleton:
        return
    import errno
    import fcntl

    # Tasks that outlive this process keep the lock.
    lock = os.open(os.path.join(job.settings.run_dir, settings.TURN), os.O_RDWR | os.O_CREAT, 0o666)
    os.set_inheritable(lock, True)

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        job.say(f"waits for the end of {marks.quote(os.fsdecode(os.pread(lock, 200, 0)))}")
        # A child waits, which a signal ends: the lock is this process's as well, and its turn comes in order.
        waiting = f"import fcntl; fcntl.flock({lock}, fcntl.LOCK_EX)"
        if run_before([sys.executable, "-IS", "-c", waiting], signals):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), settings.TURN) from None
    holder = f"job {job.id} (launch {job.settings.launch})".encode()
    with contextlib.suppress(OSError):  # on a full disk another job is named there
        os.pwrite(lock, holder, 0)
        os.ftruncate(lock, len(holder))


def _wait_for_earlier_links(job: Job, link: "Link", signals: Signals) -> None:
    """Wait for an earlier link that Slurm still runs: its end is not this one's to judge yet."""
    pause = 0
    for earlier in iter(link.earlier.find_running, ""):
        if not pause:
            job.say(f"waits for the end of job {earlier}: its own dependency is lost")
        pause = min(2 * pause or 1, _LONGEST_PAUSE)
        signals.sleep(pause)


def _say(message: str, stream: Optional[IO[str]] = None) -> None:
    """Write a line of a process that is no job."""
    number = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID") or os.getpid()
    with contextlib.suppress(OSError, ValueError):
        print(f"Job {number}: {message}", file=stream or sys.stdout, flush=True)
