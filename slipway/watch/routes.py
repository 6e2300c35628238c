"""The ways to tell people: a command, an HTTP POST, a mail. Each either delivers or raises."""

import json
import os
import smtplib
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from email.message import EmailMessage
from typing import Any, Dict, Tuple

from slipway.common.files import read_text, write_atomic
from slipway.watch.alerts import Message
from slipway.watch.messages import Run, compose_subject, compose_text, to_payload, to_webhook_body
from slipway.watch.outbox import NotDelivered
from slipway.watch.telling import COMMAND, MAIL, WEBHOOK, Mail, Tell, Webhook

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
    try:
        if route == COMMAND:
            _call_command(tell.command, to_payload(run, message), tell.timeout)
        elif route == WEBHOOK:
            _post(tell.webhook, run, message, tell.timeout)
        elif route == MAIL:
            _send_mail(tell.mail, run, message, tell.timeout)
        else:
            raise ValueError(f"{route} is no way to tell people from here")
    except (OSError, ValueError, subprocess.SubprocessError, smtplib.SMTPException) as error:
        raise NotDelivered(_say(error)) from None


def touch(tell: Tell) -> None:
    """Touch the dead man's switches.

    Raises
    ------
    NotDelivered
        If one could not be touched.
    """
    try:
        if tell.alive.file:
            write_atomic(os.path.expanduser(tell.alive.file), f"{time.time():.0f}\n", sync=False)
        if tell.alive.url_file:
            _open(urllib.request.Request(_read_secret(tell.alive.url_file)), tell.timeout)
    except (OSError, ValueError) as error:
        raise NotDelivered(_say(error)) from None


def _call_command(command: Tuple[str, ...], payload: Dict[str, Any], timeout: float) -> None:
    done = subprocess.run(
        list(command),
        input=json.dumps(payload).encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise NotDelivered(f"exit code {done.returncode}")


def _post(webhook: Webhook, run: Run, message: Message, timeout: float) -> None:
    key = _read_secret(webhook.key_file) if webhook.key_file else None
    body = json.dumps(to_webhook_body(webhook.style, run, message, key)).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "slipway"}
    _open(urllib.request.Request(_read_secret(webhook.url_file or ""), body, headers), timeout)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is refused: it may lead into a network that others cannot reach."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


def _open(request: urllib.request.Request, timeout: float) -> None:
    if request.type not in ("http", "https"):
        raise ValueError("the URL begins neither with http: nor with https:")
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout) as answer:
        answer.read(1)


def _send_mail(mail: Mail, run: Run, message: Message, timeout: float) -> None:
    letter = EmailMessage()
    letter["From"], letter["To"] = mail.sender, ", ".join(mail.to)
    letter["Subject"] = compose_subject(run, message)
    letter["X-Slipway-Alert"] = message.name
    letter.set_content(compose_text(run, message))
    host, _, port = (mail.server or "").partition(":")
    with smtplib.SMTP(host, int(port or _SMTP_PORT), timeout=timeout) as server:
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
    ValueError
        If it has none.
    """
    lines = read_text(os.path.expanduser(path), _LONGEST_SECRET).strip().splitlines()
    if not lines:
        raise ValueError(f"{path} is empty")
    return lines[0].strip()


def _say(error: Exception) -> str:
    """Say what went wrong, without the URL or the answer, which may hold secrets."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    if isinstance(error, urllib.error.URLError):
        return f"no connection: {error.reason}"
    if isinstance(error, smtplib.SMTPResponseException):
        return f"SMTP {error.smtp_code}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no end within {error.timeout:g} seconds"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return type(error).__name__ if "://" in str(error) else f"{type(error).__name__}: {error}"
