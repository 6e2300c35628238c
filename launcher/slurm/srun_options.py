"""The options of srun, as it reads them, and the keys of those that Slipway sets itself.

From srun's manual pages of Slurm 22.05 to 25.05, and Pyxis' args.c.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from launcher.slurm.sbatch_options import FREE, SET_BY

# Those without a value, or with one behind `=` in the same word.
_BARE_NAMES = """
allocate bcast compress contiguous disable-status exact exclusive help hold immediate kill-on-bad-exit label
multi-prog nice no-allocate no-kill overcommit overlap oversubscribe preserve-env propagate pty quiet
quit-on-interrupt reboot resv-ports send-libs spread-job stepmgr test-only unbuffered usage use-min-nodes
verbose version x11 container-mount-home no-container-mount-home container-writable container-readonly
container-remap-root no-container-remap-root container-entrypoint no-container-entrypoint
"""
_BARE = frozenset(_BARE_NAMES.split())
_FURTHER = """
accel-bind bcast-exclude cpu-bind epilog het-group mpi msg-timeout prolog relative slurmd-debug task-epilog
task-prolog threads container-mounts container-save container-workdir
"""
_SHORT = """
A=account b=begin c=cpus-per-task C=constraint d=dependency e=error E=preserve-env h=help H=hold I=immediate
J=job-name k=no-kill K=kill-on-bad-exit l=label L=licenses M=clusters n=ntasks N=nodes o=output O=overcommit
p=partition q=qos Q=quiet s=oversubscribe t=time u=unbuffered v=verbose V=version w=nodelist x=exclude
X=disable-status Z=no-allocate
"""
_LETTERS = dict(word.split("=") for word in _SHORT.split())
# Letters of bare options that take the rest of their word for a value.
_OPTIONAL = "IkK"

# Options of sbatch that Slipway sets, and that a step may set too.
_OF_A_STEP = """
comment cpus-per-task exclusive gpus gpus-per-node gpus-per-task gres licenses mem parsable quiet signal
verbose wait wrap
"""
# The key or the part of Slipway that sets an option of the step.
STEP_SET_BY: Mapping[str, str] = {
    **{name: by for name, by in SET_BY.items() if name not in _OF_A_STEP.split()},
    "container-env": "container_options.env",
    "container-image": "container",
    "container-name": "container_options.name",
    "export": "env_vars for the tasks, and cluster.sbatch.export for the job",
    "jobid": "Slipway, because the step belongs to its job",
    "kill-on-bad-exit": "Slipway, which ends all tasks when one fails",
    **dict.fromkeys(("multi-prog", "no-allocate", "pty"), "Slipway, which starts one program for all tasks"),
}
_OF_SBATCH = "array batch export-file get-user-env ignore-pbs kill-on-invalid-dep wait-all-nodes"
_KNOWN = frozenset((*_BARE, *_FURTHER.split(), *FREE, *SET_BY, *STEP_SET_BY)) - {*_OF_SBATCH.split()}


class StepOption(NamedTuple):
    """An option of srun as it is written: one word, or two where the second one is its value."""

    name: str
    value: str | None
    words: tuple[str, ...]

    @property
    def is_of_a_site(self) -> bool:
        """True for an option that neither srun nor Pyxis has: a plugin's."""
        return self.name not in _KNOWN

    @property
    def is_pyxis(self) -> bool:
        """True for an option of Pyxis: `--container` itself is Slurm's."""
        return self.name.startswith(("container-", "no-container-")) and self.name != "container-id"


class ProgramWord(ValueError):
    """Words that srun would take for the program, in place of the tasks' script, and the one before them."""

    def __init__(self, words: Sequence[str], before: str | None) -> None:
        super().__init__(words[0])
        self.words, self.before = tuple(words), before


def step_options(words: Sequence[str]) -> Iterator[StepOption]:
    """Yield the options of srun as getopt_long reads them; raise ProgramWord where they end early."""
    position = 0
    while position < len(words):
        word, *rest = words[position:]
        own = next((number for number, text in enumerate(rest) if text.startswith("-")), len(rest))
        if not word.startswith("-") or word in ("-", "--"):
            raise ProgramWord([word, *rest[:own]], words[position - 1] if position else None)
        *bare, (name, value) = [_parse_long(word)] if word.startswith("--") else _parse_short(word)
        yield from (StepOption(other, None, ()) for other, _ in bare)
        # A plugin's option may take a value too.
        has_next = value is None and own > 0 and name not in _BARE
        yield StepOption(
            name, rest[0] if has_next else value, tuple(words[position : position + 1 + has_next])
        )
        position += 1 + has_next


def _parse_long(word: str) -> tuple[str, str | None]:
    """Return the whole name of an option, which may be abbreviated, and the value behind its `=`."""
    name, equals, value = word.removeprefix("--").partition("=")
    longer = [] if name in _KNOWN else [other for other in _KNOWN if other.startswith(name)]
    return longer[0] if len(longer) == 1 else name, value if equals else None


def _parse_short(word: str) -> list[tuple[str, str | None]]:
    """Return the options of a word such as ``-lN2``: the first that takes a value takes the rest."""
    options: list[tuple[str, str | None]] = []
    for position, letter in enumerate(word[1:], start=2):
        name = _LETTERS.get(letter, letter)
        if name not in _BARE or letter in _OPTIONAL:
            return [*options, (name, word[position:].removeprefix("=") or None)]
        options.append((name, None))
    return options
