"""The options of srun: which take a value, and the keys of those that Slipway sets itself.

From srun's manual pages of Slurm 22.05 to 25.05, and Pyxis' args.c.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from launcher.slurm.sbatch_options import SET_BY

# An option without a value, or one whose value stands behind `=` in the same word.
_BARE = """
allocate bcast compress contiguous disable-status exact exclusive help hold immediate kill-on-bad-exit label
multi-prog nice no-allocate no-kill overcommit overlap oversubscribe preserve-env propagate pty quiet
quit-on-interrupt reboot resv-ports send-libs spread-job stepmgr test-only treewidth unbuffered usage
use-min-nodes verbose version x11
container-mount-home no-container-mount-home container-writable container-readonly container-remap-root
no-container-remap-root container-entrypoint no-container-entrypoint container-entrypoint-log
"""
_WITH_VALUE = """
accel-bind account acctg-freq bb bbf bcast-exclude begin chdir cluster-constraint clusters comment constraint
container container-id core-spec cores-per-socket cpu-bind cpu-freq cpus-per-gpu cpus-per-task deadline
delay-boot dependency distribution epilog error exclude export extra extra-node-info gid gpu-bind gpu-freq
gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags het-group hint input job-name jobid licenses
mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus mpi msg-timeout network nodefile
nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode
output partition power prefer priority profile prolog qos relative reservation segment signal slurmd-debug
sockets-per-node switches task-epilog task-prolog thread-spec threads threads-per-core time time-min tmp
tres-bind tres-per-task uid wait wckey
container-env container-image container-mounts container-name container-save container-workdir
"""
_TAKES_VALUE = {**dict.fromkeys(_BARE.split(), False), **dict.fromkeys(_WITH_VALUE.split(), True)}
_SHORT = """
A=account b=begin B=extra-node-info c=cpus-per-task C=constraint d=dependency D=chdir e=error
E=preserve-env F=nodefile G=gpus h=help H=hold i=input I=immediate J=job-name k=no-kill
K=kill-on-bad-exit l=label L=licenses m=distribution M=clusters n=ntasks N=nodes o=output O=overcommit
p=partition q=qos Q=quiet r=relative s=oversubscribe S=core-spec t=time T=threads u=unbuffered
v=verbose V=version w=nodelist W=wait x=exclude X=disable-status Z=no-allocate
"""
_LETTERS = dict(word.split("=") for word in _SHORT.split())

# Of sbatch's options that Slipway sets, those that a step may have besides.
_OF_A_STEP = """
comment cpus-per-task exclusive gpus gpus-per-node gpus-per-task gres licenses mem quiet signal verbose wait
"""
_TASKS_END = "Slipway, which ends all tasks when one fails"
_ONE_PROGRAM = "Slipway, which starts one program for all tasks"
# The key or the part of Slipway that sets an option of the step.
STEP_SET_BY: Mapping[str, str] = {
    **{name: by for name, by in SET_BY.items() if name in _TAKES_VALUE and name not in _OF_A_STEP.split()},
    "container-env": "container_options.env",
    "container-image": "container",
    "container-name": "container_options.name",
    "export": "env_vars for the tasks, and cluster.sbatch.export for the job",
    "jobid": "Slipway, whose job the step belongs to",
    "kill-on-bad-exit": _TASKS_END,
    **dict.fromkeys(("multi-prog", "no-allocate", "pty"), _ONE_PROGRAM),
}


class StepOption(NamedTuple):
    """An option of srun as it is written: one word, or two where the second one is its value."""

    name: str
    value: str | None
    words: tuple[str, ...]

    @property
    def is_of_a_site(self) -> bool:
        """True for an option that neither srun nor Pyxis has: a plugin's."""
        return self.name not in _TAKES_VALUE

    @property
    def is_pyxis(self) -> bool:
        """True for an option of Pyxis: `--container` itself is Slurm's."""
        return self.name.startswith(("container-", "no-container-")) and self.name != "container-id"


class ProgramWord(ValueError):
    """A word that srun would take for the program, in place of the tasks' script."""

    def __init__(self, words: Sequence[str], before: str | None) -> None:
        super().__init__(words[0])
        self.words, self.before = tuple(words), before


def step_options(words: Sequence[str]) -> Iterator[StepOption]:
    """Yield the options of srun as getopt_long reads them; raise ProgramWord where they end early."""
    position = 0
    while position < len(words):
        word, before = words[position], words[position - 1] if position else None
        if not word.startswith("-") or word in ("-", "--"):
            behind = words[position:]
            end = next((n for n, text in enumerate(behind) if n and text.startswith("-")), len(behind))
            raise ProgramWord(behind[:end], before)
        following = words[position + 1] if position + 1 < len(words) else None
        options = [_long(word)] if word.startswith("--") else list(_short(word))
        name, value = options[-1]
        takes = _TAKES_VALUE.get(name)
        if takes is None:  # of a site's plugin: it may take a value
            takes = following is not None and not following.startswith("-")
        has_next = takes and value is None and following is not None
        own = (word, following) if has_next and following is not None else (word,)
        yield from (StepOption(other, None, ()) for other, _ in options[:-1])
        yield StepOption(name, following if has_next else value, own)
        position += len(own)


def _long(word: str) -> tuple[str, str | None]:
    """Return the whole name of an option, which may be abbreviated, and the value behind its `=`."""
    name, equals, value = word.removeprefix("--").partition("=")
    longer = [] if name in _TAKES_VALUE else [other for other in _TAKES_VALUE if other.startswith(name)]
    return longer[0] if len(longer) == 1 else name, value if equals else None


def _short(word: str) -> Iterator[tuple[str, str | None]]:
    """Yield the options of a word such as ``-lN2``: the first that takes a value takes the rest."""
    for position, letter in enumerate(word[1:], start=2):
        name = _LETTERS.get(letter, letter)
        if _TAKES_VALUE.get(name) or name in ("exclusive", "immediate", "kill-on-bad-exit", "no-kill"):
            yield name, word[position:].removeprefix("=") or None
            return
        yield name, None
