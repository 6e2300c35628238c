"""Messages reach people through real receivers on loopback, each once; no receiver can lose or hold them."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller

from slipway.watch.alerts import Origin, read_messages, record
from slipway.watch.detectors import FIRING, QUIET, Reading
from slipway.watch.messages import Run
from slipway.watch.outbox import FAILED, SENT, NotDelivered, deliver_all, find_last_attempts
from slipway.watch.routes import touch
from slipway.watch.telling import Alive, Mail, Tell, Webhook
from tests.fakes.receiver import Receiver, receive

ORIGIN = Origin(2, 3, "17")
SPIKE = Reading("loss_spike", FIRING, "the loss is 9.1, its median 3.2", 1200, 1e9, (3.2, 3.1, 9.1))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receive() as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Run:
    directory = tmp_path / "gpt3_126m"
    directory.mkdir()
    return Run("gpt3_126m", str(directory), "login1")


def write_secret(directory: Path, name: str, text: str) -> str:
    path = directory / name
    path.write_text(text + "\n")
    return str(path)


class Letters:
    """A mail server's handler that keeps the letters; `answer` is its word to their content."""

    def __init__(self, answer: str = "250 OK") -> None:
        self.answer = answer
        self.contents: list[str] = []

    async def handle_DATA(self, _server: object, _session: object, envelope: Any) -> str:
        if self.answer.startswith("250"):
            self.contents.append(envelope.content.decode())
        return self.answer


@contextmanager
def mail_server(letters: Letters) -> Iterator[str]:
    controller = Controller(letters, hostname="127.0.0.1", port=_free_port())
    controller.start()
    try:
        yield f"127.0.0.1:{controller.port}"
    finally:
        controller.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("style", ["slack", "teams", "pagerduty", "generic"])
def test_a_webhook_gets_the_body_that_its_service_takes(
    style: str, run: Run, receiver: Receiver, tmp_path: Path
) -> None:
    record(run.directory, [SPIKE], ORIGIN, {})
    key = write_secret(tmp_path, "key", "R0UTING-KEY")
    tell = Tell(webhook=Webhook(write_secret(tmp_path, "url", receiver.url), style, key))
    [(message, route, result)] = deliver_all(run, tell)
    assert (message.alert, route, result.state) == ("loss_spike-1", "webhook", SENT)
    [body] = receiver.bodies
    text = json.dumps(body, ensure_ascii=False)
    assert "the loss is 9.1, its median 3.2" in text
    assert "▁" in text  # the plot
    assert f"slipway plot {run.directory}" in text
    shapes = {
        "slack": ("text", str),
        "teams": ("attachments", list),
        "pagerduty": ("payload", dict),
        "generic": ("values", list),
    }
    name, kind = shapes[style]
    assert isinstance(body[name], kind)
    if style == "pagerduty":
        assert body["routing_key"] == "R0UTING-KEY"
        assert body["event_action"] == "trigger"


def test_the_end_of_an_alert_resolves_the_incident(run: Run, receiver: Receiver, tmp_path: Path) -> None:
    tell = Tell(webhook=Webhook(write_secret(tmp_path, "url", receiver.url), "pagerduty"))
    for reading in (SPIKE, Reading("loss_spike", QUIET, "")):
        record(run.directory, [reading], ORIGIN, {})
        deliver_all(run, tell)
    assert [body["event_action"] for body in receiver.bodies] == ["trigger", "resolve"]
    assert len({body["dedup_key"] for body in receiver.bodies}) == 1


def test_a_command_reads_the_message_and_needs_no_shell(run: Run, tmp_path: Path) -> None:
    record(run.directory, [SPIKE], ORIGIN, {})
    program = tmp_path / "notify me.sh"
    program.write_text(f'#!/bin/bash\ncat >"{tmp_path}/got.json"\nprintf %s "$1" >"{tmp_path}/argument"\n')
    program.chmod(0o755)
    tell = Tell(command=(str(program), "$(touch x); `y`"))
    assert [result.state for _, _, result in deliver_all(run, tell)] == [SENT]
    content = json.loads((tmp_path / "got.json").read_text())
    assert content["run"] == "gpt3_126m"
    assert (content["launch"], content["link"], content["job"], content["step"]) == (2, 3, "17", 1200)
    assert (tmp_path / "argument").read_text() == "$(touch x); `y`"


def test_a_letter_has_the_run_the_values_and_the_command(run: Run) -> None:
    record(run.directory, [SPIKE], ORIGIN, {})
    letters = Letters()
    with mail_server(letters) as server:
        tell = Tell(mail=Mail(server, ("a@x.org", "b@x.org"), "slipway@x.org"))
        assert [result.state for _, _, result in deliver_all(run, tell)] == [SENT]
    [content] = letters.contents
    assert "Subject: [slipway] gpt3_126m: the loss is 9.1, its median 3.2" in content
    assert "To: a@x.org, b@x.org" in content


@pytest.mark.parametrize("how", ["hangs", "refuses", "fails", "redirects", "is gone"])
def test_what_a_receiver_did_not_take_is_delivered_later(
    how: str, run: Run, receiver: Receiver, tmp_path: Path
) -> None:
    record(run.directory, [SPIKE], ORIGIN, {})
    receiver.code = {"hangs": None, "refuses": 403, "fails": 500, "redirects": 302}.get(how, 200)
    receiver.location = "http://127.0.0.1:9/elsewhere" if how == "redirects" else ""
    url = f"http://127.0.0.1:{_free_port()}/SECRET-PATH" if how == "is gone" else receiver.url
    tell = Tell(webhook=Webhook(write_secret(tmp_path, "url", url), "slack"), timeout=0.5)
    began = time.monotonic()
    [(_, _, result)] = deliver_all(run, tell)
    assert result.state == FAILED
    assert time.monotonic() - began < 10
    assert deliver_all(run, tell) == []  # not at once again
    receiver.code = 200
    write_secret(tmp_path, "url", receiver.url)
    later = time.time() + 60
    [(_, _, result)] = deliver_all(run, tell, now=lambda: later)
    assert (result.state, result.attempt) == (SENT, 2)
    assert len(receiver.bodies) == 1
    assert deliver_all(run, tell, now=lambda: later + 9999) == []


@contextmanager
def answer_bytes(answer: bytes) -> Iterator[str]:
    """Send every client an answer, a byte each 50 ms, which needs no HTTP; yield the server's address."""

    def serve() -> None:
        with suppress(OSError):
            client = server.accept()[0]
            with client:
                for byte in answer:
                    client.sendall(bytes([byte]))
                    time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(1)  # a client may never come
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
    thread.join()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://%s/SECRET", "no end within 0.5 seconds"),
        ("http://%s/SECRET GAP", "InvalidURL"),
        ("http://me:SECRET@host/", "InvalidURL"),
        ("hooks.slack.com/services/SECRET", "begins neither with http:// nor"),
        ("https://[SECRET/", "ValueError"),
        ("mail", "no end within 0.5 seconds"),
    ],
)
def test_a_delivery_ends_in_time_and_names_no_secret(url: str, why: str, run: Run, tmp_path: Path) -> None:
    record(run.directory, [SPIKE], ORIGIN, {})
    with answer_bytes(
        b"220 x\r\n250-" + b"x" * 60 if url == "mail" else b"HTTP/1.1 200 OK\r\nX: " + b"x" * 60
    ) as server:
        mail = Mail(server, ("a@x.org",), "s@x.org") if url == "mail" else Mail()
        webhook = (
            Webhook(write_secret(tmp_path, "url", url.replace("%s", server))) if url != "mail" else Webhook()
        )
        began = time.monotonic()
        [(_, _, result)] = deliver_all(run, Tell(webhook=webhook, mail=mail, timeout=0.5))
        assert time.monotonic() - began < 2
    assert result.state == FAILED
    assert why in result.why
    assert "SECRET" not in result.why


def test_an_answer_that_is_no_http_is_a_failure(run: Run, tmp_path: Path) -> None:
    record(run.directory, [SPIKE], ORIGIN, {})
    with answer_bytes(b"SECRET\r\n\r\n") as server:
        tell = Tell(webhook=Webhook(write_secret(tmp_path, "url", f"http://{server}/")))
        assert [result.why for _, _, result in deliver_all(run, tell)] == ["BadStatusLine"]


@pytest.mark.parametrize("answer", ["550 no such person", "421 come back later"])
def test_a_refused_letter_is_sent_later(answer: str, run: Run) -> None:
    record(run.directory, [SPIKE], ORIGIN, {})
    letters = Letters(answer)
    with mail_server(letters) as server:
        tell = Tell(mail=Mail(server, ("a@x.org",), "slipway@x.org"))
        [(_, _, result)] = deliver_all(run, tell)
        assert (result.state, result.why) == (FAILED, f"SMTP {answer[:3]}")
        letters.answer = "250 OK"
        later = time.time() + 60
        deliver_all(run, tell, now=lambda: later)
    assert len(letters.contents) == 1


def test_a_claim_of_a_process_that_died_becomes_void(run: Run) -> None:
    """At once where it is seen to be gone, on the same host; elsewhere after five minutes."""
    record(run.directory, [SPIKE], ORIGIN, {})

    def die(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deliver_all(run, Tell(), ["webhook"], die)
    sent = []
    now = time.time()
    assert deliver_all(run, Tell(), ["webhook"], lambda *call: sent.append(call), now=lambda: now + 100) == []
    deliver_all(run, Tell(), ["webhook"], lambda *call: sent.append(call), now=lambda: now + 301)
    assert len(sent) == 1
    (claim,) = Path(run.directory, "alerts").glob("*.webhook.1.json")
    claim.write_text(claim.read_text().replace(f":{os.getpid()}", ":4194305"))  # larger than any id
    claim.with_name(claim.name.replace(".1.json", ".2.json")).unlink()
    deliver_all(run, Tell(), ["webhook"], lambda *call: sent.append(call), now=lambda: now + 1)
    assert len(sent) == 2


def _deliver_again_and_again(run: Run, url_file: str, until: float) -> None:
    tell = Tell(webhook=Webhook(url_file))
    while time.time() < until:
        deliver_all(run, tell)
        if len(find_last_attempts(run.directory)) == 100:
            return


def test_of_a_hundred_alerts_two_deliverers_send_each_once(
    run: Run, receiver: Receiver, tmp_path: Path
) -> None:
    url_file = write_secret(tmp_path, "url", receiver.url)
    fork = multiprocessing.get_context("fork")
    deliverers = [
        fork.Process(target=_deliver_again_and_again, args=(run, url_file, time.time() + 60))
        for _ in range(2)
    ]
    for process in deliverers:
        process.start()
    for number in range(50):
        for state in (FIRING, QUIET):
            record(run.directory, [Reading("loss_spike", state, str(number))], ORIGIN, {})
    for process in deliverers:
        process.join(60)
        assert process.exitcode == 0
    names = Counter(body["name"] for body in receiver.bodies)
    assert names == {message.name: 1 for message in read_messages(run.directory)}
    assert len(names) == 100


def test_no_secret_is_in_the_run(run: Run, receiver: Receiver, tmp_path: Path) -> None:
    secrets = {"url": receiver.url, "key": "R0UTING-KEY", "password": "PASS-W0RD"}
    files = {name: write_secret(tmp_path, name, text) for name, text in secrets.items()}
    receiver.code = 500
    with mail_server(Letters()) as server:  # which knows no password
        mail = Mail(server, ("a@x.org",), "slipway@x.org", "me", files["password"])
        tell = Tell(webhook=Webhook(files["url"], "pagerduty", files["key"]), mail=mail, timeout=1.0)
        record(run.directory, [SPIKE], ORIGIN, {})
        states = [result.state for _, _, result in deliver_all(run, tell)]
    assert states == [FAILED, FAILED]
    for path in Path(run.directory).rglob("*"):
        content = path.read_text() if path.is_file() else ""
        assert "SECRET-PATH" not in content
        assert not any(text in content for text in secrets.values()), path


def test_a_dead_mans_switch_is_touched_or_says_why_not(receiver: Receiver, tmp_path: Path) -> None:
    url_file, file = write_secret(tmp_path, "url", receiver.url), tmp_path / "alive"
    tell = Tell(alive=Alive(str(file), url_file))
    touch(tell)
    assert receiver.bodies == [None]
    assert file.exists()
    write_secret(tmp_path, "url", "file:///etc/passwd")
    with pytest.raises(NotDelivered, match="neither with http"):
        touch(tell)
    with pytest.raises(NotDelivered, match="No such file"):
        touch(Tell(alive=Alive(str(tmp_path / "absent" / "alive"))))
