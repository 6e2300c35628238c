"""Checks of tasks, signals, hooks and ports of the supervisor, with real processes of this machine."""

import contextlib
import fcntl
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

from slipway.common.node.settings import (
    ALLOCATION,
    CONTAINER,
    HOSTS,
    IMAGE,
    LOCAL,
    SLURM,
    ContainerSettings,
    Settings,
    fill_in,
)
from slipway.supervisor import detectors, hooks, images, main, srun, step, tasks, termination, time_limit
from slipway.supervisor.job import Job
from slipway.supervisor.nodes import HOSTS_FD, Nodes, find_nodes
from slipway.supervisor.rendezvous import free_port
from slipway.supervisor.slurm import JobRecord
from slipway.supervisor.tasks import Signalled, Signals, map_signals, run, run_before

# A task that signals the supervisor, and tells by its exit code which signal it got itself.
SIGNALLED = (
    "trap 'exit 5' USR1; trap 'exit 6' TERM; kill -{} $PPID; for i in 1 2 3 4 5; do sleep 0.1; done; exit 7"
)

STOPPED = "srun: launch/slurm: launch_p_step_launch: StepId=17.0 aborted before step completely launched.\n"


def task(script):
    return (["bash", "-c", script], None)


class WithSignals(unittest.TestCase):
    def setUp(self):
        self.signals = Signals()
        self.addCleanup(self.signals.release)

    def code(self, *scripts, scheduler=SLURM, save=None):
        return run([task(script) for script in scripts], self.signals, map_signals(scheduler, save))


class Tasks(WithSignals):
    def test_signals_to_the_job_reach_its_tasks_as_the_scheduler_wants_it(self):
        for scheduler, save, name, code, first in (
            (SLURM, "TERM", "USR1", 5, "USR1"),
            (SLURM, "TERM", "TERM", 7, "TERM"),  # Slurm itself tells them
            (SLURM, None, "INT", 6, "INT"),
            (ALLOCATION, "TERM", "USR1", 6, "USR1"),
            (ALLOCATION, None, "USR1", 5, "USR1"),
            (ALLOCATION, None, "INT", 6, "TERM"),
            (LOCAL, None, "USR1", 5, "USR1"),
            (LOCAL, None, "TERM", 6, "TERM"),
        ):
            with self.subTest(scheduler=scheduler, save=save, name=name):
                self.signals.first = ""
                self.assertEqual(self.code(SIGNALLED.format(name), scheduler=scheduler, save=save), code)
                self.assertEqual(self.signals.first, first)

    def test_the_first_signal_is_remembered(self):
        self.code("kill -USR1 $PPID; trap : USR1; sleep 0.2; kill -TERM $PPID; sleep 0.2")
        self.assertEqual(self.signals.first, "USR1")

    def test_the_first_task_that_fails_ends_the_others_and_gives_the_code(self):
        start = time.monotonic()
        self.assertEqual(
            self.code("sleep 60", "exit 3", "trap 'exit 4' TERM; sleep 60 >/dev/null 2>&1 & wait"), 3
        )
        self.assertLess(time.monotonic() - start, 50)

    def test_a_task_that_a_signal_ended_has_the_code_of_a_shell(self):
        self.assertEqual(self.code("kill -KILL $$"), 137)

    def test_tasks_have_a_process_group_of_their_own_and_read_nothing(self):
        with tempfile.TemporaryDirectory() as directory:
            path = directory + "/seen"
            self.code(
                f"ps -o pgid= $$ >{path}; echo $$ >>{path}; cat >>{path}; grep Sig /proc/self/status >>{path}"
            )
            with open(path) as stream:
                group, pid, *masks = stream.read().split("\n")
        self.assertEqual(group.strip(), pid)
        blocked = [int(line.split()[1], 16) for line in masks if line.startswith(("SigBlk", "SigIgn"))]
        # Signals of the C library, 32 and on, stay ignored if the process that runs the tests ignores them.
        self.assertEqual([mask & 0x7FFFFFFF for mask in blocked], [0, 0])

    def test_missing_program_ends_the_started_tasks(self):
        start = time.monotonic()
        with self.assertRaises(OSError):
            run([task("exec sleep 60"), (["/no/such/program"], None)], self.signals, {})
        self.assertLess(time.monotonic() - start, 50)

    def test_a_signal_ends_a_command_before_the_tasks(self):
        with self.assertRaises(Signalled):
            run_before(task("kill -USR1 $PPID; exec sleep 60")[0], self.signals)
        self.assertEqual(self.signals.first, "USR1")

    def test_a_signal_that_came_before_is_found(self):
        os.kill(os.getpid(), signal.SIGTERM)
        with self.assertRaises(Signalled):
            self.signals.check()
        self.signals.check()

    def test_whoever_started_the_job_may_ignore_the_end_of_children(self):
        self.addCleanup(signal.signal, signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signals = Signals()
        self.addCleanup(signals.release)
        self.assertEqual(run([task("exit 3")], signals, {}), 3)


class Turns(WithSignals):
    """The jobs of a run without Slurm, which run one after the other."""

    def setUp(self):
        super().setUp()
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        directory = self.directory.name
        settings = Settings("run", 1, "tag", directory, "/s", "/l", LOCAL, "megatron", singleton=True)
        self.job = Job("17", "17.0", "17", 1, False, directory, settings, 0, {})
        self.path = directory + "/.singleton"

    def test_a_job_stands_in_the_kernels_queue_for_its_turn(self):
        queued = f'grep -q -- "-> FLOCK.*:$(stat -c %i {self.path}) " /proc/locks'
        waits = f"for i in {{1..100}}; do {queued} && exit 0; sleep 0.05; done; exit 1"
        with open(self.path, "w") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            before = subprocess.Popen(["bash", "-c", waits], pass_fds=[holder.fileno()])
        main._wait_for_turn(self.job, self.signals)
        self.assertEqual(before.wait(), 0)
        with open(self.path) as other, self.assertRaises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_a_signal_ends_the_wait(self):
        with open(self.path, "w") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            sender = subprocess.Popen(["bash", "-c", "sleep 0.2; kill -USR1 $PPID"])
            self.assertRaises(Signalled, main._wait_for_turn, self.job, self.signals)
            sender.wait()


class Hooks(WithSignals):
    def setUp(self):
        super().setUp()
        self.log = io.StringIO()
        redirected = contextlib.redirect_stdout(self.log)
        redirected.__enter__()
        self.addCleanup(redirected.__exit__, None, None, None)
        settings = Settings("run", 1, "tag", "/r", "/r/s.sh", "/r/log_", LOCAL, "megatron")
        self.job = Job("17", "17.0", "17", 1, False, "/r", settings, 0, {})
        self.answers = []

    def hook(self, call, budget=30.0, every=60.0):
        return hooks.Hook("the check", call, lambda job, answer: self.answers.append(answer), budget, every)

    def call_once(self, *called):
        for hook in called:
            polling = hooks.Polling(self.job, self.signals, [hook._replace(every=0.0)])
            polling.poll()
            polling._due = []
            while polling._calls:
                time.sleep(0.01)
                polling.poll()

    def test_hook_that_raises_hangs_or_exits_ends_alone(self):
        def raises(job):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its traceback
            raise RuntimeError("a bug")

        def hangs(job):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)

        calls = [raises, hangs, lambda job: os._exit(9), lambda job: object(), lambda job: {"job": job.id}]
        calls[3] = lambda job: os.dup2(os.open(os.devnull, os.O_WRONLY), 2) and object()
        start = time.monotonic()
        self.call_once(*(self.hook(call, budget=1.0) for call in calls))
        self.assertLess(time.monotonic() - start, 50)
        self.assertEqual(self.answers, [{"job": "17"}])
        self.assertIn("the check: no answer within 1 seconds", self.log.getvalue())

    def test_an_answer_that_cannot_be_taken_ends_nothing(self):
        failing = hooks.Hook("the check", lambda job: 1, lambda job, answer: answer["x"])
        with contextlib.redirect_stderr(self.log):
            self.call_once(failing)
        self.assertIn("the check: TypeError", self.log.getvalue())

    def test_a_flood_of_an_answer_is_cut_off(self):
        self.call_once(self.hook(lambda job: "x" * (1 << 24)))
        self.assertEqual(self.answers, [])
        self.assertIn("the check: an answer of more than", self.log.getvalue())

    def test_an_answer_larger_than_a_pipe_wakes_the_supervisor(self):
        def take(job, answer):
            return hooks.Verdict("long", str(len(answer)))

        hook = hooks.Hook("the check", lambda job: "x" * (1 << 19), take, budget=30.0, every=0.1)
        polling = hooks.Polling(self.job, self.signals, [hook])

        def end():
            return signal.SIGTERM if polling.verdict else None

        self.assertEqual(run([task("exec sleep 9")], self.signals, {}, polling.poll, end), 143)
        polling.stop()
        self.assertEqual(polling.verdict, hooks.Verdict("long", str(1 << 19)))

    def test_hook_that_fails_repeatedly_says_so_once(self):
        def raises(job):
            raise RuntimeError("a bug")

        for call, take, said, traces in (
            (raises, None, "its process ended without an answer", 1),
            (lambda job: os._exit(9), None, "its process ended without an answer", 0),
            (lambda job: 1, lambda job, answer: sys.exit("a bug"), "SystemExit('a bug'", 1),
            (lambda job: 1, lambda job, answer: "stop", "'stop' is no verdict", 0),
            (lambda job: 1, lambda job, answer: hooks.Verdict("a", None), "is no verdict", 0),
        ):
            calls = []
            hook = hooks.Hook("the check", call, take, every=0.0)
            polling = hooks.Polling(self.job, self.signals, [hook])
            with self.subTest(said=said), tempfile.TemporaryFile("w+", 1) as errors:
                with contextlib.redirect_stderr(errors):
                    while len(calls) < 3:
                        time.sleep(0.01)
                        polling.poll()
                        calls += [each for each in polling._calls if each not in calls]
                    polling.stop()
                self.assertEqual(self.log.getvalue().count(said), 1)
                self.assertIsNone(polling.verdict)
                errors.seek(0)
                lines = errors.read().splitlines()
                self.assertEqual(sum("Traceback" in line for line in lines), traces)
                # One that is not indented would be taken for the tasks' error.
                self.assertEqual([line for line in lines if not line.startswith("  ")], [])
            self.log.seek(0)
            self.log.truncate()

    def test_detector_without_a_hook_is_left_out(self):
        only_one = unittest.mock.patch.object(detectors, "DETECTORS", (lambda job: None,))
        with only_one, contextlib.redirect_stderr(self.log):
            code = run_tasks(self.job, ["bash", "-c", "sleep 1; exit 4"], self.signals)
        self.assertEqual(code, 4)
        self.assertIn("a detector could not begin: TypeError", self.log.getvalue())

    def test_a_verdict_ends_the_tasks_in_order(self):
        for scheduler, signal_to_save, words in (
            (SLURM, "USR1", ["USR1", "TERM", "KILL"]),
            (SLURM, None, ["TERM", "KILL"]),
            (ALLOCATION, "TERM", ["TERM", "TERM", "KILL"]),
            (LOCAL, "USR1", ["USR1", "KILL"]),
            (LOCAL, None, ["TERM", "KILL"]),
        ):
            settings = self.job.settings._replace(scheduler=scheduler, save_signal=signal_to_save)
            steps = unittest.mock.Mock()
            with self.subTest(scheduler=scheduler, save=signal_to_save), unittest.mock.patch.multiple(
                termination, _SAVE_SECONDS=0, _LEAVE_SECONDS=0
            ):
                ending = termination.Termination(self.job._replace(settings=settings), steps)
                self.assertIsNone(ending.signal())
                ending.begin(hooks.Verdict("nan", "the loss\nis NaN", saves=True))
                sent = [signal.Signals(ending.signal()).name[3:] for _ in words]
                self.assertEqual(sent, words)
                self.assertEqual(steps.kill_steps.call_count, int(scheduler == SLURM))
        self.assertIn("ends the tasks: the loss?is NaN", self.log.getvalue())

    def test_only_the_first_verdict_counts_and_nothing_else_is_one(self):
        first, second = hooks.Verdict("first", "it is"), hooks.Verdict("second", "it is too")
        answers = [None, True, {"rule": "x"}, first, second]
        hook = hooks.Hook("the check", lambda job: 1, lambda job, answer: answers.pop(0), every=0.01)
        polling = hooks.Polling(self.job, self.signals, [hook])
        while answers:
            time.sleep(0.01)
            polling.poll()
            self.assertEqual(polling.verdict, first if len(answers) < 2 else None)
        polling.stop()

    def test_hooks_are_called_repeatedly_while_the_tasks_run(self):
        polling = hooks.Polling(
            self.job,
            self.signals,
            [self.hook(lambda job: 1, every=0.1), self.hook(lambda job: time.sleep(60), every=0.1)],
        )
        loop = task("for i in 1 2 3 4 5 6 7 8; do sleep 0.1; done; exit 4")
        code = run([loop], self.signals, map_signals(SLURM, None), polling.poll)
        polling.stop()
        self.assertEqual(code, 4)
        self.assertGreater(len(self.answers), 1)

    def test_failing_poll_does_not_end_the_tasks(self):
        for error in (OSError(28, "No space left on device"), ImportError("the archive is gone")):
            failing = unittest.mock.patch.object(hooks.Polling, "poll", side_effect=error)
            with failing, contextlib.redirect_stderr(self.log):
                code = run_tasks(
                    self.job, ["bash", "-c", "trap 'exit 6' TERM; sleep 0.3; exit 4"], self.signals
                )
            self.assertEqual(code, 4)

    def test_hook_that_cannot_be_killed_is_not_waited_for(self):
        # As in a read of a dead server.
        with unittest.mock.patch("os.kill"), unittest.mock.patch("os.killpg"):
            self.call_once(self.hook(lambda job: time.sleep(60), budget=0.1))
        pid = tasks._unreaped[-1]
        os.kill(pid, signal.SIGKILL)
        self.assertEqual(run([task("sleep 0.3")], self.signals, {}), 0)
        self.assertNotIn(pid, tasks._unreaped)
        self.assertRaises(ChildProcessError, os.waitpid, pid, 0)

    def test_a_full_disk_or_no_room_for_a_process_leaves_nothing_open(self):
        self.log.flush = unittest.mock.Mock(side_effect=OSError(28, "No space left on device"))
        opened = os.listdir("/proc/self/fd")
        self.call_once(self.hook(lambda job: 1))
        self.assertEqual(self.answers, [1])
        with unittest.mock.patch("os.fork", side_effect=BlockingIOError(11, "try again")):
            self.call_once(self.hook(lambda job: 1))
        self.assertEqual(os.listdir("/proc/self/fd"), opened)

    def test_a_signal_to_all_processes_does_not_end_a_hook(self):
        call = self.hook(lambda job: os.kill(os.getpid(), signal.SIGUSR1) or "answered")
        self.call_once(call)
        self.assertEqual(self.answers, ["answered"])

    def test_polling_without_hooks_never_wakes_the_supervisor(self):
        self.assertIsNone(hooks.Polling(self.job, self.signals, []).poll())


class Steps(WithSignals):
    """The messages of srun in the log, as Slurm 22.05 writes them."""

    def setUp(self):
        super().setUp()
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.log = self.directory.name + "/log_17.out"
        self.write("srun: error: timeout waiting for task launch, started 0 of 2 tasks\n", STOPPED)
        settings = Settings(
            "run", 1, "tag", "/r", "/r/s.sh", self.directory.name + "/log_", SLURM, "megatron"
        )
        self.job = Job("17", "17.1", "17", 1, False, self.directory.name, settings, 0, {})

    def write(self, *lines):
        with open(self.log, "a") as stream:
            stream.writelines(lines)

    def test_step_that_never_ran_is_recognized(self):
        step = srun.begin_step(self.job)
        self.assertFalse(step.has_never_run())  # what is in the log already is of the attempt before
        self.write("a task says: srun: Timed out waiting for job step to complete\n")
        self.assertFalse(step.has_never_run())
        self.write(STOPPED)
        self.assertTrue(step.has_never_run())
        self.write("step 20/20 | loss 1.2\n")
        self.assertFalse(step.has_never_run())  # a step of its own is what one of its ranks could not start

    def test_an_srun_that_waits_for_a_lost_node_is_killed(self):
        for name in ("_PATIENCE", "_UNTOLD_SECONDS", "_EVERY"):
            self.addCleanup(setattr, srun, name, getattr(srun, name))
        srun._PATIENCE, srun._UNTOLD_SECONDS, srun._EVERY = 0, 1, 0.05
        for words in (
            "Job step aborted: Waiting up to 1 seconds for job step to finish.",
            "launch/slurm: _step_signal: Terminating StepId=17.0",
            "Terminating StepId=17.2",  # 23.02 and later, of a second start
        ):
            with self.subTest(words):
                number = int(words[-1]) if "StepId" in words else None
                waits = srun.Patience(srun.begin_step(self.job), lambda number=number: number)
                polling = hooks.Polling(self.job, self.signals, [waits.hook])
                self.addCleanup(polling.stop)
                command = task(f"trap '' TERM; echo 'srun: {words}' >>{self.log}; exec sleep 60")
                start = time.monotonic()
                code = run([command], self.signals, map_signals(SLURM, None), polling.poll, killed_by(waits))
                self.assertEqual(code, 137)
                self.assertTrue(1 <= time.monotonic() - start < 50)

    def test_the_step_that_a_task_has_ended_is_not_the_tasks(self):
        step = srun.begin_step(self.job)
        self.write("srun: Terminating StepId=17.3\n")
        self.assertIsNone(step.wait(lambda: 1))
        self.assertIsNone(step.wait(lambda: None))  # Slurm does not answer
        self.assertEqual(step.wait(lambda: 3)[0], 60)

    def test_an_srun_whose_job_goes_on_writing_is_left_alone(self):
        patience, every = srun._PATIENCE, srun._EVERY
        self.addCleanup(lambda: (setattr(srun, "_PATIENCE", patience), setattr(srun, "_EVERY", every)))
        srun._PATIENCE, srun._EVERY = 0, 0.05
        errors = self.directory.name + "/log_17.err"
        with open(errors, "w"):
            pass
        waits = srun.Patience(srun.begin_step(self.job), lambda: 0)
        polling = hooks.Polling(self.job, self.signals, [waits.hook])
        self.addCleanup(polling.stop)
        aborted = (
            "srun: Job step aborted: Waiting up to 1 seconds for job step to finish."  # a rank's own step
        )
        works = f"echo '{aborted}' >>{errors}; for i in {{1..20}}; do echo loss >>{self.log}; sleep 0.1; done"
        code = run([task(works)], self.signals, map_signals(SLURM, None), polling.poll, killed_by(waits))
        self.assertEqual(code, 0)


def killed_by(waits):
    return lambda: signal.SIGKILL if waits.is_over() else None


def run_tasks(job, command, signals, slurm=None):
    ending = termination.Termination(job, slurm)
    return step.run_tasks(job, time_limit.TimeLimit(job, slurm), command, signals, ending, [])


class LostLaunch(WithSignals):
    """Tasks of a launch that was deleted, or is another's by now."""

    def test_tasks_that_are_told_nothing_are_killed_with_all_that_they_started(self):
        for scheduler, text in ((SLURM, None), (SLURM, '{"tag": "other"}'), (LOCAL, None)):
            with self.subTest(scheduler=scheduler, text=text), tempfile.TemporaryDirectory() as directory:
                launch = os.path.join(directory, "launch")
                settings = Settings("run", 1, "tag", directory, "/s", launch + "/l", scheduler, "nemo")
                job = Job("17", "17.0", "17", 1, False, launch, settings, 0, {"SLURM_JOB_ID": "17"})
                if text:
                    os.mkdir(launch)
                    with open(launch + "/supervisor.json", "w") as stream:
                        stream.write(text)
                # As a task of NeMo's: to be told to end is to save.
                script = f"trap 'touch {directory}/saved' TERM USR1; sleep 60 & wait; wait"
                with unittest.mock.patch.object(termination, "_LOOK_SECONDS", 0.05):
                    steps = unittest.mock.Mock()
                    code = run_tasks(job, ["bash", "-c", script], self.signals, steps)
                self.assertEqual(code, 128 + signal.SIGKILL)
                self.assertEqual(bool(steps.kill_steps.call_count), scheduler == SLURM)
                self.assertFalse(os.path.exists(directory + "/saved"))

    def test_a_directory_that_is_away_for_a_moment_ends_nothing(self):
        settings = Settings("run", 1, "tag", "/r", "/s", "/r/l", LOCAL, "nemo")
        job = Job("17", "17.0", "17", 1, False, "/r", settings, 0, {})

        def look(_directory, _tag):
            with open(self.path, "a") as stream:
                stream.write("x")
            return "gone" if os.path.getsize(self.path) % 2 else ""

        with tempfile.NamedTemporaryFile() as file, unittest.mock.patch.multiple(
            termination, _LOOK_SECONDS=0.05, why_lost=look
        ):
            self.path = file.name
            self.assertEqual(run_tasks(job, ["sleep", "1"], self.signals), 0)
            self.assertGreater(os.path.getsize(self.path), 3)


class GrantedLimit(WithSignals):
    """A limit that is shorter than the one that was asked for."""

    def limit(self, *records, **settings):
        values = dict({"save_before_end": 300, "time_limit": 3600}, **settings)
        settings = Settings("run", 1, "tag", "/r", "/s", "/l", SLURM, "megatron", **values)
        job = Job("17", "17.0", "17", 1, False, "/r", settings, 0, {"SLURM_JOB_ID": "17"})
        played = unittest.mock.Mock()
        played.show_job.side_effect = [*records, records[-1]]
        limit = time_limit.TimeLimit(job, played)
        with contextlib.redirect_stdout(io.StringIO()):
            limit.ask()
        return limit

    def record(self, seconds, left, **further):
        return JobRecord("RUNNING", "None", time_limit=seconds, end=int(time.time()) + left, **further)

    def seconds_to_save(self, limit, *commands):
        """Run a task that signals its supervisor; return after how many seconds it was told to save."""
        start = time.monotonic()
        script = "trap 'exit 5' USR1; {}; for i in {{1..80}}; do sleep 0.1; done; exit 7"
        self.signals.turn = limit.turn
        with contextlib.redirect_stdout(io.StringIO()):
            command = task(script.format("; ".join(commands or ["kill -USR1 $PPID"])))
            code = run([command], self.signals, map_signals(SLURM, None), limit.pause)
        self.assertEqual((code, self.signals.first), (5, "USR1"))
        return time.monotonic() - start

    def test_signal_at_the_beginning_is_held_back_until_a_quarter_is_left(self):
        for asked in (3600, None):
            limit = self.limit(self.record(8, 4), time_limit=asked)
            self.assertEqual(limit.seconds, 8)
            self.assertGreater(self.seconds_to_save(limit), 0.9)

    def test_signal_before_the_tasks_begin_is_held_back_too(self):
        self.signals.turn = self.limit(self.record(80, 60), None).turn  # and Slurm does not answer
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(run_before(["bash", "-c", "kill -USR1 $PPID; sleep 0.2"], self.signals), 0)
        os.kill(os.getpid(), signal.SIGUSR1)
        self.assertRaises(Signalled, self.signals.check)

    def test_tasks_are_told_to_save_without_any_signal_of_slurms(self):
        self.assertGreater(self.seconds_to_save(self.limit(self.record(8, 4)), "true"), 0.9)

    def test_second_signal_is_an_order(self):
        limit = self.limit(self.record(40, 30))
        self.assertLess(self.seconds_to_save(limit, *["kill -USR1 $PPID; sleep 0.3"] * 2), 5)

    def test_signal_that_is_no_early_one_is_passed_on_at_once(self):
        cut = self.record(2000, 1900)
        for limit in (
            self.limit(self.record(3600, 3000)),  # as asked for
            self.limit(cut),  # and the margin fits
            self.limit(self.record(400, 390), save_before_end=150),  # long before Slurm would send it
            self.limit(self.record(8, 8), self.record(8, 8, preempted="1795747882")),
            self.limit(None),
            self.limit(self.record(0, 0)),  # no limit
            self.limit(self.record(8, 8), save_before_end=None),
        ):
            self.signals.first = ""
            self.assertLess(self.seconds_to_save(limit), 5)


class Places(unittest.TestCase):
    def test_a_port_on_which_somebody_listens_is_left_alone(self):
        number = 1234
        first = free_port(number)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", first))
            listener.listen(1)
            self.assertNotEqual(free_port(number), first)

    def test_the_hosts_are_those_that_the_script_asked_for_else_slurm_is_asked(self):
        before = dict(os.environ)
        self.addCleanup(lambda: (os.environ.clear(), os.environ.update(before)))
        with tempfile.TemporaryDirectory() as directory:
            with open(directory + "/scontrol", "w") as stream:
                stream.write("#!/bin/sh\necho asked\necho $3\n")
            os.chmod(directory + "/scontrol", 0o755)
            os.environ.update(PATH=directory, SLURM_JOB_ID="17", SLURM_JOB_NODELIST="n[1-2]")
            slurms = Settings("r", 1, "t", directory, "s", "l", SLURM, "megatron", nodes=1)
            for answer, hosts in ((b"n1\nn2\n", ["n1", "n2"]), (b"", ["asked", "n[1-2]"])):
                read_end, write_end = os.pipe()
                os.write(write_end, answer)
                os.close(write_end)
                os.dup2(read_end, HOSTS_FD)
                if read_end != HOSTS_FD:
                    os.close(read_end)
                self.assertEqual(find_nodes(slurms).choose(), hosts)
                with self.assertRaises(OSError):  # the tasks do not inherit it
                    os.fstat(HOSTS_FD)

    def test_tasks_run_on_the_first_hosts_that_are_not_left_out(self):
        nodes = Nodes(["n1", "n2", "n3"], 2)
        self.assertEqual(nodes.choose(), ["n1", "n2"])
        nodes.leave_out("n1", "its GPU is gone")
        nodes.leave_out("n1", "and it is slow")
        self.assertEqual((nodes.choose(), nodes.has_enough()), (["n2", "n3"], True))
        self.assertEqual(nodes.left_out, {"n1": "its GPU is gone"})
        nodes.leave_out("n3", "it does not answer")
        self.assertFalse(nodes.has_enough())

    def test_placeholders_are_the_commands_and_not_the_payloads(self):
        command = [
            "srun",
            "--epilog=/site/task.sh",
            "--container-image=" + IMAGE,
            "-w",
            HOSTS,
            "bash",
            "/d/task.sh",
            IMAGE,
        ]
        filled = fill_in(command, {IMAGE: "/a b.sqsh", CONTAINER: "c", HOSTS: "n1,n2"}, "/d")
        expected = [
            "srun",
            "--epilog=/site/task.sh",
            "--container-image=/a b.sqsh",
            "-w",
            "n1,n2",
            "bash",
            "/d/task.sh",
            IMAGE,
        ]
        self.assertEqual(filled, expected)

    def test_a_container_is_called_after_the_state_of_its_image(self):
        with tempfile.TemporaryDirectory() as directory:
            path = directory + "/x.sqsh"
            with open(path, "w") as stream:
                stream.write("an image")
            container = ContainerSettings(path, True, name="nemo")
            first = images.container_name(container)
            self.assertRegex(first, r"\Anemo-[0-9a-f]{12}\Z")
            state = os.stat(path)
            record = '{{"size": {}, "modified": {}, "digest": "sha256:{}"}}'
            with open(path + ".json", "w") as stream:
                stream.write(record.format(state.st_size, int(state.st_mtime), "ab" * 32))
            self.assertEqual(images.container_name(container), "nemo-" + "ab" * 6)
            with open(path, "a") as stream:
                stream.write(" of today")
            self.assertEqual(images.read_record(path), {})
