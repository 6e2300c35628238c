"""The ways to tell people: a command, an HTTP POST, a mail. Each either delivers or raises."""

import contextlib
import json
import os
import signal
import smtplib
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from email.message import EmailMessage
from typing import Any, Dict, Iterator, Optional, Tuple

from slipway.common.files import read_text, write_atomic
from slipway.watch.alerts import Message
from slipway.watch.messages import Run, compose_subject, compose_text, to_payload, to_webhook_body
from slipway.watch.outbox import NotDelivered
from slipway.watch.telling import COMMAND, WEBHOOK, Mail, Tell, Webhook

# A secret is a line: of a URL, a key or a password.
_LONGEST_SECRET = 1 << 12
_SMTP_PORT = 25


def deliver(tell: Tell, route: str, run: Run, message: Message) -> None:
    """Deliver a message on one route.

    Raises
    ------
    NotDelivered
        If it did not arrive, as far as is known.
    """
    with limit(tell.timeout):
        if route == COMMAND:
            _call_command(tell.command, to_payload(run, message))
        elif route == WEBHOOK:
            _post(tell.webhook, run, message)
        else:
            _send_mail(tell.mail, run, message)


def touch(tell: Tell) -> None:
    """Touch the dead man's switches.

    Raises
    ------
    NotDelivered
        If one could not be touched.
    """
    with limit(tell.timeout):
        if tell.alive.file:
            write_atomic(os.path.expanduser(tell.alive.file), f"{time.time():.0f}\n", sync=False)
        if tell.alive.url_file:
            _open(tell.alive.url_file)


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """End a delivery after the seconds, and raise `NotDelivered` for whatever goes wrong in it.

    The timeout of a socket is that of each of its calls: a receiver that drips bytes never exceeds it.
    """

    def end(*_: Any) -> None:
        raise TimeoutError(0, f"no end within {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # and again: what ends a delivery may wait too
    try:
        yield
    except NotDelivered:
        raise
    except Exception as error:  # http.client and the services have errors of many kinds
        raise NotDelivered(_say(error)) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _call_command(command: Tuple[str, ...], payload: Dict[str, Any]) -> None:
    done = subprocess.run(
        list(command),
        input=json.dumps(payload).encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise NotDelivered(f"exit code {done.returncode}")


def _post(webhook: Webhook, run: Run, message: Message) -> None:
    key = _read_secret(webhook.key_file) if webhook.key_file else None
    body = json.dumps(to_webhook_body(webhook.style, run, message, key)).encode()
    _open(webhook.url_file or "", body)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is refused: it may lead into a network that others cannot reach."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


def _open(url_file: str, body: Optional[bytes] = None) -> None:
    url = _read_secret(url_file)
    if not url.lower().startswith(("http://", "https://")):
        raise NotDelivered(f"the URL in {url_file} begins neither with http:// nor with https://")
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "slipway"})
    with urllib.request.build_opener(_NoRedirect).open(request) as answer:
        answer.read(1)


def _send_mail(mail: Mail, run: Run, message: Message) -> None:
    letter = EmailMessage()
    letter["From"], letter["To"] = mail.sender, ", ".join(mail.to)
    letter["Subject"] = compose_subject(run, message)
    letter["X-Slipway-Alert"] = message.name
    letter.set_content(compose_text(run, message))
    host, _, port = (mail.server or "").partition(":")
    with smtplib.SMTP(host, int(port or _SMTP_PORT)) as server:
        if server.ehlo()[0] == 250 and server.has_extn("starttls"):
            server.starttls(context=ssl.create_default_context())
            server.ehlo()
        if mail.user and mail.password_file:
            server.login(mail.user, _read_secret(mail.password_file))
        refused = server.send_message(letter)
    if refused:
        raise NotDelivered(f"{', '.join(sorted(refused))} refused")


def _read_secret(path: str) -> str:
    """Return the first line of a file.

    Raises
    ------
    NotDelivered
        If it has none.
    """
    lines = read_text(os.path.expanduser(path), _LONGEST_SECRET).strip().splitlines()
    if not lines:
        raise NotDelivered(f"{path} is empty")
    return lines[0].strip()


def _say(error: Exception) -> str:
    """Say what went wrong, without the URL or the answer, which may hold secrets."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    if isinstance(error, urllib.error.URLError):
        return f"no connection: {error.reason}"
    if isinstance(error, smtplib.SMTPResponseException):
        return f"SMTP {error.smtp_code}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return type(error).__name__ + (f": {error}" if isinstance(error, smtplib.SMTPException) else "")
