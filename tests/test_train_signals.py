"""Signals: the step is finished, all ranks agree, one checkpoint is written, and the run can be resumed bit by bit."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from launcher import job
from train_toys import MOCK, ROOT, assert_same_run, launched, state_of, steps_of, torchrun, trained

from megatron_lite.checkpoint.manifest import incomplete_reason
from megatron_lite.config import exit_codes
from megatron_lite.train.signals import REPEAT_SECONDS, SignalRequests

STEPS = 12
FLAGS = f"{MOCK} --train-iters {STEPS} --log-interval 1 --num-workers 2"
ZERO = "--use-distributed-optimizer"


def complete(folder: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    found = [p for p in folder.glob("step_*") if incomplete_reason(p) is None]
    assert not [p for p in folder.glob("step_*") if p not in found], "nothing half-written is left"
    return sorted(int(p.name.removeprefix("step_")) for p in found)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    trained(2, f"{FLAGS} {ZERO} --save {folder}")
    return folder


def resumed(save: Path, whole: Path) -> None:
    """Go on from what a signal left, to the end: the same run."""
    [done] = trained(2, f"{FLAGS} {ZERO} --save {save} --load {save}")
    assert done.code == 0, done
    assert_same_run(whole, save, STEPS)


@pytest.mark.parametrize(("name", "to"), [("TERM", (1,)), ("INT", (0, 1)), ("USR1", (0,)), ("TERM", ())], ids=str)
def test_a_stop_signal(name: str, to: tuple[int, ...], whole: Path, tmp_path: Path) -> None:
    """To one rank, to all, to the whole session."""
    save = tmp_path / "save"
    with job(2, f"{FLAGS} {ZERO} --save {save}", tmp_path / "job", slow_step=0.15) as run:
        run.wait_for("step 3/12")
        run.send(name, *to)
        assert run.codes(30) == [exit_codes.SIGNAL] * 2, run.output
        run.gone_within(5)
        last = max(steps_of(save))
        assert 3 <= last <= 5 and complete(save) == [last]
        assert f"stopped after step {last} by a signal" in run.output and "Traceback" not in run.output
    resumed(save, whole)


def test_a_signal_without_a_place_to_save(tmp_path: Path) -> None:
    with job(1, f"{FLAGS} --log-dir {tmp_path}", tmp_path / "job", slow_step=0.15) as run:
        run.wait_for("step 2/12")
        run.send("TERM", 0)
        assert run.codes() == [exit_codes.SIGNAL]
        assert "there is no --save" in run.output


def test_signals_during_start_up(tmp_path: Path) -> None:
    """A request to save does not end a run that has nothing to save yet; one to stop does, before the first step."""
    save = tmp_path / "save"
    with job(2, f"{FLAGS} --save {save}", tmp_path / "job", slow_data=1) as run:
        run.wait_for("OPENING")
        run.send("USR2", 0)
        run.send("USR1", 1)
        assert run.codes() == [exit_codes.SIGNAL] * 2, run.output
        assert "stopped before the first step" in run.output and not complete(save)


def test_a_save_signal_goes_on(whole: Path, tmp_path: Path) -> None:
    """USR2 twice: two checkpoints more, the run goes on, and nothing in it changes."""
    save = tmp_path / "save"
    with job(2, f"{FLAGS} {ZERO} --save {save}", tmp_path / "job", slow_step=0.15) as run:
        for rank, step in enumerate((2, 6)):
            run.wait_for(f"step {step}/12")
            run.send("USR2", rank)
        assert run.codes() == [0, 0], run.output
        steps = complete(save)
        assert len(steps) == 3 and 2 <= steps[0] <= 4 and 6 <= steps[1] <= 8 and steps[2] == STEPS, steps
    assert_same_run(whole, save, STEPS)


def check_signal_during_save(whole: Path, tmp_path: Path, seconds: float) -> None:
    save = tmp_path / "save"
    with job(2, f"{FLAGS} {ZERO} --save {save} --save-interval 4", tmp_path / "job", slow_save=seconds) as run:
        run.wait_for("SAVING 1")
        time.sleep(0.3)
        began = time.monotonic()
        run.send("TERM")
        time.sleep(1)
        run.send("TERM")  # scheduler and launcher deliver the same request twice
        assert run.codes(seconds + 30) == [exit_codes.SIGNAL] * 2, run.output
        assert seconds - 1 < time.monotonic() - began < seconds + 10
        assert complete(save) == [4] and max(steps_of(save)) == 4, "no further step and no second save"
    resumed(save, whole)


def test_a_signal_during_a_save(whole: Path, tmp_path: Path) -> None:
    """What is being written is finished, and is the checkpoint of the stop."""
    check_signal_during_save(whole, tmp_path, 6)


@pytest.mark.nightly
def test_a_signal_during_a_long_save(whole: Path, tmp_path: Path) -> None:
    check_signal_during_save(whole, tmp_path, 45)


def test_a_second_signal_after_five_seconds_ends_at_once(whole: Path, tmp_path: Path) -> None:
    """In the middle of a save: the earlier checkpoint is untouched, and the run can be resumed from it."""
    save = tmp_path / "save"
    trained(2, f"{FLAGS} {ZERO} --save {save} --exit-interval 3")
    with job(2, f"{FLAGS} {ZERO} --save {save} --load {save}", tmp_path / "job", slow_step=0.3, slow_save=30) as run:
        run.wait_for("step 5/12")
        run.send("TERM", 0)
        run.wait_for("SAVING 1")
        time.sleep(REPEAT_SECONDS + 0.3)
        began = time.monotonic()
        run.send("TERM", 0)
        run.gone_within(5)
        assert time.monotonic() - began < 5
        assert run.codes() == [exit_codes.ERROR] * 2 and "TERM came again: exit at once" in run.output
    assert [p.name for p in sorted(save.glob("step_*"))][0] == "step_00000003"
    resumed(save, whole)
    assert complete(save) == [3, STEPS], "what the signal left half-written is gone"


def test_a_signal_during_evaluation(whole: Path, tmp_path: Path) -> None:
    """The evaluation is broken off, the step that came before it is saved."""
    save = tmp_path / "save"
    flags = f"{FLAGS} {ZERO} --save {save} --eval-interval 4 --eval-iters 40"
    with job(2, flags, tmp_path / "job", slow_eval=0.3) as run:
        run.wait_for("EVALUATING")
        run.send("TERM", 1)
        assert run.codes(20) == [exit_codes.SIGNAL] * 2, run.output
        assert complete(save) == [4] and "evaluation was broken off" in run.output
    resumed(save, whole)


@pytest.mark.parametrize("to", ["launcher", pytest.param("session", marks=pytest.mark.nightly)])
def test_a_signal_to_torchrun(to: str, whole: Path, tmp_path: Path) -> None:
    """The launcher passes it on and waits; it is the launcher that ends with 1, the ranks with 6."""
    save = tmp_path / "save"
    hooks = '{"slow_step": 0.2}'
    script = [str(ROOT / "tests" / "launcher.py"), "--hooks", hooks, *f"{FLAGS} {ZERO} --save {save}".split()]
    with launched([*torchrun(2), *script], tmp_path / "job") as run:
        run.wait_for("step 3/12")
        if to == "launcher":
            os.kill(run.process.pid, signal.SIGTERM)
        else:
            os.killpg(run.process.pid, signal.SIGTERM)
        assert run.wait(60) != 0
        run.assert_nothing_left()
        last = max(steps_of(save))
        assert complete(save) == [last] and f"stopped after step {last} by a signal" in run.output, run.output
    resumed(save, whole)


def test_plain_python_and_a_terminal(tmp_path: Path) -> None:
    """One process without a launcher, and the first Ctrl-C."""
    save = tmp_path / "save"
    hooks = '{"slow_step": 0.2}'
    script = [str(ROOT / "tests" / "launcher.py"), "--hooks", hooks, *f"{FLAGS} --save {save}".split()]
    with launched([sys.executable, *script], tmp_path / "job") as run:
        run.wait_for("step 2/12")
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait(30) == exit_codes.SIGNAL
        assert complete(save) == [max(steps_of(save))] and state_of(save, max(steps_of(save)))["progress"]["step"] > 1


def test_which_signal_means_now() -> None:
    """The same signal again, or TERM and INT after each other, later than five seconds; nothing else."""
    clock = [100.0]
    requests = SignalRequests(("TERM", "INT", "USR1"), ("USR2",))
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as m:
        m.setattr("megatron_lite.train.signals.time.monotonic", lambda: clock[0])

        def later(seconds: float, name: str) -> bool:
            clock[0] += seconds
            return requests._again(getattr(signal, f"SIG{name}"))

        assert not later(0, "USR1")
        assert not later(60, "TERM"), "a scheduler warns with USR1 first"
        assert not later(4, "TERM")
        assert later(2, "TERM")
        assert later(0, "INT")
        assert later(0, "USR1")


def test_requests_are_noted_and_given_back() -> None:
    calls: list[str] = []
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)
    requests = SignalRequests(("SIGUSR1",), ("usr2",), calls.append)
    requests.install()
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert requests.save and requests.take_save() and not requests.take_save() and not requests.stop
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert requests.stop and requests.name == "SIGUSR1" and not calls
    finally:
        requests.restore()
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)) == before
    with pytest.raises(ValueError, match="FOO"):
        SignalRequests(("FOO",), ())
