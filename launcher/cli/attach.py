"""`slipway attach`: a shell beside a rank of a running job."""

from __future__ import annotations

import argparse
import os
import sys

from launcher.cli.options import Verbs, add_option, add_verb
from launcher.cli.runs import add_run, selected_run
from launcher.errors import UserError
from launcher.jobs.attaching import AttachPoint, attach
from launcher.slurm.commands import WITHOUT_SLURM

_HELP = """\
Open a shell beside a rank of a running job: on its node, in its container if it has one (named or not, but
not Apptainer's), in its working directory and with its environment (RANK, MASTER_ADDR,
CUDA_VISIBLE_DEVICES, ...). It is a step of the job, and shares its nodes and GPUs with the training: leaving
it ends nothing, and it ends with the job. The command line goes to stderr first. A container of Enroot's
has the node's processes: `pkill` in it reaches all of yours on the node, and as root everybody's.

examples:
  slipway attach gpt3_126m                     rank 0
  slipway attach gpt3_126m --rank 9            the node of rank 9
  slipway attach gpt3_126m --node n2           that node, as one of its ranks
  slipway attach gpt3_126m -- nvidia-smi       a command instead of a shell, without a terminal
  slipway attach gpt3_126m -t -- htop          one with a terminal
  slipway attach gpt3_126m --outside           on the node itself, outside of the container
  slipway attach gpt3_126m --print             print the command line, and run nothing

exit code:
  that of the shell or the command, or srun's own
  2  there is no such run, or it does not run
  3  its state is not known"""


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "attach", run, "open a shell beside a running job", _HELP)
    parser.usage = "slipway attach [OPTION ...] RUN [-- COMMAND [ARGUMENT ...]]"
    add_run(parser)
    add_option(parser, "--rank N", "the node of global rank N (default: 0)")
    add_option(parser, "--node NAME", "on this node of the job")
    add_option(parser, "--outside", "on the node itself, not in the container")
    add_option(parser, "-t --tty", "give COMMAND a terminal too")
    add_option(parser, "--print", "print the command line to stdout, and run nothing")


def run(args: argparse.Namespace) -> int:
    """Print the command line, and become it."""
    # A printed command line is for a terminal, wherever it is printed.
    is_terminal = (args.tty or not args.command) and (args.print or sys.stdin.isatty())
    place = AttachPoint(args.rank, args.node, inside=not args.outside)
    attachment = attach(selected_run(args), place, args.command, is_terminal)
    print(attachment.line, file=sys.stdout if args.print else sys.stderr, flush=True)
    if args.print:
        return 0
    try:
        os.execvpe(attachment.argv[0], attachment.argv, dict(attachment.environment))
    except FileNotFoundError as error:
        raise UserError(f"{attachment.argv[0]} is not on this machine", hint=WITHOUT_SLURM) from error
