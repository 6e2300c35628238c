"""`slipway attach`: a shell beside a rank of a running job."""

from __future__ import annotations

import argparse
import os
import sys

from launcher.cli.runs import add_run, selected_run
from launcher.errors import UserError
from launcher.jobs.attaching import Attachment, AttachPoint, attach
from launcher.slurm.commands import WITHOUT_SLURM

_DESCRIPTION = """\
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


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "attach",
        usage="slipway attach [OPTION ...] RUN [-- COMMAND [ARGUMENT ...]]",
        help="open a shell beside a running job",
        description=_DESCRIPTION,
    )
    add_run(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="the node of global rank N (default: 0)")
    parser.add_argument("--node", metavar="NAME", help="on this node of the job")
    parser.add_argument("--outside", action="store_true", help="on the node itself, not in the container")
    parser.add_argument("-t", "--tty", action="store_true", help="give COMMAND a terminal too")
    parser.add_argument(
        "--print", action="store_true", help="print the command line to stdout, and run nothing"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the command line, and become it."""
    # A printed command line is for a terminal, wherever it is printed.
    is_terminal = (args.tty or not args.command) and (args.print or sys.stdin.isatty())
    place = AttachPoint(args.rank, args.node, inside=not args.outside)
    attachment = attach(selected_run(args), place, args.command, is_terminal)
    print(attachment.line, file=sys.stdout if args.print else sys.stderr, flush=True)
    return 0 if args.print else _become(attachment)


def _become(attachment: Attachment) -> int:
    sys.stdout.flush()
    try:
        os.execvpe(attachment.argv[0], attachment.argv, dict(attachment.environment))
    except FileNotFoundError as error:
        raise UserError(f"{attachment.argv[0]} is not on this machine", hint=WITHOUT_SLURM) from error
