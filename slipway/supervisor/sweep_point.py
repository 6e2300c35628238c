"""A task of a sweep's array: it becomes the script of its point, if the array is the sweep's own."""

import os
import signal
from typing import NoReturn, Sequence

from slipway.common.files import RECORD_LIMIT, read_json
from slipway.common.node import marks, settings
from slipway.common.node.settings import SweepSettings
from slipway.supervisor.job import Leave, Unusable


def run_point(directory: str, arguments: Sequence[str]) -> NoReturn:
    """Run the script of a point in place of this process, so that signals reach it.

    Parameters
    ----------
    arguments
        The tag that the array's script was rendered with, and what that was started with.

    Raises
    ------
    Leave
        If the array is not the sweep's: where Slurm's answer was lost, there may be two.
    Unusable
        If there is no such point.
    """
    path = os.path.join(directory, settings.NAME)
    try:
        sweep = SweepSettings(**settings.decode_file_names(read_json(path, RECORD_LIMIT)))
        number = int(os.environ["SLURM_ARRAY_TASK_ID"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Unusable(f"{path} cannot be used: {error!r}") from error
    if sweep.tag != arguments[0]:
        raise Leave(f"leaves without doing anything: {directory} is another array by now", code=1)
    by_hand = arguments[-1:] != [sweep.tag] or len(arguments) < 2
    if not by_hand:
        job_id = os.environ["SLURM_ARRAY_JOB_ID"]
        # The first that begins is it, unless the launcher has said which.
        holder = marks.claim(directory, job_id)
        if holder != job_id:
            raise Leave(f"leaves without doing anything: {directory}/marks/job says {holder}")
    if not 0 <= number < len(sweep.points):
        raise Unusable(f"the sweep {sweep.sweep} has no point {number}")
    launch_dir, tag = sweep.points[number]
    script = os.path.join(launch_dir, sweep.script)
    if not os.path.isfile(script):
        raise Unusable(f"no {launch_dir} (moved since it was launched, or not mounted)")
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and children inherit that
        signal.signal(ignored, signal.SIG_DFL)
    os.execvp("bash", ["bash", script, *([] if by_hand else [tag])])
